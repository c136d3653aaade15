"""What a graded submission is told: at a terminal, as JSON, and as Gradescope's results.json.

A task is one row of the table, and one test of Gradescope. Where it lost points, its laws follow
with the points of each, and the smallest case in which the first one is broken.
"""

from typing import TYPE_CHECKING, Any

from tinyspec.grade.grading import Report, Result, Verdict
from tinyspec.grade.task import shorten

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 600  # letters of a value
CONTAINER = (
    "The grader is no security boundary: run submissions that you do not trust in a container."
)


def note(report: Report, tells_seed: bool = True) -> str:
    """Return what the score rests on. Who is graded by a final run need not be told its seed."""
    seed, times = report.cases
    if times == 1:
        return (
            f"This run used the public cases (seed {seed}). The final run holds the same laws to other cases, "
            "and draws ten times as many: full marks here are no promise of full marks there."
        )
    run = f"Final run: seed {seed}" if tells_seed else "Final run"
    again = f" The same run again: --final --seed {seed}." if tells_seed else ""
    return f"{run}, {times} times as many cases drawn as in the public run.{again} {CONTAINER}"


def summary(result: Result) -> str:
    """Return the verdict on a task, on one line."""
    if result.counterexample is not None:
        return clean(result.sentence or f"broken: {result.counterexample.law}")
    cases = sum(evidence.cases for evidence in result.kept)
    laws = len(result.kept)
    return f"{laws} law{'s' if laws > 1 else ''} held in {cases} cases"


def table_entry(result: Result) -> str:
    """Return the verdict on a task in a few words, for the table."""
    broken = result.first_broken
    if broken is None:
        return summary(result)
    count = (
        f"{len(result.kept)} of {len(result.verdicts)} laws hold; "
        if len(result.verdicts) > 1
        else ""
    )
    return clean(count + summarize_verdict(broken))


def summarize_verdict(verdict: Verdict) -> str:
    """Return why a law does not hold in a few words: "raised ZeroDivisionError at line 154"."""
    found = verdict.counterexample
    if verdict.failed is not None:
        return verdict.failed.summary
    if found is None:
        return "holds"
    if found.got is None or str(found.got).startswith("None:"):
        return "returned None"
    return f"broken: {found.law}"


def law_lines(result: Result) -> list[str]:
    """Return a line for each law of a task: its points, and what it says."""
    lines = []
    for verdict in result.verdicts:
        points = f"{verdict.score} of {verdict.law.points}"
        why = summarize_verdict(verdict).replace("broken: ", "needs: ")
        why = f" ({why})" if verdict.status == "not judged" else ""
        lines.append(clean(f"  {points:8}  {verdict.status:10}  {verdict.law.sentence}{why}"))
    return lines


def details(result: Result) -> list[str]:
    """Return the first counterexample, a line each; nothing where there is none."""
    found = result.counterexample
    if found is None:
        return []
    if result.sentence:
        return [clean(result.sentence)]
    pairs = [*found.case.items(), ("yours", found.got), ("expected", found.expected)]
    width = max(len(name) for name, _ in pairs)
    return [
        f"broken: {clean(found.law)}",
        *(f"  {clean(n):{width}}  {clean(shorten(v, WIDEST))}" for n, v in pairs),
    ]


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
                "helpers": list(result.helpers),
                "laws": [law_dict(verdict) for verdict in result.verdicts],
            }
            for result in report.results
        ],
    }


def law_dict(verdict: Verdict) -> dict[str, Any]:
    """Return plain data for JSON: a law of a task, its points, and what it found."""
    return {
        "law": verdict.law.sentence,
        "score": verdict.score,
        "max_score": verdict.law.points,
        "status": verdict.status,
        "cases": 0 if verdict.evidence is None else verdict.evidence.cases,
        "counterexample": verdict.counterexample and verdict.counterexample.as_dict(),
    }


def gradescope(report: Report) -> dict[str, Any]:
    """Return what Gradescope reads from results.json: a test for each task, its laws in the output.

    The seed of the cases is in extra_data, which students are not shown.
    """
    return {
        "score": report.score,
        "output": note(report, tells_seed=False),
        "output_format": "text",
        "tests": [
            {
                "name": f"{result.task.title} ({result.task.name})",
                "score": result.score,
                "max_score": result.task.points,
                "status": "failed" if result.counterexample else "passed",
                "output": "\n".join(explain(result) or [summary(result)]),
                "output_format": "text",
            }
            for result in report.results
        ],
        "extra_data": {"seed": report.cases.seed, "times": report.cases.times},
    }


def explain(result: Result) -> list[str]:
    """Return all that is shown of a task that lost points: its laws, and the first
    counterexample.
    """
    if result.first_broken is None:
        return []
    lines = law_lines(result) if len(result.verdicts) > 1 and not is_unjudged(result) else []
    if result.helpers:
        lines.append(
            f"  judged with the reference's {' and '.join(result.helpers)} in the place of yours"
        )
    return [*lines, *details(result)]


def is_unjudged(result: Result) -> bool:
    """Return whether no law could be judged, all for the same reason: a list of them would only
    repeat it.
    """
    said = {str(verdict.failed) for verdict in result.verdicts}
    return (
        len(said) == 1
        and result.first_broken is not None
        and result.first_broken.failed is not None
    )


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
        points = f"{result.score} of {result.task.points}"
        style = "" if result.first_broken is None else "red"
        table.add_row(
            result.task.title, result.task.name, points, Text(table_entry(result), style=style)
        )
    console.print(
        f"{assignment.name} {assignment.title}: {report.score} of {report.max_score} points",
        style="bold",
    )
    console.print(table, highlight=False, markup=False)
    if report.problem:
        console.print(f"\n{clean(report.problem)}", style="red", highlight=False, markup=False)
    for result in [] if report.problem else report.results:
        if lines := explain(result):
            title = f"\n{result.task.title}: {result.score} of {result.task.points} points"
            console.print(title, style="bold", highlight=False, markup=False)
            console.print("\n".join(lines), highlight=False, markup=False)
    console.print(f"\n{note(report)}", highlight=False, markup=False)
