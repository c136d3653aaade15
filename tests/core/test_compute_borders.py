"""What the compiled transformer cannot compute is a ValueError of one line and no crash; all it reads stays alive."""

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.core.stacks import packed
from tinyspec._core import compute

FLAT = np.zeros(16 * 4, np.float32)


class Engines:
    """The parts of a small engine of one layer; `make` puts them together, some of them changed."""

    def __init__(self) -> None:
        gain = np.ones(4, np.float32)
        self.gain = gain
        self.facts: dict[str, Any] = {
            "heads": 2, "shared": 1, "width": 2, "hidden": 3, "rms": True, "gated": False, "silu": True,
            "half": False, "eps": 1e-5, "scale": 1.0,
        }  # fmt: skip
        self.layer = [
            gain,
            None,
            matrix(8, 4),
            matrix(4, 4),
            gain,
            None,
            matrix(3, 4),
            matrix(4, 3),
        ]
        self.parts: dict[str, Any] = {
            "layers": [tuple(self.layer)],
            "final": (gain, None),
            "head": matrix(5, 4),
        }

    def make(self, **changed: Any) -> Any:
        return compute.Engine(**{**self.parts, **self.facts, **changed})

    def feed(self, cache: np.ndarray[Any, Any], **changed: Any) -> tuple[Any, ...]:
        """What `run` takes for one row of one text with four slots."""
        good = {
            "address": cache.ctypes.data,
            "capacity": 4,
            "slots": [0],
            "positions": [0],
            "sight": (1, [(1, ())]),
            "lead": None,
        }
        return tuple({**good, **changed}.values())


def matrix(out: int, inputs: int) -> Any:
    return packed(np.ones((out, inputs), np.float32), half=False)


@pytest.mark.parametrize(
    ("out", "inputs"),
    [(2**31 - 1, 4), (2**31 - 16, 2**30), (0, 4), (16, 0), (-16, -4), (2**30, 2**30), (2**28, 16)],
)
def test_a_matrix_is_as_large_as_it_says(out: int, inputs: int) -> None:
    for data in (FLAT, FLAT[:0], FLAT.astype(np.uint16)):
        with pytest.raises(ValueError, match="matrix"):
            compute.Packed(data, out, inputs)


@pytest.mark.parametrize("data", [None, "text", FLAT.astype(float), FLAT.astype(np.int16)])
def test_a_matrix_is_float32_or_the_bits_of_bfloat16(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        compute.Packed(data, 16, 4)


def test_none_is_no_array() -> None:
    engine, own, rows = Engines().make(), matrix(5, 4), np.zeros((1, 4), np.float32)
    for call in (
        lambda: own.product(None, rows, 1),
        lambda: own.product(rows, None, 1),
        lambda: own.rows([0], None),
        lambda: own.rows(None, rows),
        lambda: engine.head(None, rows, None, 1),
        lambda: engine.head(rows, None, None, 1),
        lambda: engine.run(None, 0, 2, [], 1),
        lambda: engine.run(rows, 0, 2, None, 1),
        lambda: compute.sound(None),
        lambda: compute.use(None),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_a_kernel_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernel 'mmx'"):
        compute.sound("mmx")


def test_rows_of_a_matrix_are_read_before_any_is_copied() -> None:
    own, to = matrix(5, 4), np.zeros((2, 4), np.float32)
    for ids, error in (([0, 2**31], OverflowError), ([0, 0.5], TypeError), ([0], ValueError)):
        with pytest.raises(error):
            own.rows(ids, to)
    assert not to.any()


@pytest.mark.parametrize(
    "changed",
    [
        {"heads": 0},
        {"heads": -2},
        {"shared": 0},
        {"shared": 2**31 - 1},
        {"heads": 3, "shared": 2},
        {"heads": 1, "shared": 2},
        {"width": 0},
        {"width": 2**13},
        {"heads": 2**20, "width": 2**12},
        {"hidden": 0},
        {"hidden": 2**31 - 1},
        {"heads": 2**31 - 1, "shared": 1, "width": 2},
        {"cos": np.zeros((9, 4), np.float32), "sin": np.zeros((9, 4), np.float32)},
        {"cos": np.zeros((9, 2), np.float32), "sin": np.zeros((8, 2), np.float32)},
        {"cos": np.zeros((9, 2), np.float32)},
        {"head_norms": [(np.ones(2, np.float32),) * 2] * 2},
        {"head_norms": [(np.ones(3, np.float32),) * 2]},
        {"final": (np.ones(3, np.float32), None)},
        {"final": (None, None)},
        {"final": ()},
        {"head": matrix(5, 3)},
    ],
)
def test_the_parts_of_an_engine_fit_each_other(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Engines().make(**changed)


@pytest.mark.parametrize("at", range(8))
def test_a_layer_has_all_its_parts(at: int) -> None:
    parts = Engines()
    for wrong in (None, matrix(3, 3), np.ones(3, np.float32)):
        if wrong is None and at in (1, 5):
            continue  # a bias
        layer = [*parts.layer[:at], wrong, *parts.layer[at + 1 :]]
        with pytest.raises((TypeError, ValueError)):
            parts.make(layers=[layer])
    with pytest.raises(ValueError):
        parts.make(layers=[parts.layer[:at]])
    with pytest.raises(TypeError):
        parts.make(head=None)


def test_an_engine_is_made_once() -> None:
    parts = Engines()
    engine, own = parts.make(), matrix(5, 4)
    with pytest.raises(TypeError):
        type(engine).__new__(type(engine))
    engine.__init__(**{**parts.parts, **parts.facts, "layers": [tuple(parts.layer)] * 9})
    own.__init__(FLAT, 1, 1)
    cache, x = np.zeros(64, np.float32), np.ones((1, 4), np.float32)
    with pytest.raises(ValueError, match="sublayers 0 to 18"):
        engine.run(x, 0, 18, [parts.feed(cache)], 1)
    with pytest.raises(ValueError, match="do not fit"):
        own.product(x, np.ones((1, 1), np.float32), 1)


def test_what_an_engine_reads_stays_alive() -> None:
    parts = Engines()
    layers = parts.parts["layers"]
    engine = parts.make()
    x, cache = np.ones((1, 4), np.float32), np.zeros(64, np.float32)
    expected = x.copy()
    engine.run(expected, 0, 2, [parts.feed(cache)], 1)
    layers.clear()
    parts.layer.clear()
    parts.parts.clear()
    gc.collect()
    for _ in range(99):
        matrix(8, 4)  # takes the memory of what was let go
    engine.run(x, 0, 2, [parts.feed(cache)], 1)
    np.testing.assert_array_equal(x, expected)


class Growing(list[Any]):
    """Grows when it is asked how long it is."""

    def __len__(self) -> int:
        n = super().__len__()
        self.extend([0] * 5000)
        return n


LEAD = np.zeros((1, 1, 2, 2), np.float32)


@pytest.mark.parametrize(
    "changed",
    [
        {"address": 0},
        {"address": -1},
        {"capacity": 0},
        {"capacity": -1},
        {"capacity": 2**31 - 1},
        {"capacity": 2**31},
        {"slots": [2**31]},
        {"slots": [None]},
        {"slots": []},
        {"positions": []},
        {"positions": [-1]},
        {"positions": [2**31]},
        {"sight": ()},
        {"sight": (1,)},
        {"sight": (2**31 - 1, [(1, ())])},
        {"sight": (1, [])},
        {"sight": (1, [(-1, ())])},
        {"sight": (1, [(1, (4,))])},
        {"sight": (1, [(1, Growing([1]))])},
        {"sight": (1, [(1, (2**31,))])},
        {"sight": (1, [(1,)])},
        {"lead": ()},
        {"lead": ([], LEAD, LEAD)},
        {"lead": ([True], LEAD, LEAD[:, :, :1].copy())},
        {"lead": ([True], LEAD[0], LEAD[0])},
        {"lead": ([True], None, None)},
        {"lead": ([True], LEAD.astype(float), LEAD)},
    ],
)
def test_what_a_pass_is_given_fits(changed: dict[str, Any]) -> None:
    parts = Engines()
    turns = np.zeros((9, 2), np.float32)
    engine = parts.make(cos=turns, sin=turns)
    cache, x = np.zeros(64, np.float32), np.ones((1, 4), np.float32)
    engine.run(x, 0, 2, [parts.feed(cache, lead=([True], LEAD, LEAD))], 1)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        engine.run(x, 0, 2, [parts.feed(cache, **changed)], 1)
    for feed in ((), parts.feed(cache)[:5], None, 1):
        with pytest.raises((TypeError, ValueError)):
            engine.run(x, 0, 2, [feed], 1)


def test_a_feed_that_changes_while_it_is_read_is_an_error() -> None:
    parts = Engines()
    engine, cache, x = parts.make(), np.zeros(64, np.float32), np.ones((1, 4), np.float32)
    for column in ("slots", "seen", "more"):
        for change in ("clear", "grow"):
            slots, more, seen = [0], [1], list[Any]()
            columns = {"slots": slots, "seen": seen, "more": more}
            seen.append((1, more))

            class Room:
                """A capacity that changes the feed when it is converted."""

                def __int__(self, own: Any = columns[column], change: str = change) -> int:
                    own.clear() if change == "clear" else own.extend([own[0]] * 5000)
                    return 4

                __index__ = __int__

            feed = parts.feed(cache, capacity=Room(), slots=slots, sight=(1, seen))
            if (column, change) == ("more", "clear"):
                engine.run(x, 0, 2, [feed], 1)  # fewer slots are read than there is room for
                continue
            with pytest.raises(ValueError, match="changed while they were read"):
                engine.run(x, 0, 2, [feed], 1)


@pytest.mark.slow
def test_more_threads_than_there_may_be_take_no_more_memory() -> None:
    """In a process of its own, as threads stay."""
    code = (
        "import numpy as np; from tests.core.test_compute_borders import *; e, p = Engines().make(), Engines();"
        "x, c = np.ones((1, 4), np.float32), np.zeros(64, np.float32);"
        "e.run(x, 0, 2, [p.feed(c)], 2**31 - 1); e.head(x, x.copy(), None, 2**31 - 1);"
        "matrix(5, 4).product(x, np.ones((1, 5), np.float32), 2**31 - 1); print('ran')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "ran\n", ran.stderr[-2000:]
