"""Mask-Predict (Ghazvininejad et al. 2019): any number of words hidden, stale probabilities,
several lengths.
"""

from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.laws.nonautoregressive_laws import (
    LENGTH_CHOICE,
    MASK_RULE,
    MASKS_HIDDEN,
    chooses_best_length,
    follows_mask_predict,
    hides_uniformly,
)
from tinyspec.laws.traps import Toy, Trap
from tinyspec.lm.seq2seq import EncoderOutput
from tinyspec.nonautoregressive.mask_predict import (
    MaskPredictRefiner,
    count_masked,
    hide_tokens,
    predict_masked,
    select_lowest,
)
from tinyspec.technique import RefineRequest, find_technique


class Refreshing(MaskPredictRefiner):
    """Words that stay are given the probability they have now."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        after = super().rewrite(canvas, memory, iteration, rng)
        logits = self.model.logits(
            self.model.decode(self.model.embed(after.tokens), memory, None, slots=canvas.mask)
        )
        now = (
            logits[..., 4:]
            .log_softmax(-1)
            .gather(-1, (after.tokens - 4).clamp(min=0)[..., None])[..., 0]
        )
        return after._replace(scores=torch.where(after.extra, after.scores, now))


class Rewriting(MaskPredictRefiner):
    """Iterative refinement: every pass writes every word anew, from the text before it."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        words, scores = predict_masked(self.model, canvas.tokens, canvas.mask, memory)
        return Canvas(words, canvas.mask, scores)


class Random(MaskPredictRefiner):
    """As many words as the schedule says, but any."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        noise = torch.rand(canvas.scores.shape, generator=torch.Generator().manual_seed(iteration))
        again = select_lowest(
            noise, canvas.mask, count_masked(canvas.mask.sum(dim=1), iteration, self.iterations)
        )
        words, scores = predict_masked(
            self.model, canvas.tokens.masked_fill(again, 3), canvas.mask, memory
        )
        mixed = torch.where(again, words, canvas.tokens), torch.where(again, scores, canvas.scores)
        return Canvas(mixed[0], canvas.mask, mixed[1])


def one_length(request: RefineRequest, iterations: int, lengths: int) -> MaskPredictRefiner:
    """The likeliest length alone."""
    return MaskPredictRefiner(request.model, iterations, 1)


def one_after_the_other(request: RefineRequest, iterations: int, lengths: int) -> Any:
    """Each length is a request of its own: what should be one batch is l decodings."""

    class Apart(MaskPredictRefiner):
        def rewrite(
            self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
        ) -> Canvas:
            rows = [
                super(Apart, self).rewrite(
                    Canvas(*(part[row : row + 1] for part in canvas[:3])), memory, iteration, rng
                )
                for row in range(len(canvas.tokens))
            ]
            return Canvas(*(torch.cat([row[part] for row in rows]) for part in range(3)))

    return Apart(request.model, iterations, lengths)


def fifteen_percent(slots: Tensor, generator: torch.Generator) -> Tensor:
    """As BERT is trained, with one word at least."""
    count = (0.15 * slots.sum(dim=1)).round().long().clamp(min=1)
    return select_lowest(torch.rand(slots.shape, generator=generator), slots, count)


def drawn_once(slots: Tensor, generator: torch.Generator) -> Tensor:
    """When the data are prepared, each sentence is given its masks."""
    return hide_tokens(slots, torch.Generator().manual_seed(0))


def as_released(slots: Tensor, generator: torch.Generator) -> Tensor:
    """The released code's numbers end at N - 1: an empty page is never seen."""
    lengths = slots.sum(dim=1)
    count = (torch.rand(len(slots), generator=generator) * (lengths - 1)).long() + 1
    return select_lowest(torch.rand(slots.shape, generator=generator), slots, count)


def _class(kind: type[MaskPredictRefiner]) -> Any:
    return lambda request, iterations, lengths: kind(request.model, iterations, lengths)


TRAPS = [
    Trap(MASK_RULE, follows_mask_predict, lambda: find_technique("mask_predict").refiner),
    Trap(LENGTH_CHOICE, chooses_best_length, lambda: find_technique("mask_predict").refiner),
    Trap(MASKS_HIDDEN, hides_uniformly, lambda: hide_tokens),
]
TOYS = [
    Toy("all probabilities refreshed", MASK_RULE, _class(Refreshing)),
    Toy("all words written anew in every pass", MASK_RULE, _class(Rewriting)),
    Toy("random words masked", MASK_RULE, _class(Random)),
    Toy("a single length", LENGTH_CHOICE, one_length),
    Toy("one decoding a length", LENGTH_CHOICE, one_after_the_other),
    Toy("15 % of the words hidden", MASKS_HIDDEN, fifteen_percent),
    Toy("masks drawn once", MASKS_HIDDEN, drawn_once),
    Toy("never all words hidden", MASKS_HIDDEN, as_released),
]
