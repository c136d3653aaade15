"""Hypothesis strategies for samplers: rows, drafts, trees, warpers and uniforms, for readers too.

Rows begin as small integer weights, so that zeros, ties, point masses and disjoint supports are
common, and so that a counterexample shrinks to p = [0, 1], q = [1, 0]. Floats then get what
integers lack: a neighbour one ulp away, a weight that dominates, denormal numbers. Uniforms fall on
the edges that decide: 0, the largest below 1, the acceptance ratio itself, and their neighbours.

Hypothesis is asked the same questions every time, so that a law is a plain function of what it
judges. It comes with `pip install 'tinyspec[test]'`; the library itself does without.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import Evidence, install_command
from tinyspec.tree import ROOT

try:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import strategies as st
except ImportError as missing:
    raise TinyspecError(f"drawing cases needs Hypothesis: {install_command()}") from missing

__all__ = ["search_cases", "st"]


def search_cases(
    cases: st.SearchStrategy[Any], judge: Callable[[Any], None], law: str, examples: int
) -> Evidence:
    """Judge drawn cases; if one is broken, raise LawViolated with the smallest that is.

    The cases are the same in every run and on every machine. Exceptions that are no accusations
    pass as they are.
    """
    judged = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def every(case: Any) -> None:
        nonlocal judged
        judged += 1
        judge(case)

    began = time.perf_counter()
    every()
    return Evidence(law, judged, seconds=time.perf_counter() - began)


FloatRow = NDArray[np.float64]

LARGEST_UNIFORM = 1 - 2**-53
"""The largest uniform: a stream gives 0 <= u < 1."""

REAL_VOCABULARY = 49152
VOCABULARY_SIZES = st.sampled_from([2, 3, 1, 7, 8, 9, 255, 256, 257, 300])
"""Vocabularies: the smallest, then those around the lanes and blocks in which kernels add."""


# -------------------- distributions


def whole_weights(size: int, most: int = 4) -> st.SearchStrategy[list[int]]:
    """Draw `size` whole numbers from 0 to `most`, not all of them 0."""
    return st.lists(st.integers(0, most), min_size=size, max_size=size).filter(any)


def _exponential_noise(size: int, seed: int) -> FloatRow:
    return np.random.default_rng(seed).exponential(size=size) ** 3


@st.composite
def float_rows(draw: st.DrawFn, size: int) -> FloatRow:
    """Draw a float64 distribution [size]: small weights, some with what only floats have.

    Weights are repeated where the row is long.
    """
    few = np.array(draw(whole_weights(min(size, 8))), np.float64)
    row = np.resize(few, size)
    at = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from(["weights", "nudged", "one heavy", "denormal", "point", "noise"]))
    if kind == "noise":
        row = _exponential_noise(size, draw(st.integers(0, 999)))
    elif kind == "one heavy":
        row[at] += draw(st.sampled_from([1e-9, 1e9]))
    elif kind == "point":
        row = np.zeros(size)
        row[at] = 1
    row = row / row.sum() if row.sum() > 0 else np.full(size, 1 / size)
    if kind == "nudged":
        row[at] = max(0.0, np.nextafter(row[at], draw(st.sampled_from([0.0, 1.0]))))
    elif kind == "denormal":
        row[at] = draw(st.sampled_from([5e-324, 1e-308]))
    if not row.sum() > 0:
        row[at] = 1
    return row


@st.composite
def row_pairs(draw: st.DrawFn, size: int) -> tuple[FloatRow, FloatRow]:
    """Draw p and q, float64 [size]: unrelated, equal, an ulp apart, shifted, or disjoint."""
    p = draw(float_rows(size))
    kind = draw(st.sampled_from(["unrelated", "equal", "an ulp apart", "shifted", "disjoint"]))
    if kind == "equal":
        return p, p.copy()
    if kind == "an ulp apart":
        return p, np.nextafter(p, np.roll(p, 1))
    if kind == "shifted":
        return p, np.roll(p, 1)
    q = draw(float_rows(size))
    if kind == "disjoint" and (q[p == 0] > 0).any():
        q = np.where(p == 0, q, 0)
        q /= q.sum()
    return p, q


# -------------------- uniforms


def edge_uniforms(edges: Sequence[float] = ()) -> st.SearchStrategy[float]:
    """Draw 0 <= u < 1, often on or beside one of the edges that decide."""
    marks = st.sampled_from([0.0, 0.5, LARGEST_UNIFORM, *(edge for edge in edges if 0 <= edge < 1)])
    beside = [
        u
        for edge in edges
        for u in (np.nextafter(edge, 0), np.nextafter(edge, 1), edge - 2**-36, edge + 2**-36)
    ]
    return st.one_of(
        marks,
        st.sampled_from([float(u) for u in (2**-53, *beside) if 0 <= u < 1]),
        st.floats(0, LARGEST_UNIFORM),
    )


def cdf_edges(row: FloatRow) -> list[float]:
    """Return where an inverse CDF changes its token: up to nine of the cumulative sums."""
    sums = np.cumsum(row)
    with np.errstate(all="ignore"):
        return [float(x) for x in (sums / sums[-1])[:: max(1, len(row) // 8)]]


def acceptance_ratios(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Sequence[FloatRow | None],
    p: dict[int, FloatRow],
) -> list[float]:
    """Return the ratio of every node that is the first sibling tested, where it is below 1."""
    found = []
    with np.errstate(all="ignore"):
        for token, parent, row in zip(tokens, parents, draft_probs, strict=True):
            ratio = float(p[parent][token] / (1 if row is None else row[token]))
            found += [ratio] if 0 <= ratio < 1 else []
    return found


# -------------------- trees


@st.composite
def tree_shapes(draw: st.DrawFn, most: int = 6) -> list[int]:
    """Draw the parents of up to `most` nodes, each before its children; ROOT is -1."""
    return [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, most)))]


class WalkCase(NamedTuple):
    """The arguments of a verifier's walk: a tree, the target's rows, and the uniforms."""

    tokens: list[int]
    parents: list[int]
    draft_probs: list[FloatRow | None]
    probe: list[bool]
    p: dict[int, FloatRow]
    uniforms: FloatRow


@st.composite
def tree_walks(draw: st.DrawFn, size: int, most: int = 6) -> WalkCase:
    """Draw a tree of draft tokens with the rows they declare (or none), and its uniforms."""
    parents = draw(tree_shapes(most))
    tokens: list[int] = []
    draft_probs: list[FloatRow | None] = []
    p = {ROOT: draw(float_rows(size))}
    for _ in parents:
        kind = draw(st.sampled_from(["own", "the target's", "none"]))
        row = None if kind == "none" else p[ROOT].copy()
        if kind == "own":
            row = draw(float_rows(size))
        may = [0, size - 1] if row is None else [int(token) for token in np.flatnonzero(row)[:4]]
        tokens.append(draw(st.sampled_from(may)))
        draft_probs.append(row)
    probe = [draw(st.integers(0, 9)) == 9 for _ in parents]
    p |= {node: draw(float_rows(size)) for node in range(len(parents))}
    edges = acceptance_ratios(tokens, parents, draft_probs, p) + cdf_edges(p[ROOT])[:3]
    given = [draw(edge_uniforms(edges)) for _ in range(len(parents) + 1)]
    return WalkCase(tokens, parents, draft_probs, probe, p, np.array(given))


# -------------------- warps

SCORES = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-50, 50, width=32),
    st.sampled_from([-np.inf, -0.0, 1e30, -1e30]),
)


@st.composite
def score_rows(draw: st.DrawFn, size: int) -> NDArray[Any]:
    """Draw logits, float32 or float64 [size], with at least one finite and many ties."""
    few = draw(st.lists(SCORES, min_size=min(size, 10), max_size=min(size, 10)))
    scores = np.resize(np.array(few), size)
    if draw(st.booleans()):
        scores = scores + np.resize(
            _exponential_noise(min(size, 400), draw(st.integers(0, 999))), size
        )
    scores[draw(st.integers(0, size - 1))] = draw(st.integers(-5, 5))
    return scores.astype(draw(st.sampled_from([np.float64, np.float32])))


class WarpKnobs(NamedTuple):
    """The arguments of a warp besides the logits, in the kernels' order."""

    history: list[int]
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    penalty: float


@st.composite
def warp_knobs(draw: st.DrawFn, size: int) -> WarpKnobs:
    """Draw settings of a warp: some turned, the others neutral.

    All at once, one would hide what the others do.
    """
    turned = draw(
        st.sets(st.sampled_from(["temperature", "penalty", "top_k", "top_p", "min_p"]), max_size=4)
    )
    drawn: dict[str, Any] = {"temperature": 1.0, "penalty": 1.0}
    for name in sorted(turned):
        drawn[name] = draw(_USUAL[name] | _EXTREME[name])
    seen = st.lists(st.integers(0, size), min_size="penalty" in turned, max_size=4)
    settings: Any = {name: drawn.get(name) for name in WarpKnobs._fields[1:]}
    return WarpKnobs(draw(seen), **settings)


_USUAL: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.5, 0.8, 3.0, 0.0]),
    "penalty": st.sampled_from([1.3, 0.5]),
    "top_k": st.sampled_from([1, 2, 5, 299]),
    "top_p": st.sampled_from([0.5, 0.9, 0.3]),
    "min_p": st.sampled_from([0.1, 0.5]),
}
_EXTREME: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([1e-3, 1e-300]),
    "penalty": st.sampled_from([1e-3, 1e3]),
    "top_k": st.sampled_from([256, 1000]),
    "top_p": st.sampled_from([1e-9, LARGEST_UNIFORM, 1.0]) | st.floats(0.01, 1),
    "min_p": st.sampled_from([0.0, 1.0]),
}
