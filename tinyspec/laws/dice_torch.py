"""The stand-in for torch's generator: `torch.rand`, `torch.multinomial` and what is built on them
(Categorical).

Uniforms cannot live in a tensor, so `torch.rand` gives an array of them that compares with tensors,
element by element, and answers in tensors of bools.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tinyspec.laws.dice import EnumeratedGenerator
from tinyspec.laws.uniform import NotEnumerable

COMPARISONS = ("lt", "le", "gt", "ge")
MIRRORED_COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
ARITHMETIC = {
    "rsub": "rsub",
    "add": "add",
    "radd": "add",
    "sub": "sub",
    "mul": "mul",
    "rmul": "mul",
    "div": "truediv",
}


class TorchUniforms:
    """What torch.rand gives: uniforms in a shape. Methods that only move or convert a tensor give
    it back as it is.
    """

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array, dtype=object)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.array.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its lengths."""
        return self.shape if dim is None else self.shape[dim]

    def item(self) -> Any:
        """The only uniform."""
        return self.array.item()

    def _as_it_is(self, *args: Any, **kwargs: Any) -> "TorchUniforms":
        return self

    to = cpu = cuda = float = double = detach = clone = contiguous = _as_it_is

    def view(self, *shape: Any) -> "TorchUniforms":
        """In another shape."""
        return TorchUniforms(self.array.reshape(*shape))

    reshape = view

    def squeeze(self, dim: int | None = None) -> "TorchUniforms":
        """Without dimensions of length one."""
        return TorchUniforms(np.squeeze(self.array, dim))

    def unsqueeze(self, dim: int) -> "TorchUniforms":
        """With one more dimension."""
        return TorchUniforms(np.expand_dims(self.array, dim))

    def log(self) -> "TorchUniforms":
        """Element by element."""
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

    def __lt__(self, other: Any) -> Any:
        return self._ask("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._ask("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._ask("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._ask("ge", other)

    def __add__(self, other: Any) -> Any:
        return self._move("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._move("sub", other)

    def __rsub__(self, other: Any) -> Any:
        return self._move("rsub", other)

    def __mul__(self, other: Any) -> Any:
        return self._move("mul", other)

    def __truediv__(self, other: Any) -> Any:
        return self._move("truediv", other)

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """torch asks here when a tensor meets uniforms: `ratio > torch.rand(1)`,
        torch.searchsorted(cdf, u).
        """
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
        if name in COMPARISONS:
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
    """While it lasts, torch draws from these dice; no state of torch's generators moves."""

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

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotEnumerable(
            "continuous noise cannot be enumerated: draw with torch.multinomial, compare torch.rand"
        )

    functions: dict[str, Any] = {"rand": rand, "rand_like": rand_like, "multinomial": multinomial}
    functions |= {"manual_seed": seed, "randn": refuse, "randn_like": refuse}
    methods: dict[str, Any] = {
        "multinomial": multinomial,
        "uniform_": refuse,
        "exponential_": refuse,
        "normal_": refuse,
    }
    theirs = {name: getattr(torch, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(torch, name, function)
        for name, function in methods.items():
            setattr(torch.Tensor, name, function)
        yield
    finally:
        for name, function in theirs.items():
            setattr(torch, name, function)
        for name in methods:
            delattr(torch.Tensor, name)
