"""Files and folders that commands take: what is wrong with one is said before any work begins.

click converts arguments before a command's own code runs, so nothing is loaded when one of these
fails.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import click

from tinyspec.errors import TinyspecError


class OutputPath(click.Path):
    """A file that the command writes, or a folder.

    folder   it is a folder, which the command makes where it is missing
    parents  the command makes the folders above it
    """

    def __init__(self, folder: bool = False, parents: bool = False, allow_dash: bool = False):
        kinds = {"file_okay": not folder, "dir_okay": folder}
        super().__init__(**kinds, allow_dash=allow_dash, path_type=Path)
        self.parents = parents or folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not (self.allow_dash and str(path) == "-"):
            check_output(path, self.parents)
        return path


def check_output(path: Path, parents: bool = False) -> None:
    """Raise TinyspecError unless this file or folder can be written.

    parents  folders above it may be missing: whoever writes it makes them
    """
    place = path
    if not path.exists():
        place = path.parent
        while parents and not place.exists():
            place = place.parent
        if not place.exists():
            raise TinyspecError(f"cannot write {path}: there is no folder {place}; make it first")
        if not place.is_dir():
            raise TinyspecError(f"cannot write {path}: {place} is a file; name another place")
    if not os.access(place, os.W_OK):
        raise TinyspecError(f"cannot write {path}: no permission in {place}; name another place")


def check_folder(path: Path, hint: str) -> None:
    """Raise TinyspecError unless this is a folder that exists; `hint` says what to do."""
    if not path.exists():
        raise TinyspecError(f"there is no folder '{path}': {hint}")
    if not path.is_dir():
        raise TinyspecError(f"{path} is a file, no folder: {hint}")


def read_text(path: Path) -> str:
    """Return a text file; an error names it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start}"
        raise TinyspecError(f"{path}: not UTF-8 text ({reason})") from error


class Line(NamedTuple):
    """A prompt of a file, and the number of its line."""

    number: int
    prompt: str


def read_prompts(path: Path) -> list[Line]:
    """Return the prompts of a file, one a line; blank lines are passed over.

    A line of a .jsonl file is an object with a "prompt"; what else it holds is ignored.
    """
    lines = enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1)
    as_json = path.suffix == ".jsonl"
    found = [
        Line(number, _prompt_of(line, f"{path} line {number}") if as_json else line.rstrip("\r"))
        for number, line in lines
        if line.strip()
    ]
    if not found:
        raise TinyspecError(f"{path}: no prompts; write one a line")
    return found


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TinyspecError(f'{where}: no JSON ({error}); write {{"prompt": "..."}}') from error
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise TinyspecError(f'{where}: no "prompt" in it; write {{"prompt": "..."}}')
    if not isinstance(entry["prompt"], str):
        kind = type(entry["prompt"]).__name__
        raise TinyspecError(
            f'{where}: its "prompt" is no text but of type {kind}; put it in quotes'
        )
    return entry["prompt"]
