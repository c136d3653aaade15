"""Change one function of the library for a moment: replace a piece of its text, compile it, run.

A row of the museum says which function, which text and what stands there instead. The changed text
is compiled as part of its module, so that every name, default and `super()` of the function means
what it did; only the function's code object is exchanged. Whoever imported the function runs the
changed one, and gets the right one back afterwards.
"""

import builtins
import dis
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One replaced piece of text.

    function  the function, method or property that is changed
    old       text that occurs exactly once in its source, however its lines are broken there
    new       what stands there instead; further lines are indented like the first
    """

    function: Any
    old: str
    new: str

    @property
    def place(self) -> str:
        """The module and the name of the function, as a reader finds it.

        >>> from tinyspec.decoding.verify import residual
        >>> Patch(residual, "p", "q").place
        'decoding.verify.residual'
        """
        function = unwrap(self.function)
        return f"{function.__module__.removeprefix('tinyspec.')}.{function.__qualname__}"


def unwrap(function: Any) -> FunctionType:
    """Return the plain function of a method, a property, or a decorated function."""
    function = inspect.unwrap(getattr(function, "fget", function))
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} is no function of Python that can be changed")
    return function


def replace_once(text: str, old: str, new: str) -> str:
    """Return the text with its only occurrence of `old` replaced. Raises ValueError if `old` occurs
    not exactly once. How lines are broken, and a comma before a closing bracket, do not matter.

    >>> replace_once("a = f(  b,  c,  )", "f(b, c)", "b")
    'a = b'
    """
    words = re.findall(r"\w+|\S", old)
    pattern = re.escape(words[0])
    for before, word in pairwise(words):
        gap = r"\s+" if re.match(r"\w", before[-1]) and re.match(r"\w", word) else r"\s*"
        comma = r"(?:,\s*)?" if word in ")]}" and before != "," else ""
        pattern += gap + comma + re.escape(word)
    found = list(re.finditer(rf"(?<!\w){pattern}" if re.match(r"\w", old) else pattern, text))
    if len(found) != 1:
        raise ValueError(f"{old!r} occurs {len(found)} times, and must occur once")
    begin, end = found[0].span()
    line = text[text.rfind("\n", 0, begin) + 1 : begin]
    indent = line[: len(line) - len(line.lstrip())]
    return text[:begin] + new.replace("\n", "\n" + indent) + text[end:]


def compile_changed(function: FunctionType, patches: Sequence[Patch]) -> CodeType:
    """Return the code of a function whose text is changed by these patches."""
    file = inspect.getsourcefile(function)
    assert file is not None
    lines, first = inspect.getsourcelines(function)
    text = "".join(lines)
    for patch in patches:
        try:
            text = replace_once(text, patch.old, patch.new)
        except ValueError as error:
            raise ValueError(f"{patch.place}: {error}") from None
    module = list(linecache.getlines(file))
    module[first - 1 : first - 1 + len(lines)] = [text]
    for code in _codes(compile("".join(module), file, "exec", dont_inherit=True)):
        if code.co_qualname == function.__qualname__:
            if code.co_freevars != function.__code__.co_freevars:
                raise ValueError(
                    f"{patches[0].place}: the new text uses other outer names than the old: "
                    f"{code.co_freevars}, not {function.__code__.co_freevars}"
                )
            known = function.__globals__.keys() | vars(builtins).keys()
            if unknown := sorted(_global_names(code) - known):
                raise ValueError(
                    f"{patches[0].place}: the new text names what is not there: {unknown}"
                )
            return code
    raise ValueError(f"{patches[0].place}: not found in {file}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield this code object and all inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _global_names(code: CodeType) -> set[str]:
    """Return the names of globals that this code reads."""
    return {
        step.argval
        for inner in _codes(code)
        for step in dis.get_instructions(inner)
        if step.opname == "LOAD_GLOBAL"
    }


def changed_copy(patch: Patch) -> Callable[..., Any]:
    """Return a changed copy of a function, and leave the function as it is."""
    function = unwrap(patch.function)
    code = compile_changed(function, [patch])
    copy = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def apply_patches(patches: Sequence[Patch]) -> Iterator[None]:
    """Run the library with these patches inside the block."""
    by_function: dict[FunctionType, list[Patch]] = {}
    for patch in patches:
        by_function.setdefault(unwrap(patch.function), []).append(patch)
    changed = {function: compile_changed(function, some) for function, some in by_function.items()}
    right = {function: function.__code__ for function in changed}
    caches = [patch.function for patch in patches if hasattr(patch.function, "cache_clear")]
    try:
        for function, code in changed.items():
            function.__code__ = code
        for cached in caches:
            cached.cache_clear()
        yield
    finally:
        for function, code in right.items():
            function.__code__ = code
        for cached in caches:
            cached.cache_clear()


def show_diff(patches: Sequence[Patch]) -> str:
    """Return the patches as a reader of a review sees them.

    >>> from tinyspec.decoding.verify import residual
    >>> print(show_diff([Patch(residual, "return max(p)", "return min(p)")]))
    decoding.verify.residual
      - return max(p)
      + return min(p)
    """
    lines = []
    for patch in patches:
        lines += [
            patch.place,
            textwrap.indent(patch.old, "  - "),
            textwrap.indent(patch.new, "  + "),
        ]
    return "\n".join(lines)
