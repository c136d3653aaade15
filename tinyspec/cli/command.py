"""What every command does alike: errors in one line, --debug, plugins, knobs as options.

No torch here, and none at the top of any command's file: `tinyspec --help` answers at once.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.familiar import METHODS, hint_argument, normalize_method

if TYPE_CHECKING:
    from tinyspec.technique import Card, Knob

F = TypeVar("F", bound=Callable[..., Any])
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # as writing to standard output finds it
DEBUG = "tinyspec.debug"  # keys of a click context's `meta`
KNOBS = "tinyspec.knobs"
KNOB_OPTIONS = "tinyspec.knob_options"
CARDS = "tinyspec.cards"
HELP_SETTINGS = {"max_content_width": 100, "show_default": True}

# ---------------------------------------------------------------------- errors


class OneLine(click.ClickException):
    """An error as `tinyspec: what is wrong and what to do`, with exit code 2."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(str(TinyspecError(message)))  # on one line, whatever it quotes

    def show(self, file: Any = None) -> None:
        click.echo(f"tinyspec: {self.message}", file=file or sys.stderr)


def usage_in_one_line(error: click.UsageError) -> click.ClickException:
    """Return click's error of usage as one line that names the command's help."""
    if type(error).__name__ == "NoArgsIsHelpError":  # not an error: a group alone shows its help
        return error
    message = " ".join(error.format_message().split()).rstrip(".")
    help = f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None else ""
    return OneLine(message + help)


def error_in_one_line(error: Exception) -> str:
    """Return what a user is told of an error.

    One that nobody foresaw says its kind, and how to see where it came from.
    """
    message = " ".join(str(error).split())
    if isinstance(error, TinyspecError):
        return message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"the output cannot be written: {error.strerror}"
    if isinstance(error, MemoryError):
        return "memory is out: use a smaller model, fewer --max-new-tokens, or smaller knobs"
    if type(error).__name__ == "OutOfMemoryError":  # torch's; torch may not even be loaded here
        return (
            "CUDA is out of memory: use --dtype bfloat16, fewer --max-new-tokens, "
            "a smaller model, or --device cpu"
        )
    return f"{type(error).__name__}: {message} (this is a defect; --debug shows where)"


def is_debugging(ctx: click.Context) -> bool:
    """Return whether tracebacks are wanted: by --debug anywhere, or by TINYSPEC_DEBUG=1."""
    return bool(ctx.meta.get(DEBUG)) or os.environ.get("TINYSPEC_DEBUG", "0") not in ("", "0")


def add_debug_option(command: click.Command) -> None:
    """Add --debug, which is remembered in the context's `meta`."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True}
    help = "Show a traceback on errors."
    command.params.append(click.Option(["--debug"], callback=remember, help=help, **settings))


# ---------------------------------------------------------------------- techniques


def load_file(path: Path) -> str:
    """Load a technique file, here and in child processes, and return the technique's name."""
    from tinyspec.plugins import add_to_environment
    from tinyspec.technique import load_plugin

    cards = load_plugin(path)
    add_to_environment(path)
    return cards[0].name


def _load_plugins(ctx: click.Context, _: click.Parameter, paths: Sequence[Path]) -> None:
    for path in paths:
        load_file(path)


def plugin_option(function: F) -> F:
    """Add --plugin: techniques from files, which are loaded before anything else is looked at."""
    return click.option(
        "--plugin",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_load_plugins,
        metavar="FILE",
        help="Load a technique from this Python file; may be repeated.",
    )(function)


def our_method(name: str) -> str:
    """Return what a technique is called here, given any name of it or the file that it stands in.

    A file is loaded as by --plugin. Another library's name is answered on standard error.
    """
    if name.endswith(".py"):
        return load_file(Path(name))
    ours = METHODS.get(normalize_method(name), name)
    if ours != name and name != "plain":  # which `translate` and the tables call it too
        click.echo(f"tinyspec: {name} is called {ours} here", err=True)
        return ours
    return name


# ---------------------------------------------------------------------- commands


class Command(click.Command):
    """A command that takes --debug, and whose help keeps the shape of its examples.

    One that takes --method for any technique takes --plugin too, and a name that a technique has
    elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs["context_settings"] = HELP_SETTINGS | kwargs.get("context_settings", {})
        super().__init__(*args, **kwargs)
        self.method_options = [
            option.name
            for option in self.params
            if "--method" in option.opts
            and option.name
            and not isinstance(option.type, click.Choice)
        ]
        if self.method_options:
            plugin_option(self)
        add_debug_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for name in self.method_options:
            given = ctx.params[name]
            ctx.params[name] = (
                our_method(given) if isinstance(given, str) else tuple(map(our_method, given or ()))
            )
        return rest


class KnobCommand(Command):
    """A command whose options are also the knobs of the techniques that --method names.

    The command line is parsed twice: first for the methods, whatever else stands in it; then with
    the options that their cards declare. Cards are read only where an option is none of the
    command's own, or for the help of a method that was named: reading them takes torch.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *ctx.meta.get(KNOB_OPTIONS, ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        named = parser.parse_args(args=[*args])[0]
        own = {name for o in self.get_params(ctx) for name in (*o.opts, *o.secondary_opts)}
        # Of an unknown option the parser makes the command's argument: so the words are looked at.
        words = {word.partition("=")[0] for word in args if word.startswith("--")}
        methods = [named[name] for name in self.method_options if name in named]
        if not words - own - {"--"} and not (methods and {"--help", "-h"} & {*args}):
            return super().parse_args(ctx, args)
        for path in named.get("plugin", ()):
            if Path(path).is_file():  # else the option itself says so
                load_file(Path(path))
        defaults = [o.get_default(ctx) for o in self.params if o.name in self.method_options]
        cards = _find_cards(methods or defaults)
        ctx.meta[CARDS] = cards
        ctx.meta[KNOB_OPTIONS] = [
            option for card in cards for knob in card.knobs for option in _knob_options(knob, own)
        ]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not error.option_name.startswith("--"):
                raise
            raise explain_unknown(ctx, error.option_name.removeprefix("--"), cards) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        knobs = ctx.meta.pop(KNOB_OPTIONS, [])
        super().format_options(ctx, formatter)
        rows = [row for option in knobs if (row := option.get_help_record(ctx))]
        if rows:
            with formatter.section("Knobs of the method"):
                formatter.write_dl(rows)
        for card in ctx.meta.pop(CARDS, []):
            if card.seed_promise:
                formatter.write_paragraph()
                formatter.write_text(f"Seed of {card.name}: {card.seed_promise}.")


def _find_cards(methods: Iterable[Any]) -> "list[Card]":
    """Return the cards of techniques, each given by its name, or by several in a list."""
    from tinyspec.technique import find_technique

    names = [name for given in methods for name in ([given] if isinstance(given, str) else given)]
    found = [
        find_technique(load_file(Path(name)) if name.endswith(".py") else name) for name in names
    ]
    return list(dict.fromkeys(found))


def _knob_options(knob: "Knob", own: set[str]) -> list[click.Option]:
    """Return the options of a knob, as `--min-exit` and hidden as `--min_exit`.

    One of the command's own options comes before a knob of that name. What is given is kept for
    `read_knobs`; the card checks it.
    """
    flag = f"--{knob.name.replace('_', '-')}"
    if flag in own:
        return []
    own |= {flag, f"--{knob.name}"}

    def keep(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.meta.setdefault(KNOBS, {})[knob.name] = value

    settings: dict[str, Any] = {"expose_value": False, "callback": keep, "metavar": "VALUE"}
    text = f"{knob.doc[:1].upper()}{knob.doc[1:]}{describe_range(knob)}"
    help = f"{text}.  [default: {knob.default_text}]"
    options = [click.Option([flag, f"_{knob.name}"], help=help, **settings)]
    if flag != f"--{knob.name}":
        options.append(click.Option([f"--{knob.name}", f"__{knob.name}"], hidden=True, **settings))
    return options


def describe_range(knob: "Knob") -> str:
    """Return the values that a knob may take, in parentheses."""
    if knob.choices:
        return f" (one of {', '.join(map(str, knob.choices))})"
    if knob.low is not None and knob.high is not None:
        return f" ({knob.low:g} to {knob.high:g})"
    return "" if knob.low is None else f" (at least {knob.low:g})"


def explain_unknown(ctx: click.Context, name: str, cards: "Sequence[Card]") -> TinyspecError:
    """Return the error for an option that the command does not have, and no technique as a knob."""
    if hint := hint_argument(name.replace("-", "_"), command_line=True):
        return TinyspecError(f"--{name}: {hint}")
    knobs = sorted({knob.name for card in cards for knob in card.knobs})
    options = [o[2:] for p in ctx.command.get_params(ctx) for o in p.opts if o.startswith("--")]
    close = get_close_matches(name.replace("_", "-"), [*options, *knobs], n=1)
    hint = f"; did you mean --{close[0]}?" if close else ""
    has = f"its knobs: {', '.join(knobs)}" if knobs else "it has none"
    methods = ", ".join(card.name for card in cards)
    return TinyspecError(f"--{name} is no option, and no knob of {methods} ({has}){hint}")


def read_knobs(
    ctx: click.Context, pairs: Sequence[str], methods: Sequence[str]
) -> list[dict[str, Any]]:
    """Return each technique's share of the knobs given as options and as --knob NAME=VALUE.

    Raises TinyspecError for one that no technique has: it may be a misspelt option.
    """
    from tinyspec.technique import find_technique

    texts: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"'{pair}' is not NAME=VALUE", ctx, param_hint="--knob")
        texts[name.strip().replace("-", "_")] = value.strip()
    cards = [find_technique(method) for method in methods]
    knobs = {name: parse_literal(text) for name, text in (texts | ctx.meta.get(KNOBS, {})).items()}
    shares = [
        {knob.name: knobs[knob.name] for knob in card.knobs if knob.name in knobs} for card in cards
    ]
    for name in knobs:
        if not any(name in share for share in shares):
            raise explain_unknown(ctx, name.replace("_", "-"), cards)
    return shares


def parse_literal(text: str) -> Any:
    """Return a value as a shell passes it.

    >>> parse_literal("4"), parse_literal("0.5"), parse_literal("true"), parse_literal("tree")
    (4, 0.5, True, 'tree')
    """
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Group(click.Group):
    """Commands in the order they were added. What goes wrong becomes one line and an exit code."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs["context_settings"] = HELP_SETTINGS | kwargs.get("context_settings", {})
        super().__init__(*args, **kwargs)
        add_debug_option(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise click.UsageError(
                f"there is no command '{args[0]}': {suggest_nearest(args[0], self.commands)}", ctx
            )
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
            if is_debugging(ctx):
                raise
            raise OneLine(error_in_one_line(error)) from error
