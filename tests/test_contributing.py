"""CONTRIBUTING.md's worked example is a technique that keeps every law.

Its files are written where the text says, and removed afterwards.
"""

import doctest
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tinyspec import technique
from tinyspec.cli import main
from tinyspec.laws import museum, traps
from tinyspec.laws.prove import CI, CONTRACTS, prove_technique

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`((?:tinyspec|tests)/\S+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL))
NAME = "naive_sampling"
PACKAGES = ("tinyspec.speculative.verification", "tinyspec.laws.traps", "tests.speculative")


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example's files in folders that the packages look into too."""
    for path, code in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(code, encoding="utf-8")
    for name in PACKAGES:
        package = importlib.import_module(name)
        monkeypatch.setattr(
            package, "__path__", [*package.__path__, str(tmp_path / name.replace(".", "/"))]
        )
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield tmp_path
    technique._cards.pop(NAME, None)
    for name in set(sys.modules) - before:
        if name.rpartition(".")[2] in (NAME, f"test_{NAME}"):
            package, _, module = name.rpartition(".")
            vars(sys.modules[package]).pop(module, None)
            del sys.modules[name]


def test_the_example_is_a_technique_its_trap_and_its_tests() -> None:
    assert [path.rpartition("/")[0] for path in FILES] == [
        name.replace(".", "/") for name in PACKAGES
    ]
    assert {path.rpartition("/")[2] for path in FILES} == {f"{NAME}.py", f"test_{NAME}.py"}
    assert not any((ROOT / path).exists() for path in FILES)


@pytest.mark.usefixtures("added")
@pytest.mark.slow
def test_every_law_holds_of_it() -> None:
    card = technique.find_technique(NAME)
    assert "Guarantee:" in card.doc
    assert "left out" in card.doc.lower()
    evidence = {found.law: found.cases for found in prove_technique(card, CI)}
    assert "joint distribution" in evidence
    assert all(evidence.values())
    assert CONTRACTS in evidence or len(evidence) > 3


@pytest.mark.usefixtures("added")
def test_the_command_line_knows_it() -> None:
    listed = CliRunner().invoke(main, ["methods", NAME])
    assert listed.exit_code == 0 and "--gamma 3" in listed.output
    result = CliRunner().invoke(
        main, ["generate", "Once upon a time", "--method", NAME, "-n", "8", "--temperature", "0.8"]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("added")
def test_it_passes_its_trap_and_the_toy_falls_into_it() -> None:
    technique.find_technique(NAME)
    ((_, trap),) = [entry for entry in traps.traps() if entry[0] == NAME]
    (toy,) = [toy for toy in museum.toys() if toy.technique == NAME]
    assert trap.check(trap.real()).cases > 0
    assert museum.judge_toy(toy)["killed_by"] == toy.law == trap.law
    assert len(toy.new.splitlines()) <= 18


@pytest.mark.usefixtures("added")
def test_its_own_tests_and_examples_pass() -> None:
    technique.find_technique(NAME)
    tests = importlib.import_module(f"tests.speculative.test_{NAME}")
    asked = [test for name, test in vars(tests).items() if name.startswith("test_")]
    assert len(asked) == 2
    for test in asked:
        test()
    ran = doctest.testmod(importlib.import_module(f"tinyspec.speculative.verification.{NAME}"))
    assert ran.attempted and not ran.failed


@pytest.mark.parametrize("path", FILES)
def test_it_is_formatted_and_linted_as_all_code_is(path: str) -> None:
    if shutil.which("ruff") is None:
        pytest.skip("ruff is not installed")
    sorting = ["--ignore", "I001"]  # of imports: a module that is not there yet sorts otherwise
    for command in (["check", *sorting], ["format", "--check"]):
        call = ["ruff", *command, "--no-cache", "--stdin-filename", path, "-"]
        done = subprocess.run(call, cwd=ROOT, input=FILES[path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_of_the_example_is_left() -> None:
    assert NAME not in technique.load_techniques()
    assert NAME not in {name for name, _ in traps.traps()}
