"""Call every function and class of the compiled core with random arguments, good and bad.

    python tests/fuzz/kernels.py --calls 100000 --seed 0 [--only NAME]

A call must return, or refuse its arguments by one of `REFUSALS`. Anything else is a failure, and a crash is one too: the name
is printed before its calls. Most arguments are good, so that a call goes deep; one in some is wrong in type, size, dtype,
layout or value. `--only` repeats one function alone: its calls depend on the seed and its name.

Raw addresses cannot be checked by the core: a wrong one other than 0 is never given.
"""

import argparse
import copy
import faulthandler
import math
import os
import pickle
import random
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tinyspec import _core
from tinyspec.errors import TinyspecError

REFUSALS = (
    *(TinyspecError, ValueError, TypeError, OverflowError),
    *(KeyError, IndexError, MemoryError),
)
MEMORY = 4 << 30  # bytes of addresses; what needs more ends as a MemoryError
LIFETIME = 60  # calls of an object's methods until a new one takes its place
SLOTS = 16  # of the cache that is handed to the compiled layers


class Raising:
    """A sequence whose items are exceptions."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> int:
        raise KeyError("an item that is not there")


class Lying(list[Any]):
    """A list that gives a wrong length."""

    def __len__(self) -> int:
        return random.choice([0, 1, 1000, 2**31, 2**40])


class Once:
    """A number that cannot be read twice."""

    def __init__(self) -> None:
        self.read = False

    def __index__(self) -> int:
        if self.read:
            raise ValueError("read twice")
        self.read = True
        return 1

    __int__ = __index__


NUMBERS = np.random.default_rng(0)
NOISE = NUMBERS.standard_normal(1 << 16).astype(np.float32)
SHARES = NUMBERS.random(1 << 12)
ROW = np.linspace(0.1, 1, 6)
WRONG: list[Any] = [
    *(None, "text", b"bytes", 1.5, -1, 0, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(10**30)),
    *(float("nan"), float("inf"), -float("inf"), -0.5, 1e308, True, object(), 1j, (), range(3)),
    *(
        Raising(),
        ROW,
        ROW[::2],
        ROW[::-1],
        ROW[None],
        ROW.astype(np.float32),
        ROW.astype(np.float16),
    ),
    *(ROW.astype(np.int32), ROW.astype(np.int64), ROW.astype(object), ROW.astype(">f8"), ROW[:0]),
    *(ROW[:0].astype(np.int32), ROW * np.nan, np.full(6, np.inf), -ROW, np.float64(0.5)),
    *(np.zeros((2, 2, 2)), np.zeros((0, 3), np.float32), np.array(3), memoryview(b"abc")),
]
"""What may be given more than once."""
BAD: list[Callable[["Dice"], Any]] = [
    *(lambda dice: dice.rng.choice(WRONG),) * 30,
    *(lambda dice: [], lambda dice: {0: 1}, lambda dice: {1, 2}, lambda dice: [None]),
    *(lambda dice: [0.5], lambda dice: [2**31], lambda dice: ["a"], lambda dice: [[0]]),
    *(lambda dice: [-1, -1], lambda dice: [0] * 1000, lambda dice: iter([1]), lambda dice: Once()),
    *(lambda dice: dice.failing(), lambda dice: Lying([1, 2]), lambda dice: [Once()]),
    lambda dice: bytearray(8),
]


class Dice:
    """Random arguments: good ones from a method of the name of their kind, wrong ones from `bad`."""

    def __init__(self, seed: str, wrong: float = 0.04) -> None:
        self.rng = random.Random(seed)
        self.wrong = wrong

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def upto(self, most: int) -> int:
        return self.rng.randint(0, most)

    def or_bad(self, good: Any) -> Any:
        """Return this argument, or now and then another that is wrong."""
        return self.bad() if self.rng.random() < self.wrong else good

    def bad(self) -> Any:
        return self.rng.choice(BAD)(self)

    def failing(self) -> Iterator[int]:
        yield from range(self.upto(3))
        raise KeyError("no more")

    # --- good arguments

    def size(self) -> int:
        return self.pick(1, 2, 3, 7, 8, 9, 31, 33, 255, 256, 257, 600)

    def u(self) -> float:
        return self.pick(0.0, 0.5, self.rng.random(), 1 - 2**-53)

    def uniforms(self, n: int) -> Any:
        return self.or_bad(np.array([self.u() for _ in range(n)], np.float64))

    def row(self, n: int) -> Any:
        at = self.upto(len(SHARES) - n)
        row = SHARES[at : at + n].copy()
        row[: self.upto(n)] *= self.pick(0, 1, 1, 1e-300)
        return self.or_bad(row / row.sum() if row.sum() else row)

    def logits(self, n: int) -> Any:
        row = self.normal(n) * self.pick(0, 1, 9, 1e30)
        row[: self.upto(n)] = self.pick(-np.inf, 0, 1)
        return self.or_bad(row.astype(self.pick(np.float32, np.float64)))

    def ids(self, most: int, below: int = 4) -> Any:
        return self.or_bad([self.rng.randrange(below) for _ in range(self.upto(most))])

    def settings(self) -> list[Any]:
        return [
            self.ids(5, 600),
            self.or_bad(self.pick(0.0, 1.0, 0.3, 2.0, 1e-300)),
            self.or_bad(self.pick(None, 1, 2, 5, 1000)),
            self.or_bad(self.pick(None, 1.0, 0.9, 0.1, 1e-12)),
            self.or_bad(self.pick(None, 0.0, 0.1, 1.0)),
            self.or_bad(self.pick(1.0, 1.2, 0.7, 1e-300)),
        ]

    def parents(self, n: int) -> Any:
        return self.or_bad([self.rng.randint(-1, node - 1) for node in range(n)])

    def floats(self, *shape: int) -> Any:
        return self.or_bad(self.normal(*shape))

    def normal(self, *shape: int) -> Any:
        n = math.prod(shape)
        at = self.upto(len(NOISE) - n)
        return NOISE[at : at + n].reshape(shape).copy()


Call = Callable[[Dice], Any]


def verify(dice: Dice) -> Any:
    n, vocabulary = dice.upto(6), dice.size()
    rows: dict[int, Any] = {node: dice.row(vocabulary) for node in range(-1, n)}
    declared = [dice.pick(None, dice.row(vocabulary)) for _ in range(n)]
    return _core.verify_tree(
        dice.or_bad([dice.rng.randrange(min(vocabulary, 3)) for _ in range(n)]),
        dice.parents(n),
        dice.or_bad(declared),
        dice.or_bad([dice.rng.random() < 0.1 for _ in range(n)]),
        dice.or_bad(dice.pick(rows, list(rows.values()))),
        dice.uniforms(n + 1),
    )


def retrieve(dice: Dice) -> Any:
    text = np.array(dice.rng.choices((-1, 0, 1, 2, 3), k=dice.upto(60)), np.int32)
    order = _core.suffix_order(text)
    if dice.rng.random() < 0.2:
        order = order[np.argsort(dice.normal(len(order)))].copy()
    if len(order) and dice.rng.random() < 0.1:
        order[dice.upto(len(order) - 1)] = dice.pick(-1, len(order), 2**31 - 1)
    knobs = [
        dice.pick(1, 2),
        dice.pick(3, 31),
        dice.pick(1, 5, 31),
        dice.pick(1, 9, 5000),
        dice.upto(9),
    ]
    return _core.retrieve(
        dice.or_bad(text), dice.or_bad(order), dice.ids(40), *(dice.or_bad(knob) for knob in knobs)
    )


def suffix_order(dice: Dice) -> Any:
    tell = dice.pick(None, None, lambda done: None, dice.bad())
    return _core.suffix_order(dice.or_bad(dice.pick(dice.ids(60), dice.ids(60, 2**31 - 1))), tell)


FUNCTIONS: dict[str, Call] = {
    "sample_inverse_cdf": lambda d: _core.sample_inverse_cdf(d.row(d.size()), d.or_bad(d.u())),
    "sample_without_replacement": lambda d: _core.sample_without_replacement(
        d.row(d.size()), d.uniforms(d.upto(5))
    ),
    "exponential_race": lambda d: _core.exponential_race(
        *(lambda n: (d.row(n), d.or_bad(d.row(n) * 3)))(d.size())
    ),
    "apply_sampling": lambda d: _core.apply_sampling(d.logits(d.size()), *d.settings()),
    "sample_from_logits": lambda d: _core.sample_from_logits(
        d.logits(d.size()), *d.settings(), d.or_bad(d.u())
    ),
    "residual": lambda d: _core.residual(*(lambda n: (d.row(n), d.row(n)))(d.size())),
    "exclude_token": lambda d: _core.exclude_token(d.row(d.size()), d.or_bad(d.upto(9))),
    "verify_tree": verify,
    "ancestors": lambda d: _core.ancestors(d.parents(d.upto(40))),
    "depths": lambda d: _core.depths(d.parents(d.upto(40))),
    "unique_paths": lambda d: _core.unique_paths(
        *(lambda n: (d.or_bad([d.upto(2) for _ in range(n)]), d.parents(n)))(d.upto(40))
    ),
    "suffix_order": suffix_order,
    "retrieve": retrieve,
}


class Objects:
    """One class: its constructor, and its methods on an object that lives for some calls.

    make     the constructor on random arguments
    good     an object
    methods  by name, what calls one on an object
    """

    def __init__(
        self, make: Call, good: Call, methods: dict[str, Callable[[Dice, Any], Any]]
    ) -> None:
        self.make, self.good, self.methods = make, good, methods

    def calls(self, name: str) -> dict[str, Call]:
        """Return the calls by name; a call of a method comes after some of others."""
        return {name: self.make} | {
            f"{name}.{method}": self.living(method) for method in [*self.methods, "copy"]
        }

    def living(self, method: str) -> Call:
        state: list[Any] = [None, 0]
        growing = [self.methods[name] for name in ("open", "append") if name in self.methods]
        others = [*self.methods.values(), *growing * 5]

        def call(dice: Dice) -> Any:
            if state[1] == 0:
                state[:] = self.good(dice), LIFETIME
            state[1] -= 1
            with Refusing():
                dice.pick(*others)(dice, state[0])
            if method == "copy":
                return dice.pick(copy.copy, copy.deepcopy, pickle.dumps, repr, hash)(state[0])
            return self.methods[method](dice, state[0])

        return call


class Refusing:
    """Let refusals pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, REFUSALS)


def tree_of(dice: Dice) -> Any:
    return dice.or_bad(dice.pick("a", "b", 0, ("a", 1)))


def text_of(dice: Dice) -> Any:
    return dice.or_bad(dice.upto(2))


INDEX = Objects(
    lambda d: _core.NgramIndex(d.or_bad(d.pick(1, 2, 8, 256))),
    lambda d: _core.NgramIndex(d.pick(1, 2, 5)),
    {
        "append": lambda d, x: x.append(text_of(d), d.ids(20)),
        "length": lambda d, x: x.length(text_of(d)),
        "rewind": lambda d, x: x.rewind(text_of(d), d.or_bad(d.upto(3))),
        "lookup": lambda d, x: x.lookup(
            d.ids(6),
            d.or_bad(d.upto(9)),
            d.or_bad(d.pick(None, x.max_n)),
            d.or_bad(1),
            d.or_bad(d.pick("first", "last", "frequent")),
        ),
        "getstate": lambda d, x: x.__getstate__(),
    },
)

FOREST = Objects(
    lambda d: _core.Forest(d.or_bad(d.pick(2, 3, 9, 1024)), d.or_bad(9)),
    lambda d: _core.Forest(d.pick(2, 3, 6), d.pick(1, 9, 99)),
    {
        "open": lambda d, x: x.open(tree_of(d)),
        "append": lambda d, x: x.append(text_of(d), d.ids(12)),
        "close": lambda d, x: x.close(text_of(d)),
        "length": lambda d, x: x.length(text_of(d)),
        "rewind": lambda d, x: x.rewind(text_of(d), d.or_bad(d.upto(3))),
        "drop": lambda d, x: x.drop(tree_of(d)),
        "halve": lambda d, x: x.halve(tree_of(d)),
        "prune": lambda d, x: x.prune(tree_of(d)),
        "size": lambda d, x: x.size(tree_of(d)),
        "bytes": lambda d, x: x.bytes,
        "gather": lambda d, x: x.gather(
            d.or_bad([(tree_of(d), d.or_bad(d.upto(20))) for _ in range(d.upto(3))]),
            d.ids(8),
            *(d.or_bad(d.upto(9)) for _ in range(3)),
        ),
        "best": lambda d, x: x.best(
            d.or_bad([tree_of(d) for _ in range(d.upto(3))]),
            d.ids(8),
            d.or_bad(d.pick(0.0, 0.5, 2.0, 1e300)),
            d.or_bad(d.upto(20)),
            d.or_bad(d.upto(9)),
            d.or_bad(d.pick(0.0, 0.1)),
        ),
        "getstate": lambda d, x: x.__getstate__(),
    },
)


# --- the compiled transformer


def threads_of(dice: Dice) -> Any:
    """Few calls run on more threads than one: where there are too few cores, these wait long."""
    return dice.or_bad(dice.pick(*[1] * 50, 0, -9, 2, 3))


def packed(dice: Dice, out: int, inputs: int, half: bool = False) -> Any:
    """A matrix of random numbers; an odd one is never half."""
    if inputs % 32 == 0:
        form, size = dice.pick(("Q8_0", 34), ("Q4_0", 18), ("Q4_1", 20))
        groups = dice.rng.randbytes(-(-out // 16) * 16 * inputs // 32 * size)
        finite = np.frombuffer(groups, np.uint8) & 0x6F
        return _core.compute.Packed(finite, out, inputs, None, form)
    half = half and inputs % 2 == 0
    kind = np.uint16 if half else np.float32
    data = (dice.normal(-(-out // 16) * 16 * inputs) * 99).astype(np.int16)
    return _core.compute.Packed(data.astype(kind), out, inputs)


class Layers:
    """An engine, its parts, and what its passes need."""

    def __init__(self, dice: Dice, careful: bool) -> None:
        sound = (lambda x: x) if careful else dice.or_bad
        half = dice.rng.random() < 0.3
        self.shared, group = dice.pick(1, 2, 3), dice.pick(1, 2, 13)
        self.width, self.hidden, self.d = dice.pick(2, 6, 8, 34), dice.pick(2, 24), dice.pick(2, 20)
        self.n, self.vocabulary, heads = dice.pick(1, 2), dice.pick(1, 21), self.shared * group
        gated = dice.rng.random() < 0.5
        gain = np.ones(self.d, np.float32)
        shapes = (
            ((heads + 2 * self.shared) * self.width, self.d),
            (self.d, heads * self.width),
            ((1 + gated) * self.hidden, self.d),
            (self.d, self.hidden),
        )
        layers = []
        for _ in range(self.n):
            qkv, out, up, down = (sound(packed(dice, *shape, half)) for shape in shapes)
            norms = [sound(gain), sound(None)]
            layers.append(sound((*norms, qkv, out, *norms, up, down)))
        turns = np.zeros((9, self.width), np.float32)
        self.turned = dice.rng.random() < 0.5
        own = [(np.ones(self.width, np.float32),) * 2] * self.n
        self.cache = np.zeros(
            (self.n, 2, self.shared, SLOTS, self.width), np.uint16 if half else np.float32
        )
        self.engine = _core.compute.Engine(
            sound(layers),
            sound((gain, None)),
            sound(packed(dice, self.vocabulary, self.d, half)),
            heads=sound(heads),
            shared=sound(self.shared),
            width=sound(self.width),
            hidden=sound(self.hidden),
            rms=sound(dice.rng.random() < 0.5),
            gated=gated,
            silu=sound(True),
            half=half,
            eps=sound(1e-5),
            scale=sound(0.3),
            cos=sound(turns if self.turned else None),
            sin=sound(turns if self.turned else None),
            head_norms=sound(dice.pick(None, own)),
        )


def run(dice: Dice, layers: Layers) -> Any:
    feeds, rows = list[Any](), 0
    by_head = layers.shared if dice.rng.random() < 0.3 else 1
    for _ in range(dice.pick(1, 1, 2)):
        n = dice.upto(5)
        rows += n
        lists = [
            dice.or_bad((dice.or_bad(dice.upto(SLOTS)), dice.ids(4, SLOTS)))
            for _ in range(n * by_head)
        ]
        prefix = [dice.floats(layers.n, layers.shared, 2, layers.width) for _ in range(2)]
        lead = (dice.or_bad([dice.rng.random() < 0.5 for _ in range(n)]), *prefix)
        feeds.append(
            dice.or_bad(
                (
                    layers.cache.ctypes.data
                    if dice.rng.random() > 0.02
                    else dice.pick(0, -1, None),
                    dice.pick(*[SLOTS] * 20, 0, -1, 2**31 - 1, 2**40, None, "many"),
                    dice.or_bad([dice.upto(SLOTS - 1) for _ in range(n)]),
                    dice.or_bad([dice.upto(8) for _ in range(n)]),
                    dice.or_bad((dice.or_bad(by_head), dice.or_bad(lists))),
                    dice.or_bad(dice.pick(None, None, lead)),
                )
            )
        )
    first = dice.upto(2 * layers.n)
    return layers.engine.run(
        dice.floats(rows, layers.d),
        dice.or_bad(first),
        dice.or_bad(dice.rng.randint(first, 2 * layers.n)),
        dice.or_bad(feeds),
        threads_of(dice),
        dice.or_bad(dice.rng.random() < 0.2),
    )


def head(dice: Dice, layers: Layers) -> Any:
    n = dice.upto(5)
    return layers.engine.head(
        dice.floats(n, layers.d),
        dice.floats(n, layers.d),
        dice.pick(None, dice.floats(n, layers.vocabulary)),
        threads_of(dice),
    )


def make_packed(dice: Dice) -> Any:
    out, inputs = dice.pick(1, 5, 16, 40), dice.pick(1, 2, 7, 16)
    data = np.zeros(-(-out // 16) * 16 * inputs, dice.pick(np.float32, np.uint16))
    bias = dice.or_bad(dice.pick(None, np.zeros(out, np.float32)))
    return _core.compute.Packed(dice.or_bad(data), dice.or_bad(out), dice.or_bad(inputs), bias)


class Matrix:
    """A packed matrix and its size."""

    def __init__(self, dice: Dice) -> None:
        self.out, self.inputs = dice.pick(1, 5, 40, 90), dice.pick(2, 16, 64)
        self.packed = packed(dice, self.out, self.inputs, dice.rng.random() < 0.5)


def product(dice: Dice, matrix: Matrix) -> Any:
    k = dice.upto(5)
    x, y = dice.floats(k, matrix.inputs), dice.floats(k, matrix.out)
    return matrix.packed.product(x, y, threads_of(dice))


def copy_rows(dice: Dice, matrix: Matrix) -> Any:
    k = dice.upto(3)
    ids = dice.or_bad([dice.rng.randrange(matrix.out) for _ in range(k)])
    return matrix.packed.rows(ids, dice.floats(k, matrix.inputs))


MATRIX = Objects(make_packed, Matrix, {"product": product, "rows": copy_rows})
ENGINE = Objects(
    lambda d: Layers(d, careful=False),
    lambda d: Layers(d, careful=True),
    {"run": run, "head": head},
)


def list_calls() -> dict[str, Call]:
    """Return everything that is called, by name."""
    calls = {**FUNCTIONS, **INDEX.calls("NgramIndex"), **FOREST.calls("Forest")}
    if _core.compute is None:
        return calls
    names = _core.compute.kernels()
    return {
        **calls,
        "kernels": lambda d: _core.compute.kernels(),
        "kernel": lambda d: _core.compute.kernel(),
        "sound": lambda d: _core.compute.sound(d.or_bad(d.pick(*names, "mmx"))),
        "best": lambda d: _core.compute.best(d.or_bad(lambda name: True), d.or_bad("x86_64")),
        "use": lambda d: _core.compute.use(d.or_bad(d.pick(*names))),
        **MATRIX.calls("Packed"),
        **ENGINE.calls("Engine"),
    }


def fuzz(name: str, call: Call, calls: int, seed: int) -> tuple[Counter[str], str]:
    """Call so often; return how the calls ended, and the first failure."""
    dice, ends, failure = Dice(f"{seed} {name}"), Counter[str](), ""
    random.seed(seed)
    for number in range(calls):
        try:
            call(dice)
            ends["returned"] += 1
        except REFUSALS as error:
            ends[type(error).__name__] += 1
        except Exception:
            ends["FAILED"] += 1
            failure = failure or f"{name}, call {number}, seed {seed}\n{traceback.format_exc()}"
    if not ends["returned"]:
        failure = failure or f"{name}: no call returned, so nothing was tried"
    return ends, failure


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the compiled core.")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="functions whose names contain this")
    given = parser.parse_args()
    faulthandler.enable()
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # which takes terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    failures, total = list[str](), 0
    print(f"seed {given.seed}, {given.calls} calls each, compiled: {_core.COMPILED}")
    for name, call in list_calls().items():
        if given.only not in name:
            continue
        print(f"{name:28}", end=" ", flush=True)
        ends, failure = fuzz(name, call, given.calls, given.seed)
        total += ends.total()
        refused = ends.total() - ends["returned"] - ends["FAILED"]
        kinds = ", ".join(f"{kind} {n}" for kind, n in ends.most_common() if kind != "returned")
        print(f"returned {ends['returned']:6}  refused {refused:6}  {kinds}", flush=True)
        if failure:
            failures.append(failure)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{total} calls, {len(failures)} functions failed, at most {peak:.0f} MiB of memory")
    print("\n".join(failures), end="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
