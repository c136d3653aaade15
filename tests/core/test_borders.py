"""What no kernel may be given is an error of one line, from the kernel and from its twin: no crash, and nothing half done."""

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tinyspec import _core
from tinyspec._core import fallback
from tinyspec._core.limits import MAX_DEPTH, MAX_DRAFT_NODES, MAX_MATCHES, MAX_NGRAM, MAX_TREE_NODES
from tinyspec.errors import TinyspecError

cores = pytest.mark.parametrize("core", [_core, fallback], ids=["compiled", "pure"])
compiled = pytest.mark.skipif(not _core.COMPILED, reason="the pure twins are in use")

HALF = np.array([0.5, 0.5])
NO_ROWS: list[Any] = [
    None,
    "half",
    [0.5, 0.5],
    HALF.astype(np.float16),
    np.array([1, 1]),
    HALF[None],
    np.ones(4)[::2],
]
"""What is no contiguous row of numbers: another type, another dtype, two dimensions, every second number."""

ROW_FUNCTIONS: list[tuple[str, Callable[..., Any]]] = [
    ("sample_inverse_cdf", lambda core, row: core.sample_inverse_cdf(row, 0.5)),
    ("sample_without_replacement", lambda core, row: core.sample_without_replacement(row, HALF)),
    ("sample_without_replacement", lambda core, row: core.sample_without_replacement(HALF, row)),
    ("exponential_race", lambda core, row: core.exponential_race(row, HALF)),
    ("exponential_race", lambda core, row: core.exponential_race(HALF, row)),
    ("apply_sampling", lambda core, row: core.apply_sampling(row, (), 1.0, None, None, None, 1.0)),
    (
        "sample_from_logits",
        lambda core, row: core.sample_from_logits(row, (), 1.0, None, None, None, 1.0, 0.5),
    ),
    ("residual", lambda core, row: core.residual(row, HALF)),
    ("residual", lambda core, row: core.residual(HALF, row)),
    ("exclude_token", lambda core, row: core.exclude_token(row, 0)),
    ("verify_tree", lambda core, row: core.verify_tree([], [], [], [], {-1: row}, HALF)),
    ("verify_tree", lambda core, row: core.verify_tree([], [], [], [], {-1: HALF}, row)),
]


@cores
@pytest.mark.parametrize(("name", "function"), ROW_FUNCTIONS)
def test_a_row_is_contiguous_numbers_of_its_dtype(
    core: Any, name: str, function: Callable[..., Any]
) -> None:
    function(core, HALF)
    for row in NO_ROWS:
        with pytest.raises((TypeError, ValueError)):
            function(core, row)


@cores
@pytest.mark.parametrize("u", [-1e-9, 1.0, math.nan, math.inf])
def test_a_uniform_is_at_least_0_and_below_1(core: Any, u: float) -> None:
    given = np.array([u])
    for draw in (
        lambda: core.sample_inverse_cdf(HALF, u),
        lambda: core.sample_without_replacement(HALF, given),
        lambda: core.sample_from_logits(HALF, (), 1.0, None, None, None, 1.0, u),
        lambda: core.sample_from_logits(HALF, (), 0.0, None, None, None, 1.0, u),
        lambda: core.verify_tree([], [], [], [], {-1: HALF}, given),
    ):
        with pytest.raises(TinyspecError, match="a uniform must be"):
            draw()


@cores
@pytest.mark.parametrize(
    ("match", "at", "values"),
    [
        ("temperature", 0, [-1.0, -math.inf, math.inf, math.nan]),
        ("top_k", 1, [0, -1]),
        ("top_p", 2, [0.0, -1.0, 1.5, math.nan]),
        ("min_p", 3, [-0.1, 1.5, math.nan]),
        ("penalty", 4, [0.0, -1.0, math.inf, math.nan]),
    ],
)
def test_settings_without_a_meaning_are_errors(
    core: Any, match: str, at: int, values: list[float]
) -> None:
    for value in values:
        settings: list[Any] = [1.0, None, None, None, 1.0]
        settings[at] = value
        for row in (HALF, HALF.astype(np.float32)):
            with pytest.raises(TinyspecError, match=match):
                core.apply_sampling(row, [0], *settings)
            with pytest.raises(TinyspecError, match=match):
                core.sample_from_logits(row, [0], *settings, 0.5)


@cores
@pytest.mark.parametrize("token", [-1, 2, 2**40, -(2**62)])
def test_an_excluded_token_is_one_of_the_row(core: Any, token: int) -> None:
    with pytest.raises(TinyspecError, match="outside of a row of 2 tokens"):
        core.exclude_token(HALF, token)


@cores
def test_the_columns_of_a_tree_are_equally_long(core: Any) -> None:
    columns: list[list[Any]] = [[0, 1], [-1, 0], [None, None], [False, False]]
    p = dict.fromkeys((-1, 0, 1), HALF)
    core.verify_tree(*columns, p, np.full(3, 0.1))
    for at in range(4):
        for other in (columns[at][:1], columns[at] * 9):
            given = [*columns[:at], other, *columns[at + 1 :]]
            with pytest.raises(TinyspecError, match="a tree of"):
                core.verify_tree(*given, p, np.full(3, 0.1))


@cores
def test_all_rows_of_the_target_are_equally_long(core: Any) -> None:
    tree = ([0], [-1], [None], [False])
    with pytest.raises(TinyspecError, match="2 tokens at the root, 3 at node 0"):
        core.verify_tree(*tree, {-1: HALF, 0: np.ones(3) / 3}, np.full(2, 0.1))
    with pytest.raises(TypeError):
        core.verify_tree(*tree, {-1: HALF, 0: None}, np.full(2, 0.1))
    with pytest.raises(IndexError):
        core.verify_tree([0], [-1], [None], [False], [], np.full(2, 0.1))


@cores
def test_a_tree_that_is_emptied_while_it_is_verified_is_an_error(core: Any) -> None:
    tokens, parents, declared, probe = [0] * 9, [-1, *range(8)], [None] * 9, [False] * 9

    class Emptying(dict[int, Any]):
        def __getitem__(self, node: int) -> Any:
            if node >= 0:
                for column in (tokens, parents, probe):
                    column.clear()
            return HALF

    with contextlib.suppress(IndexError):
        core.verify_tree(tokens, parents, declared, probe, Emptying(), np.full(9, 0.1))
    assert not tokens


@compiled
def test_a_row_that_another_kernel_computes_changes_nothing() -> None:
    class Computing(dict[int, Any]):
        def __getitem__(self, node: int) -> Any:
            big = np.full(999, 1 / 999)
            _core.sample_without_replacement(big, np.full(9, 0.9))
            _core.verify_tree([0, 1], [-1, -1], [None] * 2, [False] * 2, {-1: big}, np.full(3, 0.9))
            return HALF

    tree = ([1, 0, 1], [-1, -1, 1], [None] * 3, [False] * 3)
    for uniforms in (np.full(4, 0.1), np.array([0.9, 0.1, 0.9, 0.1])):
        got = _core.verify_tree(*tree, Computing(), uniforms)
        assert got == fallback.verify_tree(*tree, dict.fromkeys(range(-1, 3), HALF), uniforms)


# ---------------------------------------------------------------------- ids


@cores
@pytest.mark.parametrize(
    ("wrong", "error"),
    [([0.5], TypeError), ([None], TypeError), ([2**31], OverflowError), (None, TypeError)],
)
def test_ids_are_whole_numbers_of_32_bits(core: Any, wrong: Any, error: type[Exception]) -> None:
    index, forest = core.NgramIndex(2), core.Forest(3, 9)
    index.append(0, [1, 2])
    forest.append(forest.open(0), [1, 2])
    for function in (
        core.ancestors,
        core.depths,
        lambda ids: core.unique_paths(ids, [-1]),
        lambda ids: core.unique_paths([0], ids),
        lambda ids: index.append(0, ids),
        lambda ids: index.lookup(ids, 1),
        lambda ids: forest.append(0, ids),
        lambda ids: forest.gather([(0, 9)], ids, 9, 9, 9),
        lambda ids: forest.best([0], ids, 1.0, 9, 9, 0.0),
        lambda ids: core.retrieve(
            np.zeros(2, np.int32), np.arange(2, dtype=np.int32), ids, *[1] * 5
        ),
    ):
        with pytest.raises(error):
            function(wrong)


@cores
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ([[1], [2]], ValueError),
        ([0.5], TypeError),
        ([2**31], OverflowError),
        (np.array([2**40]), OverflowError),
        (np.array([np.nan]), TypeError),
        (None, ValueError),
    ],
)
def test_a_text_is_one_row_of_whole_numbers(core: Any, text: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        core.suffix_order(text)


@cores
def test_a_length_that_is_wrong_takes_no_memory(core: Any) -> None:
    class Lying(list[int]):
        def __len__(self) -> int:
            return 2**40

    index = core.NgramIndex(2)
    index.append(0, Lying([1, 2, 1]))
    assert (index.length(0), index.lookup([1], 9)) == (3, [2, 1])
    assert core.depths(Lying([-1, 0])).tolist() == [1, 2]


@cores
def test_an_append_that_fails_half_way_appends_nothing(core: Any) -> None:
    def failing() -> Iterator[int]:
        yield from (1, 2, 1)
        raise KeyError("no more")

    index, forest = core.NgramIndex(2), core.Forest(4, 9)
    index.append(7, [1, 2, 3])
    text = forest.open("a")
    forest.append(text, [1, 2, 3])
    before = [x.__getstate__() for x in (index, forest)] if core is _core else None
    for tokens, error in (
        (failing(), KeyError),
        ([1, 2, 2**31], OverflowError),
        ([1, 2, None], TypeError),
        ([1, 0.5], TypeError),
    ):
        with pytest.raises(error):
            index.append(7, tokens)
        with pytest.raises(error):
            forest.append(text, failing() if error is KeyError else tokens)
        assert (index.length(7), forest.length(text)) == (3, 3)
    if before is not None:
        assert before == [x.__getstate__() for x in (index, forest)]
    index.append(7, [1, 2])
    assert index.lookup([1, 2], 9) == [3, 1, 2]


@cores
def test_tokens_that_change_what_they_are_appended_to_are_appended_after_the_change(
    core: Any,
) -> None:
    index, forest = core.NgramIndex(3), core.Forest(4, 9)
    text = forest.open(0)
    for owner, add, back in (
        (index, lambda x: index.append(0, x), lambda: index.rewind(0, 0)),
        (forest, lambda x: forest.append(text, x), lambda: forest.rewind(text, 0)),
    ):
        add([1, 2, 3, 1, 2, 3])

        def changing(back: Callable[[], None] = back) -> Iterator[int]:
            yield 4
            back()
            yield 5

        add(changing())
        assert owner.length(0) == 2
        back()
    assert forest.size(0) == 0


@cores
def test_a_suffix_that_changes_what_is_searched_finds_what_is_left(core: Any) -> None:
    index, forest = core.NgramIndex(3), core.Forest(4, 9)

    class Forgetting:
        def __index__(self) -> int:
            index.rewind(0, 0)
            forest.drop(0)
            return 1

    index.append(0, [1, 1, 1, 1])
    forest.append(forest.open(0), [1, 1, 1, 1])
    assert index.lookup([1, Forgetting()], 4, which="frequent") == []
    for draft in (
        forest.gather([(0, 4), (0, Forgetting())], [1, Forgetting()], 3, 1, 3),
        forest.best([0, 0], [1, Forgetting()], 9.0, 4, 3, 0.0),
    ):
        assert len(draft) == 4


@compiled
def test_an_owner_is_looked_up_once_and_before_anything_is_changed() -> None:
    """To hash it may run any code: here it forgets the tree that was asked for, or fails."""
    forest = _core.Forest(4, 1)

    class Owner:
        hashed, forgetting = 0, False

        def __hash__(self) -> int:
            self.hashed += 1
            if self.forgetting:
                self.forgetting = False
                forest.drop(self)
            return 1

    suffix = [1, 2]
    for work in (
        forest.open,
        forest.size,
        forest.halve,
        forest.prune,
        forest.drop,
        lambda owner: forest.gather([(owner, 9)], suffix, 3, 1, 3),
        lambda owner: forest.best([owner], suffix, 9.0, 9, 3, 0.0),
    ):
        for forgetting in (False, True):
            owner = Owner()
            text = forest.open(owner)
            forest.append(text, [1, 2, 1, 2])
            owner.hashed, owner.forgetting = 0, forgetting
            work(owner)
            assert forgetting or owner.hashed == 1
            forest.drop(owner)
            assert forest.size(owner) == 0


# ---------------------------------------------------------------------- sizes


@cores
def test_what_would_not_fit_into_memory_is_an_error(core: Any) -> None:
    forest = core.Forest(3, 9)
    forest.append(forest.open(0), [1, 2, 1, 2])
    text = np.zeros(3, np.int32), np.arange(3, dtype=np.int32)[::-1].copy()
    for wrong in (
        lambda: core.NgramIndex(MAX_NGRAM + 1),
        lambda: core.NgramIndex(2**31 - 1),
        lambda: core.Forest(MAX_DEPTH + 1, 9),
        lambda: core.Forest(2**31 - 1, 9),
        lambda: forest.gather([(0, MAX_DRAFT_NODES + 1)], [1], 3, 1, 3),
        lambda: forest.gather([(0, 2**29)], [1], 3, 1, 3),
        lambda: forest.best([0], [1], 1.0, 2**29, 3, 0.0),
        lambda: core.retrieve(*text, [0], 1, 1, 1, MAX_MATCHES + 1, 1),
        lambda: core.retrieve(*text, [0], 1, 1, 1, 1, MAX_DRAFT_NODES + 1),
        lambda: core.ancestors([-1] * (MAX_TREE_NODES + 1)),
    ):
        with pytest.raises(TinyspecError, match="must be from"):
            wrong()
    assert forest.gather([(0, MAX_DRAFT_NODES)], [1], 3, 1, 3)[0] == [2, 1]
    assert core.retrieve(*text, [0], 1, 1, 1, MAX_MATCHES, MAX_DRAFT_NODES)[0] == 1


@cores
@pytest.mark.parametrize("factor", [-1.0, math.nan, -math.inf])
def test_a_draft_has_a_factor_of_at_least_0(core: Any, factor: float) -> None:
    forest = core.Forest(3, 9)
    with pytest.raises(TinyspecError, match="a factor of at least 0"):
        forest.best([0], [1], factor, 9, 3, 0.0)
    with pytest.raises(TinyspecError, match="a floor"):
        forest.best([0], [1], 1.0, 9, 3, math.nan)


@pytest.mark.parametrize("deepest", [-1, 0, 1, 2, 2**31 - 1])
def test_a_branch_is_at_most_as_deep_as_asked_and_has_a_token(deepest: int) -> None:
    drafts = []
    for core in (_core, fallback):
        forest = core.Forest(9, 99)
        forest.append(forest.open(0), [1, 2, 3, 4, 5, 1, 2, 3, 9])
        drafts.append(forest.gather([(0, 9)], [1], 9, 9, deepest))
    assert drafts[0] == drafts[1]
    assert len(drafts[0][0]) <= max(deepest, 1) * 2


EXHAUST = """
import random, resource, sys
from tinyspec import _core
from tinyspec._core import fallback
rng = random.Random(0)
make = {"index": lambda core: core.NgramIndex(12), "forest": lambda core: core.Forest(12, 99)}[sys.argv[1]]
ours = make(_core)
text = ours.open(0) if sys.argv[1] == "forest" else 0
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
chunk = [rng.randrange(9) for _ in range(4000)]
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
try:
    while True:
        ours.append(text, chunk)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
n = ours.length(text)
assert n > 1000, n
twin = make(_core)
if sys.argv[1] == "forest":
    twin.open(0)
twin.append(text, (chunk * (n // 4000 + 1))[:n])
assert twin.length(text) == n and ours.__getstate__() == twin.__getstate__()
ours.rewind(text, 0)
ours.append(text, chunk)
twin.rewind(text, 0)
twin.append(text, chunk)
assert ours.__getstate__() == twin.__getstate__()
print("sound")
"""


@compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as on Linux")
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer takes all addresses"
)
@pytest.mark.parametrize("what", ["index", "forest"])
@pytest.mark.slow
def test_what_memory_has_no_room_for_is_not_appended_by_half(what: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", EXHAUST, what], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout == "sound\n", ran.stderr[-2000:]


@cores
def test_an_index_names_its_texts_by_whole_numbers(core: Any) -> None:
    index = core.NgramIndex(2)
    for text in (None, "a", 0.5j):
        with pytest.raises(TypeError):
            index.append(text, [1])
    if core is _core and _core.COMPILED:
        with pytest.raises(TypeError):
            index.lookup([1], 1, which=type("Name", (str,), {})("last"))
