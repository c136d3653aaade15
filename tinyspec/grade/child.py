"""Run a submission in a child process that knows nothing of what is expected.

The parent (process.py) starts this file by its path, without site-packages. So the file imports the
standard library alone, and every `props_*.py` imports the standard library and this file alone.
For a task that calculates with tensors the parent names the folder that torch lies in: then torch
is imported first, and nothing else out of that folder.

Messages come in on one private pipe and go out on another, one line of JSON each. What the
submission prints goes elsewhere.

    {}                                    -> {}: the process has started
    {"load": folder, "helpers": h}        -> {"ok": {name of a function: [names of its arguments]},
                                              "replaced": [name of a function, ...]}
                                             or {"clause": c, "summary": s}
    {"call": name, "args": [...], "chance": how, "script": [answer, ...], "most": n, "again": flag}
                                          -> {"runs": [...]}

h        null, or {"source": of the reference, "names": of functions in it, "task": to be called}.
         These functions of the reference stand in the place of the submission's own.
how      null (the function takes no chance), "" (it is the last argument) or the argument's name.
script   what chance answers: 1 or 0 to accept, a token to draw. After its end chance takes the
         first possible answer. The answer has a run of this script (two, if "again": the runs must
         agree), and then runs of the scripts that branch off it, breadth first, at most n in all.
a run    {"script": ..., "asked": [["accept", ratio] or ["draw", row], ...], "traces": [...],
          "value": result or "clause": c, "summary": s}
c, s     why there is no result: a sentence without its subject, and the same in a few words. The
         parent makes a `NoResult` of them.

This is no security boundary. It stops accidents and plain tricks. Run submissions that may be
hostile in a container.
"""

import _thread
import base64
import builtins
import fractions
import importlib
import importlib.util
import inspect
import json
import os
import random
import sys
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

MAX_DEPTH = 12  # lists in lists
MAX_VALUES = 50_000  # in one message
MAX_DIGITS = 1_000  # of a whole number, so also of a numerator or denominator
MAX_LETTERS = 20_000  # of a text
MAX_TENSOR = 4 << 20  # bytes of a tensor
BITS_PER_DIGIT = 3.33
MAX_DECISIONS = 1000  # of one run
MAX_EVENTS = 20_000  # in the traces of one run
MAX_CHANCE_BITS = 1000  # of a number given to chance: the parent multiplies many of them
SLICE_SECONDS = 0.3  # after this time the runs that are done are sent
NOT_ALLOWED = "which the grader does not allow"

if __name__ == "__main__":
    # Files of props import this module by its full name. Nothing else of the package can be
    # imported: its packages stand here without a path.
    for _name in ("tinyspec", "tinyspec.grade"):
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].__path__ = []
    sys.modules["tinyspec.grade.child"] = sys.modules["__main__"]
    # A submission may replace builtins. What is used here stays as it is.
    globals().update({k: v for k, v in vars(builtins).items() if not k.startswith("_")})


class Prop:
    """A thing that a submitted function works with, such as a model with a cache.

    A law makes a fresh one for every run, and reads its trace afterwards. Its methods call `note`
    for what happens, and raise ValueError with a sentence if they are misused.

    made_of  the arguments that it was made of, plain data (None, bool, int, float, Fraction, str,
             list, tuple, dict): the child process makes it again from these
    trace    what happened, an event each, plain data too

    A subclass says how many events a trace has at most, and what that is in words.
    """

    _limit = 1000
    _overrun = "it was asked 1000 things"

    def __init__(self, **made_of: Any) -> None:
        self.made_of = made_of
        self.trace: list[Any] = []

    def note(self, *event: Any) -> None:
        """Add an event to the trace. Raises ValueError if there are too many."""
        if len(self.trace) >= self._limit:
            raise ValueError(f"{self._overrun}: the function is not going to stop")
        self.trace.append(event)


def require_whole(value: Any, what: str, low: int, high: int) -> int:
    """Return the value if it is a whole number from low to high. Raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{what} is {value!r}: it must be a whole number from {low} to {high}")
    return value


# ---------------------------------------------------------------------- data between processes

ENCODER = json.JSONEncoder(separators=(",", ":"))


class NotPlain(ValueError):
    """A value that may not be sent, in words: "a generator, which is no plain data"."""


def to_json(value: Any, encode_other: Callable[[Any], Any] | None = None) -> Any:
    """Return what JSON can hold of plain data: None, numbers, texts, lists, tuples, dictionaries,
    and tensors where torch is loaded.

    Subclasses are not taken, because an object that only looks like a number may compare as it
    likes. Neither is what is too large or too deep. `encode_other` makes plain data of a Prop.

    >>> to_json([(1, Fraction(1, 3)), {"a": None}])
    [{'t': [1, {'q': '1/3'}]}, {'d': [['a', None]]}]
    """
    values_left = MAX_VALUES

    def encode(value: Any, depth: int) -> Any:
        nonlocal values_left
        values_left -= 1
        if values_left < 0:
            raise NotPlain(f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise NotPlain(f"data nested deeper than {MAX_DEPTH} levels")
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            if len(value) > MAX_LETTERS:
                raise NotPlain(f"a text of more than {MAX_LETTERS} letters")
            return value
        if kind is int:
            return _check_digits(value)
        if kind is Fraction:
            return {"q": f"{_check_digits(value.numerator)}/{_check_digits(value.denominator)}"}
        if kind is list:
            return [encode(item, depth + 1) for item in value]
        if kind is tuple:
            return {"t": [encode(item, depth + 1) for item in value]}
        if kind is dict:
            pairs = value.items()
            return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in pairs]}
        if is_tensor(value):
            return {"x": pack_tensor(value)}
        if encode_other is not None:
            return {"p": encode(encode_other(value), depth + 1)}
        raise NotPlain(f"{describe_kind(value)}, which is no plain data")

    return encode(value, 0)


def from_json(data: Any, decode_other: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that `to_json` encoded. Raises NotPlain for any other data."""

    def decode(data: Any) -> Any:
        if isinstance(data, list):
            return [decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((mark, inner),) = data.items()
        if mark == "q":
            numerator, denominator = map(int, inner.split("/"))
            return Fraction(numerator, denominator)
        if mark == "t":
            return tuple(map(decode, inner))
        if mark == "d":
            return {decode(name): decode(item) for name, item in inner}
        if mark == "x":
            return unpack_tensor(*inner)
        if mark == "p" and decode_other is not None:
            return decode_other(decode(inner))
        raise NotPlain(f"data marked {mark!r}")

    try:
        return decode(data)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise NotPlain(f"data that nobody wrote in this way ({error})") from None


def is_tensor(value: Any) -> bool:
    """Return whether this is a tensor. There is none where torch was not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def pack_tensor(tensor: Any) -> list[Any]:
    """Return a tensor as the name of its type, its shape, and its bytes as a text."""
    if tensor.element_size() * tensor.numel() > MAX_TENSOR:
        raise NotPlain(f"a tensor of more than {MAX_TENSOR >> 20} MB")
    torch = sys.modules["torch"]
    data = bytes(tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), base64.b64encode(data).decode()]


def unpack_tensor(name: str, shape: list[int], text: str) -> Any:
    """Return the tensor that `pack_tensor` made this of."""
    torch = sys.modules["torch"]
    dtype, data = getattr(torch, name), bytearray(base64.b64decode(text))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def to_line(data: Any) -> str:
    """Return JSON data as one line of text."""
    return ENCODER.encode(data)


def describe_kind(value: Any) -> str:
    """Return what sort of thing a value is: "a generator", "an object of the class Cheat"."""
    kind = type(value)
    name = "".join(letter for letter in str(kind.__name__)[:60] if letter.isprintable())
    for base in (bool, int, float, str, list, tuple, dict, Fraction):
        if issubclass(kind, base) and kind is not base:
            return f"an object of the class {name}, made to look like {base.__name__}"
    if kind.__module__ != "builtins":
        return f"an object of {name}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _check_digits(value: int) -> int:
    if value.bit_length() > MAX_DIGITS * BITS_PER_DIGIT:
        raise NotPlain(f"a number of more than {MAX_DIGITS} digits")
    return value


# ---------------------------------------------------------------------- what is not allowed

_WRITES = ("mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod")
_STARTS = ("os.fork", "os.forkpty", "os.system", "os.exec", "os.spawn", "os.posix_spawn")
OFFENCES_BY_EVENT = {
    **dict.fromkeys((*_STARTS, "subprocess.Popen", "pty.spawn"), "starts a process"),
    **dict.fromkeys(("os.kill", "os.killpg", "signal.pthread_kill"), "sends a signal"),
    **dict.fromkeys(("resource.setrlimit", "resource.prlimit"), "changes its limits"),
    **{f"os.{name}": "writes a file" for name in _WRITES},
    "ctypes.dlopen": "uses ctypes",
    "socket.__new__": "uses the network",
}
"""What a submission does, in words, by the audit event that Python raises when it does it."""

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HERE = os.path.dirname(os.path.realpath(__file__))


class Guard:
    """Notice what a submission may not do, by audit hooks and by comparing what it could change.

    offences     clauses such as "writes a file", kept even if the submission catches the error
    is_trusting  while the grader's own files are read
    readable     folders that a submission may read
    protected    what a submission may not change, and what it was like before
    """

    def __init__(self) -> None:
        self.offences: list[str] = []
        self.is_trusting = False
        self.readable = [os.path.dirname(os.path.realpath(os.__file__)), os.path.realpath("/dev")]
        self.protected: list[tuple[Any, dict[str, Any]]] = []

    def start(self, memory: int, seconds: int) -> None:
        """Set the limits of the operating system, and forbid what no submission needs.

        memory  bytes of addresses
        seconds of processor time
        """
        set_limits(memory, seconds)
        for name in random.__all__:
            if name.islower():
                setattr(random, name, _forbid_random)
        # No audit event tells of threads in every version of Python.
        for name in ("start_new_thread", "start_new", "start_joinable_thread"):
            setattr(_thread, name, self._forbid_thread)
        sys.addaudithook(self._on_event)

    def protect(self, folder: str) -> None:
        """Remember what a submission may not change; from now on it reads its own files alone."""
        self.readable.append(os.path.realpath(folder))
        places = (builtins, fractions, Fraction)
        self.protected = [(place, dict(vars(place))) for place in places]

    def find_offence(self) -> str | None:
        """Return what was done since the last call that is not allowed, and forget it."""
        done = self.offences[0] if self.offences else None
        self.offences.clear()
        for place, before in self.protected:
            now = dict(vars(place))
            changed = sorted(k for k in {*before, *now} if before.get(k) is not now.get(k))
            if changed:
                done = f"changes {place.__name__}.{changed[0]}"
        return f"{done}, {NOT_ALLOWED}" if done else None

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an audit event of Python."""
        if event in OFFENCES_BY_EVENT:
            self._offend(OFFENCES_BY_EVENT[event])
        if event != "open" or len(args) < 3 or isinstance(args[0], int) or args[0] == os.devnull:
            return
        if isinstance(args[2], int) and args[2] & WRITE_FLAGS:
            self._offend("writes a file")
        if self.protected and not self.is_trusting and not self._is_readable(os.fsdecode(args[0])):
            self._offend("reads a file that is not its own")

    def _is_readable(self, path: str) -> bool:
        """Return whether a file is Python's, the submission's, or needed to make props."""
        path = os.path.realpath(path)
        if os.path.dirname(path) == HERE:
            return os.path.basename(path).startswith(("props", "child"))
        return any(path == root or path.startswith(root + os.sep) for root in self.readable)

    def _offend(self, what: str) -> NoReturn:
        self.offences.append(what)
        raise PermissionError(f"the grader allows no function that {what}")

    def _forbid_thread(self, *args: Any, **named: Any) -> NoReturn:
        self._offend("starts a thread")


def _forbid_random(*args: Any, **named: Any) -> NoReturn:
    raise PermissionError("draw through chance alone: the module random is closed")


def set_limits(memory: int, seconds: int) -> None:
    """Set the limits that the operating system knows; for others the parent's clock remains."""
    try:
        import resource
    except ImportError:
        return
    for name, most in (("CPU", seconds), ("AS", memory), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (AttributeError, ValueError, OSError):
            continue


# ---------------------------------------------------------------------- errors in words


class RunEnded(BaseException):
    """Ends a run. It is no Exception, so that a submission does not catch it by accident."""


def explain_exception(error: BaseException, folder: str) -> dict[str, str]:
    """Return what a submission raised as {"clause": ..., "summary": a few words}.

    The clause is like "raises ZeroDivisionError: division by zero (submission.py, line 154)", the
    summary like "raised ZeroDivisionError at line 154". Their subject is the function or the file,
    and lines are those of files in the folder.
    """
    kind = str(type(error).__name__)[:60]
    try:
        words = str(error)[:300]
    except BaseException:
        words = "(whose text cannot be read)"
    if isinstance(error, RunEnded):
        return {"clause": words, "summary": words}
    if isinstance(error, NotImplementedError):
        clause = f"is not written yet ({words})" if words else "is not written yet"
        return {"clause": clause, "summary": f"is not written yet ({kind})"}
    if isinstance(error, SystemExit):
        clause = f"ends the program (sys.exit{' ' if words else ''}{words})"
        return {"clause": clause, "summary": clause}
    if isinstance(error, ModuleNotFoundError):
        more = " and torch" if "torch" in sys.modules else ""
        words += f", and there is Python's standard library{more} alone"
    if isinstance(error, SyntaxError) and error.filename:
        words = str(error.msg)[:300]
    file, line = locate_exception(error, folder)
    where = f" ({file}, line {line})" if file else ""
    summary = f"raised {kind}{f' at line {line}' if file else ''}"
    if file not in ("", "submission.py"):
        summary += f" of {file}"
    return {"clause": f"raises {kind}{': ' if words else ''}{words}{where}", "summary": summary}


def locate_exception(error: BaseException, folder: str) -> tuple[str, int | None]:
    """Return the file of the folder and the line that raised this; ("", None) if none did."""
    if isinstance(error, SyntaxError) and error.filename:
        return os.path.basename(str(error.filename)), error.lineno
    file, line = "", None
    trail = traceback.walk_tb(error.__traceback__)
    for frame in traceback.StackSummary.extract(trail, limit=-200, lookup_lines=False):
        if frame.filename.startswith(folder):
            file, line = os.path.basename(frame.filename), frame.lineno
    return file, line


# ---------------------------------------------------------------------- one run


def make_scripted_chance(
    script: list[int], asked: list[Any], ways: list[list[int]]
) -> tuple[object, Callable[[], bool]]:
    """Return a chance that answers by a script, and a function that tells whether it is unchanged.

    asked  takes every decision, as ["accept", ratio] or ["draw", row]
    ways   takes the possible answers of every decision
    """

    def decide(kind: str, value: Any, possible: list[int]) -> int:
        if len(asked) == MAX_DECISIONS:
            raise RunEnded(f"asked chance more than {MAX_DECISIONS} times in one run")
        if any(map(_is_long, value if kind == "draw" else [value])):
            raise ValueError(f"chance.{kind} takes numbers of at most {MAX_CHANCE_BITS} bits")
        asked.append([kind, to_json(value)])
        ways.append(possible)
        return script[len(asked) - 1] if len(asked) <= len(script) else possible[0]

    def accept(self: object, ratio: Any) -> bool:
        """Return True with probability min(1, ratio)."""
        if not _is_plain_number(ratio):
            raise TypeError(f"chance.accept needs a number, not {describe_kind(ratio)}")
        possible = ([1] if ratio > 0 else []) + ([] if ratio >= 1 else [0])
        return bool(decide("accept", ratio, possible))

    def draw(self: object, row: Any) -> int:
        """Return a token with the probability that the row gives it."""
        if type(row) not in (list, tuple) or not all(map(_is_plain_number, row)):
            raise TypeError(f"chance.draw needs a list of numbers, not {describe_kind(row)}")
        infinite = float("inf")
        if any((type(x) is float and not -infinite < x < infinite) or x < 0 for x in row):
            raise ValueError("chance.draw needs finite numbers from 0 on")
        if not sum(row) > 0:
            raise ValueError("chance.draw cannot draw from a row without mass")
        return decide("draw", list(row), [token for token, x in enumerate(row) if x > 0])

    kind = type("Chance", (), {"__slots__": (), "accept": accept, "draw": draw})
    return kind(), lambda: kind.accept is accept and kind.draw is draw  # type: ignore[attr-defined]


def _is_plain_number(x: Any) -> bool:
    return type(x) in (int, float, bool, Fraction)


def _is_long(x: Any) -> bool:
    if type(x) is float:
        return False
    bits: int = max(x.numerator.bit_length(), x.denominator.bit_length())
    return bits > MAX_CHANCE_BITS


def make_trace(record: list[Any]) -> list[Any]:
    """Return an empty trace. Its events also go to `record`, which no submission can reach."""

    def append(self: list[Any], event: Any) -> None:
        if len(record) == MAX_EVENTS:
            raise RunEnded(f"does more than {MAX_EVENTS} things with what it is given")
        record.append(to_json(event))
        list.append(self, event)

    trace: list[Any] = type("Trace", (list,), {"append": append})()
    return trace


class Submission:
    """The submitted module, run with the reference's helpers under a guard."""

    def __init__(self, guard: Guard, folder: str, helpers: dict[str, Any] | None) -> None:
        self.guard = guard
        self.helpers: dict[str, Any] = {}
        self.task = ""
        if helpers:  # made before the submission runs, which so cannot change what they are made of
            space: dict[str, Any] = {"__name__": "reference"}
            exec(compile(helpers["source"], "reference.py", "exec"), space)
            self.helpers = {name: space[name] for name in helpers["names"]}
            self.task = helpers["task"]
        sys.path.insert(0, folder)
        self.folder = folder
        self.module: Any = None
        guard.protect(folder)

    def load(self) -> dict[str, Any]:
        """Import the module, replace its helpers, and return the answer to "load"."""
        path = os.path.join(self.folder, "submission.py")
        try:
            self.module = import_source("submission", path)
            replaced = [name for name, helper in self.helpers.items() if self.replace(name, helper)]
            found = {name: value for name, value in vars(self.module).items() if callable(value)}
            functions = {name: argument_names(function) for name, function in found.items()}
            answer: dict[str, Any] = {"ok": functions, "replaced": replaced}
        except BaseException as error:
            answer = explain_exception(error, self.folder)
        offence = self.guard.find_offence()
        return {"clause": offence} if offence else answer

    def replace(self, name: str, helper: Any) -> bool:
        """Put a helper in the place of the submission's own function, under all names that it has.

        The task itself keeps its place: who hands in `verify = acceptance` is judged by that.
        Return whether there was such a function.
        """
        own = vars(self.module).get(name)
        if not callable(own):
            return False
        for module in list(sys.modules.values()):
            space = vars(module) if isinstance(module, types.ModuleType) else {}
            if str(space.get("__file__")).startswith(self.folder + os.sep):
                for key in [k for k, value in space.items() if value is own and k != self.task]:
                    space[key] = helper
        return True

    def run_scripts(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a function by a script, and then by the scripts that branch off it."""
        began, done = time.monotonic(), list[dict[str, Any]]()
        waiting = [message["script"]] * (2 if message["again"] else 1)
        for script in waiting:  # grows while it is walked
            ways: list[list[int]] = []
            done.append(self.run(message, script, ways))
            if len(done) == message["most"] or time.monotonic() - began > SLICE_SECONDS:
                break
            if script is waiting[0] and len(done) > 1:  # the second run of the first script
                continue
            taken = script + [possible[0] for possible in ways[len(script) :]]
            for place in range(len(script), len(ways)):
                waiting += [[*taken[:place], answer] for answer in ways[place][1:]]
        return done

    def run(
        self, message: dict[str, Any], script: list[int], ways: list[list[int]]
    ) -> dict[str, Any]:
        """Run a function once by a script; `ways` takes the possible answers of each decision."""
        asked: list[Any] = []
        props: list[Prop] = []
        records: list[list[Any]] = []

        def add_prop(plain: Any) -> Prop:
            props.append(self._make_prop(plain))
            records.append([])
            props[-1].trace = make_trace(records[-1])
            return props[-1]

        chance, is_unchanged = make_scripted_chance(script, asked, ways)
        result: dict[str, Any] = {"script": script, "asked": asked, "value": None}
        try:
            function = self._find_function(message["call"])
            args, named = from_json(message["args"], add_prop)
            if message["chance"]:
                named[message["chance"]] = chance
            value = function(*args, *([chance] if message["chance"] == "" else []), **named)
            try:
                result["value"] = to_json(value)
            except NotPlain as error:
                result["clause"] = f"returned {error}"
        except BaseException as error:
            result |= explain_exception(error, self.folder)
        result["traces"] = records
        try:
            if to_json([list(prop.trace) for prop in props]) != records:
                self.guard.offences.append("changes what was noted of it")
        except Exception:
            self.guard.offences.append("changes what was noted of it, or does too much")
        if not is_unchanged():
            self.guard.offences.append("changes the chance it was given")
        if offence := self.guard.find_offence():
            result |= {"clause": offence, "summary": None, "value": None}
        return result

    def _find_function(self, name: str) -> Callable[..., Any]:
        function = vars(self.module).get(name)
        if callable(function):
            return function  # type: ignore[no-any-return]
        what = "has no"
        if function is not None:
            what = f"has {describe_kind(function)} where it should have a"
        raise RunEnded(f"is missing: submission.py {what} function of this name")

    def _make_prop(self, described: Any) -> Prop:
        """Return a Prop of the class that a file defines: [class, file, what it is made of]."""
        kind, path, made_of = described
        name = f"tinyspec.grade.{Path(path).stem}"
        if name not in sys.modules:
            self.guard.is_trusting = True
            import_source(name, path)
            self.guard.is_trusting = False
        prop: Prop = getattr(sys.modules[name], kind)(**made_of)
        return prop


def import_source(name: str, path: str) -> types.ModuleType:
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def argument_names(function: Any) -> list[str]:
    """Return the names of a function's arguments, as far as they can be seen."""
    try:
        return [str(name)[:40] for name in inspect.signature(function).parameters][:20]
    except (TypeError, ValueError):
        return []


def load_torch(packages: str) -> int:
    """Import torch out of a folder of packages; return how many bytes of addresses are in use."""
    sys.path.append(packages)
    torch = importlib.import_module("torch")
    sys.path.remove(packages)
    torch.set_num_threads(1)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # no such file: the system does not limit addresses either
        return 0


def main() -> None:
    """Answer messages until there are none."""
    receive, send, memory, seconds = map(int, sys.argv[1:5])
    printed, guard = sys.stdout, Guard()
    if packages := sys.argv[5]:
        memory += load_torch(packages)
        guard.readable.append(os.path.realpath(os.path.join(packages, "torch")))
    with (
        os.fdopen(receive, "r", encoding="utf-8") as messages,
        os.fdopen(send, "w", encoding="utf-8") as answers,
    ):
        guard.start(memory, seconds)
        submission: Submission | None = None
        for line in messages:
            message = json.loads(line)
            if not message:  # the parent waits until Python itself has started
                answer: dict[str, Any] = {}
            elif submission is None:
                submission = Submission(guard, message["load"], message["helpers"])
                answer = submission.load()
            else:
                answer = {"runs": submission.run_scripts(message)}
            with suppress(Exception):  # the submission closed it: then nothing is lost
                printed.flush()
            answers.write(to_line(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
