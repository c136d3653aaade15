"""FCL-NAT: turn a translator that reads its own words into one that reads copies of the source.

Paper: Guo, Tan, Xu, Qin, Chen, Liu, AAAI 2020, arXiv 1911.08717 (fine-tuning by curriculum
learning). Schedule, inputs and masks were read in the authors' code
(github.com/lemmonation/fcl-nat).

Idea. An autoregressive decoder and a parallel one have the same layers, and differ in two things:
what they read, and who sees whom. FCL-NAT begins with a trained autoregressive model and moves both
step by step. During the curriculum a growing share alpha of the decoder's inputs is replaced: where
a position read the word before it, it reads a copy of a source word. Then the causal mask gives way
to one that hides a position from itself alone. What follows is the plain training of `parallel`,
and so is decoding.

    alpha(c)     = log(1 + 199 c) / log 200        c: how much of the curriculum is over, 0 to 1
    input at t   = copy of x_j(t)  at round(alpha T) random t, in a sentence drawn with chance alpha
                   y_t-1           elsewhere                                 `mix_inputs`
    mask         = causal                        until alpha reaches `flip`
                   all but the position itself   from then on
    L            = - sum over t of log p(y_t | inputs, x) - log p(T | x)     per word

Training. `fcl_nat_loss`, from the teacher's weights: its own training is the first phase of the
paper. The targets are the teacher's translations.

The leak. In the authors' settings the mask is opened early: after a twentieth of the curriculum, at
alpha = .45. Inputs are shifted: y_t is what position t + 1 reads. Under the open mask position t
sees position t + 1, and so it sees the very word it has to write, wherever that word is not yet a
copy. From then on, until alpha is 1, reading the answer lowers the loss. Here the mask is opened
when alpha is 1, and no target word is read any more. `flip = 0.45` is the published schedule. The
law LEAK (laws/traps/fcl_nat.py) changes y_t and watches the logits of position t.

Guarantee: APPROX: no number of lengths gives the teacher's distribution. Decoding is that of
`parallel`. Without a curriculum the loss is that of `parallel`, bit for bit; at alpha = 0 it is the
teacher's, and the length's.
Pitfall: the leak; a warm start under the name of a curriculum; a share of all positions of a batch,
padding included.
Ablation: no curriculum: fine-tuning from the same weights. No gain was found: in a test on two
dialects the curriculum is worse, and on Multi30k it is equal (tutorials/results/translation.md).
Tests: tests/nonautoregressive/test_fcl_nat.py (`mix_inputs` against the code that runs; both ends
of the curriculum; shares and schedules; the leak of the published schedule; the weights that a
curriculum begins with, on dialects).
Left out: rows of the mask that are opened one by one (an option of the code). Coins and positions
are drawn for each sentence, where the code draws once for a batch, and counts its padding. A LENGTH
token tells the length, where the code adds a fixed offset to the source's length. The code tries
the lengths around that one; here the likeliest are tried, or with `around` those around the
likeliest. Their curriculum is the whole training, and the mask is open in nearly all of its steps.
In our recipe the curriculum is the first half, and the mask is open in the second half alone. So
`parallel` has twice as many steps with an open mask in equal time. While the mask is causal, the
text has one more position for its end, as the teacher's has.
The numbers of the sections are from memory of the paper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.nat import copy_uniformly, decode_parallel
from tinyspec.nonautoregressive.parallel import (
    LENGTH_KNOBS,
    ParallelRefiner,
    find_judge,
    fits_length_token,
    label_nll,
    length_nll,
    translate_likeliest_length,
)
from tinyspec.nonautoregressive.sat import group_mask, shift_by_group
from tinyspec.technique import (
    Guarantee,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)

UNITS = 200
"""Length of the curriculum in the authors' code, in units of 10,000 steps."""

RUNGS = 10  # of the ladder
REMEDY = "train a model from models/multi30k-fcl/recipe.toml (tinyspec train mt)"


def mix_inputs(
    copies: Sequence[int], before: Sequence[int], alpha: float, coin: float, order: Sequence[int]
) -> list[int]:
    """Return what the decoder reads of one sentence during the curriculum (section 3.2).

    copies  of source words: what a parallel decoder reads at each position
    before  the beginning and all target words but the last: what an autoregressive decoder reads
    coin    uniform from 0 to 1
    order   the positions, shuffled

    `mix_batch` does this for a batch. A test compares the two.

    >>> mix_inputs([7, 8, 9], [1, 4, 5], 0.6, 0.5, [2, 0, 1])
    [7, 4, 9]
    """
    if coin >= alpha:
        return list(before)
    chosen = order[: round(alpha * len(copies))]
    return [copies[t] if t in chosen else word for t, word in enumerate(before)]


# ------------------------------ the schedule (section 3.2)


@dataclass(frozen=True)
class FclNatSettings:
    """Section [translator] of a recipe.

    curriculum  share of the training until all inputs are copies; 0: there is no curriculum
    pacing      how alpha rises: log, linear, ladder or invlog
    flip        the alpha at which the mask is opened; below 1 targets leak
    """

    curriculum: float = 0.5
    pacing: str = "log"
    flip: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.curriculum, int | float) or not 0 <= self.curriculum <= 1:
            raise TinyspecError(f"curriculum is {self.curriculum}: it must be from 0 to 1")
        if self.pacing not in PACINGS:
            known = ", ".join(PACINGS)
            raise TinyspecError(f"pacing is {self.pacing!r}: it must be one of {known}")
        if not isinstance(self.flip, int | float) or not 0 <= self.flip <= 1:
            raise TinyspecError(f"flip is {self.flip}: it must be from 0 to 1")


PACINGS: dict[str, Callable[[float], float]] = {
    "log": lambda c: math.log(1 + c * (UNITS - 1)) / math.log(UNITS),
    "linear": lambda c: c,
    "ladder": lambda c: math.floor(c * RUNGS) / RUNGS,
    "invlog": lambda c: 1 - math.log(1 + (1 - c) * (UNITS - 1)) / math.log(UNITS),
}
"""c -> alpha, by name: how much of the curriculum is over -> how many inputs are copies."""


def plan_step(settings: FclNatSettings, progress: float) -> tuple[float, bool]:
    """Return alpha, and whether the mask is open.

    progress  how much of the training is over, from 0 to 1

    >>> plan_step(FclNatSettings(), 0.0), plan_step(FclNatSettings(), 0.5)
    ((0.0, False), (1.0, True))
    """
    if progress >= settings.curriculum:
        return 1.0, True
    alpha = PACINGS[settings.pacing](progress / settings.curriculum)
    return alpha, alpha >= settings.flip


# ------------------------------ training


def mix_batch(
    before: Tensor, copies: Tensor, slots: Tensor, alpha: float, generator: torch.Generator
) -> Tensor:
    """Return what the decoder reads [B, T] during the curriculum.

    before, copies  [B, T] of an autoregressive decoder, and of a parallel one
    slots           [B, T] False at padding
    """
    coins = torch.rand(len(slots), 1, generator=generator, device=slots.device)
    draws = torch.rand(slots.shape, generator=generator, device=slots.device)
    rank = draws.masked_fill(~slots, 2).argsort(dim=1).argsort(dim=1)
    counts = (alpha * slots.sum(dim=1, keepdim=True).double()).round()
    return torch.where((coins < alpha) & (rank < counts), copies, before)


def curriculum_states(
    model: Seq2Seq,
    source: Tensor,
    target: Tensor,
    memory: EncoderOutput,
    plan: tuple[float, bool],
    generator: torch.Generator,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the decoder's states of one pass and their labels, at some point of the curriculum.

    plan  alpha, and whether the mask is open

    While the mask is causal, the end of a text is a position too.
    """
    pad, (alpha, is_open) = model.config.pad, plan
    places, slots = copy_uniformly((source != pad).sum(dim=1), (target != pad).sum(dim=1))
    target = target[:, : slots.shape[1]]
    before, labels = shift_by_group(model.config, target, 1)  # [B, T + 1]
    copies = source.gather(1, places)
    mixed = mix_batch(before[:, :-1], copies, slots, alpha, generator)
    if is_open:
        return decode_parallel(model, mixed, slots, memory, dropout), target
    inputs = torch.cat((mixed, before[:, -1:]), dim=1)
    causal = group_mask(inputs.shape[1], 1, inputs.device)
    return model.decode(model.embed(inputs), memory, causal, dropout), labels


def fcl_nat_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    generator: torch.Generator,
    plan: tuple[float, bool],
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of the words and of the length, per label.

    batch  sources [B, S] and targets [B, T], padded at the end
    plan   alpha, and whether the mask is open
    """
    source, target = batch
    memory = model.encode(source, dropout)
    states, labels = curriculum_states(model, source, target, memory, plan, generator, dropout)
    words = label_nll(model, states, labels, smoothing)
    return (words + length_nll(model, target, memory)) / (labels != model.config.pad).sum()


# ------------------------------ the card


def fcl_nat_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `fcl_nat_loss` of a batch of the trainer."""
    plan = plan_step(training.settings, training.progress)
    options = plan, training.dropout, training.smoothing
    return fcl_nat_loss(training.model, batch, generator, *options)


@technique(
    title="FCL-NAT: fine-tuning by curriculum learning",
    summary="an autoregressive model becomes parallel by curriculum",
    paper="Guo et al. 2020, arXiv 1911.08717",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        fcl_nat_batch_loss,
        translate_likeliest_length,
        "It writes all words at once, from copies of the source. It learnt this from an "
        "autoregressive model, whose inputs became copies during a share of "
        "{settings.curriculum} of the training (`fcl_nat`). Its figure is that of the likeliest "
        "length.",
        shape={"lengths": 9},
        settings=FclNatSettings,
        fits=fits_length_token,
    ),
    knobs=LENGTH_KNOBS,
)
def fcl_nat(request: RefineRequest, *, lengths: int, judge: str, around: bool) -> ParallelRefiner:
    """Return a refiner that writes all words in one pass, for the likeliest lengths."""
    teacher = find_judge(request, lengths, judge, REMEDY)
    return ParallelRefiner(request.model, teacher, lengths, around)
