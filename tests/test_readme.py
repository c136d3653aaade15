"""The README's commands are commands: every one that it and CONTRIBUTING show is parsed as its own `--help` says."""

import re
import shlex
from pathlib import Path

import click
import pytest

from tinyspec.cli import main
from tinyspec.cli.base import KnobCommand
from tinyspec.technique import techniques

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", SHOWN, re.DOTALL) for line in block.splitlines()]
COMMANDS = [part.strip() for line in LINES for part in line.split("&&") if part.strip().startswith("tinyspec ")]


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
        card = techniques().get(words[words.index("--method") + 1])  # None: the technique that CONTRIBUTING adds
        for knob in card.knobs if card else ():  # its options beyond those that are listed
            if (flag := f"--{knob.name.replace('_', '-')}") in words:
                del words[words.index(flag) : words.index(flag) + 2]
    command.make_parser(context).parse_args(list(words))
    wanted = sum(argument.required for argument in command.params if isinstance(argument, click.Argument))
    assert len([word for word in words if not word.startswith("-")]) >= wanted


def test_three_readers_find_three_commands_each() -> None:
    for reader in ("learn", "teach", "do research"):
        section = README.split(f"## If you {reader}\n", 1)[1].split("\n## ", 1)[0]
        assert len(re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()) == 3


def test_start_comes_first_with_its_two_commands() -> None:
    """The first installs and races, the second runs the tests: what .ci/run takes from here."""
    blocks = re.findall(r"```sh\n(.*?)```", README.split("## Start", 1)[1], re.DOTALL)
    assert blocks[0].strip().endswith("tinyspec race") and "pytest" in blocks[1]
