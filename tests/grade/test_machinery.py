"""The grader judges a function in a child process as it would judge it here.

Plain data crosses between the processes unchanged.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grade import props_counter
from tests.grade.props_counter import Counter
from tests.grade.tiny import FAST, RATIO, REST, RIGHT, TINY, grade_tiny, submit
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.grade import grading
from tinyspec.grade.assignments import ASSIGNMENTS, find_assignment
from tinyspec.grade.child import NotPlain, from_json, to_json, to_line
from tinyspec.grade.process import RemoteFunction, load_submission
from tinyspec.grade.report import (
    describe_counterexample,
    describe_run,
    report_to_gradescope,
    report_to_json,
)
from tinyspec.grade.starter import (
    assignment_folder,
    find_leaks,
    make_starter,
    remove_solutions,
    solution_lines,
    write_folder,
)
from tinyspec.grade.task import Cases, NoResult, shorten_value
from tinyspec.laws.checking.check import prove_form
from tinyspec.laws.checking.forms import VerifierForm
from tinyspec.laws.evidence import LawViolated

SLOW = FAST._replace(
    task=600.0, call=30.0
)  # for functions that are right, on a machine that is busy

# ---------------------------------------------------------------------- plain data


DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.fractions().map(lambda x: Fraction(x)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def kinds(value: Any) -> Any:
    """Return the same value with every type spelled out."""
    if isinstance(value, dict):
        return {name: kinds(item) for name, item in value.items()}
    return (
        [type(value), *map(kinds, value)]
        if isinstance(value, (list, tuple))
        else (type(value), value)
    )


@given(DATA)
def test_plain_data_crosses_unchanged(value: Any) -> None:
    import json

    back = from_json(json.loads(to_line(to_json(value))))
    assert back == value
    assert kinds(back) == kinds(value)


def test_nan_and_infinity_cross() -> None:
    assert math.isnan(from_json(to_json([float("nan")]))[0])
    assert from_json(to_json(float("-inf"))) == float("-inf")


@pytest.mark.parametrize(
    "data",
    [{"q": "1"}, {"q": "1/0"}, {"q": 3}, {"t": 3}, {"x": 1}, {}, {"t": [], "d": []}, {"p": 1}],
)
def test_what_nobody_wrote_is_an_error(data: Any) -> None:
    with pytest.raises(NotPlain):
        from_json([data])


# ---------------------------------------------------------------------- tables and chances


PROGRAMS = '''
def run(program, chance):
    """Any decision procedure: what to ask, and what then."""
    seen = []
    while program[0] != "end":
        if program[0] == "accept":
            answer = chance.accept(program[1])
            program = program[2] if answer else program[3]
        else:
            answer = chance.draw(program[1])
            program = program[2][answer]
        seen.append(answer)
    return (program[1], seen)
'''

THIRDS = st.integers(-1, 4).map(lambda n: Fraction(n, 3))
WEIGHTS = st.lists(st.integers(0, 3).map(Fraction), min_size=2, max_size=3).filter(any)
PROGRAM = st.recursive(
    st.integers(0, 3).map(lambda n: ["end", n]),
    lambda inner: (
        st.tuples(THIRDS | st.floats(0, 1), inner, inner).map(lambda x: ["accept", *x])
        | st.tuples(WEIGHTS, st.lists(inner, min_size=3, max_size=3)).map(lambda x: ["draw", *x])
    ),
    max_leaves=12,
)


def here(source: str, name: str) -> Callable[..., Any]:
    """Return a function of the source, in this process."""
    space: dict[str, Any] = {}
    exec(source, space)
    function: Callable[..., Any] = space[name]
    return function


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Functions of a source, in a child process."""
    children = []

    def start(source: str, name: str) -> RemoteFunction:
        folder = submit(tmp_path_factory.mktemp("submission"), source)
        loaded = load_submission(str(folder), SLOW)
        children.append(loaded.child)
        return loaded.function(name)

    yield start
    for child in children:
        child.close()


def test_any_decision_procedure_has_the_same_distribution_and_the_same_runs(there: Any) -> None:
    local, remote = here(PROGRAMS, "run"), there(PROGRAMS, "run")

    @settings(max_examples=60)
    @given(PROGRAM, st.integers(0, 99))
    def check(program: Any, seed: int) -> None:
        walked = [list(Exhaustive.walk(partial(function, program))) for function in (local, remote)]
        assert walked[0] == walked[1]
        assert kinds([outcome for outcome, _ in walked[0]]) == kinds(
            [outcome for outcome, _ in walked[1]]
        )
        assert local(program, Seeded(seed)) == remote(program, chance=Seeded(seed))

    check()


VERIFY = """
from fractions import Fraction

def verify(style, p, q, draft, chance):
    ratio, rest, last, order = style
    places = list(enumerate(draft))
    for place, token in places if order else places[:1]:
        a, b = p[place][token], q[place][token]
        if not chance.accept([a / b, a, 1 - abs(a - b), 1][ratio]):
            weights = [
                [max(0, x - y) for x, y in zip(p[place], q[place])],
                p[place],
                [abs(x - y) for x, y in zip(p[place], q[place])],
            ][rest]
            return [*draft[:place], chance.draw(weights)]
    return [*draft[: len(places) if order else 1], chance.draw(p[-1 if last else 0])]
"""


def find_verdict(function: Callable[..., Any], style: Any, seed: int) -> Any:
    """Return the result of a law for a function: evidence, a counterexample, or that it fails."""

    def verify(p: Any, q: Any, draft: Any, chance: Any) -> Any:
        return function(style, p, q, draft, chance)

    try:
        found = prove_form(
            VerifierForm(verify), seed, most=40, numbers=("fractions",), through=(NoResult,)
        )
        return found.law, found.cases, found.branches, found.notes
    except LawViolated as accused:
        return accused.counterexample
    except (NoResult, TinyspecError):
        return "failed"


def test_a_law_gives_the_same_verdict_and_counterexample_through_the_child(there: Any) -> None:
    local, remote = here(VERIFY, "verify"), there(VERIFY, "verify")

    @settings(max_examples=12)
    @given(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans()),
        st.integers(0, 3),
    )
    def check(style: Any, seed: int) -> None:
        assert find_verdict(local, style, seed) == find_verdict(remote, style, seed)

    check()
    assert find_verdict(local, (0, 0, True, True), 0)[1] == 40
    assert find_verdict(remote, (0, 0, True, True), 0)[1] == 40


def test_prove_lets_an_exception_through_where_it_is_told_to() -> None:
    def verify(p: Any, q: Any, draft: Any, chance: Any) -> Any:
        raise NoResult("no")

    with pytest.raises(NoResult, match=r"^no$"):
        prove_form(VerifierForm(verify), through=(NoResult,))
    with pytest.raises(TinyspecError, match="no verdict"):
        prove_form(VerifierForm(verify))


def test_a_case_is_played_once_however_often_it_is_asked_for(there: Any) -> None:
    remote = there("def f(x):\n    return [x, x]\n", "f")
    assert remote(Fraction(1, 2)) == [Fraction(1, 2)] * 2
    waited = remote.child.waited
    first = remote(Fraction(1, 2))
    first.append(3)
    assert remote(Fraction(1, 2)) == [Fraction(1, 2)] * 2
    assert remote.child.waited == waited


def test_arguments_by_name_and_a_chance_among_them(there: Any) -> None:
    remote = there(
        "def f(a, *, b=1, chance=None):\n    return [a, b, chance and chance.draw([0, 1])]\n", "f"
    )
    assert remote(5, b=2) == [5, 2, None]
    assert remote(5, b=2, chance=Seeded(0)) == [5, 2, 1]
    with pytest.raises(NoResult, match=r"f raises TypeError.*, given a = 5, c = 1/2"):
        remote(5, c=Fraction(1, 2))


def test_props_keep_what_the_child_process_did_with_them(there: Any) -> None:
    source = """
def count(counter, steps, chance):
    for _ in range(steps):
        counter.add(chance.draw([1, 1]))
    return counter.total
"""
    local, remote = here(source, "count"), there(source, "count")
    for function in (local, remote):
        ends = set()
        for outcome, mass in Exhaustive.walk(lambda chance: count_steps(function, chance)):  # noqa: B023
            ends.add((outcome, mass))
        assert ends == {((5 + a + b, ((a,), (b,))), Fraction(1, 4)) for a in (0, 1) for b in (0, 1)}
    counter = Counter(5)
    with pytest.raises(NoResult, match="count raises ValueError: no more than 3 steps"):
        remote(counter, 9, Seeded(1))
    assert len(counter.trace) == 3
    assert "tests.grade" not in str(props_counter.Counter(1).made_of)


def count_steps(function: Callable[..., Any], chance: Any) -> Any:
    counter = Counter(5)
    return function(counter, 2, chance), tuple(map(tuple, counter.trace))


# ---------------------------------------------------------------------- reports


def test_a_right_submission_has_all_points_twice_the_same(tmp_path: Path) -> None:
    first, second = (grade_tiny(tmp_path, RIGHT) for _ in range(2))
    assert (first.score, first.max_score) == (100, 100)
    assert report_to_json(first) == report_to_json(second)
    assert [result.summary for result in first.results] == [
        "1 law held in 30 cases",
        "1 law held in 17 cases",
    ]
    assert "public cases (seed 0)" in describe_run(first)
    assert "other cases, and draws ten times as many" in describe_run(first)
    final = grade_tiny(tmp_path, RIGHT, cases=grading.choose_cases(True, 7))
    assert describe_run(final).startswith(
        "Final run: seed 7, 10 times as many cases drawn as in the public run."
    )
    assert "no security boundary" in describe_run(final)
    for report in (first, final):
        assert "all passed" not in str(report_to_json(report)).lower()
        assert (
            sum(test["score"] for test in report_to_gradescope(report)["tests"])
            == report_to_gradescope(report)["score"]
            == 100
        )


def test_a_wrong_one_is_shown_the_smallest_case(tmp_path: Path) -> None:
    report = grade_tiny(tmp_path, RIGHT.replace("max(0, x - y)", "abs(x - y)"))
    good, bad = report.results
    assert (good.score, bad.score) == (40, 0)
    assert describe_counterexample(bad) == [
        f"broken: {REST}",
        "  p         [0, 1]",
        "  q         [1, 0]",
        "  yours     [1/2, 1/2]",
        "  expected  [0, 1]",
    ]
    told = report_to_json(report)["tasks"][1]
    assert told["law"] == REST
    assert told["counterexample"]["got"] == ["1/2", "1/2"]
    assert report_to_gradescope(report)["tests"][1]["status"] == "failed"


def test_what_a_law_did_not_foresee_is_no_crash(tmp_path: Path) -> None:
    report = grade_tiny(tmp_path, RIGHT + "\ndef accept(p, q, token, chance):\n    return [1]\n")
    assert "accept gives what its laws cannot judge: TypeError" in report.results[0].sentence
    assert report.score == 60


def test_letters_that_steer_a_terminal_are_not_shown(tmp_path: Path) -> None:
    report = grade_tiny(tmp_path, "def residual(p, q):\n    raise ValueError('\\x1b[2J')\n")
    assert "\x1b" not in "".join(
        [*describe_counterexample(report.results[1]), report.results[1].summary]
    )


def test_one_task_alone(tmp_path: Path) -> None:
    watched: list[Any] = []
    report = grade_tiny(
        tmp_path,
        RIGHT,
        only=["residual"],
        watch=lambda task, done: watched.append((task.name, done)),
    )
    assert (report.score, report.max_score, watched) == (60, 60, [("residual", 0)])
    with pytest.raises(TinyspecError, match="A0 has no task 'nothing': accept, residual"):
        grade_tiny(tmp_path, RIGHT, only=["nothing"])


def test_local_functions_are_judged_by_the_same_words() -> None:
    result = grading.judge_task(
        TINY.tasks[0], lambda p, q, token, chance: chance.accept(p[token]), Cases()
    )
    assert result.counterexample is not None and result.counterexample.law == RATIO
    assert shorten_value(list(range(200))).endswith("195, 196, 197, 198, 199]")


# ---------------------------------------------------------------------- starters


REFERENCE = '''"""A module."""

# solution
from math import floor
# end of solution


def half(x):
    """>>> half(4)
    2
    """
    # solution
    doubled = floor(x) / 2
    return doubled
    # end of solution


class Pile:
    def add(
        self,
        x: int,
    ) -> int:
        """Put on."""
        # solution
        return x + len([self]) + 3
        # end of solution
'''


def test_a_starter_keeps_everything_but_the_solution() -> None:
    text = remove_solutions(REFERENCE, {"half": "A0.1"}, "A0")
    compile(text, "starter", "exec")
    assert '    raise NotImplementedError("A0.1 half: write me")' in text
    assert '        raise NotImplementedError("A0 Pile.add: write me")' in text
    for line in solution_lines(REFERENCE):
        assert line.strip() not in text
    assert "solution" not in text
    assert ">>> half(4)" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f():\n    # solution\n    pass\n", "line 2: this solution has no end"),
        ("# end of solution\n", "line 1: a solution ends, but none has begun"),
        ("# solution\n# solution\n", "line 2: a solution begins inside the one of line 1"),
        (
            "def f():\n    # solution\n# end of solution\n",
            "line 3: a solution ends, but that of line 2 is indented",
        ),
        ("    # solution\n    # end of solution\n", "line 1: this solution stands in no function"),
        (
            (
                '"""return a + b + c"""\ndef f():\n    # solution\n    return a + b + c\n    # '
                "end of solution"
            ),
            "",
        ),
        (
            "x = a * b\ndef f():\n    # solution\n    x = a * b\n    # end of solution",
            "gives away .* x = a [*] b",
        ),
    ],
)
def test_markers_that_do_not_match_and_leaks_are_an_error(text: str, words: str) -> None:
    if not words:
        assert find_leaks(solution_lines(text), "the secret: return a + b + c + d") == []
        return
    with pytest.raises(TinyspecError, match=words):
        remove_solutions(text, {}, "A0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_every_assignment_has_a_starter_that_says_what_to_write_and_leaks_nothing(
    name: str, tmp_path: Path
) -> None:
    assignment = find_assignment(name.lower())
    reference = (assignment_folder(name) / "reference.py").read_text()
    text = make_starter(assignment)
    compile(text, "starter", "exec")
    assert find_leaks(solution_lines(reference), text) == []
    assert sum(task.points for task in assignment.tasks) == 100
    for task in assignment.tasks:
        assert task.title.startswith(f"{name}.")
        assert f"def {task.name}(" in text
    written = write_folder(assignment, tmp_path / "mine")
    assert {"submission.py", "README.md"} <= {path.name for path in written}
    with pytest.raises(TinyspecError, match="is there already"):
        write_folder(assignment, tmp_path / "mine")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "README.md").write_text("mine")
    with pytest.raises(TinyspecError, match=r"README.md is there already"):
        write_folder(assignment, tmp_path / "begun")
    assert [path.name for path in (tmp_path / "begun").iterdir()] == ["README.md"]
    report = grading.grade_folder(assignment, tmp_path / "mine", limits=FAST)
    assert report.score == 0
    assert all("is not written yet" in result.sentence for result in report.results), report.results


def test_an_unknown_assignment_is_an_error() -> None:
    with pytest.raises(TinyspecError, match="no assignment 'A9': there are A1, A2, A3, A4"):
        find_assignment("A9")
