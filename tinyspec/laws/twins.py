"""Pathwise twins: a kernel and the plain lines that define it take the same arguments and uniforms,
and agree to the bit.

An exact twin and an equal kernel are a proved kernel: the laws enumerate the twin over Fractions,
and here the compiled functions are held to it: on all small cases, then on cases that Hypothesis
draws and shrinks, then on a real vocabulary. Where the twin refuses (TinyspecError) the kernel must
refuse too; any other exception is a crash and no verdict.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyspec._core import fallback
from tinyspec.errors import TinyspecError
from tinyspec.laws import strategies
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.grids import GRIDS
from tinyspec.laws.search import search_cases, st
from tinyspec.laws.strategies import REAL_VOCABULARY, VOCABULARY_SIZES

KernelCase = dict[str, Any]
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Twin:
    """A kernel's definition: the twin, and what it is compared on where the vocabulary has a given
    size.
    """

    define: Kernel
    cases: Callable[[int], st.SearchStrategy[KernelCase]]
    sized: bool = True  # whether the size of a vocabulary says anything about it


def outcome_or_refusal(function: Kernel, case: Mapping[str, Any]) -> Any:
    """What a function gives, or the word "refuses"."""
    try:
        return function(*case.values())
    except TinyspecError:
        return "refuses"


def bit_pattern(value: Any) -> Any:
    """A value in a form that is equal only if every bit is."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [bit_pattern(x) for x in value]
    return value.hex() if isinstance(value, float) else value


def abbreviate(value: Any) -> Any:
    """A long row for the eyes: its length and how it begins."""
    if isinstance(value, np.ndarray) and value.size > 16:
        return f"{value.size} numbers, {value[:6].tolist()} ..."
    if isinstance(value, dict):
        return {key: abbreviate(x) for key, x in value.items()}
    return [abbreviate(x) for x in value] if isinstance(value, list) else value


def show_difference(expected: Any, got: Any) -> tuple[Any, Any]:
    """Both for the eyes; long rows that begin alike, from the first number that differs."""
    long = all(isinstance(value, np.ndarray) and value.size > 16 for value in (expected, got))
    if long and expected.shape == got.shape and expected.dtype == got.dtype:
        at = next(
            i
            for i in range(expected.size)
            if expected[i : i + 1].tobytes() != got[i : i + 1].tobytes()
        )
        return tuple(
            f"{x.size} numbers, from [{at}] on {x[at : at + 6].tolist()} ..."
            for x in (expected, got)
        )  # type: ignore[return-value]
    return abbreviate(expected), abbreviate(got)


def expect_same_bits(name: str, kernel: Kernel, define: Kernel, case: KernelCase) -> None:
    """Accuse the kernel if it does not give what its twin gives."""
    expected, got = outcome_or_refusal(define, case), outcome_or_refusal(kernel, case)
    if bit_pattern(expected) != bit_pattern(got):
        accuse(
            "twin",
            *show_difference(expected, got),
            kernel=name,
            **{key: abbreviate(x) for key, x in case.items()},
        )


def equals_twin(name: str, kernel: Kernel, examples: int = 120, large: int = 3) -> Evidence:
    """Law: this kernel equals its twin, bit for bit: on every small case, on `examples` drawn ones,
    and on `large` with a real vocabulary.

    >>> from tinyspec import _core
    >>> twin("pick", _core.pick, examples=20, large=1).cases > 60
    True
    """
    return judge_kernel(
        name, partial(expect_same_bits, name, kernel, TWINS[name].define), "twin", examples, large
    )


def judge_kernel(
    name: str, judge: Callable[[KernelCase], None], law: str, examples: int, large: int
) -> Evidence:
    """Judge a kernel on what its twin is tried on, smallest first."""
    known, began = TWINS[name], time.perf_counter()
    grid = 0
    for case in GRIDS[name]():
        judge(case)
        grid += 1
    evidence = Evidence(law, grid, seconds=time.perf_counter() - began, notes=[name])
    evidence += search_cases(VOCABULARY_SIZES.flatmap(known.cases), judge, law, examples)
    if large and known.sized:
        evidence += search_cases(known.cases(REAL_VOCABULARY), judge, law, large)
    return evidence


# --- what each is tried on
# ------------------------------------------------------------------------------------------


@st.composite
def pick_cases(draw: st.DrawFn, size: int) -> KernelCase:
    row = draw(strategies.float_rows(size))
    if draw(st.integers(0, 19)) == 19:
        row = np.where(row > 0, draw(st.sampled_from([0.0, np.inf, np.nan])), 0.0)
    return {"row": row, "u": draw(strategies.edge_uniforms(strategies.cdf_edges(row)))}


@st.composite
def order_cases(draw: st.DrawFn, size: int) -> KernelCase:
    row = draw(strategies.float_rows(size))
    drawn = draw(st.lists(strategies.edge_uniforms(strategies.cdf_edges(row)), max_size=6))
    return {"row": row, "uniforms": np.array(drawn, np.float64)}


@st.composite
def race_cases(draw: st.DrawFn, size: int) -> KernelCase:
    row = draw(strategies.float_rows(size)) * draw(st.sampled_from([1.0, 1.0, 1.0, 0.0]))
    noise = np.random.default_rng(draw(st.integers(0, 999))).exponential(size=size)
    for _ in range(
        draw(st.integers(0, 3))
    ):  # what a generator can return and a division may stumble over
        noise[draw(st.integers(0, size - 1))] = draw(
            st.sampled_from([0.0, -0.0, 5e-324, 0.5, np.inf])
        )
    return {"row": row, "noise": noise}


@st.composite
def sampling_cases(draw: st.DrawFn, size: int) -> KernelCase:
    scores = draw(strategies.score_rows(size))
    if draw(st.integers(0, 19)) == 19:
        scores = draw(
            st.sampled_from(
                [scores[:0], scores * np.float32(np.nan), np.full_like(scores, -np.inf)]
            )
        )
    elif draw(st.integers(0, 19)) == 19:
        scores[draw(st.integers(0, size - 1))] = draw(st.sampled_from([np.nan, np.inf]))
    return {"logits": scores, **draw(strategies.warp_knobs(size))._asdict()}


@st.composite
def draw_cases(draw: st.DrawFn, size: int) -> KernelCase:
    return {**draw(sampling_cases(size)), "u": draw(strategies.edge_uniforms())}


@st.composite
def residual_cases(draw: st.DrawFn, size: int) -> KernelCase:
    p, q = draw(strategies.row_pairs(size))
    return {"p": p, "q": q[1:] if draw(st.integers(0, 29)) == 29 else q}


@st.composite
def without_cases(draw: st.DrawFn, size: int) -> KernelCase:
    return {"row": draw(strategies.float_rows(size)), "token": draw(st.integers(0, size - 1))}


@st.composite
def walk_cases(draw: st.DrawFn, size: int) -> KernelCase:
    """Mostly trees that keep the drafter's contract; now and then an impossible token, or too few
    uniforms.
    """
    case = draw(strategies.tree_walks(size))
    broken = draw(st.integers(0, 29))
    if broken == 29 and case.tokens:
        case.tokens[draw(st.integers(0, len(case.tokens) - 1))] = draw(
            st.sampled_from([-1, size, size - 1])
        )
    if broken == 28:
        case = case._replace(uniforms=case.uniforms[:-1])
    return case._asdict()


@st.composite
def shape_cases(draw: st.DrawFn, size: int) -> KernelCase:
    parents = draw(strategies.tree_shapes(12))
    if parents and draw(st.integers(0, 9)) == 9:
        at = draw(st.integers(0, len(parents) - 1))
        parents[at] = draw(st.sampled_from([-2, at, at + 1]))
    return {"parents": parents}


@st.composite
def spelling_cases(draw: st.DrawFn, size: int) -> KernelCase:
    parents = draw(shape_cases(size))["parents"]
    tokens = draw(st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)))
    return {"tokens": tokens + [0] * (draw(st.integers(0, 19)) == 19), "parents": parents}


@st.composite
def text_cases(draw: st.DrawFn, size: int) -> KernelCase:
    """Texts that repeat themselves; -1 between documents; ids at both ends of what 32 bits hold."""
    ids = st.sampled_from([0, 1, size - 1, -1, 70_000, 2**31 - 1])
    tokens = draw(st.lists(ids, max_size=12)) * draw(st.sampled_from([1, 2, 9]))
    return {"tokens": np.array(tokens, np.int32)}


@st.composite
def retrieval_cases(draw: st.DrawFn, size: int) -> KernelCase:
    tokens = draw(text_cases(size))["tokens"]
    order = fallback.suffix_order(tokens)
    end = draw(st.integers(0, len(tokens)))
    suffix = [9] * draw(st.integers(0, 2)) + tokens[
        max(0, end - draw(st.integers(1, 9))) : end
    ].tolist()
    if len(order) and draw(st.integers(0, 29)) == 29:  # damaged
        order[:] = draw(st.sampled_from([-1, len(order)]))
    knobs = {
        "shortest": st.integers(1, 3),
        "longest": st.sampled_from([3, 16, 31, 32]),
        "length": st.integers(1, 31),
    }
    drawn = {name: draw(values) for name, values in knobs.items()}
    limits = {
        "matches": draw(st.sampled_from([5000, 1, 3])),
        "most": draw(st.sampled_from([64, 1, 5, 0])),
    }
    return {"tokens": tokens, "order": order, "suffix": suffix, **drawn, **limits}


TWINS: dict[str, Twin] = {
    "pick": Twin(fallback.pick, pick_cases),
    "order": Twin(fallback.order, order_cases),
    "race": Twin(fallback.race, race_cases),
    "warp": Twin(fallback.warp, sampling_cases),
    "draw": Twin(fallback.draw, draw_cases),
    "residual": Twin(fallback.residual, residual_cases),
    "without": Twin(fallback.without, without_cases),
    "walk": Twin(fallback.walk, walk_cases),
    "ancestors": Twin(fallback.ancestors, shape_cases, sized=False),
    "depths": Twin(fallback.depths, shape_cases, sized=False),
    "unique_paths": Twin(fallback.unique_paths, spelling_cases, sized=False),
    "suffix_order": Twin(fallback.suffix_order, text_cases),
    "retrieve": Twin(fallback.retrieve, retrieval_cases),
}
"""Every kernel that is a function, by name; the n-gram index has a history and is held to
dictionaries by a machine.
"""
