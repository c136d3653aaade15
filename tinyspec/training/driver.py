"""Train what a recipe describes into a folder: restart, resume, log, card."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.training import ranks
from tinyspec.training.card import write_card
from tinyspec.training.recipe import (
    HeadRecipe,
    Recipe,
    TranslationRecipe,
    set_recipe_values,
)
from tinyspec.training.train import Batch, Batches, Loss, TrainingResult, count_batch_rows, train

R = TypeVar("R", Recipe, TranslationRecipe, HeadRecipe)


class RunOptions(TypedDict, total=False):
    """Options of every training that follows a recipe.

    device     default: cuda where there is one
    minutes    clock budget, instead of the recipe's
    restart    forgets an interrupted training, or replaces a finished model
    overrides  single values of the recipe, as {"train.lr": "2e-3"}, each written as TOML
    console    where messages and progress are shown; None: nowhere
    """

    device: str | None
    minutes: float | None
    restart: bool
    overrides: Mapping[str, str] | None
    console: Console | None


def check_free(out: Path) -> None:
    """Raise TinyspecError if a folder holds a model, or a head, that no training left unfinished.

    What lies beside a recipe may be there: a zoo has it of models without weights.
    """
    is_begun = (out / ".tinyspec" / "state.pt").exists()
    is_model = (out / "config.json").exists() and not (out / "recipe.toml").exists()
    if is_begun or not (is_model or any(out.glob("*.safetensors"))):
        return
    raise TinyspecError(f"{out} already holds a trained model; --restart trains it again")


class RecipeRun(Generic[R]):
    """One training of a recipe's model into the folder `out`.

    An interrupted training leaves its state in out/.tinyspec, and the same call continues it. A
    finished one leaves the model with log.jsonl, README.md, loss.svg and recipe.toml.

    Raises TinyspecError for an unusable recipe, and if `out` already holds the finished model.
    """

    def __init__(
        self,
        read: Callable[[Path, Mapping[str, str]], R],
        path: str | Path,
        out: str | Path,
        *,
        device: str | None = None,
        minutes: float | None = None,
        restart: bool = False,
        overrides: Mapping[str, str] | None = None,
        console: Console | None = None,
    ):
        ranks.join_ranks()
        console = console if ranks.this_rank() == 0 else None
        self.path, self.out, self.console = Path(path), Path(out), console
        self.print = (console or Console(quiet=True)).print
        budget = {} if minutes is None else {"train.minutes": str(float(minutes))}
        self.overrides = {**(overrides or {}), **budget}
        self.recipe: R = read(self.path, self.overrides)
        gpu = f"cuda:{ranks.this_rank()}" if ranks.count_processes() > 1 else "cuda"
        try:
            self.device = torch.device(device or (gpu if torch.cuda.is_available() else "cpu"))
        except RuntimeError:
            raise TinyspecError(
                f"unknown device {device!r}: expected cpu, cuda, or cuda:0"
            ) from None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise TinyspecError(
                "device cuda: torch finds no CUDA device here; --device cpu trains on the processor"
            )
        self.forgets = restart and ranks.this_rank() == 0
        if not restart:
            check_free(self.out)

    @property
    def state(self) -> Path:
        """Return the folder of the state; --restart empties it when it is first asked for.

        Until then recipe, data and models were read, so a mistake in them costs no saved training.
        """
        folder = self.out / ".tinyspec"
        if self.forgets:
            self.forgets = False
            text = self.path.read_bytes()
            shutil.rmtree(folder, ignore_errors=True)
            if not self.path.exists():  # the recipe of `--distill` stands beside the state
                self.path.parent.mkdir(parents=True)
                self.path.write_bytes(text)
        return folder

    def train(
        self,
        weights: Mapping[str, Tensor],
        batches: Batches,
        loss: Loss,
        validate: Callable[[], Mapping[str, float]],
        before_step: Callable[[int, float], None] | None = None,
        rates: Mapping[str, float] | None = None,
        *,
        weigh: Callable[[Batch], Any] = count_batch_rows,
    ) -> TrainingResult:
        """Train or continue, by the recipe's settings; see `train`.

        Of several ranks only the first returns: it measures and writes. The others exit.
        """
        with ranks.main_rank_first():
            state = self.state
        try:
            result = train(
                weights,
                batches,
                loss,
                self.recipe.settings,
                state,
                validate=validate,
                before_step=before_step,
                rates=rates,
                weigh=weigh,
                console=self.console,
                title=self.recipe.name,
            )
        except torch.OutOfMemoryError as error:
            raise TinyspecError(
                f"{self.device} is out of memory: "
                "--set train.pieces=2 computes each batch in two parts"
            ) from error
        is_main = ranks.this_rank() == 0
        ranks.leave_ranks()
        if not is_main:
            raise SystemExit(0)
        if not result.finished:
            self.print(f"stopped at step {result.step:,}; the same command goes on from there")
        return result

    def finish(
        self,
        page: str,
        result: TrainingResult,
        curves: Mapping[str, Sequence[tuple[float, float]]],
        **values: Any,
    ) -> None:
        """Put log, recipe and card beside the model, and remove the state; see `write_card`.

        A recipe that is copied has the values that were used, those of the command line too. One
        that lay in the folder already stays as it is.
        """
        shutil.copyfile(self.state / "log.jsonl", self.out / "log.jsonl")
        if self.path.resolve() != (self.out / "recipe.toml").resolve():
            text = set_recipe_values(self.path.read_text(encoding="utf-8"), self.overrides)
            (self.out / "recipe.toml").write_text(text, encoding="utf-8")
        write_card(self.out, page, self.recipe, result, self.device, curves, **values)
        shutil.rmtree(self.state)


def inherit_weights(
    weights: dict[str, Tensor], parent: Mapping[str, Tensor], names: Iterable[str]
) -> None:
    """Replace the named weights by the parent's, in float32, where the shape is the same."""
    for name in names:
        if name in parent and name in weights and parent[name].shape == weights[name].shape:
            weights[name] = parent[name].detach().float().cpu().clone()


def find_beside(name: str, *folders: Path) -> Path | None:
    """Return the folder of a model that a recipe names relative to one of these folders."""
    for folder in folders:
        found = Path(os.path.normpath(folder / name))  # `folder` itself may not exist yet
        if (found / "config.json").is_file():
            return found
    return None
