"""tinyspec assignment: what there is to be built, a folder to begin with, and a bundle for
Gradescope.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from tinyspec.cli import base
from tinyspec.cli.grade import task_option


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


@assignment.command("list", cls=base.Command)
@base.options(click.option("--json", "as_json", is_flag=True, help="JSON on standard output."))
def list_assignments(as_json: bool) -> None:
    """The assignments, their tasks and their points.

    \b
    Examples:
      tinyspec assignment list
      tinyspec assignment list --json
    """
    from tinyspec.grade.assignments import ASSIGNMENTS

    found = ASSIGNMENTS.values()
    if as_json:
        tasks = [
            [{"name": t.name, "title": t.title, "max_score": t.points} for t in one.tasks]
            for one in found
        ]
        told = [
            {"name": one.name, "title": one.title, "tasks": its}
            for one, its in zip(found, tasks, strict=True)
        ]
        click.echo(json.dumps(told))
        return
    for one in found:
        click.echo(f"{one.name} {one.title}: {sum(task.points for task in one.tasks)} points")
        for task in one.tasks:
            click.echo(f"  {task.title} ({task.name}): {task.points}")


@assignment.command("new", cls=base.Command)
@click.argument("name")
@click.argument("folder", type=base.OutputPath(folder=True))
@base.options(task_option)
def new(name: str, folder: Path, tasks: Sequence[str]) -> None:
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


@assignment.command("bundle", cls=base.Command)
@click.argument("name")
@click.argument("out", type=base.OutputPath())
@base.options(
    task_option,
    click.option(
        "--seed",
        type=click.IntRange(0),
        help="Of the final run's cases; keep it to yourself.  [default: drawn]",
    ),
)
def bundle(name: str, out: Path, tasks: Sequence[str], seed: int | None) -> None:
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
    click.echo(
        f"{out}: {count} files, {out.stat().st_size / 1e6:.1f} MB; upload it as the autograder's zip file"
    )
    numbers = ", ".join(task.number for task in found.tasks)
    click.echo(f"It judges {numbers}: {found.points} points.")
    click.echo(
        f"The final run has seed {seed}. Keep it to yourself; --seed {seed} writes the same file again."
    )
