"""tinyspec generate: continue a prompt."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.batch import as_dict, note_context, show_lines
from tinyspec.cli.paths import read_prompts
from tinyspec.errors import TinyspecError

UNTRAINED_EXITS = (
    "note: nothing says that the early layers of {} were trained to predict tokens, so an early exit "
    "may write blanks or nonsense: take --model exits-loss, or raise --threshold"
)
"""What is said of a token that left early where the model's config.json names no exit loss."""


@click.command("generate", cls=base.KnobCommand)
@click.argument("prompt", required=False)
@base.options(
    click.option(
        "--model",
        "-m",
        default="storyteller",
        show_default=True,
        help="Name, folder, .gguf file or hub id.",
    ),
    click.option(
        "--method", default="autoregressive", show_default=True, help="See `tinyspec methods`."
    ),
    click.option(
        "--prompts",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help='A batch: one prompt a line; in a .jsonl file, one {"prompt": ...} a line.',
    ),
    base.draft_option,
    base.knob_option,
    click.option(
        "--chat", is_flag=True, help="The prompt is a user's message in the model's chat template."
    ),
    click.option("--stop", multiple=True, help="End before this text; may be repeated."),
    base.reference_option,
    base.sampling_options,
    base.where_options,
    click.option(
        "--stats", is_flag=True, help="Print calls, acceptance and time to standard error."
    ),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="One JSON object, or one a prompt, on standard output.",
    ),
    base.replay_option,
)
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    prompt: str | None,
    model: str,
    method: str,
    prompts: Path | None,
    draft: list[str],
    knob: tuple[str, ...],
    chat: bool,
    stop: tuple[str, ...],
    references: tuple[Path, ...],
    seed: int,
    device: str,
    dtype: str | None,
    stats: bool,
    as_json: bool,
    replay: Path | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT, by any technique; the text appears as it grows.

    Without PROMPT, or with -, it is read from standard input. Options that are not listed are knobs
    of the method. Ctrl-C keeps what there is and exits with 130. The prompts of --prompts run as
    batches; the i-th, counted from 0, uses seed + i and gets the text that it gets alone.

    \b
    Examples:
      tinyspec generate "The old sailor said" --temperature 0.8 --seed 7
      tinyspec generate "Once upon a time" --method speculative_decoding --gamma 6 --stats
      tinyspec generate --model smollm2 --chat --method llma "Name three rivers."
      tinyspec generate --method llma --reference notes.txt "In short:" --stop "\\n\\n"
      tinyspec generate "Once upon a time" --method specinfer --temperature 0.8 --replay tree.html
      cat story.txt | tinyspec generate --json
      tinyspec generate --prompts openings.txt --method speculative_decoding --json
    """
    knobs = base.given_knobs(ctx, knob)
    if prompts is not None and (prompt is not None or replay is not None):
        other = "PROMPT" if prompt is not None else "--replay"
        raise TinyspecError(
            f"{other} is for one prompt, --prompts for many: leave one of them away"
        )
    lines = [] if prompts is None else read_prompts(prompts)
    missing = "there is no prompt: give one as an argument, or pipe it in"
    text = base.read_prompt(prompt, missing) if prompts is None else ""
    texts = [base.read_text(path) for path in references]
    base.settle(ctx, knobs, [method])
    target, small = base.load_all(model, draft, [method], device, dtype)

    from tinyspec.generation import TextStreamer, start
    from tinyspec.show.display import describe_layers, statistics, visible

    stops = [s.replace("\\n", "\n").replace("\\t", "\t") for s in stop]
    options: dict[str, Any] = {"method": method, "draft": small, "stop": stops, "chat": chat}
    options |= {"references": texts, **sampling, **knobs}
    if prompts is not None:
        if show_lines(target, prompts, lines, seed, options, as_json, stats):
            ctx.exit(2)
        return
    running = start(target, text, seed=seed, **options)
    running.trace.detailed = replay is not None
    growing, terminal = TextStreamer(running), sys.stdout.isatty()
    interrupted = False
    try:
        for piece in growing:
            if not as_json:
                click.echo(visible(piece) if terminal else piece, nl=False)
    except KeyboardInterrupt:
        interrupted = True
        running.close("interrupted")
        if not as_json:
            click.echo(growing.rest(), nl=False)
    result = running.result()
    if as_json:
        click.echo(json.dumps(as_dict(target, method, result)))
    else:
        click.echo()
    if replay is not None:
        from tinyspec.show.replay import record, save, tell_written

        save(record(target, method, result), replay)
        click.echo(tell_written(replay), err=True)
    layers = describe_layers(result.trace.layers_run, target.config.n_layers)
    if layers and "exits" not in target.config.extra:
        click.echo(UNTRAINED_EXITS.format(target.name), err=True)
    if note := note_context(target, result, sampling["max_new_tokens"]):
        click.echo(note, err=True)
    if stats or interrupted:
        click.echo(statistics(result.stats, result.finish_reason, layers), err=True)
    if interrupted:
        ctx.exit(130)
