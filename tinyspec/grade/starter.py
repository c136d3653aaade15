"""Starters are generated: a reference solution, less what stands between its markers.

    # solution            a line of its own, inside the function that is to be written
    # end of solution     at the same depth; everything between becomes `raise NotImplementedError("A1.3 residual: write me")`

At the depth of the file itself a block is left out without a word: helpers and imports that only
the solution needs.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from tinyspec.errors import TinyspecError

BEGIN, END = "# solution", "# end of solution"
EARLIER = "put your own from the earlier homework here; the grader uses its own"
DEFINITION = re.compile(r"\s*(?:async )?(def|class) (\w+)")
WORDS = re.compile(r"\w+")


def starter(
    reference: str, labels: Mapping[str, str], name: str, earlier: Collection[str] = ()
) -> str:
    """Return the starter of a reference.

    labels   of the functions that are tasks: {"residual": "A1.3"}
    name     of the assignment, said of the others; methods of a class have the label of the task
             that uses the class
    earlier  tasks of another homework: their functions are not to be written in this one

    Raises TinyspecError where markers do not match, or a line of the solution would be given away.

    >>> print(starter("def half(x):\\n    # solution\\n    return x / 2\\n    # end of solution\\n", {"half": "A0.1"}, "A0"))
    def half(x):
        raise NotImplementedError("A0.1 half: write me")
    <BLANKLINE>
    """
    kept: list[str] = []
    secret: list[str] = []
    for number, line, hidden in _marked(reference):
        if hidden and line.strip() == BEGIN:
            depth = len(line) - len(line.lstrip())
            owner = _owner(kept, depth)
            if depth and owner is None:
                raise TinyspecError(f"line {number}: this solution stands in no function")
            if owner:
                first = owner.split(".")[0]
                task = (
                    first
                    if first in labels
                    else askers(reference, labels).get(first, "")
                    if "." in owner
                    else ""
                )
                what = EARLIER if task in earlier else "write me"
                label = f"{labels.get(task, name)} {owner}: {what}"
                kept.append(f'{line[:depth]}raise NotImplementedError("{label}")')
        elif hidden:
            secret += [] if line.strip() == END else [line]
        else:
            kept.append(line)
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).rstrip() + "\n"
    if leaked := leaks(secret, text):
        raise TinyspecError(f"the starter gives away a line of the solution: {leaked[0]}")
    return text


def drop_tasks(reference: str, names: Collection[str], tasks: Collection[str]) -> str:
    r"""Return a reference without some of its tasks, and without what only these need.

    names  of the functions to leave out
    tasks  all functions of the assignment that are tasks

    >>> print(drop_tasks("class A: ...\ndef f(): A()\ndef g():\n    pass\n", ["f"], ["f", "g"]))
    def g():
        pass
    """
    definitions = (ast.FunctionDef, ast.ClassDef)
    defined = {
        node.name: node for node in ast.parse(reference).body if isinstance(node, definitions)
    }
    judged = askers(reference, tasks).items()
    dropped = {*names, *(made for made, task in judged if task in names)}
    listed = defined.pop("Submission", None)  # the functions of all tasks, without their bodies
    found = True
    while found:
        found = False
        for name in {*defined} - dropped - {*tasks}:
            users = {
                other for other in defined if other != name and _mentions(defined[other], name)
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


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def askers(reference: str, tasks: Iterable[str]) -> dict[str, str]:
    """Which task judges a class: the function of that name, where it makes one.

    >>> askers("class Pile: ...\\ndef answers(x):\\n    return Pile(x)", ["answers"])
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
    """Return the source of these functions of a reference, with the definitions that they need and
    no others.

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
    """Every line between markers."""
    return [
        line
        for _, line, hidden in _marked(reference)
        if hidden and line.strip() not in (BEGIN, END)
    ]


def leaks(secret: list[str], text: str) -> list[str]:
    """Lines of a solution that stand in a text too; those of fewer than three words say nothing."""
    lines = {line.strip() for line in text.splitlines()}
    telling = [line.strip() for line in secret if len(set(WORDS.findall(line))) >= 3]
    return [line for line in telling if line in lines or (len(line) >= 20 and line in text)]


def _marked(reference: str) -> Iterator[tuple[int, str, bool]]:
    """Lines by number, and whether each belongs to a solution, its markers included."""
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


def _owner(lines: list[str], depth: int) -> str | None:
    """The function or class in which a line of this depth stands; a method by the name of its class
    too: "Pile.add".
    """
    names: list[str] = []
    for line in reversed(lines):
        around = len(line) - len(line.lstrip())
        if line.strip() and around < depth and (found := DEFINITION.match(line)):
            if not names or found[1] == "class":
                names.insert(0, found[2])
            depth = around
    return ".".join(names) or None
