"""Translation with one defect each: the source is not heard, passes go wrong, a teacher judges
something else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas, Pass, Refinement, blank, judge
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.laws.refine_laws import reader
from tinyspec.laws.translation_laws import JUDGED, LISTENS, LOOP, Scripted, writer
from tinyspec.lm.feed import ForwardBatch
from tinyspec.lm.given import CrossAttentionBlocks, Given
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.transformer import Model
from tinyspec.tree import TokenTree

# ---------------------------------------------------------------------- the session


class Unscaled(CrossAttentionBlocks):
    """Embeddings enter as they are."""

    def enter(self, feed: ForwardBatch) -> Tensor:
        x: Tensor = super().enter(feed)
        return x.mul(self.config.d_model**-0.5)  # right: embeddings times sqrt(d), then positions


class CountsRows(CrossAttentionBlocks):
    """A row's position is its number in the pass."""

    def enter(self, feed: ForwardBatch) -> Tensor:
        return super().enter(
            replace(feed, positions=list(range(len(feed.positions))))
        )  # right: feed.positions


class PlacedAgain(CrossAttentionBlocks):
    """Rows that were run part of the way get their position once more."""

    def enter(self, feed: ForwardBatch) -> Tensor:
        return super().enter(
            replace(feed, starts=[0] * len(feed.starts))
        )  # right: only rows that begin


class Deaf(CrossAttentionBlocks):
    """Only the first layer hears the source."""

    def span(
        self,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        heard, self.heard = (
            self.heard,
            (self.heard[0], *((k, torch.zeros_like(v)) for k, v in self.heard[1:])),
        )
        try:
            return super().span(feeds, active, x, first, last)
        finally:
            self.heard = heard


class OneLayerAhead(CrossAttentionBlocks):
    """Every layer hears with the keys and values of the next."""

    def span(
        self,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        heard, self.heard = self.heard, (*self.heard[1:], self.heard[0])
        try:
            return super().span(feeds, active, x, first, last)
        finally:
            self.heard = heard


def hearing(path: type[CrossAttentionBlocks]) -> Callable[[Seq2Seq, Sequence[int]], Model]:
    """A model that has read a source, by other blocks."""

    def given(host: Seq2Seq, source: Sequence[int]) -> Model:
        model = Given(host, source)
        assert isinstance(model._path, CrossAttentionBlocks)
        model._path = path(host, model._path.memory)
        return model

    return given


def rows(parts: Parts) -> Any:
    """What a session says of a few tokens."""
    session = parts.given(writer(0), (6, 5, 4)).session()
    session.extend((1, 4))
    session.advance(TokenTree.chain((5, 6)), 1)
    return session.score(TokenTree.chain((5, 6))).logits.tolist()


# ---------------------------------------------------------------------- the loop


class OneMore(Refinement):
    """Looks whether it is done only behind a pass."""

    def __iter__(self) -> Iterator[Pass]:
        finished = self.refiner.finished
        self.refiner.finished = lambda canvas, n: n > 0 and finished(canvas, n - 1)  # type: ignore[method-assign, assignment]
        yield from super().__iter__()


class KeepsTheFirst(Refinement):
    """The first candidate is kept, whatever is chosen."""

    def __iter__(self) -> Iterator[Pass]:
        yield from super().__iter__()
        self.chosen = 0


class FromTheStart(Refinement):
    """Every pass rewrites the first canvas."""

    def __iter__(self) -> Iterator[Pass]:
        rewrite, kept = self.refiner.rewrite, list[Canvas]()

        def again(canvas: Canvas, memory: Any, iteration: int, rng: Any) -> Canvas:
            kept.append(canvas)
            return rewrite(kept[0], memory, iteration, rng)  # right: canvas

        self.refiner.rewrite = again  # type: ignore[method-assign]
        yield from super().__iter__()


class ReadsAgain(Refinement):
    """The source is encoded in every pass."""

    def __iter__(self) -> Iterator[Pass]:
        rewrite = self.refiner.rewrite

        def reading(canvas: Canvas, memory: Any, iteration: int, rng: Any) -> Canvas:
            memory = self.model.encode(
                torch.tensor([self.source])
            )  # right: the memory that is there
            return rewrite(canvas, memory, iteration, rng)

        self.refiner.rewrite = reading  # type: ignore[method-assign]
        yield from super().__iter__()


class OneNoise(Refinement):
    """Every pass draws the same."""

    def __iter__(self) -> Iterator[Pass]:
        rewrite = self.refiner.rewrite
        self.refiner.rewrite = lambda c, m, i, rng: rewrite(c, m, i, Seeded(0))  # type: ignore[method-assign, assignment]
        yield from super().__iter__()


def kept(parts: Parts) -> Any:
    """What a scripted refiner is asked, and what is kept of it."""
    forward_log = list[Any]()
    refiner = Scripted(reader(0).counting(forward_log), 2)
    running = parts.refine(reader(0), (6, 5, 4), refiner, Seeded(0), forward_log)
    return (
        len(list(running)),
        refiner.log,
        running.tokens,
        running.chosen,
        [call.model for call in forward_log],
    )


# ---------------------------------------------------------------------- the judgement


def without_the_end(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> Tensor:
    """That the text ends where it does costs nothing."""
    places = torch.arange(canvas.tokens.shape[1] + 1)[None]
    return judge(teacher, source, canvas).masked_fill(places == canvas.mask.sum(dim=1)[:, None], 0)


def padding_too(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> Tensor:
    """Padding slots are judged as text."""
    return judge(teacher, source, canvas._replace(mask=torch.ones_like(canvas.mask)))


def both_ways(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> Tensor:
    """The teacher sees what it is to say."""
    decode = teacher.decode
    open_eyed = teacher.counting([])
    open_eyed.decode = lambda x, memory, mask: decode(x, memory)  # type: ignore[method-assign, assignment, misc]
    return judge(open_eyed, source, canvas)


def no_beginning(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> Tensor:
    """The text is read without its beginning, each token judged by the row it enters itself."""
    own = teacher.counting([])
    embed = teacher.embed
    own.embed = lambda read: embed(torch.cat((read[:, 1:], read[:, :1]), dim=1))  # type: ignore[method-assign, assignment]
    return judge(own, source, canvas)


def verdict(parts: Parts) -> Any:
    """What a teacher says of two candidates."""
    canvas = blank([3, 1], 8)
    canvas.tokens[:] = torch.tensor([[4, 5, 6], [7, 8, 8]])
    return parts.judge(writer(0), (6, 5, 4), canvas).tolist()


MUTANTS = [
    Mutant(
        "a decoder's embeddings are not scaled",
        "slip",
        LISTENS,
        replace(PARTS, given=hearing(Unscaled)),
        rows,
    ),
    Mutant(
        "positions count a pass's rows",
        "slip",
        LISTENS,
        replace(PARTS, given=hearing(CountsRows)),
        rows,
    ),
    Mutant(
        "a half-run row is placed again",
        "slip",
        LISTENS,
        replace(PARTS, given=hearing(PlacedAgain)),
        rows,
    ),
    Mutant(
        "only the first layer hears the source",
        "slip",
        LISTENS,
        replace(PARTS, given=hearing(Deaf)),
        rows,
    ),
    Mutant(
        "a layer hears as the next one",
        "slip",
        LISTENS,
        replace(PARTS, given=hearing(OneLayerAhead)),
        rows,
    ),
    Mutant("one rewriting too many", "slip", LOOP, replace(PARTS, refine=OneMore), kept),
    Mutant("the first candidate is kept", "slip", LOOP, replace(PARTS, refine=KeepsTheFirst), kept),
    Mutant(
        "every pass rewrites the first canvas",
        "slip",
        LOOP,
        replace(PARTS, refine=FromTheStart),
        kept,
    ),
    Mutant(
        "the source is encoded in every pass", "slip", LOOP, replace(PARTS, refine=ReadsAgain), kept
    ),
    Mutant("every rewriting draws the same", "S1", LOOP, replace(PARTS, refine=OneNoise), kept),
    Mutant(
        "a teacher does not judge the end",
        "slip",
        JUDGED,
        replace(PARTS, judge=without_the_end),
        verdict,
    ),
    Mutant("a teacher judges padding", "slip", JUDGED, replace(PARTS, judge=padding_too), verdict),
    Mutant(
        "a teacher sees what it judges", "slip", JUDGED, replace(PARTS, judge=both_ways), verdict
    ),
    Mutant(
        "a teacher judges a token by its own row",
        "slip",
        JUDGED,
        replace(PARTS, judge=no_beginning),
        verdict,
    ),
]
