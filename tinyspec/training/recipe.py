"""A recipe: the TOML file beside a checkpoint that says how it was trained."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.config import Config
from tinyspec.training.exit_losses import ExitLosses
from tinyspec.training.own_texts import OwnTextSettings
from tinyspec.training.schedule import TrainSettings

END_ID = (
    0  # the id of the end-of-text token: the first special token of the tokenizers trained here
)


@dataclass(frozen=True)
class Recipe:
    """All that decides what is trained. Sections [shape] (as Config), [train] (Settings), [exits]
    (Exits), [distill], [own] (Own)."""

    name: str
    shape: Mapping[str, Any]
    settings: TrainSettings
    vocab_size: int = 4096
    batch: int = 64  # crops per step
    context: int = 512  # tokens per crop
    dropout: float = 0.0
    teacher: str = ""  # a folder beside the recipe's own; its tokenizer is the student's
    tokenizer: str = (
        ""  # a folder beside the recipe's own, whose tokenizer is taken over; none: one is trained
    )
    start: str = (
        ""  # a folder beside the recipe's own: its weights are trained on, with its tokenizer
    )
    inherit: bool = False  # start from the teacher's embeddings, first layers and final norm
    draft: str = ""  # named on the card: the draft of this model
    valid_characters: int = 40_000  # of each valid book, while training; the end is measured on all
    prompts: tuple[str, ...] = ("Once upon a time",) * 3
    extra: Mapping[str, Any] = field(default_factory=dict)
    exits: ExitLosses | None = None
    own: OwnTextSettings | None = None
    distill: Mapping[str, Any] = field(
        default_factory=dict
    )  # section [distill]: from the teacher's own outputs

    def config(self) -> Config:
        extra: dict[str, Any] = {"licence": "MIT", "recipe": "recipe.toml", **self.extra}
        if self.teacher:
            extra["draft_of"] = Path(self.teacher).name
        if self.draft:
            extra["draft"] = self.draft
        if self.exits is not None and self.exits.changes_training:
            extra["exits"] = self.exits.weights
        shape = {"max_positions": self.context, "bos": None, "eos": (END_ID,), **self.shape}
        try:
            config = Config(vocab_size=self.vocab_size, extra=extra, **shape)
        except TypeError as error:
            raise TinyspecError(f"recipe {self.name}: section [shape]: {error}") from error
        for layers in () if self.exits is None else self.exits.report:
            if not 1 <= layers <= config.n_layers:
                raise TinyspecError(
                    f"recipe {self.name}: [exits] report: exits are 1 to {config.n_layers}, not {layers}"
                )
        return config


def read_sections(
    path: str | Path, overrides: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a recipe file says, section [shape], section [train]. `overrides`: see read_recipe."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        for key, text in (overrides or {}).items():
            at = values
            *sections, last = key.split(".")
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = tomllib.loads(f"x = {text}")["x"]
        return values, values.pop("shape"), values.pop("train")
    except FileNotFoundError:
        raise TinyspecError(f"{path}: no such recipe") from None
    except KeyError as error:
        raise TinyspecError(f"{path}: section [{error.args[0]}] is missing") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise TinyspecError(f"{path}: {error}") from error


def reject_unknown_keys(
    path: str | Path, given: Iterable[str], kind: type, section: str = ""
) -> None:
    """Raise TinyspecError, with the nearest name, where a recipe names something that `kind` has no
    field for.
    """
    names = {f.name for f in fields(kind)} - {"shape", "settings"}
    for key in given:
        if key not in names:
            raise TinyspecError(
                f"{path}: {section}{key} is not known; {suggest_nearest(key, names)}"
            )


def read_recipe(path: str | Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """A recipe file. `overrides` sets single values, as {"train.lr": "2e-3"}, each written as
    TOML.
    """
    values, shape, settings = read_sections(path, overrides)
    reject_unknown_keys(path, values, Recipe)
    reject_unknown_keys(path, settings, TrainSettings, "[train] ")
    reject_unknown_keys(path, values.get("exits", ()), ExitLosses, "[exits] ")
    reject_unknown_keys(path, values.get("own", ()), OwnTextSettings, "[own] ")
    try:
        values["prompts"] = tuple(values.get("prompts", Recipe.prompts))
        if "exits" in values:
            values["exits"] = ExitLosses(
                **{**values["exits"], "report": tuple(values["exits"].get("report", ()))}
            )
        if "own" in values:
            if not values.get("teacher"):
                raise TinyspecError(
                    f"{path}: [own] is what a teacher writes: teacher = NAME is missing"
                )
            lists = {
                key: tuple(values["own"][key])
                for key in ("temperatures", "penalties")
                if key in values["own"]
            }
            values["own"] = OwnTextSettings(**{**values["own"], **lists})
        return Recipe(shape=shape, settings=TrainSettings(**settings), **values)
    except TypeError as error:
        raise TinyspecError(f"{path}: {error}") from error
