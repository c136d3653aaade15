"""tinyspec bench: the measurements behind every number in the README. What they measure, `tinyspec/bench/` says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base

RAW = ("samples", "prompts", "machine")  # long, and in the file that --out writes


def _rounds(default: int) -> Any:
    return click.option(
        "--rounds", type=click.IntRange(1), default=default, show_default=True, help="How often each is timed, in turn."
    )


def _tokens(default: int) -> Any:
    return click.option("--tokens", type=click.IntRange(1), default=default, show_default=True, help="Tokens to write.")


_results = base.options(
    click.option(
        "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result with all samples here."
    ),
    click.option("--json", "as_json", is_flag=True, help="The result with all samples on standard output."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)


@click.group("bench", cls=base.Group)
def bench() -> None:
    """Measure: warm up, take turns, quote ratios of medians, keep raw samples.

    \b
    Examples:
      tinyspec bench race --rounds 5 --out results/race.json
      tinyspec bench core
      tinyspec bench plain --model smollm2
      tinyspec bench peer --model smollm2
    """


@bench.command("race", cls=base.KnobCommand)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name, folder, .gguf file or hub id."),
    click.option("--method", default="speculative_decoding", show_default=True, help="See `tinyspec methods`."),
    base.knob_option,
    _tokens(128),
    _rounds(5),
    click.option(
        "--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 0.8), show_default=True
    ),
    click.option(
        "--repetition-penalty", type=float, default=1.2, show_default=True, help="For both arms: 1 lets text loop."
    ),
    _results,
)
@click.pass_context
def race(ctx: click.Context, /, model: str, method: str, knob: tuple[str, ...], **options: Any) -> None:
    """A technique against plain decoding over ten committed prompts, greedy and sampled.

    \b
    Examples:
      tinyspec bench race
      tinyspec bench race --method llma --rounds 3 --out results/llma.json
      tinyspec bench race --gamma 6 --temperature 0
    """
    knobs = base.given_knobs(ctx, knob)
    base.settle(ctx, knobs, [method])
    from tinyspec.bench.races import measure

    _show(measure, options, name=model, method=method, **knobs)


@bench.command("core")
@base.options(_rounds(15), _results)
def core(**options: Any) -> None:
    """The compiled kernels against transformers' processors and torch, from the same logits.

    \b
    Examples:
      tinyspec bench core
      tinyspec bench core --rounds 31 --out results/core.json
    """
    from tinyspec.bench.core import measure

    _show(measure, options)


@bench.command("plain")
@base.options(
    click.option("--model", "-m", default="smollm2", show_default=True, help="Name or folder."),
    _tokens(128),
    _rounds(5),
    click.option(
        "--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True, help="May be repeated."
    ),
    _results,
)
def plain(model: str, **options: Any) -> None:
    """Plain decoding against transformers' generate: same weights, same tokens, batch 1; and peak memory.

    \b
    Examples:
      tinyspec bench plain
      tinyspec bench plain --model storyteller --dtype float32
    """
    from tinyspec.bench.plain import measure

    _show(measure, options, name=model)


@bench.command("peer")
@base.options(
    click.option("--model", "-m", default="smollm2", show_default=True, help="Name or folder."),
    click.option("--questions", type=click.IntRange(1), default=50, show_default=True, help="Prompts of Spec-Bench."),
    _tokens(64),
    click.option(
        "--method", "methods", multiple=True, default=("autoregressive",), show_default=True, help="May be repeated."
    ),
    _results,
)
def peer(model: str, **options: Any) -> None:
    """Greedy tokens against transformers' on the same float32 weights, on real questions.

    \b
    Examples:
      tinyspec bench peer
      tinyspec bench peer --questions 12 --method autoregressive --method llma
    """
    from tinyspec.bench.peer import measure

    _show(measure, options, name=model)


def _show(measure: Any, options: dict[str, Any], **more: Any) -> None:
    """Measure; write the result to --out, and print it whole (--json) or without its raw samples."""
    out, as_json = options.pop("out"), options.pop("as_json")
    result: dict[str, Any] = measure(**options, **more)
    if out is not None:
        from tinyspec.bench.harness import save

        save(out, result)
    if as_json:
        click.echo(json.dumps(result))
        return
    for line in summary(result):
        click.echo(line)
    if out is not None:
        click.echo(f"written: {out}")


def summary(figures: Mapping[str, Any], depth: int = 0) -> list[str]:
    """The figures as indented lines; a list of raw things is left to the file."""
    lines: list[str] = []
    for name, value in figures.items():
        lead = "  " * depth + name.replace("_", " ")
        if name in RAW or (isinstance(value, list) and value and isinstance(value[0], (dict, list))):
            continue
        if isinstance(value, Mapping):
            lines += [lead, *summary(value, depth + 1)]
        else:
            lines.append(f"{lead}: {value:.4g}" if isinstance(value, float) else f"{lead}: {value}")
    return lines
