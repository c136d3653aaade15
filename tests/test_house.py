"""The house rules of design.md, section 3, each as one fact about the whole package.

Floors, no circles, chapters apart, a public face that loads nothing, folders installed, code lines
per room, names defined once, names that say what a function does, docstrings that open with a
sentence, and the form of a technique file.
"""

import ast
import importlib.util
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinyspec"
CHAPTERS = ("speculative", "early_exit", "nonautoregressive")

# Each floor imports from the floors below it and from itself; modules of one name are a floor's
# packages or files.
FLOORS = [
    ("errors", "files", "progress", "processes", "familiar"),
    ("_core", "tree"),
    ("lm",),
    ("decoding",),
    (
        "hub",
        "data",
        "models",
    ),  # where models and texts come from
    (
        *("plugins", "technique", "arguments", "notebook"),
        *("generation", "pairing", "translation"),
    ),
    CHAPTERS,
    ("show", "vllm"),
    ("training",),
    ("laws",),
    ("bench", "grade"),
    ("serve",),
    ("cli", "__main__"),
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
FACE = "__init__"  # the public face may reach anything, but only inside its functions

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parse_modules() -> dict[str, ast.Module]:
    """Return every Python module of the package, parsed, by its dotted name below tinyspec."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__") or FACE
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = parse_modules()


def find_imports(node: ast.AST, into_functions: bool = True) -> Iterator[str]:
    """Yield the package's modules that a piece of code imports, but not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not into_functions:
            continue
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.module:
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        for name in names:
            if name.split(".")[0] == "tinyspec":
                inner = name.removeprefix("tinyspec").removeprefix(".")
                while inner and inner not in MODULES:
                    inner = inner.rpartition(".")[0]
                if inner:
                    yield inner
        yield from find_imports(child, into_functions)


IMPORTS = {name: set(find_imports(tree)) - {name} for name, tree in MODULES.items()}


def top_of(module: str) -> str:
    return module.split(".")[0]


def floor_of(module: str) -> int:
    """Return the floor of a module: its own where FLOORS names it, else that of its package."""
    return HEIGHT[module] if module in HEIGHT else HEIGHT[top_of(module)]


def definitions(module: str) -> list[Definition]:
    """Return the functions and classes that stand at the top level of a module."""
    return [node for node in MODULES[module].body if isinstance(node, Definition)]


def test_nothing_imports_from_a_higher_floor() -> None:
    homeless = [m for m in MODULES if m != FACE and m not in HEIGHT and top_of(m) not in HEIGHT]
    assert not homeless, "say in FLOORS of tests/test_house.py on which floor these stand"
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        if module != FACE
        for other in IMPORTS[module]
        if floor_of(other) > floor_of(module)
    ]
    assert not upward


def test_chapters_do_not_import_each_other() -> None:
    assert not [
        f"{module} imports {other}"
        for module in MODULES
        if top_of(module) in CHAPTERS
        for other in IMPORTS[module]
        if top_of(other) in CHAPTERS and top_of(other) != top_of(module)
    ]


def test_no_imports_form_a_circle() -> None:
    """Imports inside functions count too; those of the public face do not."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in IMPORTS[name] - {FACE}:
                visit(other, (*trail, name))
            done.add(name)

    for name in IMPORTS:
        if name != FACE:
            visit(name, ())


def test_the_public_face_imports_the_package_only_inside_functions() -> None:
    assert set(find_imports(MODULES[FACE], into_functions=False)) == set()


def test_every_folder_is_installed() -> None:
    """A folder that is not listed is missing from the wheel, and no test from the clone would see
    it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == folders


CODE_LINES = {
    "root + show": 3730,
    "_core": 957,
    "lm": 6316,
    "decoding": 2077,
    "chapters": 14685,
    "laws": 20128,
    "museum": 3705,
    "training": 3539,
    "bench": 10140,
    "grade": 4416,
    "serve": 1054,
    "cli": 2875,
}
"""The most code lines that each room may have, as `make size` counts them.

Who adds a capability raises the number of its room in the same commit. Who tidies up lowers it."""


@pytest.mark.slow
def test_each_room_stays_within_its_code_lines() -> None:
    spec = importlib.util.spec_from_file_location("size", ROOT / ".ci" / "size.py")
    assert spec is not None and spec.loader is not None
    size = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(size)
    counted = dict.fromkeys(CODE_LINES, 0)
    for path in PACKAGE.rglob("*.py"):
        counted[size.room_of(path)] += size.count_code(path.read_text(encoding="utf-8"))[0]
    assert {room: n for room, n in counted.items() if not 0 < n <= CODE_LINES[room]} == {}


MODELS_MIB = 160


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a folder that is no clone")
def test_the_models_of_a_clone_take_at_most_160_mib() -> None:
    """A model that was trained here and is not committed does not count."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "models"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(paths) > 100
    assert sum(path.stat().st_size for path in paths if path.exists()) <= MODELS_MIB * 2**20


SHARED_NAMES = {
    *("generate", "race", "train", "translate"),  # a command is named after what it runs
    "main",  # of the command and of a child process
    "Session",  # a student's stand-in, named as what it stands for
}
"""Public names that two modules define."""


def test_a_public_name_is_defined_once() -> None:
    """Where it is not, a reader who searches for it cannot tell which one is meant. Twins bear
    their kernel's name.
    """
    homes = defaultdict(list)
    for module in MODULES:
        if module != FACE and top_of(module) != "_core":
            for node in definitions(module):
                if not node.name.startswith("_"):
                    homes[node.name].append(module)
    shared = {name: found for name, found in homes.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if name not in SHARED_NAMES} == {}


NO_PARTICIPLES = {"embed", "staged", "speed", "seed", "token", "children"}
"""Words in -ed or -en that may name a function."""


def test_no_function_is_named_by_a_participle() -> None:
    """`kept` or `made` does not say what a function does: use a verb and an object."""
    assert not [
        f"{module}.{node.name}"
        for module in MODULES
        for node in definitions(module)
        if not isinstance(node, ast.ClassDef)
        if re.fullmatch(r"[a-z]+(ed|en)", node.name) and node.name not in NO_PARTICIPLES
    ]


CLAUSE_DOCSTRINGS = 20
"""How many docstrings of functions still open with a noun clause. It only goes down."""


def test_docstrings_open_with_a_verb() -> None:
    docs = [
        doc
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (doc := ast.get_docstring(node))
    ]
    clauses = [doc for doc in docs if re.match(r"(The|A|An|What|Whether|How|Where|So)\b", doc)]
    assert len(clauses) <= CLAUSE_DOCSTRINGS


def test_no_line_of_the_package_is_over_100_columns() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]


TECHNIQUES = {
    module: tree
    for module, tree in MODULES.items()
    if top_of(module) in CHAPTERS
    if "@technique(" in ast.unparse(tree)
}
SECTIONS = ["Paper", "Idea", "Guarantee", "Pitfall", "Tests", "Left out"]


def test_a_technique_file_has_the_same_sections_in_the_same_order() -> None:
    for module, tree in TECHNIQUES.items():
        doc = ast.get_docstring(tree) or ""
        found = re.findall(rf"^({'|'.join(SECTIONS)})\b.*?[:.]", doc, re.M)
        assert found == SECTIONS, module


def test_a_technique_file_ends_with_its_card() -> None:
    for module, tree in TECHNIQUES.items():
        last = tree.body[-1]
        assert isinstance(last, ast.FunctionDef), module
        assert "technique(" in ast.unparse(last.decorator_list[0]), module


def test_a_technique_has_tests_under_its_own_name() -> None:
    for module in TECHNIQUES:
        assert (ROOT / "tests" / top_of(module) / f"test_{module.rpartition('.')[2]}.py").exists()
