"""What commands share: options, files that they read and write, and the options of a generation."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinyspec.cli.command import Command as Command
from tinyspec.cli.command import F
from tinyspec.cli.command import Group as Group
from tinyspec.cli.command import KnobCommand as KnobCommand
from tinyspec.cli.command import plugin_option as plugin_option
from tinyspec.cli.command import read_knobs as read_knobs
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.generation import Generation, GenerationRun
    from tinyspec.lm.model import Model

# ---------------------------------------------------------------------- files


class OutputPath(click.Path):
    """A file that the command writes, or a folder.

    click converts arguments before a command's own code runs, so nothing is loaded when the place
    cannot be written.

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


INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
INPUT_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
OUTPUT_FILE = OutputPath()
OUTPUT_FOLDER = OutputPath(folder=True)
POSITIVE = click.IntRange(1)


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


def read_prompt(prompt: str | None, missing: str) -> str:
    """Return the prompt as given; `-`, or none with a pipe, reads standard input.

    `missing` says what to do at a terminal.
    """
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise TinyspecError(missing)
    return sys.stdin.read().removesuffix("\n")


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


# ---------------------------------------------------------------------- options


def options(*chosen: Callable[[F], F]) -> Callable[[F], F]:
    """Return several options as one decorator; they are listed in this order."""

    def apply(function: F) -> F:
        for option in reversed(chosen):
            function = option(function)
        return function

    return apply


option = click.option
flag = partial(click.option, is_flag=True)

model_option = option(
    "--model", "-m", default="storyteller", help="Name, folder, .gguf file or hub id."
)
json_option = flag("--json", "as_json", help="One JSON object on standard output.")
quiet_option = flag("--quiet", "-q", help="No progress bar.")
replay_option = option(
    "--replay",
    type=OUTPUT_FILE,
    help="Write a page that plays it back; if the name ends in .json, the page's trace.",
)
knob_option = option(
    "--knob",
    "-k",
    multiple=True,
    metavar="NAME=VALUE",
    help="A knob of the method; --NAME VALUE does the same.",
)
reference_option = option(
    "--reference",
    "references",
    multiple=True,
    type=INPUT_FILE,
    help="A text that the method may copy from (llma); may be repeated.",
)


def list_option(*names: str, **more: Any) -> Callable[[F], F]:
    """Return an option that takes names with commas between, and may be repeated."""
    return option(
        *names,
        multiple=True,
        callback=lambda _, __, given: [name for word in given for name in word.split(",") if name],
        **more,
    )


draft_option = list_option(
    "--draft",
    metavar="NAME[,NAME...]",
    help="The draft model, or several; quantized_draft: the model in four bits. "
    "[default: the one that the model's card names]",
)
head_option = list_option(
    "--head",
    metavar="FOLDER[,FOLDER...]",
    help="Trained heads, for methods such as medusa, and for auto. [default: those trained for the "
    "model; auto: none]",
)
where_options = options(
    option("--seed", type=int, default=0, help="Same seed, same text, on one kind of CPU."),
    option("--device", default="cpu", help="cpu, cuda, or cuda:0."),
    option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
)
sampling_options = options(
    option("--max-new-tokens", "-n", type=int, default=128, help="Tokens to add."),
    option("--temperature", "-t", type=float, default=0.0, help="0 is greedy."),
    option("--top-k", type=int, help="Keep the k most probable tokens."),
    option("--top-p", type=float, help="Keep the fewest tokens whose probability reaches p."),
    option(
        "--min-p",
        type=float,
        help="Drop tokens below min-p times the most probable one's probability.",
    ),
    option("--repetition-penalty", type=float, default=1.0, help="1 is off."),
)


def is_given(ctx: click.Context, name: str) -> bool:
    """Return whether an option stands on the command line; else its value is the default."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@dataclass
class GenerateOptions:
    """What `generate`, `chat` and `race` take alike: models, methods with their knobs, sampling.

    knobs     of each method
    settings  the sampling options by name, and the seed
    """

    model: str
    draft: list[str]
    device: str
    dtype: str | None
    methods: list[str]
    knobs: list[dict[str, Any]]
    settings: dict[str, Any]

    @classmethod
    def take(cls, ctx: click.Context, given: dict[str, Any], *methods: str) -> "GenerateOptions":
        """Sort what click has read, and raise TinyspecError for a knob that no method has."""
        knobs = read_knobs(ctx, given.pop("knob"), methods)
        assign_heads(given.pop("head"), methods, knobs)
        models = {name: given.pop(name) for name in ("model", "draft", "device", "dtype")}
        return cls(**models, methods=list(methods), knobs=knobs, settings=given)

    def load(self) -> tuple[Any, list[Any] | None]:
        """Return the model, and its draft models where one of the methods needs or can use one.

        Where a method has a draft of its own, and none was given, each finds what it needs later.
        """
        return load_all(self.model, self.draft, self.methods, self.device, self.dtype)


def assign_heads(
    heads: Sequence[str], methods: Sequence[str], knobs: Sequence[dict[str, Any]]
) -> None:
    """Give each method the head that was trained for it, as its argument `head`.

    A method that uses any head gets the first one.
    """
    from tinyspec.lm.head_formats import read_head_method
    from tinyspec.pairing import find_head
    from tinyspec.technique import find_technique

    for named in heads:
        method = read_head_method(find_head(named))
        cards = [find_technique(one) for one in methods]
        users = [
            i
            for i, card in enumerate(cards)
            if card.head_method == method or (card.optional_head and "head" not in knobs[i])
        ]
        if not users:
            raise TinyspecError(
                f"--head {named}: a head for {method}, not for {', '.join(methods)}"
            )
        for user in users:
            knobs[user]["head"] = named


def load_all(
    model: str, draft: Sequence[str], methods: Sequence[str], device: str, dtype: str | None
) -> tuple[Any, list[Any] | None]:
    """Return the model, and its draft models where one of the methods needs or can use one."""
    import tinyspec
    from tinyspec.pairing import make_draft
    from tinyspec.technique import find_technique

    cards = [find_technique(method) for method in methods]  # before anything is loaded
    target = tinyspec.load(model, device=device, dtype=dtype)
    needed = any(card.drafts or card.optional_draft for card in cards)
    if needed and not draft and not any(card.has_own_draft for card in cards):
        named = target.config.extra.get("draft") or []
        draft = [named] if isinstance(named, str) else named
    return target, [
        make_draft(target, name) or tinyspec.load(name, device=device, dtype=dtype)
        for name in draft
    ] or None


# ---------------------------------------------------------------------- showing


def show_command_progress(quiet: bool) -> Any:
    """Return a bar on standard error that disappears in the end, at a terminal only."""
    from tinyspec import progress

    return progress.show_progress(quiet, transient=True)


def console() -> Any:
    """Return a rich console on standard output.

    Into a pipe or file it writes long lines, and no control codes.
    """
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200, no_color=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns of numbers, which end in "#", are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name.endswith("#")
        table.add_column(name.rstrip("#"), overflow="fold", justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    console().print(table, highlight=False, markup=False)


def print_stream(running: "GenerationRun", escapes: bool, silent: bool = False) -> bool:
    """Print a text as it grows. Return whether Ctrl-C ended it: what there is is kept.

    escapes  whether control codes are shown as letters, as at a terminal
    silent   run it, and print nothing
    """
    from tinyspec.generation import TextStreamer
    from tinyspec.show.display import escape_controls

    stream = TextStreamer(running)
    try:
        for piece in stream:
            if not silent:
                click.echo(escape_controls(piece) if escapes else piece, nl=False)
    except KeyboardInterrupt:
        running.close("interrupted")
        if not silent:
            click.echo(stream.rest(), nl=False)
        return True
    return False


def describe_figures(model: "Model", result: "Generation") -> str:
    """Return calls, acceptance, layers and time of a text, on one line."""
    from tinyspec.show.display import describe_layers

    layers = describe_layers(result.trace.layers_run, model.config.n_layers)
    return result.stats.describe(result.finish_reason, layers)


def write_replay(record: Any, path: Path) -> None:
    """Write the page of a replay, or its trace, and say on standard error what was written."""
    from tinyspec.show.replay import save_page, tell_written

    save_page(record, path)
    click.echo(tell_written(path), err=True)
