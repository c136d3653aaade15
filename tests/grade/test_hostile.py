"""Whatever a submission does, it gets a report that says so, soon, and the grader lives on."""

import os
import time
from pathlib import Path

import pytest

from tests.grade.props_counter import Counter
from tests.grade.tiny import FAST, RIGHT, TINY, grade_tiny, submit
from tinyspec.grade.grading import GradeReport, grade_folder
from tinyspec.grade.process import Limits, load_submission
from tinyspec.grade.task import NoResult

PRELUDE = "import os, sys, time\nfrom fractions import Fraction\n"
NOT_ALLOWED = "which the grader does not allow"

# What accept does instead, and words of the sentence that says so. Everything before the last `|`
# line stands above it.
BODIES = {
    "sys.exit(0)": "ends the program (sys.exit 0)",
    "raise SystemExit": "ends the program (sys.exit), given",
    "os._exit(0)": "ends the process (exit status 0)",
    "raise BaseException('no')": "raises BaseException: no",
    "raise KeyboardInterrupt": "raises KeyboardInterrupt",
    "raise Mute()": "raises Mute: (whose text cannot be read)",
    "return 1 / 0": "raises ZeroDivisionError: division by zero (submission.py, line ",
    "return accept(p, q, token, chance)": "raises RecursionError",
    "return [0] * 10**10": "raises MemoryError",
    "return bytearray(10**10)": "raises MemoryError",
    "while True: pass": "does not come back: it was stopped after 1.5 s",
    "time.sleep(1000)": "does not come back",
    "return Always()": "returned an object of Always, which is no plain data",
    "return Whole(1)": "returned an object of the class Whole, made to look like int",
    "return Row([1])": "returned an object of the class Row, made to look like list",
    "return Third(1, 3)": "returned an object of the class Third, made to look like Fraction",
    "return (x for x in p)": "returned a generator, which is no plain data",
    "return accept": "returned a function, which is no plain data",
    "return chance": "returned an object of Chance",
    "return list(range(10**6))": "returned more than 50000 values",
    "return [[[[[[[[[[[[[[1]]]]]]]]]]]]]]": "returned data nested deeper than 12 levels",
    "return 10**4000": "returned a number of more than 1000 digits",
    "return 'x' * 10**6": "returned a text of more than 20000 letters",
    "type(chance).accept = lambda self, ratio: True; return True": (
        f"changes the chance it was given, {NOT_ALLOWED}"
    ),
    "chance.accept = lambda ratio: True; return True": "raises AttributeError",
    "Fraction.__eq__ = lambda self, other: True; return True": (
        f"changes Fraction.__eq__, {NOT_ALLOWED}"
    ),
    "import builtins; builtins.sum = len; return True": f"changes builtins.sum, {NOT_ALLOWED}",
    "import fractions; fractions.Fraction = float; return True": (
        f"changes fractions.Fraction, {NOT_ALLOWED}"
    ),
    "os.fork(); return True": f"starts a process, {NOT_ALLOWED}",
    "os.system('true')": f"starts a process, {NOT_ALLOWED}",
    "import subprocess; subprocess.run(['true'])": f"starts a process, {NOT_ALLOWED}",
    "import threading; threading.Thread(target=time.sleep, args=(9,)).start(); return True": (
        "starts a thread"
    ),
    "os.kill(os.getppid(), 9)": f"sends a signal, {NOT_ALLOWED}",
    "import socket; socket.socket()": f"uses the network, {NOT_ALLOWED}",
    "open('written', 'w').write('x')": f"writes a file, {NOT_ALLOWED}",
    "os.mkdir('written')": f"writes a file, {NOT_ALLOWED}",
    "print('x' * 10**7); return True": "prints more than 256 KB",
    "while True: os.write(1, b'x' * 1000)": "prints more than 256 KB",
    "while True: sys.stderr.write('x' * 1000)": "prints more than 256 KB",
    "import random; return random.random() < p[token]": "the module random is closed",
    "while chance.accept(Fraction(1, 2)): pass": "asked chance more than 1000 times in one run",
    "return chance.accept('yes')": "raises TypeError: chance.accept needs a number, not a str",
    "return chance.draw(p[:0])": (
        "raises ValueError: chance.draw cannot draw from a row without mass"
    ),
    "return chance.draw([2, -1])": (
        "raises ValueError: chance.draw needs finite numbers from 0 on"
    ),
    "return chance.draw([0.5, float('nan')])": (
        "raises ValueError: chance.draw needs finite numbers from 0 on"
    ),
    "return chance.accept(Fraction(1, 3**999))": (
        "raises ValueError: chance.accept takes numbers of at most 1000 bits"
    ),
    "return open('/etc/hostname').read()": f"reads a file that is not its own, {NOT_ALLOWED}",
    "return open(sys.modules['tinyspec.grade.child'].__file__.replace('child', 'task')).read()": (
        f"reads a file that is not its own, {NOT_ALLOWED}"
    ),
    "return chance.draw(3)": "raises TypeError: chance.draw needs a list of numbers, not an int",
    "return chance.draw([float('inf')])": "raises ValueError",
    "RUNS.append(1); return len(RUNS) % 2 == 0": ("decides differently when it is run again"),
    "RUNS.append(1); return chance.accept(Fraction(1, len(RUNS) + 1))": (
        "decides differently when it is run again"
    ),
    "[os.write(n, b'{}\\n') for n in PIPES]; return True": "writes into the grader's pipe",
    "[os.write(n, b'no\\n') for n in PIPES]; return True": "writes into the grader's pipe",
    "[os.close(n) for n in PIPES]; time.sleep(99)": "closes the grader's pipe",
    "os.abort()": "crashes Python (signal 6)",
}
ABOVE = """
RUNS = []
PIPES = [int(sys.argv[2])]

class Mute(Exception):
    def __str__(self):
        raise ValueError

class Always:
    def __eq__(self, other):
        return True
    __hash__ = None

class Whole(int): pass
class Row(list): pass
class Third(Fraction): pass
"""


def sentence_about(report: GradeReport, name: str = "accept") -> str:
    """Return the sentence about a task that had no result."""
    return next(result.sentence for result in report.results if result.task.name == name)


@pytest.mark.parametrize("body", BODIES)
def test_what_a_function_does_costs_it_its_points_and_is_reported(
    body: str, tmp_path: Path
) -> None:
    source = f"{PRELUDE}{ABOVE}{RIGHT}\ndef accept(p, q, token, chance):\n    {body}\n"
    began = time.monotonic()
    report = grade_tiny(tmp_path, source, only=["accept"])
    assert time.monotonic() - began < 20
    assert report.score == 0
    assert BODIES[body] in sentence_about(report)
    assert "given p = (0, 1), q = (0, 1), token = 1" in sentence_about(report)
    assert os.listdir(tmp_path) == ["submission.py"]


def test_what_was_not_allowed_is_reported_even_where_the_function_caught_it(tmp_path: Path) -> None:
    caught = "\ndef residual(p, q):\n    try:\n        open('written', 'w')\n"
    caught += "    except Exception:\n        return p\n"
    assert sentence_about(grade_tiny(tmp_path, RIGHT + caught), "residual").startswith(
        "residual writes a file, which"
    )


def test_a_submission_reads_its_own_files(tmp_path: Path) -> None:
    """Its other modules, a table beside it, and the standard library."""
    (tmp_path / "table.txt").write_text("0")
    (tmp_path / "helper.py").write_text(RIGHT)
    own = "import decimal, os\nfrom helper import accept, residual\n"
    own += "here = os.path.dirname(__file__)\n"
    assert (
        grade_tiny(
            tmp_path, own + "assert open(os.path.join(here, 'table.txt')).read() == '0'\n"
        ).score
        == 100
    )


def test_what_was_noted_of_a_function_is_out_of_its_reach(tmp_path: Path) -> None:
    for change in ("clear()", "pop()", "__setitem__(0, (7,))"):
        source = f"def count(counter):\n    counter.add(1)\n    counter.trace.{change}\n"
        loaded = load_submission(str(submit(tmp_path, source)), FAST)
        with loaded.child, pytest.raises(NoResult, match="changes what was noted of it") as failed:
            loaded.function("count")(Counter(1))
        assert "counter = Counter" in str(failed.value)


def test_more_outcomes_than_can_be_judged_are_an_error_in_time(tmp_path: Path) -> None:
    """Twenty idle coins a case: cheap for the submission, and dear for who multiplies them."""
    coins = "\ndef accept(p, q, token, chance):\n"
    coins += "    [chance.accept(Fraction(1, 2)) for _ in range(20)]\n    return True\n"
    report = grade_tiny(
        tmp_path, PRELUDE + RIGHT + coins, limits=FAST._replace(task=1.0), only=["accept"]
    )
    assert "takes too long" in sentence_about(report) or "is too slow" in sentence_about(report)


def test_a_function_costs_only_itself(tmp_path: Path) -> None:
    for wrong in ("while True: pass", "raise SystemExit", "__import__('os')._exit(3)"):
        report = grade_tiny(tmp_path, f"{RIGHT}\ndef accept(p, q, token, chance):\n    {wrong}\n")
        assert [result.score for result in report.results] == [0, 60]


def name_error_of_null() -> str:
    """Return what this Python raises for a null byte: 3.11.2 a ValueError, later a SyntaxError."""
    try:
        compile("\x00", "submission.py", "exec")
    except (SyntaxError, ValueError) as error:
        return type(error).__name__
    pytest.fail("a null byte is no source code")


MODULES = {
    "import numpy": (
        "No module named 'numpy', and there is Python's standard library alone (submission.py, "
        "line 1)"
    ),
    "import tinyspec.laws": "raises ModuleNotFoundError",
    "def accept(:": "raises SyntaxError: invalid syntax (submission.py, line 1)",
    "\x00": f"raises {name_error_of_null()}: source code string cannot contain null bytes",
    b"\xff\xfe": "raises SyntaxError",
    "raise ValueError('early')": "raises ValueError: early (submission.py, line 1)",
    "import sys; sys.exit(1)": "ends the program",
    "import os; os._exit(0)": "ends the process (exit status 0)",
    "while True: pass": "does not come back: it was stopped after 1.5 s",
    "open('written', 'w')": f"writes a file, {NOT_ALLOWED}",
    "import builtins; builtins.all = any": f"changes builtins.all, {NOT_ALLOWED}",
    "print('x' * 10**6)": "prints more than 256 KB",
    "x = [0] * 10**10": "raises MemoryError",
}


@pytest.mark.parametrize("source", MODULES)
def test_a_submission_that_cannot_be_imported_gets_a_report(
    source: str | bytes, tmp_path: Path
) -> None:
    report = grade_tiny(tmp_path, source)
    assert report.score == 0
    assert [result.task.name for result in report.results] == ["accept", "residual"]
    assert report.problem.startswith("submission.py ")
    assert str(MODULES[source]) in report.problem  # type: ignore[index]
    assert os.listdir(tmp_path) == ["submission.py"]


def test_a_function_that_is_missing_or_none(tmp_path: Path) -> None:
    report = grade_tiny(tmp_path, "accept = 3\n")
    assert (
        "accept is missing: submission.py has an int where it should have a function of this name"
        in sentence_about(report)
    )
    assert (
        sentence_about(report, "residual")
        == "residual is missing: submission.py has no function of this name"
    )
    assert report.score == 0


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    assert "raises TypeError: residual() takes 0" in sentence_about(
        grade_tiny(tmp_path, "def residual(): pass"), "residual"
    )


def test_a_folder_without_a_submission_is_an_error(tmp_path: Path) -> None:
    for folder, words in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "file", "is no folder"),
        (tmp_path, "holds no submission.py"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        (tmp_path / "file").write_text("")
        report = grade_folder(TINY, folder, limits=FAST)
        assert (report.score, report.max_score) == (0, 100)
        assert words in report.problem
    (tmp_path / "submission.py").mkdir()
    assert "holds no submission.py" in grade_folder(TINY, tmp_path, limits=FAST).problem


def test_what_a_submission_leaves_is_removed(tmp_path: Path) -> None:
    source = "import atexit, time, signal\natexit.register(time.sleep, 99)\n"
    source += f"signal.signal(15, signal.SIG_IGN)\n{RIGHT}"
    began = time.monotonic()
    assert grade_tiny(tmp_path, source).score == 100
    assert time.monotonic() - began < 20


def test_it_may_print_import_its_neighbours_and_read(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(
        "def beyond(p, q):\n    return [max(0, x - y) for x, y in zip(p, q)]\n"
    )
    source = "from helper import beyond\n"
    source += "import math, collections, functools, itertools, typing, dataclasses\n"
    source += (
        RIGHT + "\nprint(open(__file__).read())\ndef residual(p, q):\n    print('trying', p)\n"
    )
    source += "    rest = beyond(p, q)\n    return [x / sum(rest) for x in rest]\n"
    assert grade_tiny(tmp_path, source).score == 100
    assert sorted(os.listdir(tmp_path)) == ["helper.py", "submission.py"]


def test_the_environment_is_bare_and_hashes_are_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    source = "import os\ndef residual(p, q):\n    return [sorted(os.environ), hash('a')]\n"
    first, second = (
        grade_tiny(tmp_path, source, only=["residual"]).results[0].counterexample for _ in range(2)
    )
    assert first == second
    assert first is not None and "SECRET" not in first.got[0]


def test_grading_ends_soon_even_if_every_function_hangs(tmp_path: Path) -> None:
    source = (
        "def accept(*args):\n    while True: pass\ndef residual(*args):\n    while True: pass\n"
    )
    report = grade_tiny(tmp_path, source)
    assert "after 1.5 s" in sentence_about(report)
    assert "after 0.5 s" in sentence_about(report, "residual")  # the time for waiting was used up
    spent = 0.0
    for _ in range(10):  # tasks that all hang, with the limits that are used
        spent += max(Limits().least, min(Limits().call, Limits().hanging - spent))
    assert spent + 10 * 0.5 < 30


def test_slow_answers_are_counted_together(tmp_path: Path) -> None:
    source = "import time\ndef residual(p, q):\n    time.sleep(0.2)\n    return p\n"
    limits = FAST._replace(task=0.3)
    assert "is too slow: it took more than 0.3 s in all" in sentence_about(
        grade_tiny(tmp_path, source, limits=limits, only=["residual"]), "residual"
    )


def test_no_process_of_the_grader_survives_or_dies_with_a_submission(tmp_path: Path) -> None:
    """A hundred megabytes of answers, and no answer at all, leave no process running."""
    submit(tmp_path, RIGHT)
    for _ in range(3):
        assert grade_folder(TINY, tmp_path, limits=FAST).score == 100
    assert len(os.listdir("/proc/self/fd")) < 100
