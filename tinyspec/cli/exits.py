"""tinyspec train exits, calibrate, bench exits: what early exits need beside a model, and what they
save.
"""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import results, tokens
from tinyspec.errors import TinyspecError

texts_option = click.option(
    "--texts", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plain text to take passages from; may be repeated. [default: the classics]",
)  # fmt: skip
CHARACTERS = 30_000  # of each book, so that all authors have a say


@click.command("exits", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name or folder; it is not changed."),
    click.option(
        "--out", type=base.OutputPath(folder=True),
        help="A folder for a copy with the classifier. [default: into the model's own folder]",
    ),
    texts_option,
    click.option("--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps of the training."),
    click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Passages a step."),
    click.option("--context", type=click.IntRange(2), default=64, show_default=True, help="Tokens of a passage."),
    click.option("--lr", type=click.FloatRange(0, min_open=True), default=0.01, show_default=True, help="Learning rate."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the passages."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)  # fmt: skip
def train_exits(
    model: str, out: Path | None, files: tuple[Path, ...], steps: int, batch: int, context: int, lr: float, seed: int,
    quiet: bool,
) -> None:  # fmt: skip
    """Train CALM's exit classifier: one vector that says whether a layer's word is the top layer's.
    The model is frozen.

    An interrupted training goes on with the same command.

    \b
    Examples:
      tinyspec train exits --model storyteller --out models/mine
      tinyspec generate --model models/mine --method calm --measure classifier --threshold 0.8 "Once
      upon a time"
    """
    import shutil

    from rich.console import Console

    from tinyspec import models
    from tinyspec.early_exit.calm import train_exit_classifier
    from tinyspec.lm import checkpoint
    from tinyspec.training import corpus
    from tinyspec.training.schedule import Settings

    loaded = models.load(model)
    found = models.find(model)
    folder = out or (found if found is not None and found.is_dir() else None)
    if folder is None:
        raise TinyspecError(
            f"{model} is no folder that a classifier could stand in: name one with --out"
        )
    if loaded.config.n_layers < 2:
        raise TinyspecError(f"{loaded.name} has one layer: there is nowhere to exit")
    if context > loaded.config.max_positions:
        raise TinyspecError(
            f"--context {context}: {loaded.name} has a context of {loaded.config.max_positions} tokens"
        )
    if (
        out is not None
        and (out / "config.json").exists()
        and out.resolve() != (found or out / "other").resolve()
    ):
        raise TinyspecError(
            f"{out} already holds a model: name a new folder, or give --model {out}"
        )
    end = loaded.config.eos[0] if loaded.config.eos else 0
    ids = corpus.pack(
        loaded.tokenizer, [text[:CHARACTERS] for text in passages(files, "train")], end
    )
    if len(ids) <= context + 1:
        raise TinyspecError(
            f"the texts have {len(ids)} tokens, a passage {context}: give more, or a smaller --context"
        )
    settings = Settings(
        steps,
        lr=lr,
        warmup=min(20, steps),
        weight_decay=0.0,
        seed=seed,
        log_every=20,
        valid_every=max(20, steps // 10),
    )
    state = folder / ".tinyspec" / "exits"
    console = None if quiet else Console(stderr=True)
    ended, extras = train_exit_classifier(
        loaded, corpus.crops(ids, batch, context), settings, state, console=console
    )
    if not ended.finished:
        raise click.exceptions.Exit(130)
    if not (folder / "config.json").exists():
        loaded.save(folder)
    checkpoint.write_extras(folder, extras)
    shutil.rmtree(state)
    if not any(state.parent.iterdir()):
        state.parent.rmdir()
    click.echo(f"{folder}  held-out loss {ended.best:.4f} (ln 2 = 0.6931 knows nothing)")


def passages(files: tuple[Path, ...], split: Any) -> list[str]:
    """The texts of files, else the classics."""
    from tinyspec import data
    from tinyspec.training import corpus

    return [base.read_text(file) for file in files] or [
        corpus.clean(book.text) for book in data.books(split)
    ]


def knob_options(decay: str) -> Any:
    """CALM's knobs but for the threshold and the measure."""
    return base.options(
        click.option(
            "--decay", type=click.Choice(["paper", "t5x", "constant"]), default=decay, show_default=True,
            help="How the threshold falls along a text.",
        ),
        click.option("--tau", type=click.FloatRange(0), default=4.0, show_default=True, help="How fast it falls."),
        click.option("--min-exit", type=click.IntRange(1), default=1, show_default=True, help="The lowest exit."),
    )  # fmt: skip


passage_options = base.options(
    texts_option,
    click.option(
        "--prompt-tokens",
        type=click.IntRange(1),
        default=64,
        show_default=True,
        help="Tokens that are read.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the passages."),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
)


@click.command("calibrate", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name or folder."),
    click.option("--delta", type=float, default=0.1, show_default=True, help="The greatest risk: expected loss of a text."),
    click.option("--epsilon", type=float, default=0.05, show_default=True, help="How probable a greater one may be."),
    click.option(
        "--consistency", type=click.Choice(["textual", "risk"]), default="textual", show_default=True,
        help="With the full model's text (1 - ROUGE-L), or in how well the passage's own is met.",
    ),
    click.option(
        "--measure", type=click.Choice(["softmax", "saturation", "classifier"]), default="softmax", show_default=True,
        help="The confidence.",
    ),
    knob_options("paper"),
    click.option("--prompts", type=click.IntRange(1), default=200, show_default=True, help="Calibration examples."),
    tokens(32),
    click.option("--step", type=float, default=0.05, show_default=True, help="Between two thresholds."),
    click.option("--check", type=click.IntRange(0), default=200, show_default=True, help="Fresh passages, in the end."),
    passage_options,
    results,
)  # fmt: skip
def calibrate(model: str, files: tuple[Path, ...], **options: Any) -> None:
    """Choose CALM's threshold so that texts stay within delta of the full model's, with probability
    1 - epsilon.

    Learn then Test: thresholds from 1 down, until the first that cannot be shown to be safe.

    \b
    Examples:
      tinyspec calibrate --model storyteller --delta 0.3
      tinyspec calibrate --model storyteller --delta 0.1 --consistency risk --json
    """
    from tinyspec.bench.calibration import run
    from tinyspec.bench.harness import save
    from tinyspec.early_exit.calibrate import enough

    out, as_json = options.pop("out"), options.pop("as_json")
    enough(options["prompts"], options["delta"], options["epsilon"])  # before any text is read
    result = run(model, passages(files, "valid"), **options)
    if out is not None:
        save(out, result)
    if as_json:
        click.echo(json.dumps(result))
        return
    for row in result["tested"]:
        passed = "passed" if row["passed"] else "stop"
        click.echo(
            f"threshold {row['threshold']:.2f}  loss {row['loss']:.4f}  p {row['p']:.2g}  work {row['work']:.2f}  {passed}"
        )
    sure = f"risk at most {options['delta']} with probability {1 - options['epsilon']:g}"
    if "checked" in result:
        sure += (
            f"; on {result['checked']['prompts']} fresh passages {result['checked']['loss']:.4f}"
        )
    click.echo(f"threshold: {result['threshold']}  ({sure})")


@click.command("exits", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name or folder."),
    click.option(
        "--thresholds", default="0.5,0.6,0.7,0.8,0.9,0.95,0.99", show_default=True, metavar="LIST", help="From 0 to 1.",
    ),
    click.option(
        "--measures", default="softmax,saturation,classifier", show_default=True, metavar="LIST",
        help="The classifier must have been trained (`tinyspec train exits`).",
    ),
    click.option("--prompts", type=click.IntRange(1), default=20, show_default=True, help="Passages."),
    tokens(64),
    knob_options("constant"),
    passage_options,
    click.option("--resume", is_flag=True, help="Go on with the file of --out."),
    click.option("--svg", type=base.OutputPath(parents=True), help="Draw the picture into this file."),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the table here."),
    results,
)  # fmt: skip
def exits(
    model: str,
    thresholds: str,
    measures: str,
    files: tuple[Path, ...],
    svg: Path | None,
    markdown: Path | None,
    **options: Any,
) -> None:
    """What early exits save and cost: layers, fills and head products against agreement and
    perplexity.

    CALM's measures over thresholds, beside one fixed exit for all tokens; on given text, and
    writing freely.

    \b
    Examples:
      tinyspec bench exits --model storyteller --measures softmax,saturation
      tinyspec bench exits --model models/exits-loss --out results/exits.json --resume --svg
      results/exits.svg
    """
    from tinyspec.bench import exits as experiment
    from tinyspec.bench.exits_figure import picture
    from tinyspec.bench.report import page

    out, as_json = options["out"], options.pop("as_json")
    try:
        asked = [float(word) for word in thresholds.split(",") if word.strip()]
    except ValueError:
        raise TinyspecError(
            f"--thresholds {thresholds}: write numbers from 0 to 1 with commas between"
        ) from None
    named = [word.strip() for word in measures.split(",") if word.strip()]
    result = experiment.run(model, asked, named, passages(files, "valid"), **options)
    grid = experiment.grid(result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        base.console().print(grid.rich(), highlight=False)
    for file, text in {svg: picture(result), markdown: page(result, [grid])}.items():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            click.echo(f"written: {file}", err=True)
    if out is not None:
        click.echo(f"written: {out}", err=True)
