"""Call a submitted function as if it were here, while it runs in a child process (child.py).

With the answers of chance fixed beforehand (a script), a function of chance asks its questions and
ends. What it asks after each beginning of a script is its decision tree. The tree is grown breadth
first, with many scripts in one message. Any chance can then be played against it: `Exhaustive`
walks all of it, `Seeded` goes one way. So the laws judge a submission as they judge everything
else.

No security boundary: a submission that means harm belongs in a container. What is stopped here is
what accidents do.
"""

import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError
from tinyspec.grade.child import (
    NotPlain,
    Prop,
    describe_kind,
    from_json,
    is_tensor,
    to_json,
    to_line,
)
from tinyspec.grade.task import NoResult
from tinyspec.laws.evidence import format_value

CHILD_FILE = Path(__file__).with_name("child.py")
PIPE_BYTES = 1 << 16  # bytes read from a pipe at once
MAX_RUNS = 128  # in one message
MAX_ENDS = 20_000  # of a function on one case
MAX_TREES = 8_000  # that a function remembers
START_SECONDS = 30.0  # in which Python itself starts, on however busy a machine
CHILD_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a submission starts no threads, and its libraries do not either
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # torch would start a thread for each
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}

Answers = tuple[int, ...]
"""What chance answered, from the first question on."""


class Limits(NamedTuple):
    """What a submission may use.

    call     seconds for one answer
    task     seconds of answering in all, for one task
    hanging  seconds that a whole run waits for answers that do not come; after that, `least` for
             each
    memory   bytes of addresses
    output   bytes printed for one task
    answer   bytes of one answer
    """

    call: float = 4.0
    task: float = 60.0
    hanging: float = 12.0
    least: float = 1.0
    memory: int = 1 << 30
    output: int = 1 << 20
    answer: int = 16 << 20


class ChildGone(TinyspecError):
    """The child was killed, or it ended. The message is a clause: "was killed, perhaps ..."."""


class ChildHung(ChildGone):
    """No answer came in time."""


class ChildProcess:
    """A process that holds one submission. When its `with` block ends, all it started is killed.

    packages  folder that torch is imported from; "": the submission has the standard library alone
    """

    def __init__(self, limits: Limits, packages: str = ""):
        self.limits = limits
        self.waited = 0.0  # seconds
        self.printed = 0  # bytes
        self._size = 0  # of the answer that is coming
        to_child, self._send = os.pipe()
        self._receive, from_child = os.pipe()
        processor = int(limits.task) + (int(START_SECONDS) if packages else 2)
        command = [sys.executable, "-P", "-s", "-S", "-B", str(CHILD_FILE)]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, (to_child, from_child, limits.memory, processor, packages))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(to_child, from_child),
                env={**CHILD_ENVIRONMENT, "PATH": os.defpath},
                start_new_session=True,
            )
        finally:
            os.close(to_child)
            os.close(from_child)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._waiting = selectors.DefaultSelector()
        for descriptor in (self._send, self._receive, self._output):
            os.set_blocking(descriptor, False)
        for descriptor in (self._receive, self._output):
            self._waiting.register(descriptor, selectors.EVENT_READ)

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and its group, and close the pipes."""
        if self._send < 0:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._waiting.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._send)
        os.close(self._receive)
        self._send = -1

    def ask(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a message and return its answer.

        Raises ChildGone if none comes. Then the child is dead.
        """
        if self._send < 0:
            raise ChildGone("was stopped before")
        began, self._size = time.monotonic(), 0
        try:
            seconds = self.limits.call if seconds is None else seconds
            answer = self._talk((json.dumps(message) + "\n").encode(), began + seconds, seconds)
            self._drain()
            data = json.loads(answer)
            if not isinstance(data, dict):
                raise ValueError
        except ValueError:
            self.close()
            raise ChildGone("writes into the grader's pipe") from None
        except ChildGone:
            self.close()
            raise
        finally:
            self.waited += time.monotonic() - began
        if self.waited > self.limits.task:
            self.close()
            raise ChildGone(f"is too slow: it took more than {self.limits.task:g} s in all")
        return data

    def _talk(self, message: bytes, until: float, seconds: float) -> bytes:
        """Return the line that answers a line."""
        answer = bytearray()
        try:
            message = self._write(message)
            if message:
                self._waiting.register(self._send, selectors.EVENT_WRITE)
            while b"\n" not in answer[-PIPE_BYTES:]:
                left = until - time.monotonic()
                ready = self._waiting.select(max(left, 0))
                if not ready and left <= 0:
                    raise ChildHung(f"does not come back: it was stopped after {seconds:g} s")
                for key, _ in ready:
                    if key.fd == self._output:
                        self._drain()
                    elif key.fd == self._receive:
                        answer += self._read()
                    elif not (message := self._write(message)):
                        self._waiting.unregister(self._send)
        finally:
            with suppress(KeyError):
                self._waiting.unregister(self._send)
        return bytes(answer)

    def _read(self) -> bytes:
        got = os.read(self._receive, PIPE_BYTES)
        if not got:
            self._drain()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise ChildGone(describe_exit(self._process.poll()))
        self._size += len(got)
        if self._size > self.limits.answer:
            raise ChildGone(f"sends more than {self.limits.answer >> 20} MB of results")
        return got

    def _write(self, message: bytes) -> bytes:
        """Write what the pipe takes, and return the rest."""
        try:
            return message[os.write(self._send, message) :]
        except BlockingIOError:
            return message
        except BrokenPipeError:
            return b""  # the end is read from the other pipe

    def _drain(self) -> None:
        """Read what was printed, and forget it."""
        with suppress(BlockingIOError):
            while got := os.read(self._output, PIPE_BYTES):
                self.printed += len(got)
                if self.printed > self.limits.output:
                    raise ChildGone(f"prints more than {self.limits.output >> 10} KB")
            with suppress(KeyError):  # it closed its output
                self._waiting.unregister(self._output)


def describe_exit(status: int | None) -> str:
    """Return how a process ended, as a clause about the function that ended it."""
    if status is None:
        return "closes the grader's pipe"
    if status >= 0:
        return f"ends the process (exit status {status})"
    if status == -signal.SIGXCPU:
        return "uses more processor time than it may"
    if status == -signal.SIGKILL:
        return "was killed, perhaps for its memory"
    return f"crashes Python (signal {-status})"


# ---------------------------------------------------------------------- decision trees


class Decision(NamedTuple):
    """A question to chance: to "accept" a ratio, or to "draw" from a row. `line` is it as sent."""

    kind: str
    value: Any
    line: str

    @property
    def first(self) -> int:
        """Return the answer that a run takes after the end of its script."""
        if self.kind == "accept":
            return int(self.value > 0)
        return next(token for token, x in enumerate(self.value) if x > 0)


class End(NamedTuple):
    """The end of a run: a value, or why there is none, and the props' traces."""

    value: Any
    clause: str | None
    summary: str | None
    traces: Any
    line: str


class DecisionTree:
    """What a function does on one case: after each sequence of answers, a question or its end."""

    def __init__(self) -> None:
        self.nodes: dict[Answers, Decision | End] = {}
        self.ends = 0

    def add(self, run: dict[str, Any]) -> None:
        """Enter one run. Raises NoResult if an earlier run did something else at the same point."""
        answers: Answers = ()
        script = run["script"]
        for place, (kind, data) in enumerate(run["asked"]):
            if kind not in ("accept", "draw"):
                raise ValueError(kind)
            decision = Decision(kind, from_json(data), to_line([kind, data]))
            self._enter(answers, decision)
            answers = (*answers, script[place] if place < len(script) else decision.first)
        result = {name: run.get(name) for name in ("value", "clause", "summary", "traces")}
        self._enter(answers, End(**result, line=to_line(result)))
        if len(answers) < len(script):
            raise NoResult("decides differently when it is run again")
        self.ends += 1
        if self.ends > MAX_ENDS:
            raise NoResult(f"has more than {MAX_ENDS} ways to go on one case")

    def _enter(self, answers: Answers, node: Decision | End) -> None:
        known = self.nodes.setdefault(answers, node)
        if type(known) is not type(node) or known.line != node.line:
            raise NoResult(
                "decides differently when it is run again with the same answers of chance"
            )


# ---------------------------------------------------------------------- functions


def _signature(*given: Any, chance: Any) -> None:
    """Have the arguments that a RemoteFunction shows to who inspects it."""


class RemoteFunction:
    """A submitted function. A call raises NoResult if the function gives no result.

    A law may hand over positional and named arguments, plain data and props, and last a chance.

    names    of the function's arguments
    seconds  for one answer; by default those of the child's limits
    gone     why there is no child any more, or None
    """

    def __init__(
        self, child: ChildProcess, name: str, names: list[str], seconds: float | None = None
    ):
        self.__name__ = name
        self.__signature__ = inspect.signature(_signature)
        self.child, self.names, self.seconds = child, names, seconds
        self.gone: str | None = None
        self.is_hung = False
        self.began = time.process_time()
        self._trees: dict[str, DecisionTree] = {}

    def __call__(self, *given: Any, chance: Any = None, **named: Any) -> Any:
        how = None if chance is None else "chance" if "chance" in self.names else ""
        if given and chance is None and _is_chance(given[-1]):
            *given, chance = given  # type: ignore[assignment]
            how = ""
        props: list[Prop] = []

        def encode_prop(value: Any) -> Any:
            if not isinstance(value, Prop):
                raise NotPlain(describe_kind(value))
            props.append(value)
            kind = type(value)
            return [kind.__name__, str(sys.modules[kind.__module__].__file__), value.made_of]

        args = to_json([tuple(given), named], encode_prop)
        message = {"call": self.__name__, "args": args, "chance": how}
        key = to_line(message)
        if key not in self._trees:
            while len(self._trees) >= MAX_TREES:
                self._trees.pop(next(iter(self._trees)))
            self._trees[key] = DecisionTree()
        try:
            if time.process_time() - self.began > self.child.limits.task:
                raise NoResult("has so many ways to go that judging them all takes too long")
            end = self._play(self._trees[key], message, chance)
            for prop, trace in zip(props, from_json(end.traces) or [], strict=False):
                prop.trace = trace
            if end.clause is not None:
                raise NoResult(str(end.clause), summary=str(end.summary or ""))
            return from_json(end.value)
        except (NoResult, ChildGone, NotPlain) as error:
            raise self._fail(error, given, named) from None

    def _fail(self, error: Exception, given: Any, named: dict[str, Any]) -> NoResult:
        """Return what is said of a call that gave no result."""
        clause = error.clause if isinstance(error, NoResult) else str(error)
        summary = error.summary if isinstance(error, NoResult) else clause
        if isinstance(error, ChildGone):
            clause = self.gone = self.gone or clause
            self.is_hung = self.is_hung or isinstance(error, ChildHung)
            seconds = self.seconds or self.child.limits.call
            summary = f"took longer than {seconds:g} s" if self.is_hung else clause
        case: dict[str, Any] = {}
        if not clause.startswith(("is not written", "is missing")):
            extra = [f"argument {place + 1}" for place in range(len(self.names), len(given))]
            values = [*zip([*self.names, *extra], given, strict=False), *named.items()]
            case = {name: _show_prop(value) for name, value in values}
        return NoResult(f"{self.__name__} {clause}", case, summary)

    def _play(self, tree: DecisionTree, message: dict[str, Any], chance: Any) -> End:
        """Follow the tree wherever chance leads."""
        answers: Answers = ()
        while True:
            node = tree.nodes.get(answers)
            if node is None:
                self._grow(tree, message, answers)
            elif isinstance(node, End):
                return node
            else:
                answers = (*answers, int(getattr(chance, node.kind)(node.value)))

    def _grow(self, tree: DecisionTree, message: dict[str, Any], wanted: Answers) -> None:
        """Let the child run the function with these answers, and with others that branch off."""
        if self.gone is not None:
            raise ChildGone(self.gone)
        most = min(max(8, 2 * tree.ends), MAX_RUNS)
        script = {"script": wanted, "most": most, "again": not tree.nodes}
        answer = self.child.ask({**message, **script}, self.seconds)
        try:
            for run in answer["runs"]:
                tree.add(run)
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
            raise ChildGone("writes into the grader's pipe") from None
        if wanted not in tree.nodes:
            raise NoResult("decides differently when it is run again")


def _is_chance(value: Any) -> bool:
    plain = (Prop, int, float, str, list, tuple, dict, Fraction)
    return not isinstance(value, plain) and hasattr(value, "draw")


def _show_prop(value: Any) -> Any:
    if is_tensor(value):
        return value.tolist()
    if type(value) is dict:
        return {name: _show_prop(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_show_prop, value))
    is_prop = isinstance(value, Prop)
    return f"{type(value).__name__} {format_value(value.made_of)}" if is_prop else value


class Helpers(NamedTuple):
    """Functions of the reference that stand in the place of a submission's own.

    source  of the reference: these functions and what they need
    names   of the functions
    task    the function that is judged, which keeps its place whatever it is
    """

    source: str
    names: Sequence[str]
    task: str


class LoadedSubmission(NamedTuple):
    """A submission in its child process.

    functions  names of the arguments of each function
    replaced   names of the functions that the reference's helpers stand in for
    """

    child: ChildProcess
    functions: dict[str, list[str]]
    replaced: list[str]

    def function(self, name: str, seconds: float | None = None) -> RemoteFunction:
        """Return a function of the submission; a call of one that is missing raises NoResult."""
        return RemoteFunction(self.child, name, self.functions.get(name, []), seconds)


def load_submission(
    folder: str, limits: Limits, helpers: Helpers | None = None, packages: str = ""
) -> LoadedSubmission:
    """Start a child that imports a submission, and put helpers of the reference in their places.

    packages  as a `ChildProcess` takes it

    Raises NoResult, which says why the submission could not be imported.
    """
    child = ChildProcess(limits, packages)
    try:
        child.ask({}, START_SECONDS)
        answer = child.ask({"load": folder, "helpers": helpers and helpers._asdict()})
        functions, replaced = answer.get("ok"), answer.get("replaced")
        if not isinstance(functions, dict) or not isinstance(replaced, list):
            clause = str(answer.get("clause", "writes into the grader's pipe"))
            raise NoResult(clause, summary=str(answer.get("summary") or clause))
    except ChildGone as gone:
        child.close()
        raise NoResult(str(gone), summary=f"submission.py {gone}") from None
    except BaseException:
        child.close()
        raise
    return LoadedSubmission(child, functions, replaced)
