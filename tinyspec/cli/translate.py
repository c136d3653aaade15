"""tinyspec translate: a sentence in another language."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import flag, option
from tinyspec.cli.generate import UNTRAINED_EXITS
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.translation import ExtendingRun, RewritingRun, Translation


@click.command("translate", cls=base.KnobCommand)
@click.argument("source", required=False)
@option(
    "--model", "-m", help="Name or folder. [default: the one here that was trained for the method]"
)
@option("--method", default="plain", help="plain, nat, mask_predict, jacobi, ...")
@option(
    "--teacher",
    help="The model that judges candidates. [default: the one that the model's card names]",
)
@option(
    "--draft",
    help="The model that drafts (specdec). [default: the one here that was trained for it]",
)
@base.knob_option
@option(
    "--max-new-tokens",
    "-n",
    type=int,
    help="Most tokens, with plain. [default: 1.5 x source + 11]",
)
@option("--temperature", "-t", type=float, help="0 is greedy. [default: 0 from left to right]")
@option("--seed", type=int, default=0, help="Same seed, same translation.")
@option("--device", default="cpu", help="cpu, cuda, or cuda:0.")
@option("--dtype", help="float32, bfloat16, float16, float64. [default: float32]")
@flag("--trace", help="Show what every pass made of the canvas, or added to the text.")
@base.replay_option
@flag("--stats", help="Print passes and time to standard error.")
@flag("--json", "as_json", help="One JSON object a sentence on standard output.")
@click.pass_context
def translate(
    ctx: click.Context,
    /,
    source: str | None,
    model: str | None,
    method: str,
    teacher: str | None,
    draft: str | None,
    knob: tuple[str, ...],
    seed: int,
    device: str,
    dtype: str | None,
    trace: bool,
    replay: Path | None,
    stats: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Translate SOURCE, by any technique that needs no draft model, or by specdec.

    A method with a head runs on a model that was trained with one: blockwise on multi30k-blockwise.
    Without SOURCE, or with -, every line of standard input is a sentence; line i uses seed + i. A
    blank line stays blank. One that cannot be translated becomes blank, and its error is printed.
    Options that are not listed are knobs of the method. Models lie in the repository's models/
    folder; the wheel carries none of them.

    \b
    Examples:
      tinyspec translate "A dog runs through the snow." --stats
      tinyspec translate --method nat "A dog runs through the snow."
      tinyspec translate --method mask_predict --iterations 4 --trace "Two men are cooking."
      tinyspec translate --method jacobi --model models/mine "A child is sleeping." --json
      tinyspec translate --method specdec --beta 1 "A child is sleeping." --stats
      tinyspec translate --method blockwise --rule top --slack 1 "A child is sleeping." --stats
      tinyspec translate --method mask_predict --replay passes.html "Two dogs play in the snow."
      cat sentences.txt | tinyspec translate --method mask_predict > translations.txt
    """
    missing = "there is no source: give a sentence as an argument, or pipe some in"
    text = base.read_prompt(source, missing)

    from tinyspec.models import load_translator
    from tinyspec.translation import AUTOREGRESSIVE, load_for_method, start_translation

    (knobs,) = base.read_knobs(ctx, knob, [AUTOREGRESSIVE if method == "plain" else method])
    if model is None:
        translator = load_for_method(method, device, dtype)
    else:
        translator = load_translator(model, device, dtype)
    judge = None if teacher is None else load_translator(teacher, device, dtype)
    drafter = None if draft is None else load_translator(draft, device, dtype)
    lines, is_batch = [text], source in (None, "-")
    if is_batch:  # unlike splitlines: a form feed, for instance, ends no line
        lines = [line.removesuffix("\r") for line in text.split("\n")] if text else []
    if replay is not None and len(lines) > 1:
        raise TinyspecError("--replay plays back one sentence: give one as an argument")
    options = {"method": method, "teacher": judge, "draft": drafter, **limits, **knobs}
    if is_batch:  # what is wrong with every line is told once
        start_translation(translator, [translator.config.eos], **options)
    failures = 0
    for number, line in enumerate(lines):
        if is_batch and not line.strip():
            click.echo("{}" if as_json else "")
            continue
        try:
            running = start_translation(translator, line, seed=seed + number, **options)
            running.detail(replay is not None)
            n_layers = running.model.config.decoder_layers
            try:
                show_passes(running, on_lines=trace, in_place=not (trace or as_json))
            except KeyboardInterrupt:
                print_translation(running.interrupted(), n_layers, as_json, stats=True)
                ctx.exit(130)
        except TinyspecError as error:
            if not is_batch:
                raise
            failures += 1
            click.echo(json.dumps({"error": str(error)}) if as_json else "")
            click.echo(f"tinyspec: line {number + 1}: {error}", err=True)
            continue
        done = running.result()
        print_translation(done, n_layers, as_json, stats)
        left_early = any(layers < n_layers for layers in done.trace.layers_run)
        if left_early and "exits" not in running.model.config.extra:
            note = UNTRAINED_EXITS.format(running.model.name, "multi30k-exits")
            click.echo(note, err=True)
        if replay is not None:
            from tinyspec.show.replay import record_passes, record_rounds

            make = record_passes if done.passes else record_rounds
            base.write_replay(make(running.model, method, done), replay)
    if failures:
        ctx.exit(2)


def show_passes(running: "ExtendingRun | RewritingRun", on_lines: bool, in_place: bool) -> None:
    """Run a translation to its end, and show on standard error what every pass made.

    on_lines  a line for each pass
    in_place  all on one line, at a terminal only
    """
    from tinyspec.show.display import escape_controls

    in_place = in_place and sys.stderr.isatty() and sys.stdout.isatty()
    for number, _ in enumerate(running, 1):
        text = escape_controls(running.shown())
        if on_lines:
            click.echo(f"{number:3}  {text}", err=True)
        elif in_place:
            click.echo(f"\r\x1b[K{text[:100]}", nl=False, err=True)
    if in_place:
        click.echo("\r\x1b[K", nl=False, err=True)


def print_translation(done: "Translation", n_layers: int, as_json: bool, stats: bool) -> None:
    """Print a translation, as text or as JSON, and its figures on standard error."""
    from tinyspec.show.display import describe_layers, escape_controls

    if as_json:
        click.echo(json.dumps(done.as_dict(), ensure_ascii=False))
    else:
        click.echo(escape_controls(done.text) if sys.stdout.isatty() else done.text)
    if stats:
        click.echo(done.figures() + describe_layers(done.trace.layers_run, n_layers), err=True)
