"""CLLM: tune a model so that Jacobi iteration on it needs few sweeps.

Paper: Kou et al., ICML 2024, arXiv 2403.00835 (consistency large language models). The whole model
is tuned.

Idea. Jacobi iteration (jacobi.py) rewrites a block of n tokens until nothing changes. Its states
y(0), y(1), ..., y* form a *trajectory* from random tokens to the greedy text. An ordinary model
corrects about one token in a sweep, because what it predicts after a wrong token is seldom right.
So it is tuned to predict the fixed point y* from every state of its trajectories.

Training. For a text x, a trajectory of the *original* model is computed, from tokens that are drawn
from x. A state y(j) is drawn from all states but the last one. The loss has two terms:

    L    = L_GC + omega L_AR
    L_GC = mean over i of  - sum over v of p(v | x, y*_<i) log p(v | x, y(j)_<i)
    L_AR = mean over the tokens of x that the original wrote, and of y*, of  - log p(token | before)

p is the model in training. The first p in L_GC is a constant: no gradient flows through it. i runs
from the first position at which y(j) and y* differ; before it both p read the same text. L_AR
keeps the model close to what the original writes. We could not read a number for omega in the
paper; the released trainer and the pages of the released models have 10. As in that code, the
labels of L_AR are smoothed by 0.1, and a fixed point that repeats a token ten times is left out.

Guarantee: EXACT, at any temperature, for the tuned model: its greedy text is its own, not that of
the original.
Pitfall: training from y(0) alone; leaving out L_AR, so that the model collapses to repetition; a
gradient through the fixed point; texts that were sampled, whose random tokens become labels.
Ablation: the autoregressive loss alone. In a test a model that is tuned by both losses needs fewer
sweeps for texts that stay the same; by the autoregressive loss alone it does not. On the
storyteller hardly any gain shows: 1.08 tokens in a pass (tutorials/results/heads.md).
Tests: tests/nonautoregressive/test_cllm.py (trajectories against greedy decoding by hand; the loss
against the rows of single texts; no gradient through the fixed point; all earlier states are met).
Left out: the local consistency loss, of neighbouring states; the authors' option to correct some of
the wrong tokens of a state beforehand; people's answers in L_AR, another option.
Ours: trajectories are computed when they are needed, at a random place of a text that the original
wrote, and not stored beforehand. The authors' texts are greedy, block after block; here the recipe
draws them at a temperature of 0.01. L_AR and L_GC share the pass over y*; the prompt has no loss,
where the released trainer counts it. All open positions of a batch weigh the same, where the
authors average each text first. Repeated tokens are looked for in y* alone, not in the whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive.jacobi import JacobiDrafter, iterate_block, predict_with_target
from tinyspec.technique import Guarantee, Knob, Request, TrainingBatch, Tuned, Tuning, technique

REPEATS = 10  # equal tokens in a row, in a fixed point that is not trained on

# ------------------------------------------------------------------ trajectories


def trace_trajectory(
    original: Model, text: Sequence[int], n: int, generator: torch.Generator
) -> list[list[int]]:
    """Return the states of a block of n tokens after a text, from random ones to the fixed point.

    The first state is drawn from the tokens of the text. The last one is the greedy text.
    """
    drawn = torch.randint(len(text), (n,), generator=generator).tolist()
    predict = predict_with_target(original.session())
    return iterate_block(predict, text, [text[i] for i in drawn])[:-1]  # the last two are equal


class JacobiPair(NamedTuple):
    """A text, a state of a trajectory that begins after it, and the fixed point."""

    text: list[int]
    early: list[int]
    fixed: list[int]


def draw_pair(
    original: Model, text: Sequence[int], n: int, ends: Sequence[int], generator: torch.Generator
) -> JacobiPair | None:
    """Return a random state of a trajectory after a text, beside its fixed point.

    Both end with the fixed point's first end of text. None: up to there the fixed point repeats one
    token, so it is not trained on.
    """
    states = trace_trajectory(original, text, n, generator)
    end = next((at + 1 for at, token in enumerate(states[-1]) if token in ends), n)
    fixed = states[-1][:end]
    if any(sum(1 for _ in run) >= REPEATS for _, run in groupby(fixed)):
        return None
    chosen = int(torch.randint(max(len(states) - 1, 1), (), generator=generator))
    return JacobiPair(list(text), states[chosen][:end], fixed)


# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class CllmSettings:
    """The section [head] of a recipe.

    block      tokens of a block (n)
    ar_weight  weight of the autoregressive loss (omega)
    smoothing  of its labels
    """

    block: int = 16
    ar_weight: float = 10.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        if type(self.block) is not int or not 1 <= self.block <= 1024:
            raise TinyspecError(
                f"[head] block is {self.block!r}: it must be a whole number from 1 to 1024"
            )
        for name, most in (("ar_weight", float("inf")), ("smoothing", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < most:
                raise TinyspecError(
                    f"[head] {name} is {value!r}: it must be a number of at least 0 and below "
                    f"{most:g}"
                )


def consistency_loss(fixed: Tensor, early: Tensor) -> Tensor:
    """Return the mean cross-entropy of rows after a state against those after the fixed point.

    fixed, early  logits [n, V]; fixed is a constant. 0 if there is no row
    """
    if not len(early):
        return early.float().sum()
    return F.cross_entropy(early.float(), fixed.detach().float().softmax(-1))


def cllm_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return L_GC + omega L_AR at a random place of every text."""
    settings: CllmSettings = tuning.settings
    config, pairs, numbers = tuning.blocks.config, list[JacobiPair](), list[int]()
    for row, is_answer in enumerate(batch.is_answer.cpu()):
        places = is_answer.nonzero().flatten()
        if not len(places):
            continue
        place = int(places[int(torch.randint(len(places), (), generator=generator))])
        text = batch.ids[row, : place + 1].tolist()
        n = min(settings.block, config.max_positions - len(text))
        pair = draw_pair(tuning.original, text, n, config.eos, generator)
        if pair is not None:
            pairs.append(pair)
            numbers.append(row)
    if not pairs:
        return tuning.blocks.embed.sum() * 0
    width = max(len(pair.text) + len(pair.fixed) for pair in pairs)
    device = batch.ids.device
    fixed, early = torch.zeros(2, len(pairs), width, dtype=torch.long)
    is_written = torch.zeros(len(pairs), width, dtype=torch.bool)  # as `TrainingBatch.is_answer`
    is_open = torch.zeros(len(pairs), width, dtype=torch.bool)  # rows from the first difference on
    for i, (pair, row) in enumerate(zip(pairs, numbers, strict=True)):
        start, end = len(pair.text), len(pair.text) + len(pair.fixed)
        fixed[i, :end] = torch.tensor([*pair.text, *pair.fixed])
        early[i, :end] = torch.tensor([*pair.text, *pair.early])
        is_written[i, : start - 1] = batch.is_answer[row, : start - 1].cpu()
        is_written[i, start - 1 : end - 1] = True
        differs = (fixed[i] != early[i]).nonzero().flatten()
        if len(differs):
            is_open[i, int(differs[0]) - 1 : end - 1] = True
    fixed, early, is_written, is_open = (
        part.to(device) for part in (fixed, early, is_written, is_open)
    )
    logits = tuning.blocks.training_logits(fixed)
    after_early = tuning.blocks.training_logits(early)
    written = is_written[:, :-1]
    ar_loss = F.cross_entropy(
        logits[:, :-1][written].float(),
        fixed[:, 1:][written],
        label_smoothing=settings.smoothing,
    )
    return consistency_loss(logits[is_open], after_early[is_open]) + settings.ar_weight * ar_loss


# ------------------------------------------------------------------ the card


@technique(
    title="CLLM: consistency large language models",
    summary="Jacobi iteration on a tuned model",
    paper="Kou et al. 2024, arXiv 2403.00835",
    reported="2.4x to 3.4x (abstract)",
    family="parallel",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    keeps="the tuned model's distribution",
    tuned=Tuned(CllmSettings, cllm_loss, small=CllmSettings(block=4)),
    knobs=(Knob("block", 16, "tokens of a block (n)", low=1, high=1024, small=(2, 1)),),
)
def cllm(request: Request, *, block: int) -> Decoder:
    """Return a decoder that sweeps over blocks, which begin as random tokens of the text."""
    vocabulary = request.target.model.config.vocab_size  # type: ignore[attr-defined]
    return request.decoder(JacobiDrafter(block, None, "prompt", vocabulary), verify_tree)
