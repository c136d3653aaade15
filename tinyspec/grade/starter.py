"""Make the folder that a student begins with, from a reference solution.

A starter is the reference without what stands between its markers:

    # solution            a line of its own, inside the function that is to be written
    # end of solution     at the same depth

Everything between becomes `raise NotImplementedError("A1.3 residual: write me")`. At the depth of
the file itself a block is left out without a trace: helpers and imports that only the solution
needs.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError
from tinyspec.files import write_whole
from tinyspec.grade import assignments
from tinyspec.grade.task import Assignment

BEGIN, END = "# solution", "# end of solution"
EARLIER = "put your own from the earlier homework here; the grader uses its own"
DEFINITION = re.compile(r"\s*(?:async )?(def|class) (\w+)")
WORDS = re.compile(r"\w+")


# ---------------------------------------------------------------------- the files of an assignment


def assignment_folder(name: str) -> Path:
    """Return the folder of an assignment: in the package of a wheel, or beside it in a clone."""
    package = Path(__file__).parents[1]
    beside = package.parent / "tutorials" / "assignments"
    for place in (package / "_assignments", beside):
        if (place / name / "reference.py").is_file():
            return place / name
    raise TinyspecError(f"the files of {name} are missing: {beside / name}")


def read_reference(assignment: Assignment) -> str:
    """Return the source of the reference solution."""
    return (assignment_folder(assignment.name) / "reference.py").read_text(encoding="utf-8")


def make_starter(assignment: Assignment) -> str:
    """Return what a student's submission.py begins as.

    If these are some tasks of an assignment, the starter has their functions, and those of the
    earlier tasks that they use: the grader puts the reference's functions in the place of these.
    """
    labels = task_numbers(assignments.find_assignment(assignment.name))
    uses = {name for task in assignment.tasks for name in task.uses}
    others = {*labels} - uses - {*task_numbers(assignment)}
    try:
        reference = drop_tasks(read_reference(assignment), others, labels)
        return remove_solutions(
            reference, labels, assignment.name, uses - {*task_numbers(assignment)}
        )
    except TinyspecError as error:
        raise TinyspecError(f"{assignment.name}/reference.py, {error}") from None


def task_numbers(assignment: Assignment) -> dict[str, str]:
    """Return the numbers of the tasks by their names: {"residual": "A1.3"}."""
    return {task.name: task.number for task in assignment.tasks}


def write_folder(assignment: Assignment, where: Path) -> list[Path]:
    """Write the starter, the hand-out, a README and what lies beside them into a folder.

    Returns their paths. Raises TinyspecError if one of them is there already, or cannot be written;
    then nothing is added to the folder.
    """
    files = {
        "submission.py": make_starter(assignment).encode(),
        "README.md": make_readme(assignment).encode(),
    }
    for path in sorted(assignment_folder(assignment.name).iterdir()):
        if path.suffix in (".md", ".svg", ".png", ".py") and path.name != "reference.py":
            files[path.name] = path.read_bytes()
    for name in files:
        if (where / name).exists():
            raise TinyspecError(
                f"{where / name} is there already, and is left as it is: name a new folder"
            )
    is_new = not where.exists()
    where.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    try:
        for name, data in files.items():
            write_whole(where / name, data)
            written.append(where / name)
    except TinyspecError:
        for path in written:
            path.unlink()
        if is_new:
            where.rmdir()
        raise
    return written


def task_options(assignment: Assignment) -> str:
    """Return " --task 1,2" for these tasks of an assignment; "" for all of them."""
    if assignment == assignments.find_assignment(assignment.name):
        return ""
    return f" --task {','.join(task.number.split('.')[1] for task in assignment.tasks)}"


def make_readme(assignment: Assignment) -> str:
    """Return the first page of a student's folder: what is where, the tasks, and the command."""
    judged = {
        task: f", which judges your class `{made}`"
        for made, task in find_judges(read_reference(assignment), task_numbers(assignment)).items()
    }
    tasks = "\n".join(
        f"| {task.title} | `{task.name}`{judged.get(task.name, '')} | {task.points} |"
        for task in assignment.tasks
    )
    options = task_options(assignment)
    return fill_template(
        "starter.md",
        name=assignment.name,
        title=assignment.title,
        packages=assignment.packages,
        part=f"This homework is {join_numbers(assignment)} alone.\n" if options else "",
        tasks=tasks,
        options=options,
        first=assignment.tasks[0].name,
        rubric=make_rubric(assignment),
    )


def fill_template(file: str, **values: Any) -> str:
    """Return a text of the folder templates/, with a value in the place of each {name}.

    Other braces stay: the texts are shell scripts too.
    """
    text = Path(__file__).with_name("templates").joinpath(file).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def join_numbers(assignment: Assignment) -> str:
    """Return the numbers of the tasks as a reader says them: "A1.1, A1.2 and A1.3"."""
    *most, last = [task.number for task in assignment.tasks]
    return f"{', '.join(most)} and {last}" if most else last


def make_rubric(assignment: Assignment) -> str:
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


# ---------------------------------------------------------------------- from reference to starter


def remove_solutions(
    reference: str, labels: Mapping[str, str], name: str, earlier: Collection[str] = ()
) -> str:
    """Return a reference without its solutions.

    labels   of the functions that are tasks: {"residual": "A1.3"}
    name     of the assignment, said of the others; methods of a class have the label of the task
             that uses the class
    earlier  tasks of another homework: their functions are not to be written in this one

    Raises TinyspecError if markers do not match, or a line of the solution would be given away.

    >>> solution = "    # solution\\n    return x / 2\\n    # end of solution\\n"
    >>> print(remove_solutions(f"def half(x):\\n{solution}", {"half": "A0.1"}, "A0"))
    def half(x):
        raise NotImplementedError("A0.1 half: write me")
    <BLANKLINE>
    """
    kept: list[str] = []
    secret: list[str] = []
    for number, line, hidden in mark_lines(reference):
        if hidden and line.strip() == BEGIN:
            depth = len(line) - len(line.lstrip())
            owner = find_owner(kept, depth)
            if depth and owner is None:
                raise TinyspecError(f"line {number}: this solution stands in no function")
            if owner:
                task = owner.split(".")[0]
                if task not in labels:
                    task = find_judges(reference, labels).get(task, "") if "." in owner else ""
                what = EARLIER if task in earlier else "write me"
                label = f"{labels.get(task, name)} {owner}: {what}"
                kept.append(f'{line[:depth]}raise NotImplementedError("{label}")')
        elif hidden:
            secret += [] if line.strip() == END else [line]
        else:
            kept.append(line)
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).rstrip() + "\n"
    if leaked := find_leaks(secret, text):
        raise TinyspecError(f"the starter gives away a line of the solution: {leaked[0]}")
    return text


def drop_tasks(reference: str, names: Collection[str], tasks: Collection[str]) -> str:
    """Return a reference without some of its tasks, and without what only these need.

    names  of the functions to leave out
    tasks  all functions of the assignment that are tasks

    >>> reference = "class A: ...\\ndef f(): A()\\ndef g(): pass\\n"
    >>> print(drop_tasks(reference, ["f"], ["f", "g"]))
    def g(): pass
    """
    definitions = (ast.FunctionDef, ast.ClassDef)
    defined = {
        node.name: node for node in ast.parse(reference).body if isinstance(node, definitions)
    }
    judged = find_judges(reference, tasks).items()
    dropped = {*names, *(made for made, task in judged if task in names)}
    listed = defined.pop("Submission", None)  # the functions of all tasks, without their bodies
    found = True
    while found:
        found = False
        for name in {*defined} - dropped - {*tasks}:
            users = {
                other for other in defined if other != name and mentions_name(defined[other], name)
            }
            if users and users <= dropped:
                dropped, found = dropped | {name}, True
    lines, gone = reference.splitlines(), set[int]()
    for name in dropped & {*defined}:
        end = defined[name].end_lineno or 0
        while end < len(lines) and (not lines[end].strip() or lines[end][0] == " "):
            end += 1  # comments in the function that stand after its last statement
        gone.update(range(defined[name].lineno, end + 1))
    for method in listed.body if listed else []:
        if isinstance(method, ast.FunctionDef) and method.name in names:
            gone.update(range(method.lineno, (method.end_lineno or 0) + 1))
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in gone)


def mentions_name(node: ast.AST, name: str) -> bool:
    """Return whether a name stands anywhere in a definition."""
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def find_judges(reference: str, tasks: Iterable[str]) -> dict[str, str]:
    """Return which task judges a class: the function that makes an object of it.

    >>> find_judges("class Pile: ...\\ndef answers(x):\\n    return Pile(x)", ["answers"])
    {'Pile': 'answers'}
    """
    found: dict[str, str] = {}
    body = ast.parse(reference).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    for function in body:
        if isinstance(function, ast.FunctionDef) and function.name in tasks:
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            for made in calls:
                if isinstance(made, ast.Name) and made.id in classes:
                    found.setdefault(made.id, function.name)
    return found


def extract_helpers(reference: str, names: Iterable[str]) -> str:
    """Return the source of these functions, with the definitions that they need and no others.

    >>> print(extract_helpers("A = 1\\nB = 2\\ndef f(): return A\\ndef g(): return f() + B", ["f"]))
    A = 1
    def f():
        return A
    """
    body = ast.parse(reference).body
    defined: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            defined[statement.name] = statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            defined |= {
                alias.asname or alias.name.split(".")[0]: statement for alias in statement.names
            }
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            defined |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
    needed, waiting = set[ast.stmt](), list(names)
    while waiting:
        statement = defined.pop(waiting.pop(), ast.Pass())
        if statement not in needed:
            needed.add(statement)
            waiting += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return "\n".join(ast.unparse(statement) for statement in body if statement in needed)


def solution_lines(reference: str) -> list[str]:
    """Return every line between markers."""
    return [
        line
        for _, line, hidden in mark_lines(reference)
        if hidden and line.strip() not in (BEGIN, END)
    ]


def find_leaks(secret: list[str], text: str) -> list[str]:
    """Return lines of a solution that stand in a text too. Lines of two words do not count."""
    lines = {line.strip() for line in text.splitlines()}
    telling = [line.strip() for line in secret if len(set(WORDS.findall(line))) >= 3]
    return [line for line in telling if line in lines or (len(line) >= 20 and line in text)]


def mark_lines(reference: str) -> Iterator[tuple[int, str, bool]]:
    """Yield number, line, and whether the line belongs to a solution or is its marker."""
    begun = ("", 0)
    for number, line in enumerate(reference.splitlines(), 1):
        mark = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if mark == BEGIN:
            if begun[1]:
                raise TinyspecError(
                    f"line {number}: a solution begins inside the one of line {begun[1]}"
                )
            begun = (indent, number)
        if mark == END and (not begun[1] or indent != begun[0]):
            where = (
                f"that of line {begun[1]} is indented otherwise" if begun[1] else "none has begun"
            )
            raise TinyspecError(f"line {number}: a solution ends, but {where}")
        yield number, line, bool(begun[1])
        if mark == END:
            begun = ("", 0)
    if begun[1]:
        raise TinyspecError(f"line {begun[1]}: this solution has no end")


def find_owner(lines: list[str], depth: int) -> str | None:
    """Return the function in which a line of this depth stands, as "half" or "Pile.add"."""
    names: list[str] = []
    for line in reversed(lines):
        around = len(line) - len(line.lstrip())
        if line.strip() and around < depth and (found := DEFINITION.match(line)):
            if not names or found[1] == "class":
                names.insert(0, found[2])
            depth = around
    return ".".join(names) or None
