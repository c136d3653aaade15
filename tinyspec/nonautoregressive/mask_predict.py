"""Mask-Predict: predict all words at once, then mask the least certain ones and predict them again.

Paper: Ghazvininejad, Levy, Liu, Zettlemoyer, EMNLP 2019, arXiv 1904.09324.

Idea. A conditional masked language model fills in *any* subset of the target's words, from the
source and the other words. Decoding takes T passes. The first fills in everything. Before each
further pass the words with the lowest probabilities are masked, and predicted again together. A
word that stays keeps the probability from the pass that wrote it. A LENGTH token before the source
predicts the target's length; the l likeliest lengths are tried as one batch, and the translation
with the best mean log-probability wins.

    n(t) = max(1, floor(N (T - t) / T))        words masked before pass t = 1 .. T - 1, of N

Training. `masked_lm_loss`: cross-entropy of the hidden words alone, labels smoothed by 0.1, plus
that of the length, both summed and divided by the number of hidden words, as in the released code.
1 to N words are hidden, each number equally often, so that an empty page is as familiar as a full
one. (The released code never hides all N; this follows the paper.) As published, the targets are
sentences translated by a teacher.

Guarantee: APPROX: no setting gives the teacher's distribution; T = 1 is one parallel pass. What
runs is compared with a second version in laws/nonautoregressive_laws.py.
Pitfall: hiding 15 % of the words as BERT does, so that the first pass fails; computing all
probabilities anew in each pass.
Ablation: one pass. On dialects ten passes have more right translations
(tutorials/results/dialects.md).
Tests: tests/nonautoregressive/test_mask_predict.py (`mask_and_predict` against the code that runs,
pass by pass; the schedule; words that stay do not change; the loss).
Left out: nothing. Of equally certain words the leftmost is masked, and special tokens are never
written: the paper leaves both open. One pass of the encoder and T of the decoder, l rows wide; the
decoder's own keys and values cannot be kept, because every word may change.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)

VALIDATION_PASSES = 4  # few, to be quick
VALIDATION_LENGTHS = 2


def mask_and_predict(
    predict: Callable[[list[int]], tuple[list[int], list[float]]],
    n_words: int,
    iterations: int,
    mask: int,
) -> tuple[list[int], list[float]]:
    """Return a translation of n_words words and their log-probabilities (section 3).

    predict     words, some of them masks -> the likeliest word of each position, and its
                log-probability: one decoder pass
    iterations  passes (T)
    mask        id of the mask

    `MaskPredictRefiner` does this for several lengths in one batch. A test compares the two.
    """
    words, scores = [mask] * n_words, [0.0] * n_words
    for t in range(iterations):
        n_masked = max(1, n_words * (iterations - t) // iterations)  # all of them in pass 0
        least_certain = sorted(range(n_words), key=lambda i: scores[i])[:n_masked]
        for i in least_certain:
            words[i] = mask
        predicted, logprobs = predict(words)
        for i in least_certain:  # a word that stays keeps its old probability
            words[i], scores[i] = predicted[i], logprobs[i]
    return words, scores


# ------------------------------ training (section 2)


class TranslationPairs(NamedTuple):
    """A batch to train on: source [B, S] and target [B, T], padded at the end."""

    source: Tensor
    target: Tensor


def hide_tokens(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Return which slots [B, T] to hide: 1 to N of each row, each number equally likely."""
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
    """Return the cross-entropy of the hidden words and of the length, per hidden word.

    (- sum over hidden t of log p(y_t | visible words, x) - log p(N | x)) / number of hidden words
    """
    source, target = batch
    config, slots = model.config, target != model.config.pad
    lengths = slots.sum(dim=1)
    if int(lengths.max()) >= config.lengths or not int(lengths.min()):
        raise TinyspecError(
            f"targets of {int(lengths.min())} to {int(lengths.max())} tokens: the LENGTH token of "
            f"{model.name} tells 1 to {config.lengths - 1}, so leave the others out"
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


# ------------------------------ decoding (section 3)


def count_masked(length: Tensor, iteration: int, iterations: int) -> Tensor:
    """Return n(t), how many words pass t of T predicts: all in pass 0.

    >>> [int(count_masked(torch.tensor(6), t, 4)) for t in range(4)]
    [6, 4, 3, 1]
    """
    return (length * (iterations - iteration) // iterations).clamp(min=1)


def select_lowest(scores: Tensor, slots: Tensor, count: Tensor) -> Tensor:
    """Return which slots [C, T] have the `count` [C] lowest scores [C, T] of their row.

    Of equal scores the leftmost slot is taken. Padding is never among them.
    """
    order = scores.masked_fill(~slots, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)  # the position of each slot in that order
    return (rank < count[:, None]) & slots


def predict_masked(
    model: Seq2Seq, tokens: Tensor, slots: Tensor, memory: EncoderOutput
) -> tuple[Tensor, Tensor]:
    """Return the likeliest words and their log-probabilities, each [C, T]: one decoder pass.

    tokens  [C, T] words, some of them masks
    """
    c = model.config
    logits = model.logits(model.decode(model.embed(tokens), memory, None, slots=slots))  # [C, T, V]
    special = torch.tensor([c.pad, c.bos, c.eos, c.mask], device=logits.device)
    scores, words = logits.index_fill(-1, special, -torch.inf).log_softmax(dim=-1).max(dim=-1)
    return words, scores


class MaskPredictRefiner:
    """Rewrite a canvas T times, for the l likeliest lengths at once.

    `extra` of its canvas is the slots that the last pass predicted.
    """

    def __init__(self, model: Seq2Seq, iterations: int, lengths: int):
        self.model, self.iterations, self.width = model, iterations, lengths

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas of masks, one candidate for each length."""
        longest = self.model.config.max_positions
        likeliest = select_lengths(
            length_logprobs(self.model, memory)[:, : longest + 1], self.width
        )[0]
        return blank_canvas(likeliest, self.model.config.mask, self.model.device)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Mask the least certain words and predict them; other words keep their probability."""
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
        """Return the candidate with the best mean log-probability.

        Of equal candidates it is the one of the likelier length.
        """
        return int(canvas.means().argmax())


# ------------------------------ lengths


def length_logprobs(model: Seq2Seq, memory: EncoderOutput) -> Tensor:
    """Return the LENGTH token's log-probabilities of lengths: [B, lengths]."""
    return model.length_logits(memory).log_softmax(dim=-1)


def find_likeliest_lengths(
    model: Seq2Seq, memory: EncoderOutput, count: int, longest: int
) -> list[int]:
    """Return the `count` likeliest lengths of one source, none above `longest`."""
    return select_lengths(length_logprobs(model, memory)[:, : longest + 1], count)[0]


def find_nearest_lengths(
    model: Seq2Seq, memory: EncoderOutput, count: int, longest: int
) -> list[int]:
    """Return the likeliest length of one source and those nearest to it, `count` in all.

    None is above `longest`. Of two equally near lengths the shorter comes first.
    """
    logprobs = length_logprobs(model, memory)[:, : longest + 1]
    likeliest = select_lengths(logprobs, 1)[0][0]
    return sorted(range(1, logprobs.shape[1]), key=lambda n: (abs(n - likeliest), n))[:count]


def check_length_token(model: Seq2Seq, remedy: str) -> None:
    """Raise TinyspecError, which ends with a remedy, if a model has no LENGTH token."""
    if not model.config.lengths:
        raise TinyspecError(
            f"{model.name} has no LENGTH token, so nobody says how long its translations are: "
            f"{remedy}"
        )


def select_lengths(logprobs: Tensor, width: int) -> list[list[int]]:
    """Return the `width` likeliest lengths of each row, the likeliest first.

    logprobs  [B, lengths]

    Of equally likely lengths the shorter comes first. Impossible lengths are left out.

    >>> select_lengths(torch.tensor([[0.0, 0.2, 0.5, 0.3]]).log(), 2)
    [[2, 3]]
    """
    if width < 1:
        raise TinyspecError(f"lengths is {width}: it must be at least 1")
    order = logprobs.sort(dim=-1, descending=True, stable=True)
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


# ------------------------------ the card


def mask_predict_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `masked_lm_loss` of a batch of the trainer."""
    pairs = TranslationPairs(*batch)
    return masked_lm_loss(training.model, pairs, generator, training.dropout, training.smoothing)


def translate_to_validate(model: Seq2Seq, settings: Any, sources: Tensor) -> list[list[int]]:
    """Return translations of padded sources [B, S]."""
    refiner = MaskPredictRefiner(model, VALIDATION_PASSES, VALIDATION_LENGTHS)
    return translate_sources(model, sources, refiner)


@technique(
    title="Mask-Predict: conditional masked language model",
    summary="rewrites the least certain words",
    paper="Ghazvininejad et al. 2019, arXiv 1904.09324",
    reported="about 3x (survey)",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    translator=TrainedTranslator(
        mask_predict_batch_loss,
        translate_to_validate,
        "It fills in masked words, in several passes (`mask_predict`). Its figure is that of four "
        "iterations over two lengths.",
        shape={"lengths": 9},
        fits=lambda config, settings, source, target: 0 < target < config.lengths,
    ),
    knobs=(
        Knob("iterations", 10, "decoder passes T", low=1, high=1024, small=(2, 1, 4)),
        Knob("lengths", 5, "target lengths tried at once", low=1, high=1024, small=(2, 1)),
    ),
    kind="refine",
)
def mask_predict(request: RefineRequest, *, iterations: int, lengths: int) -> MaskPredictRefiner:
    """Return a refiner that predicts all words at once, then the least certain ones again."""
    check_length_token(request.model, "use a model that was trained for mask_predict")
    return MaskPredictRefiner(request.model, iterations, lengths)
