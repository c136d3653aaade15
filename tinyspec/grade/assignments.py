"""The assignments there are, and the folder that a student begins with."""

from importlib import import_module
from pathlib import Path

from tinyspec.errors import TinyspecError
from tinyspec.grade.starter import askers, drop_tasks, starter
from tinyspec.grade.task import Assignment

NAMES = ("A1", "A2", "A3")


def find(name: str) -> Assignment:
    """An assignment by its name; TinyspecError where there is none."""
    if name.upper() not in NAMES:
        raise TinyspecError(f"no assignment {name!r}: there are {', '.join(NAMES)}")
    found: Assignment = import_module(f"tinyspec.grade.{name.lower()}").ASSIGNMENT
    return found


def folder(name: str) -> Path:
    """Return the folder of an assignment: in the package of a wheel, or beside it in a clone."""
    package = Path(__file__).parents[1]
    beside = package.parent / "tutorials" / "assignments"
    for place in (package / "_assignments", beside):
        if (place / name / "reference.py").is_file():
            return place / name
    raise TinyspecError(f"the files of {name} are missing: {beside / name}")


def reference_of(assignment: Assignment) -> str:
    """Return the source of the reference solution."""
    return (folder(assignment.name) / "reference.py").read_text(encoding="utf-8")


def starter_of(assignment: Assignment) -> str:
    """Return what a student's submission.py begins as.

    Where the assignment has some of its tasks alone, the starter has the functions of these, and
    of the earlier tasks that they use: the grader puts the reference's functions in their place.
    """
    whole = find(assignment.name)
    uses = {name for task in assignment.tasks for name in task.uses}
    labels = _labels(whole)
    earlier = uses - {*_labels(assignment)}
    others = {*labels} - uses - {*_labels(assignment)}
    try:
        reference = drop_tasks(reference_of(assignment), others, labels)
        return starter(reference, labels, assignment.name, earlier)
    except TinyspecError as error:
        raise TinyspecError(f"{assignment.name}/reference.py, {error}") from None


def task_options(assignment: Assignment) -> str:
    """Return " --task 1,2" for these tasks of an assignment; "" for all of them."""
    if assignment == find(assignment.name):
        return ""
    return f" --task {','.join(task.number.split('.')[1] for task in assignment.tasks)}"


def _labels(assignment: Assignment) -> dict[str, str]:
    """The numbers of the tasks by their names: {"residual": "A1.3"}."""
    return {task.name: task.number for task in assignment.tasks}


def new(assignment: Assignment, where: Path) -> list[Path]:
    """Write the starter, the hand-out and a README into a folder; TinyspecError where one of them
    is there already.
    """
    source = folder(assignment.name)
    texts = {"submission.py": starter_of(assignment), "README.md": readme(assignment)}
    handout = {
        path.name: path.read_bytes()
        for path in sorted(source.iterdir())
        if path.suffix in (".md", ".svg", ".png")
    }
    files = {**{name: text.encode() for name, text in texts.items()}, **handout}
    try:
        where.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            with (where / name).open("xb") as file:
                file.write(data)
    except FileExistsError as error:
        raise TinyspecError(
            f"{error.filename} is there already, and is left as it is: name a new folder"
        ) from None
    return [where / name for name in files]


def readme(assignment: Assignment) -> str:
    """The first page: what is where, the tasks, and the one command."""
    name = assignment.name
    judged = {
        task: f", which judges your class `{made}`"
        for made, task in askers(reference_of(assignment), _labels(assignment)).items()
    }
    tasks = "\n".join(
        f"| {task.title} | `{task.name}`{judged.get(task.name, '')} | {task.points} |"
        for task in assignment.tasks
    )
    options = task_options(assignment)
    part = f"This homework is {_join(assignment)} alone.\n" if options else ""
    return f"""# {name}: {assignment.title}

{part}`handout.md` says what is to be built, and why. Write the functions in `submission.py`;
the standard library is all there is.

| task | function | points |
|---|---|---|
{tasks}

Grade what you have, as often as you like:

    tinyspec grade {name} .{options}
    tinyspec grade {name} . --task {assignment.tasks[0].name}

The report shows, for each function that breaks a law, the smallest case in which it does: yours and what was expected.
These are the public cases. The final run holds the same laws to other cases, and draws ten times as many.

## Points

Each law that holds earns its points, whatever becomes of the others. A law that cannot be judged earns none.

{rubric(assignment)}
"""


def _join(assignment: Assignment) -> str:
    """Return the numbers of the tasks as a reader says them: "A1.1, A1.2 and A1.3"."""
    *most, last = [task.number for task in assignment.tasks]
    return f"{', '.join(most)} and {last}" if most else last


def rubric(assignment: Assignment) -> str:
    """Return the table of an assignment's laws and their points, in Markdown."""
    rows = ["| task | | law | points |", "|---|---|---|---|"]
    for task in assignment.tasks:
        numbers = {law.sentence: number for number, law in enumerate(task.laws, 1)}
        for law in task.laws:
            needs = "".join(f" (only where law {numbers[need]} holds)" for need in law.needs)
            name = f"{task.number} `{task.name}`"
            rows.append(
                f"| {name} | {numbers[law.sentence]} | {law.sentence}{needs} | {law.points} |"
            )
    return "\n".join(rows)
