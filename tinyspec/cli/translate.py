"""tinyspec translate: a sentence in another language."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.translation import ExtendingRun, RewritingRun, Translation


@click.command("translate", cls=base.KnobCommand)
@click.argument("source", required=False)
@base.options(
    click.option(
        "--model",
        "-m",
        help="Name or folder. [default: the one here that was trained for the method]",
    ),
    click.option("--method", default="plain", help="plain, nat, mask_predict, jacobi, ..."),
    click.option(
        "--teacher",
        help="The model that judges candidates. [default: the one that the model's card names]",
    ),
    base.knob_option,
    click.option(
        "--max-new-tokens",
        "-n",
        type=int,
        help="At most, from left to right. [default: 1.5 x source + 11]",
    ),
    click.option(
        "--temperature",
        "-t",
        type=float,
        help="Of what is drawn. [default: left to right, 0: greedy]",
    ),
    click.option("--seed", type=int, default=0, help="Same seed, same translation."),
    click.option("--device", default="cpu", help="cpu, cuda, or cuda:0."),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: float32]"),
    click.option(
        "--trace",
        is_flag=True,
        help="Show what every pass made of the canvas, or added to the text.",
    ),
    base.replay_option,
    click.option("--stats", is_flag=True, help="Print passes and time to standard error."),
    click.option(
        "--json", "as_json", is_flag=True, help="One JSON object a sentence on standard output."
    ),
)
@click.pass_context
def translate(
    ctx: click.Context,
    /,
    source: str | None,
    model: str | None,
    method: str,
    teacher: str | None,
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
    """Translate SOURCE, by any technique that needs no draft model.

    Without SOURCE, or with -, every line of standard input is a sentence; line i uses seed + i.
    Options that are not listed are knobs of the method. Models lie in the repository's models/
    folder; the wheel carries none of them.

    \b
    Examples:
      tinyspec translate "A dog runs through the snow." --stats
      tinyspec translate --method nat "A dog runs through the snow."
      tinyspec translate --method mask_predict --iterations 4 --trace "Two men are cooking."
      tinyspec translate --method jacobi --model models/mine "A child is sleeping." --json
      tinyspec translate --method mask_predict --replay passes.html "Two dogs play in the snow."
      cat sentences.txt | tinyspec translate --method mask_predict > translations.txt
    """
    missing = "there is no source: give a sentence as an argument, or pipe some in"
    text = base.read_prompt(source, missing)

    from tinyspec.translation import AUTOREGRESSIVE, load_for_method, start_translation

    (knobs,) = base.read_knobs(ctx, knob, [AUTOREGRESSIVE if method == "plain" else method])
    translator = (
        load_for_method(method, device, dtype) if model is None else _load(model, device, dtype)
    )
    judge = None if teacher is None else _load(teacher, device, dtype)
    lines = [text] if source not in (None, "-") else text.splitlines()
    if replay is not None and len(lines) > 1:
        raise TinyspecError("--replay plays back one sentence: give one as an argument")
    options = {"method": method, "teacher": judge, **limits, **knobs}
    for number, line in enumerate(lines):
        running = start_translation(translator, line, seed=seed + number, **options)
        running.detail(replay is not None)
        n_layers = running.model.config.decoder_layers
        try:
            _run(running, shows=trace, grows=not (trace or as_json))
        except KeyboardInterrupt:
            _report(running.interrupted(), n_layers, as_json, stats=True)
            ctx.exit(130)
        done = running.result()
        _report(done, n_layers, as_json, stats)
        if replay is not None:
            from tinyspec.show.replay import record_passes, record_rounds

            make = record_passes if done.passes else record_rounds
            base.write_replay(make(running.model, method, done), replay)


def _load(name: str, device: str, dtype: str | None) -> Any:
    from tinyspec.models import load_translator

    return load_translator(name, device, dtype)


def _run(running: "ExtendingRun | RewritingRun", shows: bool, grows: bool) -> None:
    """Run to the end.

    Show every pass on standard error, or, at a terminal, the text as it grows on one line.
    """
    from tinyspec.show.display import escape_controls

    live = grows and sys.stderr.isatty() and sys.stdout.isatty()
    for number, _ in enumerate(running, 1):
        if shows:
            click.echo(f"{number:3}  {escape_controls(running.shown())}", err=True)
        elif live:
            click.echo(f"\r\x1b[K{escape_controls(running.shown())[:100]}", nl=False, err=True)
    if live:
        click.echo("\r\x1b[K", nl=False, err=True)


def _report(done: "Translation", n_layers: int, as_json: bool, stats: bool) -> None:
    from tinyspec.show.display import describe_layers, escape_controls

    if as_json:
        click.echo(json.dumps(done.as_dict(), ensure_ascii=False))
    else:
        click.echo(escape_controls(done.text) if sys.stdout.isatty() else done.text)
    if stats:
        click.echo(done.figures() + describe_layers(done.trace.layers_run, n_layers), err=True)
