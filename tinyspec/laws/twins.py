"""A compiled kernel and its plain twin agree to the bit on the same arguments and uniforms.

An exact twin and an equal kernel are a proved kernel: the laws enumerate the twin over Fractions,
and here the compiled functions are compared with it: on all small cases, in order of size, then on
cases that Hypothesis draws and shrinks, then on a real vocabulary. Where the twin raises
TinyspecError the kernel must raise it with the same sentence; any other exception is a crash and no
verdict.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from tinyspec._core import fallback
from tinyspec.errors import TinyspecError
from tinyspec.laws import strategies
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact import rational
from tinyspec.laws.strategies import (
    LARGEST_UNIFORM,
    REAL_VOCABULARY,
    VOCABULARY_SIZES,
    FloatRow,
    cdf_edges,
    search_cases,
    st,
)
from tinyspec.tree import ROOT

KernelCase = dict[str, Any]


def _float_row(row: Any) -> FloatRow:
    return np.array([float(x) for x in row])


def float_pairs(largest: int) -> list[tuple[FloatRow, FloatRow]]:
    """Return every p and q of two and three tokens with small denominators, few tokens first."""
    return [(_float_row(p), _float_row(q)) for p, q in rational.distribution_pairs((2, 3), largest)]


SMALL_ROWS = [
    _float_row(row)
    for vocabulary in (1, 2, 3)
    for whole in (1, 2, 3)
    for row in rational.distributions(vocabulary, whole)
]


def deciding_uniforms(*rows: FloatRow) -> list[float]:
    """Return 0, the largest uniform, and where these rows change their token."""
    found = {x for row in rows for x in cdf_edges(row) if 0 < x < 1}
    return [0.0, *sorted(found), LARGEST_UNIFORM]


def small_picks() -> Iterator[KernelCase]:
    for row in [*SMALL_ROWS, np.zeros(2), np.array([np.inf, 0.0])]:
        for u in deciding_uniforms(row):
            yield {"row": row, "u": u}
    for row, u in picks_across_blocks():
        yield {"row": row, "u": u}


def picks_across_blocks() -> Iterator[tuple[FloatRow, float]]:
    """Yield rows of more than one block of the ordered sum, and where the blocks decide."""
    block = 256
    yield np.array([0.0] * block + [1.0]), 0.0  # a block without mass holds no token
    for u in (0.5, 0.995):
        yield np.full(2 * block + 8, 1 / 4), u
    # One by one the first block adds up to 1, in lanes to a little more: u falls in between, so its
    # last token with mass is drawn, which is neither the last of the block nor the next one.
    row = np.array([1.0] + [2.0**-53] * (block - 2) + [0.0, 1.0])
    yield row, (1 + 2.0**-49) / 2


def small_orders() -> Iterator[KernelCase]:
    for row in SMALL_ROWS:
        for n in range(4):
            for uniforms in product((0.0, 0.5, LARGEST_UNIFORM), repeat=n):
                yield {"row": row, "uniforms": np.array(uniforms, np.float64)}


def small_races() -> Iterator[KernelCase]:
    for row in [*SMALL_ROWS, np.zeros(2)]:
        for noise in product((0.0, 1.0, np.inf), repeat=len(row)):
            yield {"row": row, "noise": np.array(noise)}
    # Two arrival times with one whole part, 2.1 and 2.4: the earlier one wins, wherever it stands.
    for pair in ((1.05, 1.2), (1.2, 1.05)):
        yield {"row": np.full(2, 1 / 2), "noise": np.array(pair)}


SETTINGS: list[KernelCase] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 2},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.5},
    {"history": [0], "penalty": 2.0},
    {"history": [0, 1, 0, -1, 9], "penalty": 0.5},  # -1 and 9 name no token
    {"history": [1], "penalty": 2.0, "temperature": 0.0},
    {"temperature": 0.5, "top_k": 2, "top_p": 0.9},
]
NEUTRAL: KernelCase = {
    "history": [],
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "penalty": 1.0,
}


def small_samplings() -> Iterator[KernelCase]:
    for size in (1, 2, 3):
        values = (0.0, 1.0, -np.inf) if size > 2 else (0.0, 1.0, -1.0, -np.inf, np.nan)
        for logits in product(values, repeat=size):
            for setting in SETTINGS:
                yield {"logits": np.array(logits), **NEUTRAL, **setting}
    for wrong in ([], [np.inf, 0.0]):
        yield {"logits": np.array(wrong), **NEUTRAL}
    yield from nuclei_of_small_weights()


def nuclei_of_small_weights() -> Iterator[KernelCase]:
    """Yield logits whose lower weights are about one unit of `reference.order_free_masses`.

    A unit is 2^-53 for 259 tokens. A weight of 1.75 units counts as 1, and top-p ends among such
    weights. A weight of 0.75 units counts as 0, and a top-p of 1 keeps it nevertheless. Four
    tokens then have weights that are far from whole numbers.
    """
    for units, top_p in ((1.75, LARGEST_UNIFORM), (0.75, 1.0)):
        logits = np.full(259, math.log(units * 2.0**-53))
        logits[0] = 0.0
        yield {"logits": logits, **NEUTRAL, "top_p": top_p}
    yield {"logits": -np.arange(4.0), **NEUTRAL, "top_p": 0.9}


def small_draws() -> Iterator[KernelCase]:
    for case in small_samplings():
        for u in (0.0, 0.5, LARGEST_UNIFORM):
            yield {**case, "u": u}


def small_residuals() -> Iterator[KernelCase]:
    for p, q in float_pairs(6):
        yield {"p": p, "q": q}
    for n, m in ((2, 1), (1, 2)):  # an error
        yield {"p": np.full(n, 1 / n), "q": np.full(m, 1 / m)}


def small_withouts() -> Iterator[KernelCase]:
    for row in SMALL_ROWS:
        for token in range(len(row)):
            yield {"row": row, "token": token}


def small_walks() -> Iterator[KernelCase]:
    """Yield one draft token, drawn or a point mass; then two, side by side and in a chain.

    Every node has the same distribution.
    """
    shapes = (([ROOT], 5, 2), ([ROOT], 4, 3), ([ROOT, ROOT], 3, 2), ([ROOT, 0], 3, 2))
    for parents, largest, size in shapes:
        for p, q in (pair for pair in float_pairs(largest) if len(pair[0]) == size):
            for declared in (q, None):
                may = range(len(p)) if declared is None else np.flatnonzero(q).tolist()
                for tokens in product(may, repeat=len(parents)):
                    ratio = float(p[tokens[0]] / (1 if declared is None else q[tokens[0]]))
                    edges = [float(np.nextafter(ratio, 0)), ratio] if 0 < ratio < 1 else []
                    tests = [0.0, *edges, LARGEST_UNIFORM]
                    for uniforms in product(*[tests] * len(parents), (0.0, 0.5, LARGEST_UNIFORM)):
                        yield walk_case(tokens, parents, declared, p, uniforms)
    # The target has an ulp less of the token than the draft, and no more of the other one: a
    # rejection leaves nothing, before a sibling and after the last one.
    half, less = np.full(2, 1 / 2), np.array([np.nextafter(1 / 2, 0), 1 / 2])
    for n in (1, 2):
        yield walk_case([0] * n, [ROOT] * n, half, less, [LARGEST_UNIFORM] * n + [0.0])
    for token in (-1, 2, 3):  # no token of this vocabulary
        yield walk_case([token], [ROOT], None, half, [0.0, 0.0])
    for wrong in ([1.0], [0.5, 0.5, 0.0], [0.0, 1.0], [math.nan, 1.0]):  # no distribution of it
        yield walk_case([0], [ROOT], np.array(wrong), half, [0.0, 0.0])


def walk_case(
    tokens: Sequence[int],
    parents: list[int],
    declared: FloatRow | None,
    p: FloatRow,
    uniforms: Sequence[float],
) -> KernelCase:
    """Return the arguments of a walk on which every node has the same distributions."""
    return {
        "tokens": list(tokens),
        "parents": parents,
        "draft_probs": [declared] * len(parents),
        "probe": [False] * len(parents),
        "p": dict.fromkeys(range(-1, len(parents)), p),
        "uniforms": np.array(uniforms),
    }


def small_shapes() -> Iterator[KernelCase]:
    for n in range(5):
        for parents in product(*(range(ROOT, node) for node in range(n))):
            yield {"parents": list(parents)}
    yield from ({"parents": [0]}, {"parents": [-2]}, {"parents": [ROOT, 1]})


def small_spellings() -> Iterator[KernelCase]:
    for shape in small_shapes():
        for tokens in product(range(2), repeat=len(shape["parents"])):
            yield {"tokens": list(tokens), **shape}
    yield {"tokens": [0], "parents": []}


def small_texts() -> Iterator[KernelCase]:
    for n in range(6):
        for tokens in product((0, 1, -1), repeat=n):
            yield {"tokens": np.array(tokens, np.int32)}


def small_retrievals() -> Iterator[KernelCase]:
    """Yield short texts and ends of texts; then arguments that are errors."""
    knobs = {"shortest": 1, "longest": 3, "length": 2, "matches": 9, "most": 9}
    for case in small_texts():
        if len(case["tokens"]) < 5:
            order = fallback.suffix_order(case["tokens"])
            for suffix, few in product(([0], [1, 0], [0, 0]), ({}, {"most": 1}, {"matches": 1})):
                yield {**case, "order": order, "suffix": suffix, **knobs, **few}
    often = np.array([0, 1, 0, 2, 0, 3, 0, 4], np.int32)  # two of four places are read
    order = fallback.suffix_order(often)
    yield {**case, "tokens": often, "order": order, "suffix": [0], **knobs, "matches": 2}
    wrong = (("shortest", 0), ("longest", 32), ("shortest", 4), ("length", 0), ("matches", 0))
    for knob, value in (*wrong, ("most", -1)):
        yield {**case, "order": case["tokens"] * 0, "suffix": [0], **knobs, knob: value}


Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Twin:
    """A kernel's definition, and the cases on which it is compared.

    define  the plain twin
    small   yields every small case, smallest first
    cases   the cases for a vocabulary of a given size
    sized   whether the size of a vocabulary matters to it
    """

    define: Kernel
    small: Callable[[], Iterator[KernelCase]]
    cases: Callable[[int], st.SearchStrategy[KernelCase]]
    sized: bool = True


def outcome_or_error(function: Kernel, case: Mapping[str, Any]) -> Any:
    """Return what a function returns, or the sentence of its TinyspecError."""
    try:
        return function(*case.values())
    except TinyspecError as error:
        return f"an error: {error}"


def bit_pattern(value: Any) -> Any:
    """Return a value in a form that is equal only if every bit is."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [bit_pattern(x) for x in value]
    return value.hex() if isinstance(value, float) else value


def abbreviate(value: Any) -> Any:
    """Return a long row in short: its length and its beginning."""
    if isinstance(value, np.ndarray) and value.size > 16:
        return f"{value.size} numbers, {value[:6].tolist()} ..."
    if isinstance(value, dict):
        return {key: abbreviate(x) for key, x in value.items()}
    return [abbreviate(x) for x in value] if isinstance(value, list) else value


def show_difference(expected: Any, got: Any) -> tuple[Any, Any]:
    """Return both values for display; long rows from the first number that differs."""
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
    """Raise LawViolated if the kernel does not return what its twin returns."""
    expected, got = outcome_or_error(define, case), outcome_or_error(kernel, case)
    if bit_pattern(expected) != bit_pattern(got):
        accuse(
            "twin",
            *show_difference(expected, got),
            kernel=name,
            **{key: abbreviate(x) for key, x in case.items()},
        )


def equals_twin(name: str, kernel: Kernel, examples: int = 120, large: int = 3) -> Evidence:
    """Check that this kernel equals its twin, bit for bit.

    It is tried on every small case, on `examples` drawn ones, and on `large` with a real
    vocabulary.

    >>> from tinyspec import _core
    >>> equals_twin("sample_inverse_cdf", _core.sample_inverse_cdf, examples=20, large=1).cases > 60
    True
    """
    return judge_kernel(
        name, partial(expect_same_bits, name, kernel, TWINS[name].define), "twin", examples, large
    )


def judge_kernel(
    name: str, judge: Callable[[KernelCase], None], law: str, examples: int, large: int
) -> Evidence:
    """Judge a kernel on its twin's cases, smallest first."""
    known, began = TWINS[name], time.perf_counter()
    grid = 0
    for case in known.small():
        judge(case)
        grid += 1
    evidence = Evidence(law, grid, seconds=time.perf_counter() - began, notes=[name])
    evidence += search_cases(VOCABULARY_SIZES.flatmap(known.cases), judge, law, examples)
    if large and known.sized:
        evidence += search_cases(known.cases(REAL_VOCABULARY), judge, law, large)
    return evidence


# ---------------------------------------------------------------------- the cases of each kernel


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
    edges = st.sampled_from([0.0, -0.0, 5e-324, 0.5, np.inf])  # where a division may fail
    for _ in range(draw(st.integers(0, 3))):
        noise[draw(st.integers(0, size - 1))] = draw(edges)
    return {"row": row, "noise": noise}


@st.composite
def sampling_cases(draw: st.DrawFn, size: int) -> KernelCase:
    scores = draw(strategies.score_rows(size))
    if draw(st.integers(0, 19)) == 19:
        wrong = [scores[:0], scores * np.float32(np.nan), np.full_like(scores, -np.inf)]
        scores = draw(st.sampled_from(wrong))
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
    """Draw trees that mostly keep the drafter's contract.

    Now and then a token is impossible, or uniforms are missing.
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
    """Draw texts that repeat themselves, with -1 between documents and ids at the ends of 32
    bits."""
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
    "sample_inverse_cdf": Twin(fallback.sample_inverse_cdf, small_picks, pick_cases),
    "sample_without_replacement": Twin(
        fallback.sample_without_replacement, small_orders, order_cases
    ),
    "exponential_race": Twin(fallback.exponential_race, small_races, race_cases),
    "apply_sampling": Twin(fallback.apply_sampling, small_samplings, sampling_cases),
    "sample_from_logits": Twin(fallback.sample_from_logits, small_draws, draw_cases),
    "residual": Twin(fallback.residual, small_residuals, residual_cases),
    "exclude_token": Twin(fallback.exclude_token, small_withouts, without_cases),
    "verify_tree": Twin(fallback.verify_tree, small_walks, walk_cases),
    "ancestors": Twin(fallback.ancestors, small_shapes, shape_cases, sized=False),
    "depths": Twin(fallback.depths, small_shapes, shape_cases, sized=False),
    "unique_paths": Twin(fallback.unique_paths, small_spellings, spelling_cases, sized=False),
    "suffix_order": Twin(fallback.suffix_order, small_texts, text_cases),
    "retrieve": Twin(fallback.retrieve, small_retrievals, retrieval_cases),
}
"""Every kernel that is a function, by name; the n-gram index has a history and is held to
dictionaries by a machine.
"""
