"""What all commands share: how they behave (`command.py`), and the options of models, knobs and
sampling.

No torch here, and none at the top of any command's file: `tinyspec --help` answers at once.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tinyspec.cli.command import KNOBS as KNOBS
from tinyspec.cli.command import Command as Command
from tinyspec.cli.command import F, close_names
from tinyspec.cli.command import Group as Group
from tinyspec.cli.command import KnobCommand as KnobCommand
from tinyspec.cli.command import plugin_option as plugin_option
from tinyspec.cli.paths import OutputPath as OutputPath
from tinyspec.cli.paths import check_folder as check_folder
from tinyspec.cli.paths import read_text as read_text
from tinyspec.errors import TinyspecError
from tinyspec.familiar import hint_argument

# ---------------------------------------------------------------------- options


def options(*chosen: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator; they are listed in this order."""

    def apply(function: F) -> F:
        for option in reversed(chosen):
            function = option(function)
        return function

    return apply


def overrides(seed: int | None, settings: Sequence[str]) -> dict[str, str]:
    """What --seed and --set KEY=VALUE change in a recipe."""
    changed = {} if seed is None else {"train.seed": str(seed)}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise TinyspecError(f"--set {setting}: write KEY=VALUE, such as train.lr=2e-3")
        changed[key.strip()] = value.strip()
    return changed


replay_option = click.option(
    "--replay",
    type=OutputPath(),
    help="Write a page that plays it back; if the name ends in .json, the page's trace.",
)


def where_options(function: F) -> F:
    """--seed, --device, --dtype."""
    return options(
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Same seed, same text."
        ),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:0."),
        click.option(
            "--dtype",
            default=None,
            help="float32, bfloat16, float16, float64. [default: as stored]",
        ),
    )(function)


def sampling_options(function: F) -> F:
    """--max-new-tokens, --temperature and the warpers."""
    return options(
        click.option(
            "--max-new-tokens",
            "-n",
            type=int,
            default=128,
            show_default=True,
            help="Tokens to add.",
        ),
        click.option(
            "--temperature", "-t", type=float, default=0.0, show_default=True, help="0 is greedy."
        ),
        click.option("--top-k", type=int, help="Keep the k most probable tokens."),
        click.option(
            "--top-p", type=float, help="Keep the fewest tokens whose probability reaches p."
        ),
        click.option(
            "--min-p",
            type=float,
            help="Drop tokens below min-p times the most probable one's probability.",
        ),
        click.option(
            "--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off."
        ),
    )(function)


knob_option = click.option(
    "--knob",
    "-k",
    "knob",
    multiple=True,
    metavar="NAME=VALUE",
    help="A knob of the method; --NAME VALUE does the same.",
)
draft_option = click.option(
    "--draft",
    multiple=True,
    metavar="NAME[,NAME...]",
    callback=lambda ctx, option, given: [
        name for word in given for name in word.split(",") if name
    ],
    help="The draft model, or several. [default: the one that the model's card names]",
)
reference_option = click.option(
    "--reference",
    "references",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text that the method may copy from (llma); may be repeated.",
)


def given_knobs(ctx: click.Context, pairs: Sequence[str]) -> dict[str, Any]:
    """Knobs from --knob name=value and from unknown options, as numbers where they look like
    numbers.
    """
    texts: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"'{pair}' is not NAME=VALUE", ctx, param_hint="--knob")
        texts[name.strip().replace("-", "_")] = value.strip()
    texts |= ctx.meta.get(KNOBS, {})
    return {name: literal(value) for name, value in texts.items()}


def literal(text: str) -> Any:
    """A value as a shell passes it.

    >>> literal("4"), literal("0.5"), literal("true"), literal("tree")
    (4, 0.5, True, 'tree')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def settle(
    ctx: click.Context, knobs: dict[str, Any], methods: Sequence[str]
) -> list[dict[str, Any]]:
    """Each method's share of the knobs. One that no method has may be a misspelt option: say what
    is close.
    """
    from tinyspec.technique import find_technique

    cards = [find_technique(method) for method in methods]
    owned = {knob.name for card in cards for knob in card.knobs}
    for name in knobs:
        if name not in owned:
            if hint := hint_argument(name, command_line=True):
                raise TinyspecError(f"--{name.replace('_', '-')}: {hint}")
            options = [
                o[2:] for p in ctx.command.get_params(ctx) for o in p.opts if o.startswith("--")
            ]
            close = close_names(name.replace("_", "-"), [*options, *owned])
            hint = f"; did you mean --{close[0]}?" if close else ""
            has = f"its knobs: {', '.join(sorted(owned))}" if owned else "it has none"
            raise TinyspecError(
                f"--{name.replace('_', '-')} is no option, and no knob of {', '.join(methods)} ({has}){hint}"
            )
    return [
        {k: v for k, v in knobs.items() if k in {knob.name for knob in card.knobs}}
        for card in cards
    ]


def read_prompt(prompt: str | None, missing: str) -> str:
    """The prompt: as given; `-` or none with a pipe reads standard input. `missing` says what to do
    at a terminal.
    """
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise TinyspecError(missing)
    return sys.stdin.read().removesuffix("\n")


def load_all(
    model: str, draft: Sequence[str], methods: Sequence[str], device: str, dtype: str | None
) -> tuple[Any, list[Any] | None]:
    """The model, and its draft models where one of the methods needs or can use one (else None)."""
    import tinyspec
    from tinyspec.technique import find_technique

    cards = [
        find_technique(method) for method in methods
    ]  # a misspelt method is said before anything is loaded
    target = tinyspec.load(model, device=device, dtype=dtype)
    if not draft and any(card.drafts or card.optional_draft for card in cards):
        named = target.config.extra.get("draft") or []
        draft = [named] if isinstance(named, str) else named
    return target, [tinyspec.load(name, device=device, dtype=dtype) for name in draft] or None


def show_progress(quiet: bool) -> Any:
    """Return a bar on standard error that disappears in the end, at a terminal only."""
    from tinyspec import progress

    return progress.show_progress(quiet, transient=True)


def console() -> Any:
    """A rich console on standard output; into a pipe or file it writes long lines, and no control
    codes.
    """
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200, no_color=True)
