"""What a graded submission is told: at a terminal, as JSON, and as Gradescope's results.json."""

from typing import TYPE_CHECKING, Any

from tinyspec.grade.grading import Report, Result
from tinyspec.grade.task import brief

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 600  # letters of a value
CONTAINER = "The grader is no security boundary: run submissions that you do not trust in a container."


def note(report: Report) -> str:
    """What the score rests on."""
    seed, times = report.cases
    if times == 1:
        return (
            f"This run used the public cases (seed {seed}). The final run holds the same laws to other cases, "
            "and draws ten times as many: full marks here are no promise of full marks there."
        )
    return f"Final run: seed {seed}, {times} times as many cases drawn as in the public run. {CONTAINER}"


def summary(result: Result) -> str:
    """The verdict on a task, on one line."""
    if result.counterexample is not None:
        return clean(result.sentence or f"broken: {result.counterexample.law}")
    cases = sum(evidence.cases for evidence in result.kept)
    laws = len(result.kept)
    return f"{laws} law{'s' if laws > 1 else ''} held in {cases} cases"


def details(result: Result) -> list[str]:
    """The counterexample, a line each; nothing where there is none."""
    found = result.counterexample
    if found is None:
        return []
    if result.sentence:
        return [clean(result.sentence)]
    pairs = [*found.case.items(), ("yours", found.got), ("expected", found.expected)]
    width = max(len(name) for name, _ in pairs)
    return [f"broken: {clean(found.law)}", *(f"  {clean(n):{width}}  {clean(brief(v, WIDEST))}" for n, v in pairs)]


def clean(text: str) -> str:
    """Without letters that would steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def as_dict(report: Report) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "assignment": report.assignment.name,
        "title": report.assignment.title,
        "run": "public" if report.cases.times == 1 else "final",
        "seed": report.cases.seed,
        "times": report.cases.times,
        "score": report.score,
        "max_score": report.max_score,
        "note": note(report),
        "tasks": [
            {
                "name": result.task.name,
                "title": result.task.title,
                "score": result.score,
                "max_score": result.task.points,
                "law": result.counterexample and result.counterexample.law,
                "counterexample": result.counterexample and result.counterexample.as_dict(),
                "message": summary(result),
            }
            for result in report.results
        ],
    }


def gradescope(report: Report) -> dict[str, Any]:
    """What Gradescope reads from results.json: a test for each task."""
    return {
        "score": report.score,
        "output": note(report),
        "output_format": "text",
        "tests": [
            {
                "name": f"{result.task.title} ({result.task.name})",
                "score": result.score,
                "max_score": result.task.points,
                "status": "failed" if result.counterexample else "passed",
                "output": "\n".join(details(result) or [summary(result)]),
                "output_format": "text",
            }
            for result in report.results
        ],
    }


def show(report: Report, console: "Console") -> None:
    """The whole report: a line for each task, then what was found, then what the score rests on."""
    from rich.table import Table
    from rich.text import Text

    assignment = report.assignment
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("function", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for result in report.results:
        good = result.counterexample is None
        told = summary(result) if good or not result.sentence else "there was nothing to judge"
        points = f"{result.score} of {result.task.points}"
        table.add_row(result.task.title, result.task.name, points, Text(told, style="" if good else "red"))
    console.print(f"{assignment.name} {assignment.title}: {report.score} of {report.max_score} points", style="bold")
    console.print(table, highlight=False, markup=False)
    if report.problem:
        console.print(f"\n{clean(report.problem)}", style="red", highlight=False, markup=False)
    for result in [] if report.problem else report.results:
        if lines := details(result):
            console.print(f"\n{result.task.title}", style="bold", highlight=False, markup=False)
            console.print("\n".join(lines), highlight=False, markup=False)
    console.print(f"\n{note(report)}", highlight=False, markup=False)
