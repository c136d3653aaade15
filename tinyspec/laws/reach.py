"""Which data a piece of code can find by name: the globals of its module and of the functions it
calls, data of classes.

Worked out once for a class or function. A counter in a module, noise kept in a class attribute or a
table behind a helper function are state of a decoder as much as its attributes are, and the digest
looks at them every time.
"""

import sys
import types
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

TRUSTED = frozenset(sys.stdlib_module_names) | {
    "Cython", "_pytest", "cython_runtime", "hypothesis", "numpy", "pytest", "rich", "safetensors", "scipy", "tokenizers",
    "torch",
}  # fmt: skip
OURSELVES = ("tinyspec.laws.digest", "tinyspec.laws.reach")
ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented))


class ReachedPlace(NamedTuple):
    """Somewhere a value can be found again.

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
        """What it holds now."""
        if type(self.of) is types.CellType:
            return _content(self.of)
        if type(self.of) is types.FunctionType:
            return getattr(self.of, self.name) or None
        return self.of.get(self.name)


Names = list[tuple[Any, str, Any]]


def find_reachable(owner: Any) -> tuple[Names, list[ReachedPlace]]:
    """The data that a class or function reaches by name; not a function's own defaults and cells,
    which are its own.

    First what stays the same as long as the name means the same object, as (get, name, object);
    then the places whose value must be looked at.
    """
    key = owner.__code__ if isinstance(owner, types.FunctionType) else owner
    if key not in _reach_cache:
        own = (
            owner,
            *_cells(owner),
        )  # by identity: cells are equal where their contents are, and arrays have no truth
        places = [
            place for place in _find_places(owner) if all(place.of is not mine for mine in own)
        ]
        quick = [place for place in places if place.still and hasattr(place.of, "get")]
        rest = [place for place in places if not (place.still and hasattr(place.of, "get"))]
        slow = [place for place in rest if not (place.still and _settled(place))]
        _reach_cache[key] = [(place.of.get, place.name, place.before) for place in quick], slow
    return _reach_cache[key]


def _settled(place: ReachedPlace) -> bool:
    """Nobody rebinds the defaults of a function that no instance holds, or the class that a
    generated method encloses.
    """
    return place.name in ("__defaults__", "__kwdefaults__") or isinstance(place.before, type)


def _cells(owner: Any) -> tuple[types.CellType, ...]:
    return (owner.__closure__ if isinstance(owner, types.FunctionType) else None) or ()


_reach_cache: dict[Any, tuple[Names, list[ReachedPlace]]] = {}


def _find_places(owner: Any) -> Iterator[ReachedPlace]:
    waiting, met = [owner], {id(owner)}
    told: set[tuple[int, str]] = set()
    for code in waiting:  # grows while it is walked
        for place, name, value in _names_of(code):
            if (id(place), name) in told:
                continue
            told.add((id(place), name))
            inner = getattr(
                value, "__func__", getattr(value, "fget", getattr(value, "__wrapped__", value))
            )
            followed = isinstance(inner, (types.FunctionType, type))
            if followed and id(inner) not in met and not is_trusted(inner):
                met.add(id(inner))
                waiting.append(inner)
            if type(value).__name__ != "_tuplegetter":
                remembers = hasattr(
                    value, "cache_info"
                )  # a cache is not looked into: its counters tell
                given = tuple(value.values()) if name == "__kwdefaults__" and value else value
                yield ReachedPlace(
                    place, name, value, not remembers and (followed or _still(given))
                )


def is_trusted(owner: Any) -> bool:
    """Whether a class or function is of the standard library or of a library that keeps no state of
    a decoder.
    """
    where = str(getattr(owner, "__module__", None))
    return where.partition(".")[0] in TRUSTED or where in OURSELVES


def _names_of(owner: Any) -> Iterator[tuple[Any, str, Any]]:
    """Where a class or function looks, for which names, and what is there."""
    if is_trusted(owner):
        return
    if isinstance(owner, types.FunctionType):
        for name in _names_in_code(owner.__code__):
            if name in owner.__globals__:
                yield owner.__globals__, name, owner.__globals__[name]
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            yield owner, name, getattr(owner, name) or None
        for cell in owner.__closure__ or ():
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
    """Names that a piece of code, and the code inside it, look up."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in_code(part)


def _still(value: Any) -> bool:
    """Whether a value is the same for ever."""
    if isinstance(value, (tuple, frozenset)):
        return type(value) in (tuple, frozenset) and all(_still(item) for item in value)
    if type(value).__name__ == "cython_function_or_method":
        return True
    return isinstance(value, (*ATOMS, float, Fraction, *_DULL))


_DULL = (
    types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, types.UnionType, types.MemberDescriptorType,
    types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.FunctionType, property,
    type, type(Any),
)  # fmt: skip
