from collections.abc import Callable, Sequence
from typing import Any

def kernels() -> list[str]: ...
def kernel() -> str: ...
def sound(name: str) -> bool: ...
def best(sound: Callable[[str], bool] = ..., machine: str = ...) -> str: ...
def use(name: str) -> None: ...

class Packed:
    def __init__(
        self, data: Any, out: int, inputs: int, bias: Any = None, kind: str | None = None
    ) -> None: ...
    def product(self, x: Any, y: Any, threads: int) -> None: ...
    def rows(self, ids: Sequence[int], to: Any) -> None: ...

class Engine:
    def __init__(
        self,
        layers: Sequence[tuple[Any, ...]],
        final: tuple[Any, Any],
        head: Packed,
        *,
        heads: int,
        shared: int,
        width: int,
        hidden: int,
        rms: bool,
        gated: bool,
        silu: bool,
        half: bool,
        eps: float,
        scale: float,
        cos: Any = None,
        sin: Any = None,
        head_norms: Sequence[tuple[Any, Any]] | None = None,
    ) -> None: ...
    def run(
        self,
        x: Any,
        first: int,
        last: int,
        feeds: list[tuple[Any, ...]],
        threads: int,
        mute: bool = False,
    ) -> None: ...
    def head(self, x: Any, normed: Any, logits: Any, threads: int) -> None: ...
