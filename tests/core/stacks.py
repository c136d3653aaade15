"""Build small random transformers twice, and run passes over trees of rows through both.

One is compiled, the other is the pure twin in float64. A pass is a forest of rows: every row has a
parent that stands before it, or none, and sees its ancestors and itself (or some of them). `alone`
runs each row by itself; `together` runs them in blocks, in any slots, on any threads, beside any
other rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from tinyspec import _core

if _core.compute is None:
    pytest.skip("NO COMPILED TRANSFORMER: its kernels are not tested", allow_module_level=True)

from tinyspec._core import compute
from tinyspec._core import reference_compute as twin
from tinyspec.lm.engine import pack_matrix

Array = NDArray[Any]
EPS = 2.0**-24
WIDTHS = (
    1,
    2,
    3,
    6,
    7,
    8,
    12,
    16,
    18,
    24,
    30,
    32,
    34,
    48,
    64,
    66,
)  # of heads: below, at and beyond every vector


@pytest.fixture(scope="module", params=compute.kernels(), autouse=True)
def each_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where it is imported, all tests run with every kernel."""
    before = compute.kernel()
    compute.use(request.param)
    yield
    compute.use(before)


def rounds(half: bool) -> bool:
    """Whether the kernel in use rounds its rows to bfloat16, having instructions that multiply
    these.
    """
    return half and compute.kernel() == "avx512bf16"


def falls(law: Callable[..., None], *accused: Any) -> bool:
    """Return whether the law refutes the function that it is given."""
    try:
        law(*accused)
    except (AssertionError, ValueError):
        return True
    return False


def packed(weight: Array, half: bool, bias: Array | None = None) -> "compute.Packed":
    """A matrix as the kernels read it."""
    tensor = pack_matrix(torch.from_numpy(weight).to(torch.bfloat16 if half else torch.float32))
    bits = tensor.view(torch.uint16) if half else tensor
    return compute.Packed(bits.numpy(), *weight.shape, bias)


def stored(rng: np.random.Generator, *shape: int, half: bool, scale: float = 1.0) -> Array:
    """Random float32 numbers, such as bfloat16 can hold where `half` asks for it."""
    numbers = (rng.standard_normal(shape) * scale).astype(np.float32)
    return twin.bfloat16(numbers) if half else numbers


@dataclass(frozen=True)
class Shape:
    """What a model looks like; `seed` fills it."""

    layers: int = 2
    shared: int = 1
    group: int = 2
    width: int = 8
    hidden: int = 24
    d: int = 20
    vocabulary: int = 21
    rms: bool = True
    gated: bool = True
    silu: bool = True
    half: bool = False
    bias: bool = False
    rope: bool = True
    head_norms: bool = False
    seed: int = 0


GPT2 = Shape(shared=3, group=1, rms=False, gated=False, silu=False, bias=True, rope=False)
LLAMA = Shape(shared=2, group=2)
POSITIONS = 160


@st.composite
def shapes(draw: st.DrawFn, half: bool | None = None) -> Shape:
    """GPT-2 and LLaMA and everything between, odd widths included (bfloat16 comes in pairs)."""
    half = draw(st.booleans()) if half is None else half
    rope = draw(st.booleans())
    shared, group, width = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(WIDTHS)),
    )
    if (rope and width % 2) or (half and shared * group * width % 2):
        width += 1
    even = 2 if half else 1
    return Shape(
        layers=draw(st.integers(1, 3)),
        shared=shared,
        group=group,
        width=width,
        hidden=draw(st.integers(1, 40)) * even,
        d=draw(st.integers(1, 40)) * even,
        vocabulary=draw(st.integers(1, 70)),
        rms=draw(st.booleans()),
        gated=draw(st.booleans()),
        silu=draw(st.booleans()),
        half=half,
        bias=draw(st.booleans()),
        rope=rope,
        head_norms=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


class Stack:
    """A model of some shape: `engine` is compiled, `twin` its float64 definition."""

    def __init__(self, shape: Shape):
        rng = np.random.default_rng(shape.seed)
        self.shape = s = shape
        heads = s.shared * s.group
        sizes = [
            ((heads + 2 * s.shared) * s.width, s.d), (s.d, heads * s.width),
            ((1 + s.gated) * s.hidden, s.d), (s.d, s.hidden),
        ]  # fmt: skip

        def norm() -> tuple[Array, Array | None]:
            gain = 1 + stored(rng, s.d, half=False, scale=0.3)
            return gain, None if s.rms else stored(rng, s.d, half=False, scale=0.3)

        def matrix(out: int, inputs: int) -> tuple[Array, Array | None]:
            bias = stored(rng, out, half=s.half, scale=0.3) if s.bias else None
            return stored(rng, out, inputs, half=s.half, scale=1.5 / np.sqrt(inputs)), bias

        layers = [
            (
                norm(),
                matrix(*sizes[0]),
                matrix(*sizes[1]),
                norm(),
                matrix(*sizes[2]),
                matrix(*sizes[3]),
            )
            for _ in range(s.layers)
        ]
        final, vocabulary = norm(), matrix(s.vocabulary, s.d)
        cos = sin = None
        if s.rope:
            angle = np.arange(POSITIONS)[:, None] / 10.0 ** (
                np.arange(s.width // 2) / max(s.width // 2, 1) * 3
            )
            cos = np.concatenate((np.cos(angle), np.cos(angle)), axis=1).astype(np.float32)
            sin = np.concatenate((-np.sin(angle), np.sin(angle)), axis=1).astype(np.float32)
        gains = [
            tuple(1 + stored(rng, s.width, half=False, scale=0.3) for _ in "qk")
            for _ in range(s.layers if s.head_norms else 0)
        ]
        facts: Any = {
            "heads": heads, "shared": s.shared, "width": s.width, "rms": s.rms, "gated": s.gated,
            "silu": s.silu,
            "half": s.half, "eps": 1e-5, "scale": 1 / np.sqrt(s.width), "cos": cos, "sin": sin,
        }  # fmt: skip
        self.engine = compute.Engine(
            [
                tuple(
                    p
                    for part in layer
                    for p in (part if part[0].ndim == 1 else (packed(part[0], s.half, part[1]),))
                )
                for layer in layers
            ],
            final,
            packed(vocabulary[0], s.half, vocabulary[1]),
            hidden=s.hidden,
            head_norms=gains or None,
            **facts,
        )
        wide = [
            tuple(tuple(p if p is None else p.astype(float) for p in part) for part in layer)
            for layer in layers
        ]
        both = [
            tuple(p if p is None else p.astype(float) for p in part) for part in (final, vocabulary)
        ]
        wide_gains = [tuple(gain.astype(float) for gain in pair) for pair in gains] or None
        self.twin = twin.Engine(wide, *both, **facts, head_norms=wide_gains, rounds=rounds(s.half))

    def cache(self, capacity: int, kind: Any = None) -> Array:
        """Room for keys and values, of the type the engine stores or of another."""
        s = self.shape
        return np.zeros(
            (s.layers, 2, s.shared, capacity, s.width),
            kind or (np.uint16 if s.half else np.float32),
        )

    def logits(self, x: Array, threads: int = 1) -> Array:
        logits = np.empty((len(x), self.shape.vocabulary), np.float32)
        self.engine.head(x, np.empty_like(x), logits, threads)
        return logits


@dataclass
class Rows:
    """The rows of one session: their states, their parents, and the ancestors that each of them
    sees, by key/value head.
    """

    x: Array  # [n, d]
    parents: list[int]
    hidden: Array  # bool [n, shared, n]: the ancestors that a row does not see
    lead: tuple[Array, Array, Array] | None = None  # which rows see it; its keys and values
    slots: list[int] = field(default_factory=list)

    def path(self, row: int) -> list[int]:
        path: list[int] = []
        while row >= 0:
            path.append(row)
            row = self.parents[row]
        return path[::-1]

    def seen(self, row: int, slots: Sequence[int]) -> list[list[int]]:
        """By key/value head, the slots in the order of the path."""
        return [
            [slots[i] for i in self.path(row) if i == row or not h[i]] for h in self.hidden[row]
        ]

    def feed(
        self, stack: Stack, cache: Array, chosen: Sequence[int], slots: Sequence[int], by_head: bool
    ) -> tuple[Any, ...]:
        """Return the chosen rows for `Engine.run`. The slots that a row sees are written with a
        prefix where the slots allow it.
        """
        lists = [
            own
            for row in chosen
            for own in (self.seen(row, slots) if by_head else self.seen(row, slots)[:1])
        ]
        lead = (
            None
            if self.lead is None
            else ([bool(self.lead[0][row]) for row in chosen], *self.lead[1:])
        )
        return (cache.ctypes.data, cache.shape[3], [slots[row] for row in chosen],
                [len(self.path(row)) - 1 for row in chosen],
                (len(self.hidden[0]) if by_head else 1, [short(own) for own in lists]),
                lead)  # fmt: skip


def short(slots: list[int]) -> tuple[int, tuple[int, ...]]:
    """Write the slots 0, 1, 2... at the beginning of a list as their number alone."""
    prefix = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
    return prefix, tuple(slots[prefix:])


def forest(stack: Stack, parents: list[int], seed: int, hiding: float = 0.0, lead: int = 0) -> Rows:
    """Return rows with random states; each ancestor is hidden with probability `hiding`, and half
    of the rows see the lead.
    """
    s, n = stack.shape, len(parents)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, s.d)).astype(np.float32)
    rows = Rows(x, parents, rng.random((n, s.shared, n)) < hiding)
    if lead:
        size = s.layers, s.shared, lead, s.width
        rows.lead = (
            rng.random(n) < 0.5,
            *(rng.standard_normal(size).astype(np.float32) for _ in range(2)),
        )
    return rows


def alone(stack: Stack, rows: Rows, mute: bool = False) -> tuple[Array, Array, Array]:
    """Run every row by itself, in slots of their own order; return states, logits and cache."""
    n, cache = len(rows.parents), stack.cache(len(rows.parents))
    x = rows.x.copy()
    for row in range(n):
        feed = rows.feed(stack, cache, [row], range(n), by_head=True)
        stack.engine.run(x[row : row + 1], 0, 2 * stack.shape.layers, [feed], 1, mute)
    return x, np.concatenate([stack.logits(x[row : row + 1]) for row in range(n)]), cache


def exact(stack: Stack, rows: Rows, mute: bool = False) -> tuple[Array, Array, Array]:
    """The same in float64, by the twin."""
    n, cache = len(rows.parents), stack.cache(len(rows.parents), float)
    states = []
    for row, x in enumerate(rows.x.astype(float)):
        lead = (
            np.stack(rows.lead[1:]).astype(float)
            if rows.lead is not None and rows.lead[0][row]
            else None
        )
        seen = rows.seen(row, range(n))
        place = twin.Row(cache, row, len(rows.path(row)) - 1, seen, lead, mute)
        states.append(stack.twin.run(x, 0, 2 * stack.shape.layers, place))
    return np.array(states), np.array([stack.twin.head(x) for x in states]), cache


@dataclass(frozen=True)
class Way:
    """How `together` runs rows: threads, where it cuts the rows of every session, and how it deals
    out slots.
    """

    threads: int = 1
    cuts: tuple[int, ...] = ()
    shuffle: int | None = None
    spare: int = 0
    by_head: bool = True


def together(
    stack: Stack, sessions: Sequence[Rows], way: Way, mute: bool = False
) -> list[tuple[Array, Array, Array]]:
    """All sessions in common passes, one for each stretch between two cuts: states, logits and
    cache of each.
    """
    caches, places = [], []
    for number, rows in enumerate(sessions):
        capacity = len(rows.parents) + way.spare
        slots = np.arange(capacity)
        if way.shuffle is not None:
            np.random.default_rng(way.shuffle + number).shuffle(slots)
        caches.append(stack.cache(capacity))
        places.append(slots[: len(rows.parents)].tolist())
    states = [rows.x.copy() for rows in sessions]
    longest = max(len(rows.parents) for rows in sessions)
    marks = [0, *sorted({cut for cut in way.cuts if 0 < cut < longest}), longest]
    for first, last in pairwise(marks):
        chosen = [range(first, min(last, len(rows.parents))) for rows in sessions]
        feeds = [
            rows.feed(stack, cache, part, slots, way.by_head)
            for rows, cache, part, slots in zip(sessions, caches, chosen, places, strict=True)
        ]
        block = np.concatenate([x[list(part)] for x, part in zip(states, chosen, strict=True)])
        stack.engine.run(block, 0, 2 * stack.shape.layers, feeds, way.threads, mute)
        at = 0
        for x, part in zip(states, chosen, strict=True):
            x[list(part)] = block[at : at + len(part)]
            at += len(part)
    logits = stack.logits(np.concatenate(states), way.threads)
    ends = np.cumsum([len(rows.parents) for rows in sessions])[:-1]
    return [
        (x, own, cache[:, :, :, slots])
        for x, own, cache, slots in zip(states, np.split(logits, ends), caches, places, strict=True)
    ]


def in_half(shape: Shape) -> Shape:
    """The same shape with weights, keys and values in bfloat16."""
    return replace(shape, half=True)
