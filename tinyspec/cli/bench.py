"""tinyspec bench: run the measurements that give the numbers in `tutorials/results`.

`tinyspec/bench/` says what they measure.
"""

from functools import partial
from typing import Any

import click

from tinyspec.bench.settings import COMMANDS
from tinyspec.cli import base
from tinyspec.cli.base import POSITIVE, flag, is_given, option
from tinyspec.cli.measuring import (
    make_command,
    name_files,
    print_result,
    result_options,
    write_text,
)

switch = partial(option, default=True, show_default=False)


@click.group("bench", cls=base.Group, invoke_without_command=True)
@option("--model", "-m", default="smollm2", help="Name, folder, .gguf file or hub id.")
@option("--draft", help="The draft model. [default: the one that the model's card names]")
@option(
    "--dtype",
    default="bfloat16",
    help="float32, bfloat16, float16, float64; stored: as the file has it, quantised or not.",
)
@option("--device", default="cpu", help="cpu, cuda, or cuda:0.")
@option("--threads", type=POSITIVE, help="Threads of every arm. [default: torch's choice]")
@option(
    "--methods",
    multiple=True,
    default=("llma",),
    metavar="LIST",
    help="NAME or NAME:knob=value:knob=value, with commas between; head=FOLDER gives a trained "
    "head. Plain decoding always takes part.",
)
@option("--chapter", help="All techniques of a chapter that this model can run, in tables by task.")
@option(
    "--peers",
    multiple=True,
    metavar="LIST",
    help="transformers[:lookup=10|:assistant=MODEL], llama.cpp[:weights=q8_0].",
)
@option(
    "--tasks",
    multiple=True,
    default=("spec_bench,edits:20",),
    metavar="LIST",
    help="spec_bench (or one of its six), human_eval, gsm8k, edits, books; all. NAME:20 takes 20 "
    "prompts.",
)
@option("--prompts", type=POSITIVE, default=10, help="Prompts of each other task.")
@option("--tokens", type=POSITIVE, default=64, help="Tokens to write.")
@flag("--until-eos", help="Answers end where plain greedy decoding's do. [default: nowhere]")
@option("--rounds", type=POSITIVE, default=3, help="How often each is timed, in turn.")
@option("--temperature", "-t", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@option("--top-p", type=float, help="Keep the fewest tokens whose probability reaches p.")
@option("--seed", type=int, default=0, help="Of the first round; each round adds 1.")
@switch("--curve/--no-curve", "curves", help="Cost curve and ceilings. [default: on]")
@switch("--memory/--no-memory", "memories", help="Peak memory. [default: on]")
@option("--resume", type=base.INPUT_FILE, help="Go on with this file.")
@option("--svg", type=base.OUTPUT_FOLDER, help="Draw pictures, named after --out, into it.")
@option("--markdown", type=base.OUTPUT_FILE, help="Write the tables here.")
@result_options
@base.plugin_option
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure: every method and peer on the same prompts, in turns, against plain decoding.

    Ratios are taken within a turn and are medians; a slow-down is printed as one. With --out, all
    samples are written as they come, and an interrupted run goes on with --resume. --chapter asks a
    chat model Spec-Bench and any other 60 continuations of the valid books, without curve and
    memory. The commands below measure one thing each.

    \b
    Examples:
      tinyspec bench --methods llma,llma:k=8 --prompts 3 --rounds 1
      tinyspec bench --model storyteller --methods speculative_decoding:gamma=2 --tasks books
      tinyspec bench --peers transformers,transformers:lookup=10,llama.cpp --out results/bench.json
      tinyspec bench --chapter speculative --model storyteller --out results/speculative.json
      tinyspec bench --resume results/bench.json --rounds 5
      tinyspec bench --device cuda --dtype bfloat16 --no-memory
      tinyspec bench race --rounds 5 --out results/race.json
    """
    given = {name for name in options if is_given(ctx, name)}
    if ctx.invoked_subcommand is None:
        run_harness(options, given)
    elif given:
        stray = min(given, key=list(options).index)
        command = f"`bench {ctx.invoked_subcommand}`"
        raise click.UsageError(
            f"options of {command} stand after its name ({stray} before it)", ctx
        )


def run_harness(options: dict[str, Any], given: set[str]) -> None:
    """Make settings of the options, measure, and show the result.

    given  names of the options that stand on the command line
    """
    from dataclasses import fields

    from tinyspec.bench import plot, report, run
    from tinyspec.bench.plan import BenchSettings, read_arms
    from tinyspec.bench.tasks import expand_tasks

    chapter, resume, out = options["chapter"], options["resume"], options["out"]
    if chapter is not None:
        if resume is not None:
            raise click.UsageError(
                "--resume goes on with the methods of the file: leave --chapter away"
            )
        unless_given = {"curves": False, "memories": False, "tasks": (), "methods": ()}
        options |= {name: x for name, x in unless_given.items() if name not in given}
    options["tasks"] = expand_tasks(
        [name.strip() for part in options["tasks"] for name in part.split(",") if name.strip()]
    )
    for kind in ("methods", "peers"):
        options[kind] = tuple(arm.label for arm in read_arms(options[kind]))
    settings = {field.name: options[field.name] for field in fields(BenchSettings)}
    more = {name: settings[name] for name in settings if name in given and resume is not None}
    book = run.open_book(BenchSettings(**settings), out, resume, **more)
    shown = {name: options[name] for name in ("chapter", "curves", "memories", "quiet")}
    try:
        result = run.run_bench(book, **shown)
    except KeyboardInterrupt:
        if book.path is not None and book.path.exists():
            click.echo(f"\ninterrupted; go on with: tinyspec bench --resume {book.path}", err=True)
        raise
    markdown, svg = options["markdown"], options["svg"]
    print_result(result, options["as_json"], [report.render_result(result)])
    if markdown is not None:
        write_text(markdown, report.write_markdown(result))
    name = "bench" if book.path is None else book.path.stem  # two results draw into one folder
    pictures = {} if svg is None else report.make_charts(result)
    files = [svg / f"{name}-{kind}.svg" for kind in pictures]
    for file, chart in zip(files, pictures.values(), strict=True):
        write_text(file, plot.draw_chart(chart))
    name_files(book.path, markdown, *files)


for name, spec in COMMANDS.items():
    if name != "calibrate":
        bench.add_command(make_command(spec))
calibrate = make_command(COMMANDS["calibrate"])
