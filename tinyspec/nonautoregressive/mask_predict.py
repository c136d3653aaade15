"""Mask-Predict: write all words at once, then mask those you were least sure of and write them
again, knowing the others.

Ghazvininejad, Levy, Liu, Zettlemoyer, EMNLP 2019, arXiv 1904.09324. A conditional masked language
model fills in *any* subset of the target's words, from the source and the other words. Decoding is
T passes: the first fills in everything; before pass t = 1..T-1 the n = floor(N (T - t) / T) words
with the lowest probabilities are masked, and predicted again together. So a translation that the
first pass was torn about is settled word by word. What makes it Mask-Predict: training hides 1 to N
words, each number equally often, so that an empty page is as familiar as a full one (15 %, as BERT
hides, never shows one); a word that stays keeps the probability it was *given*, stale on purpose; a
LENGTH token before the source tells the length, the l likeliest lengths are tried as one batch, and
the one with the best mean log-probability wins.

Trained: everything, by `loss`: cross-entropy of the hidden words alone, labels smoothed by 0.1, and
that of the length, both summed and divided by the number of hidden words, as the released code
does. That code never hides all N words (its random number ends at N - 1), where the paper says 1 to
N: here it is the paper. As published: sentences translated by a teacher.

Guarantee: APPROX. No setting gives the teacher's law; T = 1 is one parallel pass. Its own rule is
proved in laws/nonautoregressive_laws.py by an oracle that decodes each length by itself, without padding;
tests/nonautoregressive/test_mask_predict.py has the schedule, strictly falling for T <= N, and that
words which stay do not change. Passes: T of the decoder, l rows wide, and one of the encoder, whose
keys and values all rows and passes share; the decoder's own cannot be kept, as every word may
change.
Left out: nothing. Of equally sure words the leftmost is masked, and special tokens are never
written: the paper leaves it open.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, blank
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.technique import Guarantee, Knob, RefineRequest, technique

# ---------------------------------------------------------------------- training (section 2)


class TranslationPairs(NamedTuple):
    """What `loss` trains on: source [B, S] and target [B, T], padded at the end."""

    source: Tensor
    target: Tensor


def hide_tokens(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Which slots [B, T] are masked: 1 to N of each row, each number equally likely, and each
    choice of so many.
    """
    lengths = slots.sum(dim=1)
    share = torch.rand(len(slots), generator=generator, device=slots.device)
    count = (share * lengths).long() + 1  # [B], share < 1
    return select_lowest(
        torch.rand(slots.shape, generator=generator, device=slots.device), slots, count
    )


def masked_lm_loss(
    model: Seq2Seq,
    batch: TranslationPairs,
    generator: torch.Generator,
    dropout: float = 0.0,
    smoothing: float = 0.1,
) -> Tensor:
    """-sum over hidden t of log p(y_t | what is not hidden, x), and -log p(N | x), per hidden
    token.
    """
    source, target = batch
    config, slots = model.config, target != model.config.pad
    lengths = slots.sum(dim=1)
    if int(lengths.max()) >= config.lengths or not int(lengths.min()):
        raise TinyspecError(
            f"targets of {int(lengths.min())} to {int(lengths.max())} tokens: the LENGTH token of {model.name} tells "
            f"1 to {config.lengths - 1}, so leave the others out"
        )
    hidden = hide_tokens(slots, generator)
    memory = model.encode(source, dropout)
    read = model.embed(target.masked_fill(hidden, config.mask))
    states = model.decode(read, memory, None, dropout, slots)
    tokens = F.cross_entropy(
        model.logits(states[hidden]), target[hidden], reduction="sum", label_smoothing=smoothing
    )
    return (
        tokens + F.cross_entropy(model.length_logits(memory), lengths, reduction="sum")
    ) / hidden.sum()


# ---------------------------------------------------------------------- decoding (section 3)


def count_masked(length: Tensor, iteration: int, iterations: int) -> Tensor:
    """How many of a row's words pass t of T predicts: all in pass 0, then floor(N (T - t) / T), at
    least 1.

    >>> [int(count_masked(torch.tensor(6), t, 4)) for t in range(4)]
    [6, 4, 3, 1]
    """
    return (length * (iterations - iteration) // iterations).clamp(min=1)


def select_lowest(scores: Tensor, slots: Tensor, count: Tensor) -> Tensor:
    """The count [C] slots of each row with the lowest scores [C, T], of equals the leftmost;
    padding is never among them.
    """
    order = scores.masked_fill(~slots, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)  # the place of each slot in that order
    return (rank < count[:, None]) & slots


def predict_masked(
    model: Seq2Seq, tokens: Tensor, slots: Tensor, memory: EncoderOutput
) -> tuple[Tensor, Tensor]:
    """One decoder pass over tokens [C, T], some of them masks: the likeliest words, and their
    log-probabilities.
    """
    c = model.config
    logits = model.logits(model.decode(model.embed(tokens), memory, None, slots=slots))  # [C, T, V]
    special = torch.tensor([c.pad, c.bos, c.eos, c.mask], device=logits.device)
    scores, words = logits.index_fill(-1, special, -torch.inf).log_softmax(dim=-1).max(dim=-1)
    return words, scores


class MaskPredictRefiner:
    """T passes over the l likeliest lengths at once. `extra` of its canvas: the slots that the last
    pass predicted.
    """

    def __init__(self, model: Seq2Seq, iterations: int, lengths: int):
        self.model, self.iterations, self.width = model, iterations, lengths

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Masks, as many as each length says."""
        longest = self.model.config.max_positions
        likeliest = likeliest_lengths(
            length_logprobs(self.model, memory)[:, : longest + 1], self.width
        )[0]
        return blank(likeliest, self.model.config.mask, self.model.device)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Mask what is least sure, predict it; everything else keeps its word and the probability
        it had.
        """
        again = select_lowest(
            canvas.scores,
            canvas.mask,
            count_masked(canvas.mask.sum(dim=1), iteration, self.iterations),
        )
        words, scores = predict_masked(
            self.model,
            canvas.tokens.masked_fill(again, self.model.config.mask),
            canvas.mask,
            memory,
        )
        tokens = torch.where(again, words, canvas.tokens)
        return Canvas(tokens, canvas.mask, torch.where(again, scores, canvas.scores), again)

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == self.iterations

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        """The length with the best mean log-probability; of equals, the likelier length."""
        return int(canvas.means().argmax())


@technique(
    title="Mask-Predict: conditional masked language model",
    summary="rewrites the least certain words",
    paper="Ghazvininejad et al. 2019, arXiv 1904.09324",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    knobs=(
        Knob("iterations", 10, "decoder passes T", low=1, small=(2, 1, 4)),
        Knob("lengths", 5, "target lengths tried at once", low=1, small=(2, 1)),
    ),
    kind="refine",
)
def mask_predict(request: RefineRequest, *, iterations: int, lengths: int) -> MaskPredictRefiner:
    """All words at once, then the least sure ones again."""
    if not request.model.config.lengths:
        raise TinyspecError(
            f"{request.model.name} has no LENGTH token, so nobody says how long its translations are: use a model that "
            "was trained for mask_predict"
        )
    return MaskPredictRefiner(request.model, iterations, lengths)


# ---------------------------------------------------------------------- lengths


def length_logprobs(model: Seq2Seq, memory: EncoderOutput) -> Tensor:
    """The law that the LENGTH token tells: [B, lengths]."""
    return model.length_logits(memory).log_softmax(dim=-1)


def likeliest_lengths(law: Tensor, width: int) -> list[list[int]]:
    """The `width` likeliest lengths of each row, the likeliest first, of equals the shorter; fewer
    where no more can be.

    >>> likeliest_lengths(torch.tensor([[0.0, 0.2, 0.5, 0.3]]).log(), 2)
    [[2, 3]]
    """
    if width < 1:
        raise TinyspecError(f"{width} lengths: a length beam holds at least one")
    order = law.sort(dim=-1, descending=True, stable=True)
    found = []
    for values, lengths in zip(
        order.values[:, :width].tolist(), order.indices[:, :width].tolist(), strict=True
    ):
        chosen = [
            length for value, length in zip(values, lengths, strict=True) if value > -torch.inf
        ]
        if not chosen:
            raise TinyspecError(
                "the model holds no length for possible: its checkpoint is broken, train it anew"
            )
        found.append(chosen)
    return found


def _possible(law: Tensor) -> Tensor:
    """Without length 0, and normalised."""
    return torch.cat((torch.full_like(law[:, :1], -torch.inf), law[:, 1:]), dim=1).log_softmax(
        dim=-1
    )
