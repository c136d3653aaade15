"""tinyspec grade: judge a submission by the laws; tinyspec assignment: list, begin and bundle."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import OUTPUT_FILE, OUTPUT_FOLDER, flag, option
from tinyspec.errors import TinyspecError
from tinyspec.files import write_whole

STDOUT = Path("-")
REPORT_FILE = base.OutputPath(allow_dash=True)
SEED = click.IntRange(0)
A_DAY = 86_400  # seconds

task_option = base.list_option(
    "--task",
    "tasks",
    metavar="TASK[,TASK...]",
    help="These tasks alone, as residual, A1.3 or 3; may be repeated.",
)


@click.command("grade", cls=base.Command)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@flag("--final", help="The final run: other cases, ten times as many drawn.")
@option("--seed", type=SEED, help="Of the cases that are drawn.  [default: 0; with --final drawn]")
@task_option
@option(
    "--seconds",
    type=float,
    help="Time limit of a whole task.  [default: 60; final 600]",
)
@option(
    "--json",
    "as_json",
    type=REPORT_FILE,
    metavar="FILE",
    help="Write the report as JSON; - is standard output.",
)
@option(
    "--gradescope",
    type=REPORT_FILE,
    metavar="FILE",
    help="Write Gradescope's results.json; - is standard output.",
)
@base.quiet_option
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

    if seconds is not None and not 1 <= seconds <= A_DAY:
        raise TinyspecError(f"--seconds {seconds:g}: give 1 to {A_DAY}, a day")
    if as_json == gradescope == STDOUT:
        raise TinyspecError("--json - and --gradescope - both want standard output: name a file")
    found = assignments.find_assignment(name).select(tasks)
    folder = submission_folder(folder, found.name)
    if as_json is None and gradescope is None:  # else the report says what is wrong
        hint = f": name the folder of yours, or begin one: tinyspec assignment new {name} {folder}"
        if missing := grading.explain_missing_submission(folder, hint):
            raise TinyspecError(missing)
    cases = grading.choose_cases(final, seed)
    count = len(found.tasks)
    with base.show_command_progress(quiet) as advance:

        def watch(task: Any, done: int) -> None:
            advance(f"{task.title:40}", done, count)

        limits = None if seconds is None else Limits(task=seconds)
        judged = grading.grade_folder(found, folder, cases, limits, watch)
    for path, form in ((as_json, report.report_to_json), (gradescope, report.report_to_gradescope)):
        if path == STDOUT:
            click.echo(json.dumps(form(judged)))
        elif path is not None:
            write_whole(path, (json.dumps(form(judged), indent=1) + "\n").encode())
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


# ---------------------------------------------------------------------- assignments


@click.group("assignment", cls=base.Group)
def assignment() -> None:
    """Assignments: list them, begin one, or bundle its autograder.

    \b
    Examples:
      tinyspec assignment list
      tinyspec assignment new A1 my-a1          a hand-out and a starter
      tinyspec grade A1 my-a1                   judge it
      tinyspec assignment bundle A1 a1.zip      for instructors: upload it to Gradescope
    """


@assignment.command("list")
@flag("--json", "as_json", help="JSON on standard output.")
def list_assignments(as_json: bool) -> None:
    """The assignments, their tasks and their points.

    \b
    Examples:
      tinyspec assignment list
      tinyspec assignment list --json
    """
    from tinyspec.grade.assignments import ASSIGNMENTS

    listed = []
    for one in ASSIGNMENTS.values():
        lines = [f"{one.name} {one.title}: {one.points} points"]
        lines += [f"  {task.title} ({task.name}): {task.points}" for task in one.tasks]
        if not as_json:
            click.echo("\n".join(lines))
        tasks = [{"name": t.name, "title": t.title, "max_score": t.points} for t in one.tasks]
        listed.append({"name": one.name, "title": one.title, "tasks": tasks})
    if as_json:
        click.echo(json.dumps(listed))


@assignment.command("new")
@click.argument("name")
@click.argument("folder", type=OUTPUT_FOLDER)
@task_option
def begin_assignment(name: str, folder: Path, tasks: Sequence[str]) -> None:
    """Begin assignment NAME in FOLDER: a hand-out, submission.py with what is to be written, and a
    README.

    Nothing that is there already is overwritten. With --task the folder has these functions alone,
    and places for the earlier ones that they use.

    \b
    Examples:
      tinyspec assignment new A1 my-a1
      tinyspec assignment new A1 my-a1 --task 1,2,3,4      a part of it as a homework
    """
    from tinyspec.grade import assignments, starter

    found = assignments.find_assignment(name).select(tasks)
    for path in starter.write_folder(found, folder):
        click.echo(path)
    command = f"tinyspec grade {found.name} {folder}{starter.task_options(found)}"
    click.echo(f"Read the hand-out, write submission.py, and see how far it is: {command}")


@assignment.command("bundle")
@click.argument("name")
@click.argument("out", type=OUTPUT_FILE)
@task_option
@option(
    "--seed", type=SEED, help="Of the final run's cases; keep it to yourself.  [default: drawn]"
)
def bundle_assignment(name: str, out: Path, tasks: Sequence[str], seed: int | None) -> None:
    """Write OUT, a zip file that Gradescope takes as the autograder of assignment NAME.

    It holds this package's source, setup.sh and run_autograder, which makes the final run on what a
    student handed in. It installs this package's dependencies and nothing else. The seed of the
    final run is drawn, printed, and written into run_autograder alone.

    \b
    Examples:
      tinyspec assignment bundle A1 a1.zip
      tinyspec assignment bundle A1 a1.zip --seed 1848
      tinyspec assignment bundle A1 first.zip --task 1,2,3,4
    """
    from tinyspec.grade import assignments, bundle, grading

    found = assignments.find_assignment(name).select(tasks)
    seed = grading.draw_seed() if seed is None else seed
    count = bundle.write_bundle(found, out, seed)
    size = f"{count} files, {out.stat().st_size / 1e6:.1f} MB"
    click.echo(f"{out}: {size}; upload it as the autograder's zip file")
    numbers = ", ".join(task.number for task in found.tasks)
    click.echo(f"It judges {numbers}: {found.points} points.")
    again = f"--seed {seed} writes the same file again"
    click.echo(f"The final run has seed {seed}. Keep it to yourself; {again}.")
