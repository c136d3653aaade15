"""A submitted function, as a function: it runs in a child process, and is known here by the table
of its decisions.

Run with the answers of chance fixed beforehand (a script), a function of chance asks, and ends.
What it asked after each beginning of a script is its table; it is grown breadth first, many scripts
a message. Any `Chance` can then be played against the table: `Exhaustive` walks it, `Seeded` goes
one way. So the laws judge a submission as they judge everything else.
"""

import inspect
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tinyspec.grade import codec
from tinyspec.grade.process import Child, Gone, Hung, Limits
from tinyspec.grade.props import Prop
from tinyspec.grade.task import Failed
from tinyspec.laws.accused import show

BATCH = 128  # runs in a message
WAYS = 20_000  # ends that a function may have on one case
START = 30.0  # seconds in which Python itself starts, on however busy a machine
TABLES = 8_000  # that are remembered

Path = tuple[int, ...]


class Asks(NamedTuple):
    """A decision: "accept" a ratio, or "draw" from a row; `told` is it as it crossed the border."""

    kind: str
    value: Any
    told: str

    @property
    def first(self) -> int:
        """The answer that a run takes behind the end of its script."""
        return (
            int(self.value > 0)
            if self.kind == "accept"
            else next(token for token, x in enumerate(self.value) if x > 0)
        )


class Ends(NamedTuple):
    """An end: a result or a problem (and the problem in a few words), and what happened to the
    props.
    """

    value: Any
    problem: str | None
    summary: str | None
    traces: Any
    told: str


class Helpers(NamedTuple):
    """Functions of the reference that stand in the place of a submission's own.

    source  of the reference: these functions and what they need
    names   of the functions
    task    the function that is judged, which keeps its place whatever it is
    """

    source: str
    names: Sequence[str]
    task: str


class Loaded(NamedTuple):
    """A submission that was imported: its functions and the names of their arguments, and which
    were replaced.
    """

    functions: dict[str, list[str]]
    replaced: list[str]


class Table:
    """What a function does on one case: after every answer of chance, what it asks next, or how it
    ends.
    """

    def __init__(self) -> None:
        self.nodes: dict[Path, Asks | Ends] = {}
        self.ways = 0

    def add(self, run: dict[str, Any]) -> None:
        """Enter one run. Failed where it did something else before, at the same point."""
        path: Path = ()
        script = run["script"]
        for place, (kind, told) in enumerate(run["asked"]):
            if kind not in ("accept", "draw"):
                raise ValueError(kind)
            asks = Asks(kind, codec.back(told), codec.text([kind, told]))
            self._enter(path, asks)
            path = (*path, script[place] if place < len(script) else asks.first)
        result = {name: run.get(name) for name in ("value", "problem", "summary", "traces")}
        self._enter(path, Ends(**result, told=codec.text(result)))
        if len(path) < len(script):
            raise Failed("decides differently when it is run again")
        self.ways += 1
        if self.ways > WAYS:
            raise Failed(f"has more than {WAYS} ways to go on one case")

    def _enter(self, path: Path, node: Asks | Ends) -> None:
        known = self.nodes.setdefault(path, node)
        if type(known) is not type(node) or known.told != node.told:
            raise Failed("decides differently when it is run again with the same answers of chance")


def _form(*given: Any, chance: Any) -> None:
    """The form that a Function shows to whoever looks at its arguments."""


class Function:
    """Looks like the submitted function. Raises Failed where that gives no result.

    A law may hand over positional and named arguments: plain data and props; and, last, a chance.
    """

    def __init__(self, child: Child, name: str, names: list[str], seconds: float | None = None):
        self.__name__ = name
        self.__signature__ = inspect.signature(_form)
        self.child, self.names, self.seconds = child, names, seconds
        self.gone: str | None = None  # why there is no child any more
        self.hung = False
        self.began = time.process_time()
        self._tables: dict[str, Table] = {}

    def __call__(self, *given: Any, chance: Any = None, **named: Any) -> Any:
        how = None if chance is None else "chance" if "chance" in self.names else ""
        if given and chance is None and _decides(given[-1]):
            *given, chance = given  # type: ignore[assignment]
            how = ""
        props: list[Prop] = []

        def told(value: Any) -> Any:
            if not isinstance(value, Prop):
                raise codec.NotPlain(codec.described(value))
            props.append(value)
            kind = type(value)
            return [kind.__name__, str(sys.modules[kind.__module__].__file__), value.plain()]

        args = codec.plain([tuple(given), named], told)
        message = {"call": self.__name__, "args": args, "chance": how}
        key = codec.text(message)
        table = self._tables.get(key)
        if table is None:
            while len(self._tables) >= TABLES:
                self._tables.pop(next(iter(self._tables)))
            table = self._tables[key] = Table()
        try:
            if time.process_time() - self.began > self.child.limits.task:
                raise Failed("has so many ways to go that judging them all takes too long")
            end = self._play(table, message, chance)
            for prop, trace in zip(props, codec.back(end.traces) or [], strict=False):
                prop.trace = trace
            if end.problem is not None:
                raise Failed(str(end.problem), summary=str(end.summary or ""))
            return codec.back(end.value)
        except (Failed, Gone, codec.NotPlain) as error:
            said = error.said if isinstance(error, Failed) else str(error)
            summary = error.summary if isinstance(error, Failed) else said
            if isinstance(error, Gone):
                said = self.gone = self.gone or said
                self.hung = self.hung or isinstance(error, Hung)
                summary = (
                    f"took longer than {self.seconds or self.child.limits.call:g} s"
                    if self.hung
                    else said
                )
            case = (
                {}
                if said.startswith(("is not written", "is missing"))
                else self._case(given, named)
            )
            raise Failed(f"{self.__name__} {said}", case, summary) from None

    def _play(self, table: Table, message: dict[str, Any], chance: Any) -> Ends:
        """Follow the table wherever chance leads."""
        path: Path = ()
        while True:
            node = table.nodes.get(path)
            if node is None:
                self._grow(table, message, path)
            elif isinstance(node, Ends):
                return node
            else:
                path = (*path, int(getattr(chance, node.kind)(node.value)))

    def _grow(self, table: Table, message: dict[str, Any], wanted: Path) -> None:
        if self.gone is not None:
            raise Gone(self.gone)
        asked = {
            "script": wanted,
            "most": min(max(8, 2 * table.ways), BATCH),
            "again": not table.nodes,
        }
        answer = self.child.ask({**message, **asked}, self.seconds)
        try:
            for run in answer["runs"]:
                table.add(run)
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
            raise Gone("writes into the grader's pipe") from None
        if wanted not in table.nodes:
            raise Failed("decides differently when it is run again")

    def _case(self, given: Any, named: dict[str, Any]) -> dict[str, Any]:
        shown = [
            f"argument {place + 1}" if place >= len(self.names) else self.names[place]
            for place in range(len(given))
        ]
        return {
            name: _shown(value) for name, value in [*zip(shown, given, strict=True), *named.items()]
        }


def _decides(value: Any) -> bool:
    return not isinstance(value, (Prop, int, float, str, list, tuple, dict, Fraction)) and hasattr(
        value, "draw"
    )


def _shown(value: Any) -> Any:
    return f"{type(value).__name__} {show(value.plain())}" if isinstance(value, Prop) else value


def load(folder: str, limits: Limits, helpers: Helpers | None = None) -> tuple[Child, Loaded]:
    """Start a child that imports a submission, and puts helpers of the reference in their places.

    Raises Failed, which says why the submission could not be imported.
    """
    child = Child(limits)
    try:
        child.ask({}, START)
        answer = child.ask({"load": folder, "helpers": helpers and helpers._asdict()})
        functions, replaced = answer.get("ok"), answer.get("replaced")
        if not isinstance(functions, dict) or not isinstance(replaced, list):
            problem = str(answer.get("problem", "writes into the grader's pipe"))
            raise Failed(problem, summary=str(answer.get("summary") or problem))
    except Gone as gone:
        child.close()
        raise Failed(str(gone), summary=f"submission.py {gone}") from None
    except BaseException:
        child.close()
        raise
    return child, Loaded(functions, replaced)
