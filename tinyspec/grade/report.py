"""Write what a graded submission is told: at a terminal, as JSON, and as Gradescope's results.json.

The three say the same in the same words (`TaskResult.summary`, `explain_result`). A task is one row
of the table, and one test of Gradescope. If it lost points, its laws follow with the points of
each, and the smallest case in which the first one is broken.
"""

from typing import TYPE_CHECKING, Any

from tinyspec.grade.grading import GradeReport, LawVerdict, TaskResult
from tinyspec.grade.task import shorten_value

if TYPE_CHECKING:
    from rich.console import Console

MAX_VALUE_LETTERS = 600
CONTAINER = (
    "The grader is no security boundary: run submissions that you do not trust in a container."
)


def describe_run(report: GradeReport, tells_seed: bool = True) -> str:
    """Return what the score rests on. A student graded by a final run need not be told its seed."""
    seed, times = report.cases
    if times == 1:
        return (
            f"This run used the public cases (seed {seed}). The final run holds the same laws to "
            "other cases, and draws ten times as many: full marks here are no promise of full "
            "marks there."
        )
    run = f"Final run: seed {seed}" if tells_seed else "Final run"
    again = f" The same run again: --final --seed {seed}." if tells_seed else ""
    return f"{run}, {times} times as many cases drawn as in the public run.{again} {CONTAINER}"


def explain_result(result: TaskResult) -> list[str]:
    """Return all that is shown of a task that lost points: its laws, and a counterexample."""
    if result.first_broken is None:
        return []
    lines = list_laws(result) if len(result.verdicts) > 1 and not result.is_unjudged else []
    if result.helpers:
        names = " and ".join(result.helpers)
        lines.append(f"  judged with the reference's {names} in the place of yours")
    return [*lines, *describe_counterexample(result)]


def list_laws(result: TaskResult) -> list[str]:
    """Return a line for each law of a task. A reason for not judging it is said once."""
    lines, said = [], set[str]()
    for verdict in result.verdicts:
        points = f"{verdict.score} of {verdict.law.points}"
        reason = verdict.reason.replace("broken: ", "needs: ")
        is_news = verdict.status == "not judged" and reason not in said
        said.add(reason)
        why = f" ({reason})" if is_news else ""
        lines.append(
            make_printable(f"  {points:8}  {verdict.status:10}  {verdict.law.sentence}{why}")
        )
    return lines


def describe_counterexample(result: TaskResult) -> list[str]:
    """Return the first counterexample, a line each; nothing if every law holds."""
    found = result.counterexample
    if found is None:
        return []
    if result.sentence:
        return [make_printable(result.sentence)]
    pairs = [*found.case.items(), ("yours", found.got), ("expected", found.expected)]
    width = max(len(name) for name, _ in pairs)
    return [
        f"broken: {make_printable(found.law)}",
        *(
            f"  {make_printable(n):{width}}  {make_printable(shorten_value(v, MAX_VALUE_LETTERS))}"
            for n, v in pairs
        ),
    ]


def make_printable(text: str) -> str:
    """Return a text without letters that would steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def report_to_json(report: GradeReport) -> dict[str, Any]:
    """Return a report as plain data for JSON."""
    return {
        "assignment": report.assignment.name,
        "title": report.assignment.title,
        "run": "public" if report.cases.times == 1 else "final",
        "seed": report.cases.seed,
        "times": report.cases.times,
        "score": report.score,
        "max_score": report.max_score,
        "note": describe_run(report),
        "tasks": [
            {
                "name": result.task.name,
                "title": result.task.title,
                "score": result.score,
                "max_score": result.task.points,
                "law": result.counterexample and result.counterexample.law,
                "counterexample": result.counterexample and result.counterexample.as_dict(),
                "message": make_printable(result.summary),
                "helpers": list(result.helpers),
                "laws": [_verdict_to_json(verdict) for verdict in result.verdicts],
            }
            for result in report.results
        ],
    }


def _verdict_to_json(verdict: LawVerdict) -> dict[str, Any]:
    return {
        "law": verdict.law.sentence,
        "score": verdict.score,
        "max_score": verdict.law.points,
        "status": verdict.status,
        "cases": 0 if verdict.evidence is None else verdict.evidence.cases,
        "counterexample": verdict.counterexample and verdict.counterexample.as_dict(),
    }


def report_to_gradescope(report: GradeReport) -> dict[str, Any]:
    """Return what Gradescope reads from results.json: a test for each task.

    The seed of the cases is in extra_data, which students are not shown.
    """
    return {
        "score": report.score,
        "output": describe_run(report, tells_seed=False),
        "output_format": "text",
        "tests": [
            {
                "name": f"{result.task.title} ({result.task.name})",
                "score": result.score,
                "max_score": result.task.points,
                "status": "failed" if result.counterexample else "passed",
                "output": "\n".join(explain_result(result) or [result.summary]),
                "output_format": "text",
            }
            for result in report.results
        ],
        "extra_data": {"seed": report.cases.seed, "times": report.cases.times},
    }


def print_report(report: GradeReport, console: "Console") -> None:
    """Print a line for each task, then what was found, then what the score rests on."""
    from rich.table import Table
    from rich.text import Text

    def print_plain(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False)

    assignment = report.assignment
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("function", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for result in report.results:
        verdict = Text(make_printable(result.summary), style="red" if result.first_broken else "")
        points = f"{result.score} of {result.task.points}"
        table.add_row(result.task.title, result.task.name, points, verdict)
    title = f"{assignment.name} {assignment.title}: {report.score} of {report.max_score} points"
    console.print(title, style="bold")
    console.print(table, highlight=False, markup=False)
    if report.problem:
        print_plain(f"\n{make_printable(report.problem)}", "red")
    for result in [] if report.problem else report.results:
        if lines := explain_result(result):
            print_plain(
                f"\n{result.task.title}: {result.score} of {result.task.points} points", "bold"
            )
            print_plain("\n".join(lines))
    print_plain(f"\n{describe_run(report)}")
