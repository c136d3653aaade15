"""The house of design.md, section 2: floors, no circles, nothing sideways between chapters, and the code lines of each room."""

import ast
import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinyspec"
CHAPTERS = ("speculative", "early_exit", "nonautoregressive")

# Each floor imports from the floors below it and from itself; modules of one name are a floor's packages or files.
FLOORS = [
    ("errors", "progress", "familiar"),
    ("_core", "tree"),
    ("lm",),
    ("decoding",),
    (
        "hub",
        "data",
        "models",
    ),  # where models and texts come from
    (
        *("plugins", "technique", "training", "arguments", "notebook"),
        *("generation", "pairing", "translation"),
    ),
    CHAPTERS,
    ("show",),
    ("laws",),
    (
        "bench",
        "grade",
        "training.taught",
        "training.train_mt",
    ),  # translators learn a chapter's losses
    ("cli", "__main__"),
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
FACE = "__init__"  # the public face may reach anything, but only inside its functions


def modules() -> dict[str, Path]:
    """Every Python module of the package by its dotted name below tinyspec."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__") or FACE] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "tinyspec":
                inner = name.removeprefix("tinyspec").removeprefix(".")
                while inner and inner not in MODULES:
                    inner = inner.rpartition(".")[0]
                if inner:
                    yield inner


def early(path: Path) -> Iterator[str]:
    """Modules of the package imported when the file is: not inside functions, not for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept: list[ast.stmt] = []
    for node in tree.body:
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not typing_only and not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            kept.append(node)
    tree.body = kept
    source = ast.unparse(tree)
    temporary = ast.parse(source)
    for node in ast.walk(temporary):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tinyspec"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("tinyspec").removeprefix(".")
                while inner and inner not in MODULES:
                    inner = inner.rpartition(".")[0]
                if inner:
                    yield inner


def top(module: str) -> str:
    return module.split(".")[0]


def floor(module: str) -> int:
    """That of the module's own name, else of the package that it stands in."""
    return HEIGHT[module] if module in HEIGHT else HEIGHT[top(module)]


@pytest.mark.parametrize("module", [m for m in MODULES if m != FACE])
def test_every_module_stands_on_a_floor(module: str) -> None:
    assert module in HEIGHT or top(module) in HEIGHT, (
        f"say in tests/test_house.py on which floor {module} stands"
    )


@pytest.mark.parametrize("module", [m for m in MODULES if m != FACE])
def test_nothing_imports_upward(module: str) -> None:
    for other in imports(MODULES[module]):
        assert floor(other) <= floor(module), f"{module} imports {other}, which stands above it"


@pytest.mark.parametrize("module", [m for m in MODULES if top(m) in CHAPTERS])
def test_chapters_import_nothing_from_each_other(module: str) -> None:
    for other in imports(MODULES[module]):
        assert top(other) == top(module) or top(other) not in CHAPTERS


def test_no_circle_of_imports() -> None:
    graph = {name: set(early(path)) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_every_package_is_installed() -> None:
    """A folder that is not listed is missing from the wheel, and no test from the clone would see it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == folders


def test_the_public_face_imports_the_package_only_inside_functions() -> None:
    assert set(early(MODULES[FACE])) == set()


CODE_LINES = {
    "root + show": 2820,
    "_core": 860,
    "lm": 4010,
    "decoding": 1390,
    "chapters": 5_260,
    "laws": 11640,
    "museum": 3410,
    "training": 2720,
    "bench": 6120,
    "grade": 3660,
    "cli": 2630,
}
"""The most code lines that each room may have, as `make size` counts them.

Who adds a capability raises the number of its room in the same commit. Who tidies up lowers it."""


@pytest.mark.parametrize("room", CODE_LINES)
def test_a_room_stays_within_its_code_lines(room: str) -> None:
    spec = importlib.util.spec_from_file_location("size", ROOT / ".ci" / "size.py")
    assert spec is not None and spec.loader is not None
    size = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(size)
    counted = sum(
        size.count_code(path.read_text(encoding="utf-8"))[0]
        for path in PACKAGE.rglob("*.py")
        if size.room_of(path) == room
    )
    assert 0 < counted <= CODE_LINES[room]


def techniques() -> list[str]:
    return [
        m
        for m in MODULES
        if top(m) in CHAPTERS and "@technique(" in MODULES[m].read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("module", techniques())
def test_a_technique_file_says_what_it_is(module: str) -> None:
    doc = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""
    assert "Guarantee:" in doc
    assert "left out" in doc.lower()


@pytest.mark.parametrize("module", [m for m in techniques() if not m.endswith("autoregressive")])
def test_a_technique_has_tests_under_its_own_name(module: str) -> None:
    name = module.rpartition(".")[2]
    assert (ROOT / "tests" / top(module) / f"test_{name}.py").exists()
