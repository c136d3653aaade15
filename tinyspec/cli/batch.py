"""The prompts of a file, several in each forward pass: `tinyspec generate --prompts FILE`."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli.paths import Line
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.generation import Generation
    from tinyspec.lm.gate import BatchBarrier
    from tinyspec.lm.transformer import Model

ROWS = 16
"""Prompts in a forward pass: enough to share the reading of the weights, few enough for memory."""


def generate_lines(
    target: "Model", lines: Sequence[Line], seed: int, options: dict[str, Any]
) -> Iterator[tuple[Line, "Generation | TinyspecError"]]:
    """Yield each line with its text, ROWS lines at a time. Line i of the list uses seed + i.

    A prompt that cannot be run is returned with its error, and the others go on. What is wrong with
    every prompt of the first batch is wrong with the settings, and raised once.
    """
    from tinyspec.lm.gate import run_together

    for first in range(0, len(lines), ROWS):
        part = lines[first : first + ROWS]
        jobs = [
            partial(_generate_line, target, line.prompt, seed + row, options)
            for row, line in enumerate(part, first)
        ]
        results = run_together(jobs)
        said = {str(result) for result in results if isinstance(result, TinyspecError)}
        failed = sum(isinstance(result, TinyspecError) for result in results)
        if first == 0 and failed == len(results) and len(said) == 1 and failed > 1:
            raise TinyspecError(said.pop())
        yield from zip(part, results, strict=True)


def _generate_line(
    target: "Model", prompt: str, seed: int, options: dict[str, Any], gate: "BatchBarrier"
) -> "Generation | TinyspecError":
    from tinyspec.generation import start

    try:
        running = start(target, prompt, seed=seed, gate=gate, **options)
        for _ in running:
            pass
        return running.result()
    except TinyspecError as error:
        return error


def show_lines(
    target: "Model",
    path: Path,
    lines: Sequence[Line],
    seed: int,
    options: dict[str, Any],
    as_json: bool,
    stats: bool,
) -> int:
    """Generate for every line and print as the batches end; return how many lines failed."""
    from tinyspec.show.display import describe_layers, statistics, visible

    failures, terminal = 0, sys.stdout.isatty()
    for line, result in generate_lines(target, lines, seed, options):
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
            text = visible(result.text) if terminal else result.text
            click.echo(f"== line {line.number}: {visible(short)}\n{text}\n")
        notes = [note_context(target, result, options["max_new_tokens"])]
        if stats:
            layers = describe_layers(result.trace.layers_run, target.config.n_layers)
            notes.append(statistics(result.stats, result.finish_reason, layers))
        for note in filter(None, notes):
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


def note_context(target: "Model", result: "Generation", asked: int) -> str:
    """Return what to tell of a text that filled the context; "" of any other."""
    if result.finish_reason != "context":
        return ""
    return (
        f"note: the text ends after {len(result.tokens)} of {asked} tokens: the context of "
        f"{target.name} holds {target.config.max_positions}, the prompt's "
        f"{len(result.trace.prompt)} among them"
    )
