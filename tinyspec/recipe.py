"""A recipe: the TOML file beside a checkpoint that says how it was trained."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError, nearest
from tinyspec.lm.config import Config
from tinyspec.schedule import Settings

END = 0  # the id of the end-of-text token: the first special token of the tokenizers trained here


@dataclass(frozen=True)
class Recipe:
    """All that decides what is trained. Sections [shape] (fields of Config), [train] (fields of Settings), [distill]."""

    name: str
    shape: Mapping[str, Any]
    settings: Settings
    vocab_size: int = 4096
    batch: int = 64  # crops per step
    context: int = 512  # tokens per crop
    dropout: float = 0.0
    teacher: str = ""  # a folder beside the recipe's own; its tokenizer is the student's
    inherit: bool = False  # start from the teacher's embeddings, first layers and final norm
    draft: str = ""  # named on the card: the draft of this model
    valid_characters: int = 40_000  # of each valid book, while training; the end is measured on all
    prompts: tuple[str, ...] = ("Once upon a time",) * 3
    extra: Mapping[str, Any] = field(default_factory=dict)
    distill: Mapping[str, Any] = field(default_factory=dict)  # section [distill]: from the teacher's own outputs

    def config(self) -> Config:
        extra: dict[str, Any] = {"licence": "MIT", "recipe": "recipe.toml", **self.extra}
        if self.teacher:
            extra["draft_of"] = Path(self.teacher).name
        if self.draft:
            extra["draft"] = self.draft
        shape = {"max_positions": self.context, "bos": None, "eos": (END,), **self.shape}
        try:
            return Config(vocab_size=self.vocab_size, extra=extra, **shape)
        except TypeError as error:
            raise TinyspecError(f"recipe {self.name}: section [shape]: {error}") from error


def read_recipe(path: str | Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """A recipe file. `overrides` sets single values, as {"train.lr": "2e-3"}, each written as TOML."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        for key, text in (overrides or {}).items():
            at = values
            *sections, last = key.split(".")
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = tomllib.loads(f"x = {text}")["x"]
        shape, settings = values.pop("shape"), values.pop("train")
    except FileNotFoundError:
        raise TinyspecError(f"{path}: no such recipe") from None
    except KeyError as error:
        raise TinyspecError(f"{path}: section [{error.args[0]}] is missing") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise TinyspecError(f"{path}: {error}") from error
    known = {f.name for f in fields(Recipe)} - {"shape", "settings"}
    for key, section, names in (
        *((k, "", known) for k in values),
        *((k, "[train] ", {f.name for f in fields(Settings)}) for k in settings),
    ):
        if key not in names:
            raise TinyspecError(f"{path}: {section}{key} is not known; {nearest(key, names)}")
    try:
        values["prompts"] = tuple(values.get("prompts", Recipe.prompts))
        return Recipe(shape=shape, settings=Settings(**settings), **values)
    except TypeError as error:
        raise TinyspecError(f"{path}: {error}") from error
