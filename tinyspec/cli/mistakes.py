"""Errors as one line on standard error, with exit code 2."""

import sys
from typing import Any

import click

from tinyspec.errors import TinyspecError


class OneLine(click.ClickException):
    """An error as `tinyspec: what is wrong and what to do`, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"tinyspec: {self.message}", file=file or sys.stderr)


def usage_in_one_line(error: click.UsageError) -> click.ClickException:
    """Return click's error of usage as one line that names the command's help."""
    if type(error).__name__ == "NoArgsIsHelpError":  # not an error: a group alone shows its help
        return error
    said = " ".join(error.format_message().split()).rstrip(".")
    help = f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None else ""
    return OneLine(said + help)


def in_one_line(error: Exception) -> str:
    """What a user is told of an error. One that nobody foresaw says its kind, and how to see where
    it came from.
    """
    if isinstance(error, TinyspecError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's; torch may not even be loaded here
        return "CUDA is out of memory: use --dtype bfloat16, fewer --max-new-tokens, a smaller model, or --device cpu"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} (this is a defect; --debug shows where)"
