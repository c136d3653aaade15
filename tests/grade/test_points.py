"""The points: each law earns its own, a mistake costs once, an unwritten function earns none."""

import re
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.grade.tiny import (
    FAST,
    RATIO,
    REST,
    RIGHT,
    TINY,
    grade_tiny,
    judge_ratio,
    judge_residual,
    submit,
)
from tinyspec.errors import TinyspecError
from tinyspec.grade import bundle, grading
from tinyspec.grade.assignments import A1, ASSIGNMENTS, find_assignment
from tinyspec.grade.process import Limits
from tinyspec.grade.report import explain_result, report_to_gradescope, report_to_json
from tinyspec.grade.starter import (
    assignment_folder,
    extract_helpers,
    fill_template,
    make_rubric,
    make_starter,
    read_reference,
    write_folder,
)
from tinyspec.grade.task import Cases, GradedLaw, Task
from tinyspec.laws.evidence import Evidence, accuse

SLOW = Limits(task=600.0, call=30.0)  # for functions that are right, on a machine that is busy
REFERENCE = (assignment_folder("A1") / "reference.py").read_text(encoding="utf-8")


def edit_reference(*changes: tuple[str, str], text: str = REFERENCE) -> str:
    """Return the reference of A1 with some lines exchanged."""
    for old, line in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, line)
    return text


def score_a1(folder: Path, source: str, *only: str) -> dict[str, int]:
    """Return the points of a submission to A1, by task."""
    submit(folder, source)
    names = only or [task.name for task in A1.tasks]
    return {
        name: grading.grade_folder(A1.select([name]), folder, limits=SLOW).score for name in names
    }


def task_of(*laws: GradedLaw) -> Task:
    return Task("f", "A0.1 F", laws)


def law_of(points: int, sentence: str, *needs: str, cases: int = 1, breaks: str = "") -> GradedLaw:
    """Return a law that holds, or that breaks the law named."""

    def judge(function: Any, cases_drawn: Cases) -> Evidence:
        if breaks:
            accuse(breaks, 1, function())
        return Evidence(sentence, cases)

    return GradedLaw(points, sentence, judge, needs)


# ---------------------------------------------------------------------- points of each law


def test_a_law_that_holds_earns_its_points_whatever_becomes_of_the_others() -> None:
    task = task_of(
        law_of(1, "a"), law_of(2, "b", breaks="b"), law_of(4, "c"), law_of(8, "d", breaks="a")
    )
    result = grading.judge_task(task, lambda: 0)
    assert (result.score, result.task.points) == (5, 15)
    assert [verdict.status for verdict in result.verdicts] == [
        "holds",
        "broken",
        "holds",
        "not judged",
    ]
    assert result.counterexample is not None and result.counterexample.law == "b"


def test_a_law_earns_nothing_where_it_looked_at_nothing_or_lacks_what_it_needs() -> None:
    task = task_of(
        law_of(1, "a", cases=0), law_of(2, "b", "a"), law_of(4, "c", "d"), law_of(8, "d")
    )
    result = grading.judge_task(task, lambda: 0)
    assert result.score == 12
    assert [verdict.status for verdict in result.verdicts] == [
        "not judged",
        "not judged",
        "holds",
        "holds",
    ]
    assert "while another is broken: a" in str(result.verdicts[1].failed)


def test_what_the_grader_does_not_allow_costs_the_whole_task(tmp_path: Path) -> None:
    """Also what is done in the last case of the last law."""
    laws = (
        GradedLaw(40, RATIO, judge_ratio),
        GradedLaw(60, REST, lambda function, cases: judge_residual(_residual(function), cases)),
    )
    both = TINY._replace(tasks=(Task("accept", "A0.1 Both", laws),))
    source = f"{RIGHT}\ndef accept(p, q, token, chance):\n    if chance is None:\n        "
    source += "{}\n        return residual(p, q)\n    return chance.accept(p[token] / q[token])\n"
    for line, score in (("pass", 100), ("p = q", 40), ("open('written', 'w')", 0)):
        report = grading.grade_folder(both, submit(tmp_path, source.format(line)), limits=FAST)
        assert report.score == score, line


def _residual(function: Any) -> Any:
    """Return a function that asks `accept` for the residual."""
    return lambda p, q: function(p, q, 0, None)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_new_folder_lists_the_points_of_every_law(name: str, tmp_path: Path) -> None:
    write_folder(find_assignment(name), tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    for task in find_assignment(name).tasks:
        for law in task.laws:
            line = next(
                line
                for line in text.splitlines()
                if f"`{task.name}` |" in line and f"| {law.sentence}" in line
            )
            assert line.endswith(f" | {law.points} |")
            assert (" (only where law " in line) is bool(law.needs)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_points_are_whole_and_add_up(name: str) -> None:
    tasks = find_assignment(name).tasks
    assert sum(task.points for task in tasks) == 100
    for at, task in enumerate(tasks):
        sentences = [law.sentence for law in task.laws]
        assert len(set(sentences)) == len(sentences)
        assert all(type(law.points) is int and law.points > 0 for law in task.laws)
        assert all(set(law.needs) < set(sentences) for law in task.laws)
        assert set(task.uses) <= {earlier.name for earlier in tasks[:at]}


PAGE = (assignment_folder("A1").parents[1] / "instructors.md").read_text(encoding="utf-8")


def test_the_page_for_instructors_has_the_points_of_the_code_and_is_short() -> None:
    for name in ASSIGNMENTS:
        assert make_rubric(find_assignment(name)) in PAGE
    prose = re.sub(r"```.*?```", "", PAGE.split("## The laws and their points")[0], flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.strip().startswith("|")]
    assert len(" ".join(lines).split()) <= 900
    points = {task.title.split()[0]: task.points for task in A1.tasks}
    assert sum(points[f"A1.{number}"] for number in (1, 2, 3, 4)) == 70 and points["A1.5"] == 30
    assert "A1.1 to A1.4, 70 points" in PAGE and "A1.5, 30 points" in PAGE


def test_the_page_s_container_has_the_places_that_the_bundle_asks_for() -> None:
    for place in (
        "/autograder/submission:ro",
        "/autograder/results",
        "/autograder/source/run_autograder",
    ):
        assert place in PAGE
    setup, run = fill_template("setup.sh"), fill_template("run_autograder.sh")
    assert '"$root/submission"' in run and '"$root/results/results.json"' in run
    assert "/autograder/venv/bin/pip" in setup and "$root/venv/bin/python" in run


def test_the_page_s_rows_are_distributions_and_a_student_s_own() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    space: dict[str, Any] = {}
    exec(textwrap.dedent(code), space)
    for student in range(20_000):  # four of these would be given p = q, if it were not drawn again
        p, q = space["draw_rows"](student)
        assert sum(p) == sum(q) == 1 and len(p) == len(q) == 4 and p != q
    assert space["draw_rows"]("1") == space["draw_rows"]("1") != space["draw_rows"]("2")


# ---------------------------------------------------------------------- half-right submissions


TOP_P = ("        kept = kept[:size]\n", "        kept = kept[: size - 1]\n")
NOT_CAPPED = ("return min(Fraction(1), p[token] / q[token])", "return p[token] / q[token]")
NOT_NORMALISED = ("return [x / mass for x in left] if mass else list(p)", "return left")
FROM_P = ("chance.draw(residual(p_rows[place], q_rows[place]))", "chance.draw(p_rows[place])")
NEWEST = ("            unread = [*text, *drafted][len(draft) :]\n",
          "            unread = [*text, *drafted][-1:] if len(draft) else text\n")  # fmt: skip


@pytest.mark.parametrize(
    "slips", [(TOP_P, NOT_CAPPED, NOT_NORMALISED, FROM_P), (TOP_P, NOT_NORMALISED, FROM_P, NEWEST)]
)
@pytest.mark.slow
def test_four_natural_slips_leave_at_least_half_of_the_points(slips: Any, tmp_path: Path) -> None:
    """Top-p is a token short, the acceptance may exceed 1, the residual is not normalised, and a
    rejected token is drawn from p again. Or the draft never reads the last token of a draft that
    was accepted whole.
    """
    scores = score_a1(tmp_path, edit_reference(*slips))
    assert 50 <= sum(scores.values()) < 100
    lost = [task.name for task in A1.tasks if scores[task.name] < task.points]
    assert len(lost) == 4


REWIND = """            target,
            draft,
        ):  # the newest token is no model's yet, and what was rejected must go
            session.rewind(min(len(session), len(text) - 1))
"""


@pytest.mark.parametrize(
    "slip",
    [
        REWIND.replace("            draft,\n", ""),
        REWIND.replace("            target,\n", ""),
        REWIND.replace("min(len(session), len(text) - 1)", "len(text) - 1"),
    ],
    ids=["draft", "target", "too far"],
)
def test_a_session_that_raises_costs_the_whole_task(slip: str, tmp_path: Path) -> None:
    """A model that is never rewound is asked to score nothing.

    The page and the hand-out say what that costs.
    """
    assert score_a1(tmp_path, edit_reference((REWIND, slip)), "generate") == {"generate": 0}
    assert "the 30 points of `generate` are lost" in " ".join(PAGE.split())


NO_IDEA = """
def warp(weights, temperature, top_k, top_p):
    return [Fraction(1, len(weights))] * len(weights)

def acceptance(p, q, token):
    return Fraction(1)

def residual(p, q):
    return p

def verify(p_rows, q_rows, draft, chance):
    return [chance.draw(p_rows[0])]

def generate(target, draft, prompt, n, gamma, eos, knobs, chance):
    text = list(prompt)
    while len(text) < len(prompt) + n and (len(text) == len(prompt) or text[-1] != eos):
        text.append(chance.draw(warp(target.score(text[len(target):])[-1], *knobs)))
    return text[len(prompt):]
"""


@pytest.mark.slow
def test_functions_that_do_not_try_earn_little(tmp_path: Path) -> None:
    """Plain decoding is half of the loop. Functions that return what lies at hand earn little."""
    scores = score_a1(tmp_path, f"from fractions import Fraction\n{NO_IDEA}")
    assert scores == {"warp": 3, "acceptance": 2, "residual": 4, "verify": 3, "generate": 15}
    assert f"get {sum(scores.values())} of 100, most of it for plain decoding" in " ".join(
        PAGE.split()
    )


# ---------------------------------------------------------------------- the reference's helpers


UNWRITTEN = "    raise NotImplementedError\n"


def remove_bodies(*names: str) -> str:
    """Return the reference of A1 without the bodies of these functions."""
    return REFERENCE + "".join(f"\ndef {name}(*given):\n{UNWRITTEN}" for name in names)


@pytest.mark.slow
def test_a_mistake_in_a_helper_costs_once(tmp_path: Path) -> None:
    scores = score_a1(
        tmp_path, edit_reference(TOP_P, NOT_NORMALISED), "residual", "verify", "generate"
    )
    assert scores == {"residual": 5, "verify": 25, "generate": 30}


@pytest.mark.slow
def test_what_is_not_written_earns_nothing_and_what_builds_on_it_everything(tmp_path: Path) -> None:
    scores = score_a1(tmp_path, remove_bodies("warp", "acceptance", "residual", "verify"))
    assert scores == {"warp": 0, "acceptance": 0, "residual": 0, "verify": 0, "generate": 30}


def test_helpers_are_replaced_in_every_file_and_under_every_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(edit_reference(NOT_NORMALISED), encoding="utf-8")
    source = "from mine import acceptance, generate, residual, verify, warp\n"
    assert score_a1(tmp_path, source, "residual", "verify") == {"residual": 5, "verify": 25}
    (tmp_path / "mine.py").write_text(
        edit_reference(NOT_NORMALISED, ("chance.draw(residual(", "chance.draw(rest("))
        + "\nrest = residual\n",
        encoding="utf-8",
    )
    assert score_a1(tmp_path, source, "verify") == {"verify": 25}


def test_a_helper_of_another_form_is_judged_where_it_stands(tmp_path: Path) -> None:
    """Who gave `residual` one argument more, and passes it, has a `verify` that works with that
    residual alone.
    """
    source = edit_reference(
        (
            "def residual(p: Row, q: Row) -> Row:",
            "def residual(p: Row, q: Row, place: int = 0) -> Row:",
        ),
        (
            "residual(p_rows[place], q_rows[place])",
            "residual(p_rows[place], q_rows[place], place=place)",
        ),
    )
    assert score_a1(tmp_path, source, "residual", "verify") == {"residual": 15, "verify": 25}


def test_the_report_says_whose_functions_stood_in_place(tmp_path: Path) -> None:
    report = grading.grade_folder(
        A1.select(["verify"]), submit(tmp_path, edit_reference(FROM_P)), limits=SLOW
    )
    assert report_to_json(report)["tasks"][0]["helpers"] == ["acceptance", "residual"]
    assert (
        "  judged with the reference's acceptance and residual in the place of yours"
        in explain_result(report.results[0])
    )
    inlined = "from fractions import Fraction\n"
    inlined += "def verify(p_rows, q_rows, draft, chance):\n    return []\n"
    report = grading.grade_folder(A1.select(["verify"]), submit(tmp_path, inlined), limits=SLOW)
    assert report.results[0].helpers == []


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_the_helpers_of_a_task_hold_no_solution_of_it(name: str) -> None:
    assignment = find_assignment(name)
    for task in assignment.tasks:
        source = extract_helpers(read_reference(assignment), task.uses)
        compile(source, "helpers", "exec")
        given = [other.name for other in assignment.tasks if f"def {other.name}(" in source]
        assert set(given) == set(task.uses)
    assert not any(
        "climb" in extract_helpers(read_reference(find_assignment("A3")), task.uses)
        for task in find_assignment("A3").tasks
    )


HUNT = """
import gc, sys, types

def acceptance(p, q, token): ...
def residual(p, q): ...

def verify(p_rows, q_rows, draft, chance):
    mine = sys.modules["submission"]
    spaces = [vars(mine), acceptance.__globals__, residual.__globals__]
    modules, functions = types.ModuleType, types.FunctionType
    spaces += [vars(module) for module in sys.modules.values() if isinstance(module, modules)]
    spaces += [found.__globals__ for found in gc.get_objects() if isinstance(found, functions)]
    for space in spaces:
        found = space.get("verify")
        if isinstance(found, types.FunctionType) and found.__code__ is not verify.__code__:
            return found(p_rows, q_rows, draft, chance)
    raise LookupError("no other verify")
"""


def test_no_submission_finds_the_reference_of_the_task_itself(tmp_path: Path) -> None:
    report = grading.grade_folder(A1.select(["verify"]), submit(tmp_path, HUNT), limits=SLOW)
    assert report.score == 0
    assert "raises LookupError: no other verify" in report.results[0].sentence


def test_a_helper_in_the_place_of_the_task_stays_where_it_is(tmp_path: Path) -> None:
    scores = score_a1(
        tmp_path, REFERENCE + "\nverify = acceptance\ngenerate = verify\n", "verify", "generate"
    )
    assert scores == {"verify": 0, "generate": 0}


# ---------------------------------------------------------------------- a part of an assignment


def test_tasks_are_named_by_function_or_number() -> None:
    names = [task.name for task in A1.select(["5", "A1.3", "verify", "a1.4"]).tasks]
    assert names == ["residual", "verify", "generate"]
    assert A1.select([]) == A1
    for wrong in ("A2.3", "6", "nothing", ""):
        with pytest.raises(TinyspecError, match=f"A1 has no task '{wrong}': warp, acceptance"):
            A1.select([wrong])


FIRST, SECOND = A1.select("1234"), A1.select("5")


def test_a_part_has_its_own_points_starter_and_readme(tmp_path: Path) -> None:
    """Two lectures: A1.1 to A1.4 give 70 points, A1.5 gives 30."""
    assert (FIRST.points, SECOND.points) == (70, 30)
    write_folder(FIRST, tmp_path / "first")
    text = (tmp_path / "first" / "submission.py").read_text(encoding="utf-8")
    compile(text, "starter", "exec")
    assert "def generate(" not in text and "class Session" not in text
    assert text.count(": write me") == 4 and "class Dice" in text
    readme = (tmp_path / "first" / "README.md").read_text(encoding="utf-8")
    assert "This homework is A1.1, A1.2, A1.3 and A1.4 alone." in readme
    assert "tinyspec grade A1 . --task 1,2,3,4\n" in readme and "`generate`" not in readme
    write_folder(SECOND, tmp_path / "second")
    text = (tmp_path / "second" / "submission.py").read_text(encoding="utf-8")
    assert text.count(": write me") == 1 and "A1.5 generate: write me" in text
    assert "A1.4 verify: put your own from the earlier homework here" in text


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_every_task_can_be_a_homework_alone(name: str) -> None:
    for task in find_assignment(name).tasks:
        text = make_starter(find_assignment(name).select([task.name]))
        space: dict[str, Any] = {"__name__": "starter"}
        exec(compile(text, "starter", "exec"), space)
        mine = {other.name for other in find_assignment(name).tasks if other.name in space}
        assert mine == {task.name, *task.uses}


@pytest.mark.slow
def test_a_homework_is_judged_with_the_reference_in_place_of_earlier_ones(tmp_path: Path) -> None:
    """The starter of A1.5 with `generate` written, and nothing else, has full marks."""
    source = f"{make_starter(SECOND)}\n\n{extract_helpers(REFERENCE, ['generate'])}"
    names = ("warp", "acceptance", "residual", "verify")
    source += "".join(f"\ndef {name}(*given):\n    raise NotImplementedError\n" for name in names)
    report = grading.grade_folder(SECOND, submit(tmp_path, source), limits=SLOW)
    assert (report.score, report.max_score) == (30, 30)


def test_a_bundle_of_a_part_judges_it_alone(tmp_path: Path) -> None:
    bundle.write_bundle(SECOND, tmp_path / "second.zip", 7)
    with ZipFile(tmp_path / "second.zip") as packed:
        script = packed.read("run_autograder").decode()
        assert '"$root/submission" --task 5 --final --seed 7' in script
        assert "A1.5, 30 points" in packed.read("README.txt").decode()
        helpers = packed.read("tinyspec/_assignments/A1/reference.py").decode()
    assert "def verify(" in helpers and "def generate(" not in helpers
    bundle.write_bundle(A1, tmp_path / "all.zip", 7)
    with ZipFile(tmp_path / "all.zip") as packed:
        assert "--task" not in packed.read("run_autograder").decode()


# ---------------------------------------------------------------------- the table


TABLE = {
    "x = 1\n    return x / 0": "raised ZeroDivisionError at line {line}",
    "pass": "returned None",
    "raise NotImplementedError('write me')": "is not written yet (NotImplementedError)",
    "while True: pass": "took longer than 1.5 s",
    "from helper import fail; fail()": "raised KeyError at line 2 of helper.py",
    "return [Fraction(1, 7)] * 2": "broken: the residual is max(0, p - q), normalised",
    "return (x for x in p)": "returned a generator, which is no plain data",
    "import os; os._exit(3)": "ends the process (exit status 3)",
}


@pytest.mark.parametrize("body", TABLE)
def test_the_table_says_in_a_few_words_what_happened(body: str, tmp_path: Path) -> None:
    submit(tmp_path, "")
    (tmp_path / "helper.py").write_text("def fail():\n    raise KeyError(3)\n", encoding="utf-8")
    source = f"from fractions import Fraction\n{RIGHT}\ndef residual(p, q):\n    {body}\n"
    result = grade_tiny(tmp_path, source, only=["residual"]).results[0]
    assert result.summary == TABLE[body].format(line=source.count("\n"))


def test_the_table_says_why_a_file_could_not_be_imported(tmp_path: Path) -> None:
    for source, words in (
        ("x = (\n", "raised SyntaxError at line 1"),
        ("\nx = 1 / 0\n", "raised ZeroDivisionError at line 2"),
    ):
        entries = [result.summary for result in grade_tiny(tmp_path, source).results]
        assert entries == [words] * 2
    nowhere = grading.grade_folder(TINY, tmp_path / "nowhere", limits=FAST)
    assert [result.summary for result in nowhere.results] == ["there is no submission.py"] * 2


def test_the_table_counts_the_laws_that_hold(tmp_path: Path) -> None:
    report = grading.grade_folder(
        A1.select(["verify"]), submit(tmp_path, edit_reference(FROM_P)), limits=SLOW
    )
    assert report.results[0].summary.startswith("3 of 4 laws hold; broken: joint distribution")


# ---------------------------------------------------------------------- reports for machines


@pytest.mark.slow
def test_json_and_gradescope_have_the_points_of_every_law(tmp_path: Path) -> None:
    report = grading.grade_folder(
        A1, submit(tmp_path, edit_reference(NOT_CAPPED, FROM_P)), limits=SLOW
    )
    told, scope = report_to_json(report), report_to_gradescope(report)
    assert told["score"] == scope["score"] == sum(test["score"] for test in scope["tests"]) == 85
    for task, test in zip(told["tasks"], scope["tests"], strict=True):
        assert task["score"] == sum(law["score"] for law in task["laws"]) == test["score"]
        assert (
            task["max_score"] == sum(law["max_score"] for law in task["laws"]) == test["max_score"]
        )
        assert (
            (test["status"] == "passed")
            is (task["law"] is None)
            is (task["score"] == task["max_score"])
        )
    verify = told["tasks"][3]
    assert [law["status"] for law in verify["laws"]] == ["holds", "holds", "holds", "broken"]
    assert [law["cases"] > 0 for law in verify["laws"]] == [True, True, True, False]
    assert verify["laws"][3]["counterexample"] == verify["counterexample"]
    assert verify["law"] == verify["laws"][3]["law"]
    for law in verify["laws"]:
        assert f"{law['score']} of {law['max_score']}" in scope["tests"][3]["output"]


def test_a_final_run_draws_its_seed_and_does_not_show_it_to_students(tmp_path: Path) -> None:
    first, second = (grading.choose_cases(True, None) for _ in range(2))
    assert first.seed != second.seed and first.times == second.times == grading.FINAL_TIMES
    assert grading.choose_cases(False, None) == Cases(0, 1)
    report = grade_tiny(tmp_path, RIGHT, cases=Cases(987_654_321, 10))
    told = report_to_gradescope(report)
    assert told["extra_data"] == {"seed": 987_654_321, "times": 10}
    assert "987654321" not in str({name: told[name] for name in told if name != "extra_data"})
    assert "--final --seed 987654321" in report_to_json(report)["note"]


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    wrong = RIGHT.replace("max(0, x - y)", "abs(x - y)")
    cases = grading.choose_cases(True, None)
    first, second = (report_to_json(grade_tiny(tmp_path, wrong, cases=cases)) for _ in range(2))
    assert first == second
    assert Fraction(first["score"]) == 40
