"""How every command behaves: errors in one line, --debug, knobs as options, plugins, and other
names of methods.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tinyspec.cli.mistakes import OneLine, in_one_line, usage_in_one_line
from tinyspec.errors import TinyspecError, nearest
from tinyspec.familiar import METHODS, hint_argument, normalize_method

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
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=note,
        help="Show a traceback on errors.",
    )


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
    """--plugin: techniques from files that stand anywhere, loaded before anything else is looked
    at.
    """
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


class Command(click.Command):
    """A command that takes --debug, and whose help keeps the shape of its examples.

    One that takes --method for any technique takes --plugin too, and a name that a technique has
    elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("context_settings", {}).setdefault("max_content_width", 100)
        super().__init__(*args, **kwargs)
        self._takes_method = [
            option.name
            for option in self.params
            if "--method" in option.opts
            and option.name
            and not isinstance(option.type, click.Choice)
        ]
        if self._takes_method:
            plugin_option(self)
        self.params.append(_debug_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for name in self._takes_method:
            given = ctx.params[name]
            ctx.params[name] = (
                our_method(given) if isinstance(given, str) else tuple(map(our_method, given or ()))
            )
        return rest


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


class KnobCommand(Command):
    """A command whose unknown options are a technique's knobs: `--gamma 4`, `--gamma=4`. Its card
    checks them later.
    """

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
                if (
                    name in known
                    and not equals
                    and not known[name].is_flag
                    and not known[name].count
                    and waiting
                ):
                    kept.append(waiting.pop(0))
                continue
            if not equals:
                if not waiting or waiting[0].startswith("--"):
                    if hint := hint_argument(name[2:], command_line=True):
                        raise TinyspecError(f"{name}: {hint}")
                    raise click.NoSuchOption(name, possibilities=close_names(name, known), ctx=ctx)
                value = waiting.pop(0)
            knobs[name[2:].replace("-", "_")] = value
        ctx.meta[KNOBS] = knobs
        return super().parse_args(ctx, kept)


def close_names(name: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    """Return the two names that are nearest in spelling, or fewer."""
    from difflib import get_close_matches

    return get_close_matches(name, list(known), n=2)


class Group(click.Group):
    """Commands under one name, in the order they were added. Whatever goes wrong becomes one line
    and an exit code.
    """

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
            raise click.UsageError(
                f"there is no command '{args[0]}': {nearest(args[0], self.commands)}", ctx
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
            if debugging(ctx):
                raise
            raise OneLine(in_one_line(error)) from error
