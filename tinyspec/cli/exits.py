"""tinyspec train exits: train what early exits need beside a model."""

from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
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
      tinyspec generate --model models/mine --method calm --measure classifier "Once upon a time"
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
