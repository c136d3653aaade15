"""A stand-in for a random generator that enumerates every outcome of the code that draws from it.

A reader's sampler is judged as it was written. Whatever it draws with (`rng.random()`,
`rng.choice(V, p=row)`, `np.random.rand(n)`, `random.choices(...)`, `torch.multinomial`) is answered
by uniforms whose comparisons branch (uniforms.py). `seed` starts a stream from its beginning, as in
numpy: code that reseeds in its loop meets the same noise again. A tensor cannot hold such uniforms,
so `torch.rand` returns an array of them that compares with tensors element by element.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partialmethod
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.laws.checking.uniforms import TINY_SPLIT, LazyUniform, NotEnumerable, UniformSpan

ArrayShape = int | tuple[int, ...] | None

# A run whose probability fell below this is not followed: loops that reject have no last outcome.
NEGLIGIBLE = 1e-6
MOST_NUMBERS = 1000  # numbers that a run on two or three tokens may draw


class Negligible(BaseException):
    """This run is too improbable to matter.

    It is not an Exception, so that the code that is run does not catch it.
    """


class _SharedStreams:
    """The state that all generators of one run share."""

    def __init__(self, rng: Exhaustive, zero: int | None) -> None:
        self.rng, self.zero = rng, zero
        self.streams: dict[Any, list[UniformSpan]] = {}
        self.made = 0


class EnumeratedGenerator:
    """A stand-in for numpy.random.Generator; indexing it or iterating over it gives uniforms.

    zero    the number of the uniform that is exactly 0.0, or None
    length  how many uniforms it has where it is indexed or has its length taken
    """

    def __init__(self, rng: Exhaustive, zero: int | None = None, length: int | None = None) -> None:
        self._begin(_SharedStreams(rng, zero), object(), length)

    def restart(self, rng: Exhaustive) -> None:
        """Begin a new run: every stream starts afresh, and the pinned uniform is the same."""
        self._begin(_SharedStreams(rng, self._shared.zero), object(), self._length)

    def _begin(self, shared: _SharedStreams, key: Any, length: int | None = None) -> None:
        self._shared, self._length, self._given = shared, length, list[LazyUniform]()
        self._start(key)

    def _start(self, key: Any) -> None:
        self._stream, self._at = self._shared.streams.setdefault(key, []), 0

    @property
    def rng(self) -> Exhaustive:
        """Return the library's source of enumerated decisions."""
        return self._shared.rng

    @property
    def made(self) -> int:
        """Return how many uniforms every generator of this run has used so far."""
        return self._shared.made

    def _next(self) -> LazyUniform:
        if self._at == len(self._stream):
            shared = self._shared
            if (
                shared.made > 12 and shared.rng.probability < NEGLIGIBLE
            ):  # (asked late: it takes time)
                raise Negligible
            if shared.made == MOST_NUMBERS:
                raise RuntimeError(f"it drew {MOST_NUMBERS} random numbers and was not done")
            self._stream.append(UniformSpan(shared.rng, shared.made == shared.zero))
            shared.made += 1
        self._at += 1
        return LazyUniform(self._stream[self._at - 1])

    def seed(self, seed: Any = None) -> None:
        """Start a stream; the same seed gives the same noise again."""
        self._start(object() if seed is None else ("seed", str(seed)))

    def generator(self, seed: Any = None) -> "EnumeratedGenerator":
        """Stand in for numpy.random.default_rng."""
        if isinstance(seed, EnumeratedGenerator):
            return seed
        child = EnumeratedGenerator.__new__(EnumeratedGenerator)
        child._begin(self._shared, object() if seed is None else ("generator", str(seed)))
        child._at = 0
        return child

    # ------------------------------------------------------------------ numpy

    def random(self, size: ArrayShape = None, **kwargs: Any) -> Any:
        """Return uniforms in [0, 1)."""
        return _shaped(self._next, size)

    random_sample = sample = ranf = random

    def rand(self, *shape: int) -> Any:
        """Return uniforms in [0, 1), by dimensions."""
        return self.random(shape or None)

    def uniform(self, low: Any = 0, high: Any = 1, size: ArrayShape = None) -> Any:
        """Return uniforms in [low, high)."""
        return _shaped(lambda: low + (high - low) * self._next(), size)

    def choice(
        self, a: Any, size: ArrayShape = None, replace: bool = True, p: Any = None, **kwargs: Any
    ) -> Any:
        """Draw from range(a) or from a sequence, with the probabilities p.

        Raises ValueError for probabilities that numpy rejects.
        """
        n = a if isinstance(a, (int, np.integer)) else len(a)
        row = [Fraction(1, int(n))] * int(n) if p is None else _checked_probabilities(p, int(n))

        def one() -> Any:
            token = self._pick(row)
            if not replace:
                row[token] = 0 * row[token]
            return token if isinstance(a, (int, np.integer)) else a[token]

        return _shaped(one, size)

    def multinomial(self, n: int, pvals: Any, size: ArrayShape = None) -> Any:
        """Return how often each token was drawn in n draws."""
        row = _checked_probabilities(pvals, len(pvals))

        def counts() -> Any:
            drawn = np.zeros(len(row), int)
            for _ in range(n):
                drawn[self._pick(row)] += 1
            return drawn

        return (
            counts()
            if size is None
            else np.array([counts() for _ in range(math.prod(np.atleast_1d(size)))])
        )

    def integers(
        self, low: int, high: int | None = None, size: ArrayShape = None, **kwargs: Any
    ) -> Any:
        """Return integers in [low, high), or in [0, low)."""
        start, stop = (0, low) if high is None else (low, high)
        return _shaped(
            lambda: start + self._pick([Fraction(1, stop - start)] * (stop - start)), size
        )

    def binomial(self, n: int, p: Any, size: ArrayShape = None) -> Any:
        """Return how many of n uniforms lie below p."""
        return _shaped(lambda: sum(bool(self._next() < p) for _ in range(n)), size)

    # ------------------------------------------------------------------ the module random

    def choices(
        self, population: Sequence[Any], weights: Any = None, *, cum_weights: Any = None, k: int = 1
    ) -> list[Any]:
        """Draw k of the population, with replacement."""
        if cum_weights is not None:
            weights = [b - a for a, b in zip([0, *cum_weights], cum_weights, strict=False)]
        row = [Fraction(1)] * len(population) if weights is None else list(weights)
        if not sum(row) > 0:
            raise ValueError("Total of weights must be greater than zero")
        return [population[self._pick(row)] for _ in range(k)]

    # ------------------------------------------------------------------ a list of uniforms

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this generator has no length")
        return self._length

    def __getitem__(self, index: Any) -> Any:
        while len(self._given) < len(self):
            self._given.append(self._next())
        return self._given[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(lambda: self._next(), None) if self._length is None else iter(self[:])

    def __next__(self) -> Any:
        return self._next()

    def __call__(self) -> Any:
        return self._next()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotEnumerable(
            f"rng.{name} cannot be enumerated: draw with rng.random(), rng.uniform(), "
            "rng.choice(n, p=row), rng.integers() or rng.multinomial()"
        )

    def _pick(self, row: Sequence[Any]) -> int:
        """Draw by inverse CDF with one uniform, as numpy's choice does."""
        mass = sum(row)
        least = TINY_SPLIT * mass if isinstance(mass, float) else 0
        support = [token for token, x in enumerate(row) if x > least]
        u, reached = self._next(), 0 * mass
        for token in support[:-1]:
            reached = reached + row[token]
            if u < reached / mass:
                return token
        return support[-1]


def _checked_probabilities(p: Any, n: int) -> list[Any]:
    """Return the probabilities; raises ValueError where numpy does."""
    row = [x.item() if hasattr(x, "item") else x for x in p]
    if len(row) != n:
        raise ValueError("'a' and 'p' must have same size")
    if any(x != x for x in row):
        raise ValueError("probabilities contain NaN")
    if any(x < 0 for x in row):
        raise ValueError("probabilities are not non-negative")
    if abs(sum(row) - 1) > 1e-8:
        raise ValueError("probabilities do not sum to 1")
    return row


def _shaped(one: Callable[[], Any], size: ArrayShape) -> Any:
    if size is None:
        return one()
    shape = tuple(int(n) for n in np.atleast_1d(size))
    drawn = [one() for _ in range(math.prod(shape))]
    if any(isinstance(x, LazyUniform) for x in drawn):
        array = np.empty(len(drawn), object)
        array[:] = drawn
        return array.reshape(shape)
    return np.array(drawn).reshape(shape)


_NUMPY = {
    **dict.fromkeys(("random", "random_sample", "sample", "ranf"), "random"),
    **{name: name for name in ("rand", "uniform", "choice", "multinomial", "binomial", "seed")},
    "randint": "integers",
    "default_rng": "generator",
    "RandomState": "generator",
}
"""Names in numpy.random, and the methods that stand in for them."""


@contextmanager
def _replace_attributes(owner: Any, functions: dict[str, Any]) -> Iterator[None]:
    """Replace attributes of a module or class inside the block."""
    own = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name in functions:
            if name in own:
                setattr(owner, name, own[name])
            else:  # it was inherited
                delattr(owner, name)


@contextmanager
def replace_generators(dice: EnumeratedGenerator) -> Iterator[None]:
    """Replace the global generators of numpy and of `random` inside the block; no state moves."""

    def uniform(a: Any = 0, b: Any = 1) -> Any:
        return dice.uniform(a, b)

    def randint(a: int, b: int) -> Any:
        return dice.integers(a, b + 1)

    pythons = {name: getattr(dice, name) for name in ("random", "choice", "choices", "seed")}
    pythons |= {"uniform": uniform, "randint": randint, "randrange": dice.integers}
    numpys = {name: getattr(dice, ours) for name, ours in _NUMPY.items()}
    with _replace_attributes(np.random, numpys), _replace_attributes(random, pythons):
        yield


MIRRORED_COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
ARITHMETIC = {
    "rsub": "rsub",
    "add": "add",
    "radd": "add",
    "sub": "sub",
    "mul": "mul",
    "rmul": "mul",
}
ARITHMETIC |= {"div": "truediv"}
"""Names of torch's functions, and of numpy's methods."""


class TorchUniforms:
    """The uniforms that `torch.rand` returns, in a shape.

    Methods that only move or convert a tensor return the same object.
    """

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array, dtype=object)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.array.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its lengths."""
        return self.shape if dim is None else self.shape[dim]

    def item(self) -> Any:
        """Return the only uniform."""
        return self.array.item()

    def _as_it_is(self, *args: Any, **kwargs: Any) -> "TorchUniforms":
        return self

    to = cpu = cuda = float = double = detach = clone = contiguous = _as_it_is

    def view(self, *shape: Any) -> "TorchUniforms":
        """Return the uniforms in another shape."""
        return TorchUniforms(self.array.reshape(*shape))

    reshape = view

    def squeeze(self, dim: int | None = None) -> "TorchUniforms":
        """Drop dimensions of length one."""
        return TorchUniforms(np.squeeze(self.array, dim))

    def unsqueeze(self, dim: int) -> "TorchUniforms":
        """Add a dimension of length one."""
        return TorchUniforms(np.expand_dims(self.array, dim))

    def log(self) -> "TorchUniforms":
        """Take the logarithm of each."""
        return TorchUniforms(np.log(self.array))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> "TorchUniforms":
        return TorchUniforms(self.array[_host(index)])

    def __iter__(self) -> Iterator["TorchUniforms"]:
        return (TorchUniforms(x) for x in self.array)

    def __float__(self) -> Any:
        return float(self.item())

    def _ask(self, name: str, other: Any) -> torch.Tensor:
        return torch.tensor(
            getattr(np, NUMPY_COMPARISONS[name])(self.array, _host(other)).astype(bool)
        )

    def _move(self, name: str, other: Any) -> "TorchUniforms":
        x = _host(other)
        return TorchUniforms(
            x - self.array if name == "rsub" else getattr(self.array, f"__{name}__")(x)
        )

    __lt__, __le__ = partialmethod(_ask, "lt"), partialmethod(_ask, "le")
    __gt__, __ge__ = partialmethod(_ask, "gt"), partialmethod(_ask, "ge")
    __add__ = __radd__ = partialmethod(_move, "add")
    __mul__ = __rmul__ = partialmethod(_move, "mul")
    __sub__, __rsub__ = partialmethod(_move, "sub"), partialmethod(_move, "rsub")
    __truediv__ = partialmethod(_move, "truediv")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer torch where a tensor meets uniforms, as in `ratio > torch.rand(1)`."""
        name = function.__name__.strip("_")
        if name == "searchsorted" and isinstance(args[1], cls):
            right = (kwargs or {}).get("right") or (kwargs or {}).get("side") == "right"
            side: Any = "right" if right else "left"
            found = [int(np.searchsorted(_host(args[0]), u, side)) for u in args[1].array.flat]
            return torch.tensor(found).reshape(
                args[1].shape
            )  # one by one: numpy compares neighbouring keys
        if name == "log":
            return args[0].log()
        if name in MIRRORED_COMPARISONS:
            a, b = args
            return a._ask(name, b) if isinstance(a, cls) else b._ask(MIRRORED_COMPARISONS[name], a)
        if name in ARITHMETIC:
            a, b = args
            if isinstance(a, cls):
                return a._move(ARITHMETIC[name], b)
            if name != "div":
                return b._move("rsub" if name == "sub" else ARITHMETIC[name], a)
        raise NotEnumerable(
            f"torch.{name} of random numbers cannot be enumerated: compare torch.rand with a ratio"
        )


NUMPY_COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}


def _host(x: Any) -> Any:
    if isinstance(x, TorchUniforms):
        return x.array
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x


@contextmanager
def replace_torch_generators(dice: EnumeratedGenerator) -> Iterator[None]:
    """Replace torch's random functions inside the block; no state of torch's generators moves."""

    def rand(*size: Any, **kwargs: Any) -> TorchUniforms:
        shape = kwargs.get(
            "size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        )
        return TorchUniforms(dice.random(tuple(shape)))

    def rand_like(tensor: torch.Tensor, **kwargs: Any) -> TorchUniforms:
        return TorchUniforms(dice.random(tuple(tensor.shape)))

    def multinomial(
        input: torch.Tensor, num_samples: int, replacement: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        rows = input.detach().double().reshape(-1, input.shape[-1])
        drawn = []
        for row in rows.tolist():
            if not all(0 <= x < float("inf") for x in row) or not sum(row) > 0:
                raise RuntimeError(
                    "probability tensor contains either inf, nan or element < 0, or its sum is 0"
                )
            mass = sum(row)
            drawn.append(
                dice.choice(len(row), num_samples, replacement, [x / mass for x in row]).tolist()
            )
        return torch.tensor(drawn).reshape(*input.shape[:-1], num_samples)

    def seed(seed: Any = None) -> None:
        dice.seed(seed)

    def reject(*args: Any, **kwargs: Any) -> Any:
        raise NotEnumerable(
            "continuous noise cannot be enumerated: draw with torch.multinomial, compare torch.rand"
        )

    functions = {"rand": rand, "rand_like": rand_like, "multinomial": multinomial}
    functions |= {"manual_seed": seed, "randn": reject, "randn_like": reject}
    methods = {"multinomial": multinomial}
    methods |= dict.fromkeys(("uniform_", "exponential_", "normal_"), reject)
    with _replace_attributes(torch, functions), _replace_attributes(torch.Tensor, methods):
        yield
