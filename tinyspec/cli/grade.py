"""tinyspec grade: judge a submission by the laws."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base


@click.command("grade", cls=base.Command)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@base.options(
    click.option("--final", is_flag=True, help="The final run: other cases, ten times as many drawn."),
    click.option("--seed", type=click.IntRange(0), help="Of the cases that are drawn.  [default: 0; with --final drawn]"),
    click.option("--task", metavar="NAME", help="Judge this one function."),
    click.option("--seconds", type=click.FloatRange(min=1), help="For a task's answers in all.  [default: 60; final 600]"),
    click.option("--json", "as_json", type=base.OutputPath(allow_dash=True), metavar="FILE",
                 help="Write the report as JSON; - is standard output."),
    click.option("--gradescope", type=base.OutputPath(), metavar="FILE",
                 help="Write Gradescope's results.json."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)  # fmt: skip
def grade(
    name: str,
    folder: Path,
    final: bool,
    seed: int | None,
    task: str | None,
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
      tinyspec grade A1 my-a1 --json report.json
      tinyspec grade A1 handed-in --final --seed 1848 --gradescope results.json
    """
    from rich.console import Console

    from tinyspec.grade import assignments, grading, report
    from tinyspec.grade.process import Limits
    from tinyspec.waiting import counted

    found = assignments.find(name)
    base.check_folder(folder, f"begin one with: tinyspec assignment new {found.name} {folder}")
    cases = grading.cases_of(final, seed)
    count = 1 if task else len(found.tasks)
    terminal = Console(stderr=True)
    with counted(terminal if terminal.is_terminal and not quiet else None) as bar:
        row = bar.add_task("", total=count)

        def watch(task: Any, done: int) -> None:
            bar.update(row, description=f"{task.title:40}", completed=done)

        limits = None if seconds is None else Limits(task=seconds)
        judged = grading.grade(found, folder, cases, limits, task, watch)
    if as_json == Path("-"):
        click.echo(json.dumps(report.as_dict(judged)))
    else:
        report.show(judged, base.console())
    if as_json not in (None, Path("-")):
        as_json.write_text(json.dumps(report.as_dict(judged), indent=1) + "\n", encoding="utf-8")
    if gradescope is not None:
        gradescope.write_text(
            json.dumps(report.gradescope(judged), indent=1) + "\n", encoding="utf-8"
        )
    if judged.score < judged.max_score:
        raise click.exceptions.Exit(1)
