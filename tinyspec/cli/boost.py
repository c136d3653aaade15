"""tinyspec train boost: draft models made for each other, after SpecInfer."""

from pathlib import Path

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError


@click.command("boost", cls=base.Command)
@base.options(
    click.option(
        "--model",
        "-m",
        default="storyteller",
        show_default=True,
        help="The target: name or folder.",
    ),
    base.draft_option,
    click.option(
        "--out", required=True, type=base.OutputPath(folder=True), help="A folder for the drafts."
    ),
    click.option(
        "--data",
        "data_folder",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Where the texts lie. [default: TINYSPEC_DATA, else the cache]",
    ),
    click.option(
        "--prompts",
        type=click.IntRange(1),
        default=2000,
        show_default=True,
        help="Passages of the books.",
    ),
    click.option(
        "--prompt-tokens",
        type=click.IntRange(1),
        default=32,
        show_default=True,
        help="Tokens of a passage.",
    ),
    click.option(
        "--tokens",
        type=click.IntRange(1),
        default=4,
        show_default=True,
        help="Tokens of the target's answer.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(1),
        default=300,
        show_default=True,
        help="Training steps of each draft.",
    ),
    click.option("--lr", type=float, default=3e-4, show_default=True, help="Learning rate."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same drafts."),
    click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:0."),
)
def boost(
    model: str, draft: list[str], out: Path, data_folder: Path | None, prompts: int, prompt_tokens: int, tokens: int,
    steps: int, lr: float, seed: int, device: str,
) -> None:  # fmt: skip
    """Tune several draft models so that together they say what the target says (SpecInfer's
    collective boost-tuning).

    The target continues passages of the training books greedily; each draft is tuned on those that
    no draft before it continues alike. A draft that is named twice becomes two. An interrupted
    training goes on from where it was.

    \b
    Examples:
      tinyspec train boost --draft apprentice,apprentice --out boosted
      tinyspec generate --method specinfer --draft boosted/1,boosted/2 "Once upon a time"
    """
    import torch

    from tinyspec import data
    from tinyspec.pairing import check_pair
    from tinyspec.speculative.verification import specinfer
    from tinyspec.training import corpus
    from tinyspec.training.recipe import END
    from tinyspec.training.schedule import Settings

    target, small = base.load_all(model, draft, ["specinfer"], device, "float32")
    if small is None:
        raise TinyspecError(f"the card of {target.name} names no draft: give --draft NAME,NAME")
    for one in small:
        check_pair(target, one)
    texts = [corpus.clean(book.text) for book in data.books("train", data_folder)]
    draw = corpus.crops(corpus.pack(target.tokenizer, texts, END), prompts, prompt_tokens)
    passages, _ = draw(torch.Generator().manual_seed(seed))
    settings = Settings(steps=steps, lr=lr, warmup=min(20, steps), weight_decay=0.0, seed=seed)
    found = specinfer.boost_drafts(target, small, passages, settings, out / ".tinyspec", tokens)
    for number, (tuned, own, together) in enumerate(zip(*found, strict=True), start=1):
        tuned.to("cpu", torch.bfloat16).save(out / str(number))
        click.echo(
            f"{out / str(number)}  says what {target.name} says on {own:.1%} of the passages, together {together:.1%}"
        )
