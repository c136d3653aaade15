"""tinyspec bench: the measurements behind every number in `tutorials/results`. `tinyspec/bench/`
says what they measure.
"""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.bench.settings import COMMANDS
from tinyspec.cli import base
from tinyspec.cli.measuring import make_command, result_options


@click.group("bench", cls=base.Group, invoke_without_command=True)
@base.options(
    click.option("--model", "-m", default="smollm2", show_default=True, help="Name, folder, .gguf file or hub id."),
    click.option("--draft", help="The draft model. [default: the one that the model's card names]"),
    click.option("--dtype", default="bfloat16", show_default=True, help="float32, bfloat16, float16, float64."),
    click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:0."),
    click.option("--threads", type=click.IntRange(1), help="Threads of every arm. [default: torch's choice]"),
    click.option(
        "--methods", multiple=True, default=("llma",), show_default=True, metavar="LIST",
        help="NAME or NAME:knob=value:knob=value, with commas between; plain decoding always takes part.",
    ),
    click.option("--chapter", help="All techniques of a chapter that this model can run, in tables by task."),
    click.option(
        "--peers", multiple=True, metavar="LIST",
        help="transformers[:lookup=10|:assistant=MODEL], llama.cpp[:weights=q8_0].",
    ),
    click.option(
        "--tasks", multiple=True, default=("spec_bench,edits:20",), show_default=True, metavar="LIST",
        help="spec_bench (or one of its six), human_eval, gsm8k, edits, books; all. NAME:20 takes 20 prompts.",
    ),
    click.option("--prompts", type=click.IntRange(1), default=10, show_default=True, help="Prompts of each other task."),
    click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens to write."),
    click.option("--until-eos", is_flag=True, help="Answers end where plain greedy decoding's do. [default: nowhere]"),
    click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often each is timed, in turn."),
    click.option("--temperature", "-t", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, help="Keep the fewest tokens whose probability reaches p."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the first round; each round adds 1."),
    click.option("--curve/--no-curve", "curves", default=True, help="Cost curve and ceilings. [default: on]"),
    click.option("--memory/--no-memory", "memories", default=True, help="Peak memory. [default: on]"),
    click.option("--resume", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Go on with this file."),
    click.option("--svg", type=base.OutputPath(folder=True), help="Draw pictures, named after --out, into it."),
    click.option("--markdown", type=base.OutputPath(), help="Write the tables here."),
    result_options,
    base.plugin_option,
)  # fmt: skip
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
    given = {
        name
        for name in options
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if ctx.invoked_subcommand is not None:
        if given:
            stray = min(given, key=list(options).index)
            raise click.UsageError(
                f"options of `bench {ctx.invoked_subcommand}` stand behind its name ({stray} before it)",
                ctx,
            )
        return
    _harness(options, given)


def _harness(options: dict[str, Any], given: set[str]) -> None:
    """The harness: from options to settings, and from a result to what is shown."""
    from dataclasses import fields

    from tinyspec.bench import run
    from tinyspec.bench.plan import BenchSettings, read_arms
    from tinyspec.bench.tasks import expand_tasks

    if options["chapter"] is not None:
        options |= {name: False for name in ("curves", "memories") if name not in given}
        options |= {"tasks": ()} if "tasks" not in given else {}
    options["tasks"] = expand_tasks(
        [name.strip() for part in options["tasks"] for name in part.split(",") if name.strip()]
    )
    for kind in ("methods", "peers"):
        options[kind] = tuple(arm.label for arm in read_arms(options[kind]))
    if options["chapter"] is not None and "methods" not in given:
        options["methods"] = ()
    names = [field.name for field in fields(BenchSettings)]
    resume, out = options["resume"], options["out"]
    if resume is not None and options["chapter"] is not None:
        raise click.UsageError(
            "--resume goes on with the methods of the file: leave --chapter away"
        )
    book = run.open_book(
        BenchSettings(**{name: options[name] for name in names}),
        out,
        resume,
        **({name: options[name] for name in names if name in given} if resume is not None else {}),
    )
    try:
        result = run.run_bench(
            book,
            chapter=options["chapter"],
            curves=options["curves"],
            memories=options["memories"],
            quiet=options["quiet"],
        )
    except KeyboardInterrupt:
        if book.path is not None and book.path.exists():
            click.echo(f"\ninterrupted; go on with: tinyspec bench --resume {book.path}", err=True)
        raise
    _present(result, options, book.path)


def _present(result: dict[str, Any], options: dict[str, Any], path: Path | None) -> None:
    from tinyspec.bench import plot, report

    if options["as_json"]:
        click.echo(json.dumps(result))
    else:
        base.console().print(report.render_result(result), highlight=False)
    if options["markdown"] is not None:
        options["markdown"].write_text(report.write_markdown(result), encoding="utf-8")
    name = "bench" if path is None else path.stem  # so that two results draw into one folder
    written = [path, options["markdown"]]
    if options["svg"] is not None:
        options["svg"].mkdir(parents=True, exist_ok=True)
        for kind, chart in report.make_charts(result).items():
            written.append(options["svg"] / f"{name}-{kind}.svg")
            written[-1].write_text(plot.draw(chart), encoding="utf-8")
    for file in written:
        if file is not None:
            click.echo(f"written: {file}", err=True)


for name, spec in COMMANDS.items():
    if name != "calibrate":
        bench.add_command(make_command(spec))
calibrate = make_command(COMMANDS["calibrate"])
