"""tinyspec bench plan-draft, sizes, skip, retrieval: measurements of drafts."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import results, rounds, show, tokens, write


@click.command("plan-draft", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="The target: name or folder."),
    click.option("--drafts", multiple=True, metavar="LIST", help="Candidates. [default: the draft that the card names]"),
    click.option("--longest", type=click.IntRange(1), default=6, show_default=True, help="Drafted tokens a round, at most."),
    click.option("--prompts", type=click.IntRange(1), default=4, show_default=True, help="Openings to measure on."),
    tokens(64),
    click.option("--temperature", "-t", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
    click.option("--check/--no-check", default=True, help="Measure the forecasts on other prompts. [default: on]"),
    click.option(
        "--numbers", type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Advise from the numbers of this file; nothing is run.",
    ),
    results,
)  # fmt: skip
def plan_draft(model: str, drafts: tuple[str, ...], numbers: Path | None, **options: Any) -> None:
    """Which draft model, and how many tokens of it: measured, forecast, recommended (arXiv
    2402.01528).

    \b
    Examples:
      tinyspec bench plan-draft
      tinyspec bench plan-draft --drafts apprentice,models/mine --longest 8 --out results/plan.json
      tinyspec bench plan-draft --numbers results/plan.json
    """
    from tinyspec.bench import planning
    from tinyspec.bench.harness import save

    out, as_json = options.pop("out"), options.pop("as_json")
    named = [name.strip() for part in drafts for name in part.split(",") if name.strip()]
    result = (
        planning.advise(numbers)
        if numbers is not None
        else planning.measure(model, named, **options)
    )
    if out is not None:
        save(out, result)
    if as_json:
        click.echo(json.dumps(result))
        return
    base.console().print(planning.grid(result).rich(), highlight=False)
    click.echo(planning.sentence(result))
    if out is not None:
        click.echo(f"written: {out}", err=True)


@click.command("skip", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name or folder."),
    click.option(
        "--evaluations",
        type=click.IntRange(1),
        default=100,
        show_default=True,
        help="Skip sets to be timed.",
    ),
    click.option(
        "--prompts",
        type=click.IntRange(1, 20),
        default=2,
        show_default=True,
        help="Openings to measure on.",
    ),
    tokens(32),
    click.option(
        "--temperature",
        "-t",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="0 is greedy.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the search."),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
    click.option("--resume", is_flag=True, help="Go on with the file of --out."),
    results,
)
def skip(model: str, **options: Any) -> None:
    """Search the sublayers that self_speculative skips: Bayesian optimisation of the measured time
    per token.

    The file of --out is what the knob takes; it is written after every evaluation, and --resume
    goes on with it.

    \b
    Examples:
      tinyspec bench skip --model storyteller --out skip.json
      tinyspec bench skip --model storyteller --out skip.json --resume --evaluations 200
      tinyspec generate --model storyteller --method self_speculative --skip skip.json "Once upon a
      time"
    """
    from tinyspec.bench.skip import measure

    show(measure, options, kept=True, name=model)


@click.command("sizes", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="The target: name or folder."),
    click.option("--drafts", multiple=True, required=True, metavar="LIST", help="Drafts of several sizes: names or folders."),
    click.option("--gammas", default="1,2,3,4", show_default=True, metavar="LIST", help="Drafted tokens a round."),
    click.option("--prompts", type=click.IntRange(1), default=20, show_default=True, help="Openings of the valid books."),
    tokens(64),
    rounds(3),
    click.option("--temperature", "-t", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--dtype", default="bfloat16", show_default=True, help="float32, bfloat16, float16, float64."),
    click.option("--svg", type=base.OutputPath(parents=True), help="Draw the picture into this file."),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the table here."),
    results,
)  # fmt: skip
def sizes(
    model: str,
    drafts: tuple[str, ...],
    gammas: str,
    svg: Path | None,
    markdown: Path | None,
    **options: Any,
) -> None:
    """Acceptance and time against the size of the draft: alpha by paired rows, tau, time, and the
    forecast of both.

    \b
    Examples:
      tinyspec train lm --distill storyteller --layers 1 --minutes 5 --out drafts/one
      tinyspec bench sizes --drafts drafts/one,apprentice --out results/sizes.json --svg
      results/sizes.svg
    """
    from tinyspec.bench import sizes as experiment
    from tinyspec.bench.book import dumps
    from tinyspec.bench.report import page
    from tinyspec.errors import TinyspecError

    out, as_json = options.pop("out"), options.pop("as_json")
    if not all(part.strip().isdecimal() and int(part) for part in gammas.split(",")):
        raise TinyspecError(
            f"--gammas {gammas}: write numbers of drafted tokens with commas between, such as 1,2,4"
        )
    named = [name.strip() for part in drafts for name in part.split(",") if name.strip()]
    result = experiment.run(model, named, tuple(map(int, gammas.split(","))), **options)
    if as_json:
        click.echo(json.dumps(result))
    else:
        base.console().print(experiment.grid(result).rich(), highlight=False)
    texts = {out: dumps(result), svg: experiment.picture(result)}
    texts[markdown] = page(result, [experiment.grid(result)])
    write(texts)


@click.command("retrieval", cls=base.Command)
@base.options(
    click.option(
        "--size", "sizes", type=click.IntRange(1000), multiple=True, default=(10_000, 100_000, 1_000_000), show_default=True,
        help="Tokens that are known; may be repeated. 10 million take some GB.",
    ),
    click.option(
        "--method", "arms", type=click.Choice(["llma", "lookahead_trie", "suffix_decoding", "rest"]), multiple=True,
        default=("llma", "lookahead_trie", "suffix_decoding", "rest"), show_default=True, help="May be repeated.",
    ),
    rounds(5),
    results,
)  # fmt: skip
def retrieval(**options: Any) -> None:
    """What it costs to look a draft up and to add a token, by the size of what is known.

    \b
    Examples:
      tinyspec bench retrieval
      tinyspec bench retrieval --size 100000 --method suffix_decoding
      tinyspec bench retrieval --size 10000 --size 100000 --size 1000000 --size 10000000 --out
      results/retrieval.json
    """
    from tinyspec.bench.retrieval import measure

    show(measure, options)
