"""tinyspec generate: continue a prompt, or each prompt of a file; tinyspec replay: play it back."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tinyspec.cli import base
from tinyspec.cli.base import flag, option
from tinyspec.errors import BatchError, TinyspecError

if TYPE_CHECKING:
    from tinyspec.generation import Generation
    from tinyspec.lm.model import Model

ROWS = 16
"""Prompts in a forward pass: enough to share the reading of the weights, few enough for memory."""

UNTRAINED_EXITS = (
    "note: nothing says that the early layers of {} were trained to predict tokens, so an early "
    "exit may write blanks or nonsense: take --model {}, or raise --threshold"
)
"""What is said of a token that left early where the model's config.json names no exit loss."""

UNTUNED = (
    "note: {0} was not tuned for {1}, so it drafts badly; the text is right. To tune it: "
    "tinyspec train head --for {0} --method {1} --out FOLDER"
)
"""What is said of a method whose `tuned` the model's config.json does not name."""

UNTUNED_LOSSY = (
    "note: {0} was not tuned for {1}, so its text may be nonsense, unless --{2} is {3}. To tune "
    "it: tinyspec train head --for {0} --method {1} --out FOLDER"
)
"""What is said of such a method if it changes the text."""


@click.command("generate", cls=base.KnobCommand)
@click.argument("prompt", required=False)
@base.model_option
@option("--method", default="autoregressive", help="See `tinyspec methods`.")
@option(
    "--prompts",
    type=base.INPUT_FILE,
    metavar="FILE",
    help='A batch: one prompt a line; in a .jsonl file, one {"prompt": ...} a line.',
)
@base.draft_option
@base.head_option
@base.knob_option
@flag("--chat", help="The prompt is a user's message in the model's chat template.")
@option("--stop", multiple=True, help="End before this text; may be repeated.")
@base.reference_option
@base.sampling_options
@base.where_options
@flag("--stats", help="Print calls, acceptance and time to standard error.")
@flag("--json", "as_json", help="One JSON object, or one a prompt, on standard output.")
@base.replay_option
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    prompt: str | None,
    method: str,
    prompts: Path | None,
    chat: bool,
    stop: tuple[str, ...],
    references: tuple[Path, ...],
    stats: bool,
    as_json: bool,
    replay: Path | None,
    **given: Any,
) -> None:
    """Continue PROMPT, by any technique; the text appears as it grows.

    Without PROMPT, or with -, it is read from standard input. Options that are not listed are knobs
    of the method. Ctrl-C keeps what there is, of --prompts the finished batches, and exits with
    130. The i-th prompt of --prompts, counted from 0, uses seed + i and gets the text that it gets
    alone.

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
    if prompts is not None and (prompt is not None or replay is not None):
        other = "PROMPT" if prompt is not None else "--replay"
        raise TinyspecError(f"give {other} or --prompts FILE, not both")
    lines = [] if prompts is None else base.read_prompts(prompts)
    missing = "there is no prompt: give one as an argument, or pipe it in"
    text = base.read_prompt(prompt, missing) if prompts is None else ""
    texts = [base.read_text(path) for path in references]
    chosen = base.GenerateOptions.take(ctx, given, method)
    target, drafts = chosen.load()

    stops = [s.replace("\\n", "\n").replace("\\t", "\t") for s in stop]
    options: dict[str, Any] = {"method": method, "draft": drafts, "stop": stops, "chat": chat}
    options |= {"references": texts, **chosen.settings, **chosen.knobs[0]}
    if prompts is not None:
        if show_lines(target, prompts, lines, options, as_json, stats):
            ctx.exit(2)
        return

    from tinyspec.generation import start_generation
    from tinyspec.technique import find_technique, is_tuned_for

    running = start_generation(target, text, **options)
    running.trace.detailed = replay is not None
    interrupted = base.print_stream(running, escapes=sys.stdout.isatty(), silent=as_json)
    result = running.result()
    click.echo(json.dumps(as_dict(target, method, result)) if as_json else "")
    if replay is not None:
        from tinyspec.show.replay import record_rounds

        base.write_replay(record_rounds(target, method, result), replay)
    left_early = any(layers < target.config.n_layers for layers in result.trace.layers_run)
    card = find_technique(method)
    if card.tuned is not None and not is_tuned_for(target, method):
        note = UNTUNED if card.lossy is None else UNTUNED_LOSSY
        click.echo(note.format(target.name, method, *(card.lossy or ())), err=True)
    elif card.tuned is None and left_early and "exits" not in target.config.extra:
        click.echo(UNTRAINED_EXITS.format(target.name, "exits-loss"), err=True)
    for note in make_notes(target, result, options, stats or interrupted):
        click.echo(note, err=True)
    if interrupted:
        ctx.exit(130)


def generate_lines(
    target: "Model", lines: Sequence[base.Line], seed: int, options: dict[str, Any]
) -> "Iterator[tuple[base.Line, Generation | TinyspecError]]":
    """Yield each line with its text, ROWS lines at a time. Line i of the list uses seed + i.

    A prompt that cannot be run is returned with its error, and the others go on. What is wrong with
    every prompt of the first batch is wrong with the settings, and raised once.
    """
    from tinyspec.generation import generate

    for first in range(0, len(lines), ROWS):
        part = lines[first : first + ROWS]
        prompts = [line.prompt for line in part]
        results: list[Any]
        try:
            results = cast(list[Any], generate(target, prompts, **options | {"seed": seed + first}))
        except BatchError as error:
            if not all(isinstance(one, TinyspecError) for one in error.errors.values()):
                raise  # a defect, which no other prompt would mend
            results = [error.errors.get(row, text) for row, text in enumerate(error.results)]
        except TinyspecError as error:
            if first == 0:
                raise
            results = [error] * len(part)
        yield from zip(part, results, strict=True)


def show_lines(
    target: "Model",
    path: Path,
    lines: Sequence[base.Line],
    options: dict[str, Any],
    as_json: bool,
    stats: bool,
) -> int:
    """Generate for every line and print as the batches end; return how many lines failed."""
    from tinyspec.show.display import escape_controls

    failures, terminal = 0, sys.stdout.isatty()
    for line, result in generate_lines(target, lines, options["seed"], options):
        head = {"line": line.number, "prompt": line.prompt}
        if isinstance(result, TinyspecError):
            failures += 1
            if as_json:
                click.echo(json.dumps(head | {"error": str(result)}))
            click.echo(f"tinyspec: {path} line {line.number}: {result}", err=True)
            continue
        if as_json:
            click.echo(json.dumps(head | as_dict(target, options["method"], result)))
        else:
            short = line.prompt if len(line.prompt) <= 60 else line.prompt[:57] + "..."
            text = escape_controls(result.text) if terminal else result.text
            click.echo(f"== line {line.number}: {escape_controls(short)}\n{text}\n")
        for note in make_notes(target, result, options, stats):
            click.echo(f"line {line.number}: {note}", err=True)
    return failures


def as_dict(target: "Model", method: str, result: "Generation") -> dict[str, Any]:
    """Return a result for --json."""
    return {
        "model": target.name,
        "method": method,
        "text": result.text,
        "tokens": result.tokens,
        "logprobs": result.logprobs,
        "finish_reason": result.finish_reason,
        "stats": result.stats.as_dict(),
    }


def make_notes(
    target: "Model", result: "Generation", options: dict[str, Any], stats: bool
) -> list[str]:
    """Return what to tell of a result: that it filled the context, and its figures if wanted."""
    notes = list[str]()
    if result.finish_reason == "context":
        notes.append(
            f"note: the text ends after {len(result.tokens)} of {options['max_new_tokens']} "
            f"tokens: the context of {target.name} holds {target.config.max_positions}, "
            f"the prompt's {len(result.trace.prompt)} among them"
        )
    if stats:
        notes.append(base.describe_figures(target, result))
    return notes


@click.command("replay", cls=base.Command)
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@option("--out", "-o", type=base.OUTPUT_FILE, help="[default: beside it, as .html]")
def replay(trace: Path, out: Path | None) -> None:
    """Make the page that plays back TRACE, which --replay FILE.json or the page itself has saved.

    \b
    Examples:
      tinyspec generate "Once upon a time" --method specinfer --replay story.html    at once
      tinyspec generate "Once upon a time" --method specinfer --replay story.json
      tinyspec replay story.json --out story.html
    """
    from tinyspec.show.replay import read_record, save_page

    page = trace.with_suffix(".html") if out is None else out
    save_page(read_record(trace), page)
    click.echo(f"{page}: open it in a browser")
