"""The child process of the grader: it runs the submission, and knows nothing of what is expected.

Messages come in on one private pipe and go out on another, a line of JSON each; what the submission
prints goes elsewhere.

    {}                                          -> {}: it has started
    {"load": folder, "helpers": h}              -> {"ok": {name of a function: [names of its arguments]},
                                                    "replaced": [name of a function, ...]}
                                                   or {"problem": text, "summary": the same in a few
                                                   words}
    h: null, or {"source": of the reference, "names": of functions in it, "task": that will be
    called}; the reference's functions stand in the place of the submission's own {"call": name,
    "args": [...], "chance": how, "script": [answer, ...], "most": n, "again": whether}
                                                -> {"runs": [...]}: this script, twice if it is to
                                                be run again, and then the
                                                   other branches below it, breadth first, n runs at
                                                   most
    how: null (it takes no chance), "" (behind the arguments) or the name of the argument
    a run: {"script": ..., "asked": [["accept", ratio] or ["draw", row], ...], "traces": [...],
            "value": result or "problem": text, "summary": the same in a few words}

A script is what chance answers: 1 or 0 for accept, a token for draw; behind its end chance takes
the first branch. This is no security boundary. It stops accidents and plain tricks; run it in a
container where submissions may be hostile.

Started by path, without site-packages; it imports the standard library, and its neighbours
codec.py, guard.py, problems.py and props.py.
"""

import builtins
import fractions
import importlib.util
import inspect
import json
import os
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DECISIONS = 1000  # of one run
EVENTS = 20_000  # that props note in one run
LONGEST = (
    1000  # bits of a number that chance is asked about: what is asked often is multiplied often
)
SLICE = 0.3  # seconds after which the runs that are done are sent

if __name__ == "__main__":  # the package without its weight
    for _name, _path in (("tinyspec", []), ("tinyspec.grade", [str(HERE)])):
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].__path__ = _path
from tinyspec.grade import codec, guard, problems, props  # noqa: E402
from tinyspec.grade.problems import Enough  # noqa: E402

if __name__ == "__main__":  # what is here stays as it is, whatever the submission makes of builtins
    sys.modules["tinyspec.grade"].__path__ = []
    for _place in (globals(), vars(codec), vars(guard), vars(problems)):
        _place.update(
            {_name: _value for _name, _value in vars(builtins).items() if not _name.startswith("_")}
        )


def scripted(
    script: list[int], asked: list[Any], ways: list[list[int]]
) -> tuple[object, Callable[[], bool]]:
    """A chance that follows a script and notes every decision and its possible answers; and whether
    nobody changed it.
    """

    def decide(kind: str, value: Any, possible: list[int]) -> int:
        if len(asked) == DECISIONS:
            raise Enough(f"asked chance more than {DECISIONS} times in one run")
        if any(map(long, value if kind == "draw" else [value])):
            raise ValueError(f"chance.{kind} takes numbers of at most {LONGEST} bits")
        asked.append([kind, codec.plain(value)])
        ways.append(possible)
        return script[len(asked) - 1] if len(asked) <= len(script) else possible[0]

    def accept(self: object, ratio: Any) -> bool:
        """True with probability min(1, ratio)."""
        if not number(ratio):
            raise TypeError(f"chance.accept needs a number, not {codec.described(ratio)}")
        return bool(
            decide("accept", ratio, ([1] if ratio > 0 else []) + ([] if ratio >= 1 else [0]))
        )

    def draw(self: object, row: Any) -> int:
        """A token with the probability that the row gives it."""
        if type(row) not in (list, tuple) or not all(map(number, row)):
            raise TypeError(f"chance.draw needs a list of numbers, not {codec.described(row)}")
        if not all(map(finite, row)) or any(x < 0 for x in row):
            raise ValueError("chance.draw needs finite numbers from 0 on")
        if not sum(row) > 0:
            raise ValueError("chance.draw cannot draw from a row without mass")
        return decide("draw", list(row), [token for token, x in enumerate(row) if x > 0])

    kind = type("Chance", (), {"__slots__": (), "accept": accept, "draw": draw})
    return kind(), lambda: kind.accept is accept and kind.draw is draw  # type: ignore[attr-defined]


def number(x: Any) -> bool:
    return type(x) in (int, float, bool, fractions.Fraction)


def finite(x: Any) -> bool:
    return type(x) is not float or -float("inf") < x < float("inf")


def long(x: Any) -> bool:
    return (
        type(x) is not float and max(x.numerator.bit_length(), x.denominator.bit_length()) > LONGEST
    )


def noting(record: list[Any]) -> list[Any]:
    """An empty trace. What is appended is also kept in the record, where the submission does not
    reach it.
    """

    def append(self: list[Any], event: Any) -> None:
        if len(record) == EVENTS:
            raise Enough(f"does more than {EVENTS} things with what it is given")
        record.append(codec.plain(event))
        list.append(self, event)

    trace: list[Any] = type("Trace", (list,), {"append": append})()
    return trace


class Submission:
    """The submitted module and what it may not change."""

    def __init__(self, folder: str, helpers: dict[str, Any] | None) -> None:
        self.helpers: dict[str, Any] = {}
        self.task = ""
        if helpers:  # before the submission, which cannot change what they are made of
            space: dict[str, Any] = {"__name__": "reference"}
            exec(compile(helpers["source"], "reference.py", "exec"), space)
            self.helpers = {name: space[name] for name in helpers["names"]}
            self.task = helpers["task"]
        sys.path.insert(0, folder)
        self.folder = folder
        self.module: Any = None
        guard.keep(folder)

    def load(self) -> dict[str, Any]:
        """Import it, and put the helpers in their places."""
        path = os.path.join(self.folder, "submission.py")
        try:
            spec = importlib.util.spec_from_file_location("submission", path)
            assert spec is not None and spec.loader is not None
            self.module = sys.modules["submission"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.module)
            replaced = [name for name, helper in self.helpers.items() if self.replace(name, helper)]
        except BaseException as error:
            if problem := guard.offence():
                return {"problem": problem}
            return problems.describe(error, self.folder)
        if problem := guard.offence():
            return {"problem": problem}
        functions = {
            name: names(found) for name, found in vars(self.module).items() if callable(found)
        }
        return {"ok": functions, "replaced": replaced}

    def replace(self, name: str, helper: Any) -> bool:
        """Put a helper in the place of the submission's own function, under every name that its
        modules have for it.

        The task itself keeps its place: whoever hands in `verify = acceptance` is judged by that.
        """
        own = vars(self.module).get(name)
        if not callable(own):
            return False
        for module in list(sys.modules.values()):
            space = vars(module) if isinstance(module, types.ModuleType) else {}
            if str(space.get("__file__")).startswith(self.folder + os.sep):
                for key in [
                    key for key, value in space.items() if value is own and key != self.task
                ]:
                    space[key] = helper
        return True

    def runs(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a function by a script, and by those that branch off."""
        began, done = time.monotonic(), list[dict[str, Any]]()
        waiting = [message["script"]] * (2 if message["again"] else 1)
        for script in waiting:  # grows while it is walked
            ways: list[list[int]] = []
            done.append(self.run(message, script, ways))
            if len(done) == message["most"] or time.monotonic() - began > SLICE:
                break
            taken = script + [possible[0] for possible in ways[len(script) :]]
            for place in (
                range(len(script), len(ways)) if script is not waiting[0] or len(done) == 1 else ()
            ):
                waiting += [[*taken[:place], answer] for answer in ways[place][1:]]
        return done

    def run(
        self, message: dict[str, Any], script: list[int], ways: list[list[int]]
    ) -> dict[str, Any]:
        """Run a function once, by a script; `ways` takes the possible answers of each decision."""
        asked: list[Any] = []
        given: list[props.Prop] = []
        records: list[list[Any]] = []

        def one(told: Any) -> props.Prop:
            given.append(made(told))
            records.append([])
            given[-1].trace = noting(records[-1])
            return given[-1]

        chance, untouched = scripted(script, asked, ways)
        function = vars(self.module).get(message["call"])
        result: dict[str, Any] = {"script": script, "asked": asked, "value": None}
        try:
            if not callable(function):
                what = (
                    "has no"
                    if function is None
                    else f"has {codec.described(function)} where it should have a"
                )
                raise Enough(f"is missing: submission.py {what} function of this name")
            args, named = codec.back(message["args"], one)
            if message["chance"]:
                named[message["chance"]] = chance
            value = function(*args, *([chance] if message["chance"] == "" else []), **named)
            try:
                result["value"] = codec.plain(value)
            except codec.NotPlain as refused:
                result["problem"] = f"returned {refused}"
        except BaseException as error:
            result |= problems.describe(error, self.folder)
        result["traces"] = records
        try:
            if codec.plain([list(prop.trace) for prop in given]) != records:
                guard.offences.append("changes what was noted of it")
        except Exception:
            guard.offences.append("changes what was noted of it, or does too much")
        if not untouched():
            guard.offences.append("changes the chance it was given")
        if offence := guard.offence():
            result |= {"problem": offence, "summary": None, "value": None}
        return result


def names(function: Any) -> list[str]:
    """Of the arguments, as far as they can be seen."""
    try:
        return [str(name)[:40] for name in inspect.signature(function).parameters][:20]
    except (TypeError, ValueError):
        return []


def made(told: Any) -> props.Prop:
    """A Prop of the class that a file defines."""
    kind, path, plain = told
    name = f"tinyspec.grade.{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        guard.trusting[0] = True
        spec.loader.exec_module(sys.modules[name])
        guard.trusting[0] = False
    prop: props.Prop = getattr(sys.modules[name], kind).make(plain)
    return prop


def main() -> None:
    """Answer messages until there are none."""
    receive, send, memory, seconds = map(int, sys.argv[1:5])
    shown = sys.stdout
    with (
        os.fdopen(receive, "r", encoding="utf-8") as messages,
        os.fdopen(send, "w", encoding="utf-8") as answers,
    ):
        guard.begin(memory, seconds)
        submission: Submission | None = None
        for line in messages:
            message = json.loads(line)
            if not message:  # a greeting: the time until it is answered is Python's own
                answer: dict[str, Any] = {}
            elif submission is None:
                submission = Submission(message["load"], message["helpers"])
                answer = submission.load()
            else:
                answer = {"runs": submission.runs(message)}
            with suppress(Exception):  # it closed it: then nothing is lost
                shown.flush()
            answers.write(codec.text(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
