"""Rewrite the canvases of a batch of sources together.

There is one encoder pass and, in each iteration, one decoder pass for all candidates of all
sources. It is for techniques that draw no random numbers in a pass and do not change finished
candidates. Tests show that the result is that of `refine`, source by source. Parallel decoding
gains least on a large batch, and the benchmarks measure it with this.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, Refiner, encode_sources
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq


class CanvasBatch(NamedTuple):
    """Canvases of several sources as one, after the last iteration.

    canvas  all candidates, those of a source together, in the sources' order; its `extra` is None
    owners  [C] whose candidate each row is
    """

    canvas: Canvas
    owners: Tensor

    def canvas_of(self, source: int) -> Canvas:
        """Return the canvas of one source, without the padding that the others need."""
        rows = (self.owners == source).nonzero().flatten()
        room = max(1, int(self.canvas.mask[rows].sum(dim=1).max()))
        return Canvas(*(part[rows, :room] for part in self.canvas[:3]))


@torch.inference_mode()
def refine_many(
    model: Seq2Seq,
    sources: Tensor,
    refiner: Refiner,
    rngs: Sequence[RandomSource],
    memory: EncoderOutput | None = None,
) -> CanvasBatch:
    """Rewrite a canvas for each of the sources [B, S], padded at the end; nothing is chosen yet.

    rngs    one for each source, as `refine` would get it
    memory  of these sources, if the caller has it
    """
    memory = encode_sources(model, refiner, sources) if memory is None else memory
    mask = sources != model.config.pad
    firsts = [
        refiner.start(row[there].tolist(), select_source(memory, i), rng.split("start", 0))
        for i, (row, there, rng) in enumerate(zip(sources, mask, rngs, strict=True))
    ]
    canvas, owners = stack_canvases(firsts)
    source_memory, iteration = memory.select_rows(owners), 0
    while not refiner.finished(canvas, iteration):
        canvas = refiner.rewrite(canvas, source_memory, iteration, _NoRandomSource())
        iteration += 1
    return CanvasBatch(canvas._replace(extra=None), owners)


def translate_sources(
    model: Seq2Seq,
    sources: Tensor,
    refiner: Refiner,
    rngs: Sequence[RandomSource] | None = None,
) -> list[list[int]]:
    """Return the translations of the sources [B, S]: what `refine` chooses for each.

    rngs  one for each source; None: each has seed 0
    """
    rngs = [Seeded(0) for _ in sources] if rngs is None else rngs
    with torch.inference_mode():
        memory = encode_sources(model, refiner, sources)
    many, found = refine_many(model, sources, refiner, rngs, memory), []
    for i, row in enumerate(sources):
        canvas, source = many.canvas_of(i), row[row != model.config.pad].tolist()
        with torch.inference_mode():
            found.append(canvas.text(refiner.choose(canvas, source, select_source(memory, i))))
    return found


def select_source(memory: EncoderOutput, source: int) -> EncoderOutput:
    """Return the encoding of one source, without the padding that the others need."""
    length = int(memory.mask[source].sum())
    one = memory.select_rows([source])
    cross_kv = one.cross_kv
    if cross_kv is not None:
        cross_kv = tuple((k[:, :length], v[:, :length]) for k, v in cross_kv)
    tokens = None if one.source is None else one.source[:, :length]
    states, mask = one.states[:, :length], one.mask[:, :length]
    return EncoderOutput(states, mask, one.summary, cross_kv, tokens)


def stack_canvases(canvases: Sequence[Canvas]) -> tuple[Canvas, Tensor]:
    """Return the canvases as one, padded to the widest, and the source of each row."""
    room = max(canvas.tokens.shape[1] for canvas in canvases)
    parts = zip(*(canvas[:3] for canvas in canvases), strict=True)
    tokens, mask, scores = (
        torch.cat([F.pad(part, (0, room - part.shape[1])) for part in of]) for of in parts
    )
    counts = torch.tensor([len(canvas.tokens) for canvas in canvases], device=tokens.device)
    return Canvas(tokens, mask, scores), torch.repeat_interleave(counts)


class _NoRandomSource:
    """Raise an error on every draw: one random source cannot serve several sources of a batch."""

    def __getattr__(self, name: str) -> NoReturn:
        raise TinyspecError(
            "this technique draws random numbers while it rewrites: call `refine` for each source"
        )
