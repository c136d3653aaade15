"""Every command that README and CONTRIBUTING show is parsed as its own `--help` says."""

import re
import shlex
from pathlib import Path

import click
import pytest

from tinyspec.cli import main
from tinyspec.cli.base import KnobCommand
from tinyspec.technique import load_techniques

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"```sh\n(.*?)```", SHOWN, re.DOTALL)
    for line in block.splitlines()
]
COMMANDS = [
    part.strip()
    for line in LINES
    for part in line.split("&&")
    if part.strip().startswith("tinyspec ")
]


@pytest.mark.parametrize("line", dict.fromkeys(COMMANDS))
def test_a_command_that_is_shown_is_one(line: str) -> None:
    """Its name, its options and its number of arguments; nothing is run."""
    command: click.Command = main
    _, *words = shlex.split(line, comments=True)
    context = click.Context(main, info_name="tinyspec")
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, context, name)
    if isinstance(command, KnobCommand) and "--method" in words:
        card = load_techniques().get(
            words[words.index("--method") + 1]
        )  # None: the technique that CONTRIBUTING adds
        for knob in card.knobs if card else ():  # its options beyond those that are listed
            if (flag := f"--{knob.name.replace('_', '-')}") in words:
                del words[words.index(flag) : words.index(flag) + 2]
    command.make_parser(context).parse_args(list(words))
    wanted = sum(
        argument.required for argument in command.params if isinstance(argument, click.Argument)
    )
    assert len([word for word in words if not word.startswith("-")]) >= wanted


def blocks(text: str) -> list[list[str]]:
    """The lines of each block of commands."""
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("reader", ["learn", "teach", "do research"])
def test_a_reader_finds_three_commands(reader: str) -> None:
    section = README.split(f"## If you {reader}\n", 1)[1].split("\n## ", 1)[0]
    (lines,) = blocks(section)
    assert sum("tinyspec " in line for line in lines) == 3


def test_start_installs_and_races_then_shows_a_real_model_then_tests() -> None:
    """`.ci/run` executes these blocks, and those of the three readers, in this order."""
    first, real, tests = blocks(README.split("## Start", 1)[1].split("\n## ", 1)[0])
    assert first[0].startswith("python3 -m venv") and first[-1].endswith("tinyspec race")
    assert "download.pytorch.org/whl/cpu" in first[1], "no gigabytes of CUDA by surprise"
    assert real[0] == "tinyspec models fetch smollm2" and real[1].startswith(
        "tinyspec race --model smollm2"
    )
    assert "pytest" in tests[0]


def test_the_readme_has_at_most_800_words() -> None:
    """Beside the table of methods, which has a row for each technique."""
    rows = re.findall(r"(?m)^\|.*$", README.split("## Methods", 1)[1])
    assert len(README.split()) - len(" ".join(rows).split()) <= 800


def test_the_readme_counts_the_methods() -> None:
    """All that decode or rewrite, but plain decoding."""
    kinds = [card.kind for card in load_techniques().values() if card.name != "autoregressive"]
    assert f"{len(kinds) - kinds.count('analysis')} methods" in README


def test_no_placeholder_is_left() -> None:
    assert "@@" not in README and "TODO" not in README


def test_the_pictures_that_are_shown_are_held_to_be_pictures() -> None:
    from tests.show.test_replay import SHOWN as pictures

    assert sum(command in README for command in pictures) >= 2


def test_the_counterexample_is_what_check_prints(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = re.search(
        r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    exec(code, {})
    assert capsys.readouterr().out.strip() == printed.strip()


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    exec(code, {})
    assert "tokens" in capsys.readouterr().out


def test_the_path_of_a_reader_is_short() -> None:
    section = README.split("## Read one method from top to bottom", 1)[1].split("\n## ", 1)[0]
    files = [ROOT / name for name in re.findall(r"\]\((tinyspec/[^)]+)\)", section)]
    assert len(files) <= 12 and all(file.exists() for file in files)
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 2500
