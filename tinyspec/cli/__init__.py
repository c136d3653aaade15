"""The command line. A command imports what it needs when it runs: --help answers at once."""

import click

import tinyspec
from tinyspec.cli import (
    bench,
    book,
    chat,
    generate,
    grade,
    laws,
    methods,
    models,
    race,
    serve,
    train,
    translate,
)
from tinyspec.cli.base import Group


@click.group(
    "tinyspec",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(tinyspec.__version__, "--version", prog_name="tinyspec")
def main() -> None:
    """Accelerated generation for language models: race it, use it, read it.

    \b
    Examples:
      tinyspec race                             plain against speculative decoding, side by side
      tinyspec generate "The old sailor said"   continue a text
      tinyspec methods                          every technique, with its guarantee and its knobs
      tinyspec laws --all                       prove them, outcome by outcome
      tinyspec generate --help                  what a command takes, with examples

    Errors are one line on standard error and exit code 2; --debug (or TINYSPEC_DEBUG=1) adds the
    traceback.
    """


for command in (
    race.race,
    generate.generate,
    translate.translate,
    chat.chat,
    serve.serve,
    generate.replay,
    book.book,
    grade.assignment,
    grade.grade,
    methods.methods,
    laws.laws,
    models.models,
    models.data,
    train.train,
    models.export,
    models.quantize,
    bench.calibrate,
    bench.bench,
):
    main.add_command(command)
