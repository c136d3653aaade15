"""Mask-Predict with one defect each: the wrong number of masks, the wrong places, a probability or
a length mistaken.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor

from tinyspec.decoding.refine import Canvas, blank
from tinyspec.decoding.rng import RandomSource
from tinyspec.laws.masking import CHOICE, HIDDEN, RULE, SOURCES, begun, fillers
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.lm.seq2seq import EncoderOutput
from tinyspec.nonautoregressive.mask_predict import (
    MaskPredictRefiner,
    beam,
    by_token,
    count_masked,
    hide_tokens,
    predict_masked,
    select_lowest,
)


def _counting(
    count: Callable[[Tensor, int, int], Tensor], choose: Callable[..., Tensor] = select_lowest
) -> type[MaskPredictRefiner]:
    """The rule with another number of masks, or other places for them."""

    class Wrong(MaskPredictRefiner):
        def rewrite(
            self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
        ) -> Canvas:
            again = choose(
                canvas.scores,
                canvas.mask,
                count(canvas.mask.sum(dim=1), iteration, self.iterations),
            )
            read = canvas.tokens.masked_fill(again, self.model.config.mask)
            words, scores = predict_masked(self.model, read, canvas.mask, memory)
            return Canvas(
                torch.where(again, words, canvas.tokens),
                canvas.mask,
                torch.where(again, scores, canvas.scores),
                again,
            )

    return Wrong


def one_late(n: Tensor, t: int, passes: int) -> Tensor:
    return count_masked(n, max(t - 1, 0), passes)  # right: t


def one_early(n: Tensor, t: int, passes: int) -> Tensor:
    return count_masked(n, t + 1, passes) if t else n  # right: t


def rounded_up(n: Tensor, t: int, passes: int) -> Tensor:
    return -(-n * (passes - t) // passes)  # right: the floor, at least 1


def maybe_none(n: Tensor, t: int, passes: int) -> Tensor:
    return n * (passes - t) // passes  # right: at least 1


def of_the_last(n: Tensor, t: int, passes: int) -> Tensor:
    return (
        count_masked(n, t, passes)
        if t < 2
        else (count_masked(n, t - 1, passes) * (passes - t) // passes).clamp(min=1)
    )  # of N


def of_the_longest(n: Tensor, t: int, passes: int) -> Tensor:
    return count_masked(n.max().expand_as(n), t, passes)  # right: each row's own length


def padding_counts(scores: Tensor, slots: Tensor, count: Tensor) -> Tensor:
    known = scores.masked_fill(~slots, -torch.inf)  # right: padding is never the least sure
    return select_lowest(known, torch.ones_like(slots), count) & slots


def surest(scores: Tensor, slots: Tensor, count: Tensor) -> Tensor:
    return select_lowest(-scores, slots, count)  # right: the lowest


def leftmost(scores: Tensor, slots: Tensor, count: Tensor) -> Tensor:
    return select_lowest(torch.zeros_like(scores), slots, count)  # right: by their probabilities


class SeesTheOld(MaskPredictRefiner):
    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        again = select_lowest(
            canvas.scores,
            canvas.mask,
            count_masked(canvas.mask.sum(dim=1), iteration, self.iterations),
        )
        words, scores = predict_masked(
            self.model, canvas.tokens, canvas.mask, memory
        )  # right: masks where it is written again
        return Canvas(
            torch.where(again, words, canvas.tokens),
            canvas.mask,
            torch.where(again, scores, canvas.scores),
        )


class SeesThePadding(MaskPredictRefiner):
    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        again = select_lowest(
            canvas.scores,
            canvas.mask,
            count_masked(canvas.mask.sum(dim=1), iteration, self.iterations),
        )
        read = canvas.tokens.masked_fill(again, self.model.config.mask)
        words, scores = predict_masked(
            self.model, read, torch.ones_like(canvas.mask), memory
        )  # right: canvas.mask
        return Canvas(
            torch.where(again, words, canvas.tokens),
            canvas.mask,
            torch.where(again, scores, canvas.scores),
        )


class KeepsTheFirst(MaskPredictRefiner):
    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        after = super().rewrite(canvas, memory, iteration, rng)
        return (
            after._replace(scores=canvas.scores) if iteration else after
        )  # right: new words, new probabilities


class BySum(MaskPredictRefiner):
    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return int(
            canvas.scores.masked_fill(~canvas.mask, 0).sum(dim=1).argmax()
        )  # right: the mean


class ByWidth(MaskPredictRefiner):
    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return int(canvas.scores.mean(dim=1).argmax())  # right: the mean over the slots


class TheLikeliest(MaskPredictRefiner):
    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0  # right: the best mean log-probability


class OneShorter(MaskPredictRefiner):
    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        lengths = beam(
            by_token(self.model, memory)[:, 1 : self.model.config.max_positions + 1], self.width
        )[0]
        return blank(
            [max(n, 1) for n in lengths], self.model.config.mask
        )  # right: class 0 stays where it was


class Around(MaskPredictRefiner):
    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        first = beam(by_token(self.model, memory), 1)[0][0]  # right: the l likeliest
        longest = self.model.config.max_positions
        return blank(
            [min(max(first + i, 1), longest) for i in range(self.width)], self.model.config.mask
        )


def with_padding(slots: Tensor, generator: Generator) -> Tensor:
    return hide_tokens(torch.ones_like(slots), generator) & slots  # right: of the row's own slots


def each_by_itself(slots: Tensor, generator: Generator) -> Tensor:
    share = torch.rand(len(slots), 1, generator=generator)
    return (
        torch.rand(slots.shape, generator=generator) < share
    ) & slots  # right: a number, then so many


def a_run(slots: Tensor, generator: Generator) -> Tensor:
    count = hide_tokens(slots, generator).sum(dim=1)
    return slots & (torch.arange(slots.shape[1]) < count[:, None])  # right: any choice of so many


def rewrites(parts: Parts) -> Any:
    """Words and scores of all candidates after every pass, the lengths, the choice."""
    made = []
    build: Any = lambda request, iterations, lengths: parts.mask_predict(  # noqa: E731
        request.model, iterations, lengths
    )
    for model, source, passes in product(fillers(), SOURCES, (3, 9)):
        run = begun(build, model, source, passes, 3)
        after = [step.after for step in run]
        made.append(
            ([(canvas.tokens.tolist(), canvas.scores.tolist()) for canvas in after], run.chosen)
        )
    return made


def masks(parts: Parts) -> Any:
    """The masks of a batch."""
    return parts.hide(
        torch.arange(6) < torch.tensor([[2], [4], [6]]), Generator().manual_seed(1)
    ).tolist()


def _rule(name: str, kind: type[MaskPredictRefiner]) -> Mutant:
    return Mutant(name, "slip", RULE, replace(PARTS, mask_predict=kind), rewrites)


def _choice(name: str, kind: type[MaskPredictRefiner]) -> Mutant:
    return Mutant(name, "slip", CHOICE, replace(PARTS, mask_predict=kind), rewrites)


def _hidden(name: str, function: Callable[[Tensor, Generator], Tensor]) -> Mutant:
    return Mutant(name, "slip", HIDDEN, replace(PARTS, hide=function), masks)


MUTANTS = [
    _rule("the schedule is a pass late", _counting(one_late)),
    _rule("the schedule is a pass early", _counting(one_early)),
    _rule("as many masks as the ceiling says", _counting(rounded_up)),
    _rule("no masks where the floor is 0", _counting(maybe_none)),
    _rule("a share of the masks before, not of all words", _counting(of_the_last)),
    _rule("masks counted by the longest candidate", _counting(of_the_longest)),
    _rule("padding counts as least sure", _counting(count_masked, padding_counts)),
    _rule("the surest words are masked", _counting(count_masked, surest)),
    _rule("the first words are masked", _counting(count_masked, leftmost)),
    _rule("a word that is written again sees itself", SeesTheOld),
    _rule("padding is looked at", SeesThePadding),
    _rule("a word that is written again keeps its old probability", KeepsTheFirst),
    _choice("lengths compared by the sum", BySum),
    _choice("lengths compared by the mean over the padding too", ByWidth),
    _choice("the likeliest length is kept", TheLikeliest),
    _choice("lengths are one shorter than the LENGTH token says", OneShorter),
    _choice("lengths upwards from the likeliest", Around),
    _hidden("numbers of masks counted with the padding", with_padding),
    _hidden("each word hidden by itself", each_by_itself),
    _hidden("a run of words hidden", a_run),
]
