"""tinyspec grade: judge a submission by the laws."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError

STDOUT = Path("-")


task_option = click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="TASK[,TASK...]",
    callback=lambda ctx, option, given: [t for word in given for t in word.split(",") if t],
    help="These tasks alone, as residual, A1.3 or 3; may be repeated.",
)


@click.command("grade", cls=base.Command)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@base.options(
    click.option("--final", is_flag=True, help="The final run: other cases, ten times as many drawn."),
    click.option("--seed", type=click.IntRange(0), help="Of the cases that are drawn.  [default: 0; with --final drawn]"),
    task_option,
    click.option("--seconds", type=click.FloatRange(min=1), help="For a task's answers in all.  [default: 60; final 600]"),
    click.option("--json", "as_json", type=base.OutputPath(allow_dash=True), metavar="FILE",
                 help="Write the report as JSON; - is standard output."),
    click.option("--gradescope", type=base.OutputPath(allow_dash=True), metavar="FILE",
                 help="Write Gradescope's results.json; - is standard output."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)  # fmt: skip
def grade(
    name: str,
    folder: Path,
    final: bool,
    seed: int | None,
    tasks: Sequence[str],
    seconds: float | None,
    as_json: Path | None,
    gradescope: Path | None,
    quiet: bool,
) -> None:
    """Judge FOLDER/submission.py, a solution to assignment NAME: its functions are held to the laws
    of this package.

    Each law has points of its own. Prints them and, for a law that is broken, the smallest case in
    which it is: yours and what was expected. A task is judged with the reference's functions in the
    place of your earlier ones, so that a mistake costs once. The same submission gets the same
    report every time; a final run prints its seed, with which it can be repeated. Exit status 0 is
    full marks; 1 is less.

    The functions run in child processes with limits on time, memory and output. That stops
    accidents. It is no security boundary: run submissions that you do not trust in a container.

    \b
    Examples:
      tinyspec grade A1 my-a1
      tinyspec grade A1 my-a1 --task residual
      tinyspec grade A1 my-a1 --task 1,2,3,4
      tinyspec grade A1 my-a1 --json report.json
      tinyspec grade A1 handed-in --final --seed 1848 --gradescope results.json
    """
    from tinyspec.grade import assignments, grading, report
    from tinyspec.grade.process import Limits

    if as_json == gradescope == STDOUT:
        raise TinyspecError("--json - and --gradescope - both want standard output: name a file")
    found = assignments.find_assignment(name).select(tasks)
    folder = submission_folder(folder, found.name)
    cases = grading.choose_cases(final, seed)
    count = len(found.tasks)
    with base.show_progress(quiet) as advance:

        def watch(task: Any, done: int) -> None:
            advance(f"{task.title:40}", done, count)

        limits = None if seconds is None else Limits(task=seconds)
        judged = grading.grade_folder(found, folder, cases, limits, watch)
    for path, form in ((as_json, report.report_to_json), (gradescope, report.report_to_gradescope)):
        if path == STDOUT:
            click.echo(json.dumps(form(judged)))
        elif path is not None:
            path.write_text(json.dumps(form(judged), indent=1) + "\n", encoding="utf-8")
    if STDOUT not in (as_json, gradescope):
        report.print_report(judged, base.console())
    if judged.score < judged.max_score:
        raise click.exceptions.Exit(1)


def submission_folder(path: Path, name: str) -> Path:
    """Return the folder to grade: for a submission.py, the folder that holds it.

    Raises TinyspecError where there is none, with what to do.
    """
    if path.is_file():
        if path.name == "submission.py":
            return path.parent
        hint = "name the folder that holds submission.py"
        if path.suffix == ".py":
            hint = f"rename it to submission.py: tinyspec grade {name} {path.parent}"
        raise TinyspecError(f"{path} is a file, no folder: {hint}")
    base.check_folder(path, f"begin one with: tinyspec assignment new {name} {path}")
    return path
