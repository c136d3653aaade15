"""A digest of everything a decoder is: two with the same digest behave the same from now on.

The exact laws merge branches after a round only where digests agree. If something were left out
(noise drawn once and used again, a counter, a global), branches that differ in it would be merged,
and a biased decoder could seem right. So the whole object graph is walked: attributes, slots,
containers, closures and defaults of functions, data of classes, and the globals that their code
names. What cannot be inspected is an error, never skipped. Shared objects are numbered, so that
two names for one list differ from two equal lists; floats are rounded to 1e-12.

Not followed: modules, the standard library and the numerical libraries (`exact_distribution`
compares their global random states before and after), and what the caller names as `outside`, such
as logs.
"""

import copyreg
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel

TRUSTED = frozenset(sys.stdlib_module_names) | {
    "Cython", "_pytest", "cython_runtime", "hypothesis", "numpy", "pytest", "rich", "safetensors",
    "scipy", "tokenizers", "torch",
}  # fmt: skip
OURSELVES = ("tinyspec.laws.exact.digest",)
ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented))


class ReachedPlace(NamedTuple):
    """A place where a value can be found again: a name in a namespace, or a cell.

    of      a namespace (anything with `get`), or a cell
    name    the name in it
    before  what it held when it was first looked up
    still   whether that cannot change as long as it is the same object
    """

    of: Any
    name: str
    before: Any
    still: bool

    def value(self) -> Any:
        """Return the value that it holds now."""
        if type(self.of) is types.CellType:
            return _content(self.of)
        if type(self.of) is types.FunctionType:
            return getattr(self.of, self.name) or None
        return self.of.get(self.name)


Names = list[tuple[Any, str, Any]]


def find_reachable(owner: Any) -> tuple[Names, list[ReachedPlace]]:
    """Return the data that a class or function reaches by name.

    A function's own defaults and cells are its own and do not count.

    First what stays the same as long as the name means the same object, as (get, name, object);
    then the places whose value must be looked at.
    """
    key = owner.__code__ if isinstance(owner, types.FunctionType) else owner
    if key not in _reach_cache:
        # By identity: cells are equal where their contents are, and arrays have no truth.
        own = owner, *_cells(owner)
        places = [
            place for place in _find_places(owner) if all(place.of is not mine for mine in own)
        ]
        quick = [place for place in places if place.still and hasattr(place.of, "get")]
        rest = [place for place in places if not (place.still and hasattr(place.of, "get"))]
        slow = [place for place in rest if not (place.still and _settled(place))]
        _reach_cache[key] = [(place.of.get, place.name, place.before) for place in quick], slow
    return _reach_cache[key]


def _settled(place: ReachedPlace) -> bool:
    """Return whether nobody rebinds this place.

    That holds for the defaults of a function that no instance holds, and for the class that a
    generated method encloses.
    """
    return place.name in ("__defaults__", "__kwdefaults__") or isinstance(place.before, type)


def _cells(owner: Any) -> tuple[types.CellType, ...]:
    return (owner.__closure__ if isinstance(owner, types.FunctionType) else None) or ()


_reach_cache: dict[Any, tuple[Names, list[ReachedPlace]]] = {}


def _find_places(owner: Any) -> Iterator[ReachedPlace]:
    waiting, met = [owner], {id(owner)}
    met_names: set[tuple[int, str]] = set()
    for code in waiting:  # grows while it is walked
        for place, name, value in _names_of(code):
            if (id(place), name) in met_names:
                continue
            met_names.add((id(place), name))
            inner = value
            for wrapped in ("__wrapped__", "fget", "__func__"):
                inner = getattr(value, wrapped, inner)
            followed = isinstance(inner, (types.FunctionType, type))
            if followed and id(inner) not in met and not is_trusted(inner):
                met.add(id(inner))
                waiting.append(inner)
            if type(value).__name__ != "_tuplegetter":
                # A cache is not looked into: its counters are compared.
                remembers = hasattr(value, "cache_info")
                given = tuple(value.values()) if name == "__kwdefaults__" and value else value
                still = not remembers and (followed or _still(given))
                yield ReachedPlace(place, name, value, still)


def is_trusted(owner: Any) -> bool:
    """Return whether code belongs to the standard library, or to one that keeps no decoder
    state."""
    where = str(getattr(owner, "__module__", None))
    return where.partition(".")[0] in TRUSTED or where in OURSELVES


def _names_of(owner: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield where a class or function looks, for which names, and what is there."""
    if is_trusted(owner):
        return
    if isinstance(owner, types.FunctionType):
        for name in _names_in_code(owner.__code__):
            if name in owner.__globals__:
                yield owner.__globals__, name, owner.__globals__[name]
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            yield owner, name, getattr(owner, name) or None
        for cell in _cells(owner):
            yield cell, "", _content(cell)
        return
    for kind in owner.__mro__:
        if not is_trusted(kind):
            for name, value in vars(kind).items():
                if isinstance(value, types.FunctionType) or not name.startswith(
                    ("__", "_abc_", "_field")
                ):
                    yield vars(kind), name, value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return Ellipsis


def _names_in_code(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a piece of code, and the code inside it, look up."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in_code(part)


def _still(value: Any) -> bool:
    """Return whether a value can never change."""
    if isinstance(value, (tuple, frozenset)):
        return type(value) in (tuple, frozenset) and all(_still(item) for item in value)
    if type(value).__name__ == "cython_function_or_method":
        return True
    return isinstance(value, (*ATOMS, float, Fraction, *_DULL))


_DULL = (
    types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, types.UnionType,
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.FunctionType, property, type, type(Any),
)  # fmt: skip


DECIMALS = 12
CONTAINERS = (list, tuple, dict, set, frozenset)
PYTHONS = {object, *CONTAINERS, int, str, float, bytes, BaseException, Exception}


def compute_digest(thing: object, outside: Iterable[object] = ()) -> bytes:
    """Return the digest of an object and of all that can be reached from it.

    Raises TinyspecError for what it cannot see through.

    outside  objects that are not looked into (compared by identity)

    >>> compute_digest([1, (2, 0.5)]) == compute_digest([1, (2, 0.5 + 1e-15)])
    True
    >>> compute_digest([1]) == compute_digest([True])
    False
    """
    walk = _GraphWalk(outside)
    walk.see(thing)
    return blake2b("\0".join(walk.words).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _GraphWalk:
    """One walk over an object graph; `words` describe what it found."""

    def __init__(self, outside: Iterable[object]):
        self.words: list[str] = []
        self._numbers: dict[int, int] = {}  # id -> when it was first met
        self._alive: list[object] = []  # so that no id is used twice
        self._outside = {id(thing): f"outside {i}" for i, thing in enumerate(outside)}

    def see(self, thing: Any) -> None:
        """Write an object down: values as they are, things with an identity once, then by
        number."""
        kind = type(thing)
        if kind in _VALUES:
            self.words.append(_VALUES[kind](thing))
            return
        mark = id(thing)
        if mark in self._outside:
            self.words.append(self._outside[mark])
            return
        if kind is tuple:  # no identity worth the name
            self.words.append(f"tuple {len(thing)}")
            for item in thing:
                self.see(item)
            return
        if mark in self._numbers:
            self.words.append(f"again {self._numbers[mark]}")
            return
        self._numbers[mark] = len(self._numbers)
        self._alive.append(thing)
        look = _LOOKS.get(kind)
        if look is None:
            look = next(
                (_LOOKS[base] for base in _BASES if issubclass(kind, base)), _GraphWalk.object
            )
        look(self, thing)

    # ------------------------------------------------------------------ containers and numbers

    def list(self, thing: Any) -> None:
        self.words.append(f"list {len(thing)}")
        for item in thing:
            self.see(item)

    def dict(self, thing: Any) -> None:
        """Write a dict down in order, because what iterates over it sees the order."""
        self.words.append(f"dict {len(thing)}")
        for key, value in thing.items():
            self.see(key)
            self.see(value)

    def set(self, thing: Any) -> None:
        """Write a set down by the digests of its members, because their order is random."""
        members = list(thing)
        self.words.append(f"set {len(members)}")
        for _, i in sorted((compute_digest(member), i) for i, member in enumerate(members)):
            self.see(members[i])

    def array(self, thing: Any) -> None:
        self.words.append(f"array {thing.dtype} {thing.shape}")
        if thing.dtype == object:
            self.list(thing.ravel().tolist())
        else:
            self.words.append(_rounded_bytes(thing))

    def tensor(self, thing: torch.Tensor) -> None:
        self.words.append(f"tensor {thing.dtype} {tuple(thing.shape)} {thing.device}")
        flat = thing.detach().cpu()
        if flat.dtype not in (torch.float64, torch.int64, torch.bool):
            flat = flat.to(torch.float64)
        self.words.append(_rounded_bytes(flat.numpy()))

    def table(self, thing: TableModel) -> None:
        """Write a table model down by its settings: what it remembers follows from them."""
        self.words.append(
            f"table {thing.seed} {thing.vocabulary} {thing.zeros} {thing.floats} {thing.config}"
        )
        self.see(thing.rows)

    # ------------------------------------------------------------------ code

    def function(self, thing: types.FunctionType) -> None:
        """Write down the code, its defaults, its closure, and the data it finds by name."""
        self.words.append(
            f"code {thing.__module__} {thing.__qualname__} {thing.__code__.co_firstlineno}"
        )
        for part in (thing.__defaults__, thing.__kwdefaults__, thing.__dict__ or None):
            self.see(part)
        for cell in _cells(thing):
            self.cell(cell)
        self.data(thing)

    def data(self, owner: Any) -> None:
        """Write down what a class or function reaches by name; what can change is read each
        time."""
        names, places = find_reachable(owner)
        for get, name, before in names:  # many, and nearly always as they were
            if get(name) is not before:
                self.words.append(f"data {name}")
                self.see(get(name))
        for place in places:
            value = place.value()
            if value is not None or place.before is not None:
                self.words.append(f"data {place.name}")
                self.see(value)

    def cell(self, thing: types.CellType) -> None:
        try:
            value = thing.cell_contents
        except ValueError:
            self.words.append("empty cell")
        else:
            self.see(value)

    def method(self, thing: types.MethodType) -> None:
        self.see(thing.__func__)
        self.see(thing.__self__)

    def builtin(self, thing: types.BuiltinFunctionType) -> None:
        self.words.append(f"builtin {thing.__qualname__}")
        if not isinstance(thing.__self__, types.ModuleType):
            self.see(thing.__self__)

    def partial(self, thing: Any) -> None:
        for part in (thing.func, thing.args, thing.keywords):
            self.see(part)

    def module(self, thing: types.ModuleType) -> None:
        self.words.append(f"module {thing.__name__}")

    def type(self, thing: type) -> None:
        """Write down a class: its name, and the data that it and its methods reach."""
        self.words.append(f"class {thing.__module__}.{thing.__qualname__}")
        self.data(thing)

    # ------------------------------------------------------------------ everything else

    def object(self, thing: Any) -> None:
        """Write down attributes, slots and contents, else what the object tells pickle of
        itself."""
        kind = type(thing)
        self.see(kind)
        form = _FORMS.get(kind)
        if form is None:
            form = _FORMS[kind] = (_is_compiled(kind), _slots(kind))
        if form[0]:
            self.reduced(thing)
            return
        for container, look in (
            (dict, _GraphWalk.dict),
            ((list, tuple), _GraphWalk.list),
            ((set, frozenset), _GraphWalk.set),
        ):
            if isinstance(thing, container):
                look(self, thing)
        if isinstance(thing, (int, str, float, bytes)):
            self.words.append(repr(thing))
        for name in form[1]:
            if hasattr(thing, name):
                self.words.append(name)
                self.see(getattr(thing, name))
        for name, value in getattr(thing, "__dict__", {}).items():
            self.words.append(name)
            self.see(value)

    def reduced(self, thing: Any) -> None:
        """Write down a compiled object: what pickle would keep of it."""
        kind = type(thing)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                reduce = copyreg.dispatch_table.get(kind)
                state = thing.__reduce_ex__(2) if reduce is None else reduce(thing)
        except Exception as error:
            raise TinyspecError(
                f"the digest cannot see into a {kind.__module__}.{kind.__qualname__}, "
                "so branches cannot be merged: "
                "give it a __getstate__ that returns all of its state"
            ) from error
        self._alive.append(state)
        for place, part in enumerate(state if isinstance(state, tuple) else (state,)):
            if place == 0 and not isinstance(part, (type, str)):
                # A function that would rebuild it has no state.
                self.words.append(f"made by {part.__qualname__}")
            elif place > 2 and part is not None:
                self.see(list(part))  # pickle iterates over the items
            else:
                self.see(part)

    def cache(self, thing: Any) -> None:
        """Write down that a cache was used; what it holds cannot be seen."""
        self.words.append(f"cache {thing.cache_info()}")
        self.see(thing.__wrapped__)

    def opaque(self, thing: Any) -> None:
        what = type(thing).__qualname__
        raise TinyspecError(
            f"the digest cannot see into a {what}, so branches cannot be merged: "
            "keep a list instead"
        )

    def local(self, thing: threading.local) -> None:
        self.see(type(thing))
        self.see(vars(thing))  # this thread's

    def lock(self, thing: Any) -> None:
        """Write down whether a lock is held, which is all of its state."""
        self.words.append(f"lock {thing.locked()}")

    def weak(self, thing: Any) -> None:
        self.see(thing())

    def enum(self, thing: Enum) -> None:
        self.words.append(f"enum {type(thing).__qualname__}.{thing.name}")

    def generator(self, thing: torch.Generator) -> None:
        self.see(thing.get_state())


def _rounded_bytes(array: Any) -> str:
    if array.dtype.kind in "fc":
        array = np.round(array, DECIMALS) + 0.0  # no negative zero
    return bytes(np.ascontiguousarray(array).tobytes()).hex()


def _is_compiled(kind: type) -> bool:
    """Return whether instances hold memory that only compiled code can see."""
    word = object.__basicsize__ // 2
    while kind not in PYTHONS:
        own = vars(kind)
        base = kind.__base__ or object
        named = len(_own_slots(kind)) + ("__dict__" in own) + ("__weakref__" in own)
        if kind.__basicsize__ - base.__basicsize__ > named * word:
            return True
        kind = base
    return False


def _own_slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    named = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in named if name not in ("__dict__", "__weakref__")]


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in _own_slots(base))


_FORMS: dict[type, tuple[bool, tuple[str, ...]]] = {}  # class -> whether it is compiled, its slots
_VALUES: dict[type, Callable[[Any], str]] = {
    **{kind: lambda x, kind=kind: f"{kind.__name__} {x!r}" for kind in ATOMS},  # type: ignore[misc]
    float: lambda x: f"float {round(x, DECIMALS) + 0.0!r}",
    Fraction: lambda x: f"fraction {x.numerator}/{x.denominator}",
}
_LOOKS: dict[type, Callable[[_GraphWalk, Any], None]] = {
    list: _GraphWalk.list,
    dict: _GraphWalk.dict,
    set: _GraphWalk.set,
    frozenset: _GraphWalk.set,
    np.ndarray: _GraphWalk.array,
    torch.Tensor: _GraphWalk.tensor,
    torch.Generator: _GraphWalk.generator,
    types.FunctionType: _GraphWalk.function,
    types.CellType: _GraphWalk.cell,
    types.MethodType: _GraphWalk.method,
    types.BuiltinFunctionType: _GraphWalk.builtin,
    partial: _GraphWalk.partial,
    types.ModuleType: _GraphWalk.module,
    type: _GraphWalk.type,
    weakref.ref: _GraphWalk.weak,
    TableModel: _GraphWalk.table,
    threading.local: _GraphWalk.local,
    type(threading.Lock()): _GraphWalk.lock,
    types.GeneratorType: _GraphWalk.opaque,
    types.CoroutineType: _GraphWalk.opaque,
    types.AsyncGeneratorType: _GraphWalk.opaque,
    type(lru_cache(len)): _GraphWalk.cache,
    Enum: _GraphWalk.enum,
    np.generic: _GraphWalk.array,
}
_BASES = (
    Enum,
    torch.Tensor,
    np.ndarray,
    np.generic,
    type,
    types.ModuleType,
    weakref.ref,
    threading.local,
    TableModel,
)
