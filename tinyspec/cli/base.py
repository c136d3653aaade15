"""What all commands share: errors in one line, --debug, knobs as options, and the options of models and sampling.

No torch here, and none at the top of any command's file: `tinyspec --help` answers at once.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tinyspec.cli.mistakes import OneLine, in_one_line, usage_in_one_line
from tinyspec.cli.paths import OutputPath as OutputPath
from tinyspec.cli.paths import check_folder as check_folder
from tinyspec.cli.paths import read_text as read_text
from tinyspec.errors import TinyspecError, nearest

F = TypeVar("F", bound=Callable[..., Any])
KNOBS = "tinyspec.knobs"  # where a command's unknown options wait in its context
DEBUG = "tinyspec.debug"


def debugging(ctx: click.Context) -> bool:
    """Whether tracebacks are wanted: --debug before or after the command, or TINYSPEC_DEBUG=1."""
    return bool(ctx.meta.get(DEBUG)) or os.environ.get("TINYSPEC_DEBUG", "0") not in ("", "0")


def _debug_option() -> click.Option:
    def note(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=note, help="Show a traceback on errors."
    )


class Command(click.Command):
    """A command that takes --debug, and whose help keeps the shape of its examples."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("context_settings", {}).setdefault("max_content_width", 100)
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())


class KnobCommand(Command):
    """A command whose unknown options are a technique's knobs: `--gamma 4`, `--gamma=4`. Its card checks them later."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known: dict[str, click.Option] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option):
                known |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], parameter)
        kept: list[str] = []
        knobs: dict[str, str] = {}
        waiting = list(args)
        while waiting:
            word = waiting.pop(0)
            if word == "--":
                kept += [word, *waiting]
                break
            name, equals, value = word.partition("=")
            if name in known or not name.startswith("--"):
                kept.append(word)
                if name in known and not equals and not known[name].is_flag and not known[name].count and waiting:
                    kept.append(waiting.pop(0))
                continue
            if not equals:
                if not waiting or waiting[0].startswith("--"):
                    raise click.NoSuchOption(name, possibilities=_close(name, known), ctx=ctx)
                value = waiting.pop(0)
            knobs[name[2:].replace("-", "_")] = value
        ctx.meta[KNOBS] = knobs
        return super().parse_args(ctx, kept)


def _close(name: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, list(known), n=2)


class Group(click.Group):
    """Commands under one name, in the order they were added. Whatever goes wrong becomes one line and an exit code."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise click.UsageError(f"there is no command '{args[0]}': {nearest(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise usage_in_one_line(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise usage_in_one_line(error) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(130) from None
        except BrokenPipeError:
            raise  # click ends quietly: whoever read the output has seen enough
        except Exception as error:
            if debugging(ctx):
                raise
            raise OneLine(in_one_line(error)) from error


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
        click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same text."),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:0."),
        click.option("--dtype", default=None, help="float32, bfloat16, float16, float64. [default: as stored]"),
    )(function)


def sampling_options(function: F) -> F:
    """--max-new-tokens, --temperature and the warpers."""
    return options(
        click.option("--max-new-tokens", "-n", type=int, default=128, show_default=True, help="Tokens to add."),
        click.option("--temperature", "-t", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, help="Keep the k most probable tokens."),
        click.option("--top-p", type=float, help="Keep the fewest tokens whose probability reaches p."),
        click.option("--min-p", type=float, help="Drop tokens below min-p times the most probable one's probability."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off."),
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
    callback=lambda ctx, option, given: [name for word in given for name in word.split(",") if name],
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
    """Knobs from --knob name=value and from unknown options, as numbers where they look like numbers."""
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


def settle(ctx: click.Context, knobs: dict[str, Any], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Each method's share of the knobs. One that no method has may be a misspelt option: say what is close."""
    from tinyspec.technique import find

    cards = [find(method) for method in methods]
    owned = {knob.name for card in cards for knob in card.knobs}
    for name in knobs:
        if name not in owned:
            options = [o[2:] for p in ctx.command.get_params(ctx) for o in p.opts if o.startswith("--")]
            close = _close(name.replace("_", "-"), [*options, *owned])
            hint = f"; did you mean --{close[0]}?" if close else ""
            has = f"its knobs: {', '.join(sorted(owned))}" if owned else "it has none"
            raise TinyspecError(
                f"--{name.replace('_', '-')} is no option, and no knob of {', '.join(methods)} ({has}){hint}"
            )
    return [{k: v for k, v in knobs.items() if k in {knob.name for knob in card.knobs}} for card in cards]


def read_prompt(prompt: str | None, missing: str) -> str:
    """The prompt: as given; `-` or none with a pipe reads standard input. `missing` says what to do at a terminal."""
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
    from tinyspec.technique import find

    cards = [find(method) for method in methods]  # a misspelt method is said before anything is loaded
    target = tinyspec.load(model, device=device, dtype=dtype)
    if not draft and any(card.drafts or card.optional_draft for card in cards):
        named = target.config.extra.get("draft") or []
        draft = [named] if isinstance(named, str) else named
    return target, [tinyspec.load(name, device=device, dtype=dtype) for name in draft] or None


def console() -> Any:
    """A rich console on standard output; into a pipe or file it writes long lines, and no control codes."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200, no_color=True)
