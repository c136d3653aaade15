"""Read recipes: the TOML files beside checkpoints that say how they were trained."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from tinyspec.errors import TinyspecError, describe_value, suggest_nearest
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.families import to_hf
from tinyspec.technique import (
    Card,
    NoSettings,
    Trained,
    TrainedTranslator,
    Tuned,
    find_technique,
    load_techniques,
)
from tinyspec.training.bitext import BOS, EOS, MASK, PAD
from tinyspec.training.corpus import END_ID
from tinyspec.training.distilled import BeamSettings
from tinyspec.training.exit_losses import ExitLosses
from tinyspec.training.outputs import DistillSettings, OutputSettings
from tinyspec.training.own_texts import OwnTextSettings
from tinyspec.training.schedule import TrainSettings

C = TypeVar("C", Config, Seq2SeqConfig)


@dataclass(frozen=True)
class Recipe:
    """A recipe of a language model.

    Sections: [shape] (Config), [train] (TrainSettings), [exits] (ExitLosses), [own]
    (OwnTextSettings), [distill] (DistillSettings). Folders are relative to the recipe's own.

    vocab_size        of the tokenizer that is trained, if none is named
    batch             crops (with [distill]: texts) per step
    context           tokens per crop
    teacher           folder of the teacher; its tokenizer is the student's
    tokenizer         folder whose tokenizer is used
    start             folder whose weights are trained further, with its tokenizer
    inherit           begin with the teacher's embeddings, first layers and final norm
    draft             named on the card: the draft of this model
    valid_characters  of each valid book, during training; the final figures use all
    prompts           of the samples on the card
    extra             goes into the checkpoint's config
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {
        "train": TrainSettings,
        "exits": ExitLosses,
        "own": OwnTextSettings,
        "distill": DistillSettings,
    }
    NEEDED: ClassVar[tuple[str, ...]] = ("shape", "train")
    COMMAND: ClassVar[str] = "train lm"

    name: str
    shape: Mapping[str, Any]
    settings: TrainSettings
    vocab_size: int = 4096
    batch: int = 64
    context: int = 512
    dropout: float = 0.0
    teacher: str = ""
    tokenizer: str = ""
    start: str = ""
    inherit: bool = False
    draft: str = ""
    valid_characters: int = 40_000
    prompts: tuple[str, ...] = ("Once upon a time",) * 3
    extra: Mapping[str, Any] = field(default_factory=dict)
    exits: ExitLosses | None = None
    own: OwnTextSettings | None = None
    distill: DistillSettings | None = None

    def __post_init__(self) -> None:
        if self.own is not None and not self.teacher:
            raise TinyspecError("[own] is what a teacher writes: teacher = NAME is missing")
        if self.distill is not None and not self.teacher:
            raise TinyspecError("a draft is distilled from a target: teacher = NAME is missing")

    def config(self) -> Config:
        """Return the config of the model that the recipe trains."""
        extra: dict[str, Any] = {"licence": "MIT", "recipe": "recipe.toml", **self.extra}
        if self.teacher:
            extra["draft_of"] = Path(self.teacher).name
        if self.draft:
            extra["draft"] = self.draft
        if self.exits is not None and self.exits.changes_training:
            extra["exits"] = self.exits.weights
        shape = {"max_positions": self.context, "bos": None, "eos": (END_ID,), **self.shape}
        config = build_config(
            self.name, lambda: Config(vocab_size=self.vocab_size, extra=extra, **shape)
        )
        check_reported_exits(self.name, self.exits, config.n_layers)
        to_hf(config, "float32")  # what a checkpoint cannot hold is said before the training
        return config


@dataclass(frozen=True)
class TranslationRecipe:
    """A recipe of a translation model.

    Sections: [shape] (Seq2SeqConfig), [translator] (the method's settings), [train]
    (TrainSettings), [distill] (BeamSettings: how the teacher writes the targets; without it the
    targets are people's), [exits] (ExitLosses of the decoder's layers; of method teacher). Folders
    are relative to the recipe's own.

    method      the technique whose loss is used; teacher: the autoregressive loss
    vocab_size  of the tokenizer that is trained, if there is no teacher
    tokens      positions of a batch, on its longer side
    longest     tokens; longer pairs are left out
    smoothing   of the labels
    teacher     folder of the teacher: tokenizer, distilled targets, first weights
    inherit     prefixes of the names of weights that begin as the teacher's; as a table: each with
                the prefix of the teacher's weights
    finetune    folder of a model of this method that is trained further, in its second stage
    start       folder of a model, with the teacher's tokens, as which the training begins
    judged      valid sentences that are translated at each validation
    extra       goes into the checkpoint's config
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {
        "train": TrainSettings,
        "distill": BeamSettings,
        "exits": ExitLosses,
    }
    NEEDED: ClassVar[tuple[str, ...]] = ("shape", "train")
    COMMAND: ClassVar[str] = "train mt"

    name: str
    shape: Mapping[str, Any]
    settings: TrainSettings
    method: str = "teacher"
    vocab_size: int = 4800
    tokens: int = 2048
    longest: int = 100
    dropout: float = 0.3
    smoothing: float = 0.1
    teacher: str = ""
    inherit: tuple[str, ...] | Mapping[str, str] = ()
    finetune: str = ""
    start: str = ""
    translator: Mapping[str, Any] = field(default_factory=dict)
    judged: int = 1014
    extra: Mapping[str, Any] = field(default_factory=dict)
    distill: BeamSettings | None = None
    exits: ExitLosses | None = None

    def __post_init__(self) -> None:
        if self.exits is not None and (self.method != "teacher" or self.exits.p_max):
            raise TinyspecError(
                "[exits] is for method teacher, and without layer dropout: p_max must be 0"
            )
        begins = self.inherit or self.finetune or self.start
        if not self.teacher and (self.distill is not None or begins):
            raise TinyspecError(
                "[distill], inherit, finetune and start need a teacher: teacher = FOLDER is missing"
            )
        lent = [
            *self.inherit,
            *(self.inherit.values() if isinstance(self.inherit, Mapping) else ()),
        ]
        if not all(isinstance(prefix, str) for prefix in lent):
            raise TinyspecError(
                "inherit must be a list of prefixes of weights' names, or a table of such prefixes"
            )
        trained = self.trained
        if self.finetune and (trained is None or trained.finetune is None):
            raise TinyspecError(f"method {self.method} has no second stage: leave finetune out")
        if trained is not None and trained.extends and not self.teacher:
            raise TinyspecError(
                f"{self.method} adds weights to a teacher: teacher = FOLDER is missing"
            )
        if trained is not None and trained.figures is not None and not self.teacher:
            raise TinyspecError(
                f"{self.method} is judged by its teacher: teacher = FOLDER is missing"
            )
        for name, value in {} if trained is None else trained.shape.items():
            if bool(self.shape.get(name)) != bool(value):
                wrong = "is missing" if value else f"must be {value}"
                raise TinyspecError(f"method {self.method}: [shape] {name} {wrong}")
        self.settings_of_translator()

    @property
    def trained(self) -> TrainedTranslator | None:
        """Return what the method trains; None: the autoregressive teacher."""
        if self.method == "teacher":
            return None
        cards = load_techniques()
        trained = cards[self.method].translator if self.method in cards else None
        if trained is None:
            known = [name for name, card in cards.items() if card.translator is not None]
            raise TinyspecError(
                f"method {self.method} cannot be trained; "
                f"{suggest_nearest(self.method, ['teacher', *known])}"
            )
        return trained

    def settings_of_translator(self) -> Any:
        """Return the section [translator] with the method's defaults."""
        kind: Any = NoSettings if self.trained is None else self.trained.settings
        reject_unknown_keys(self.translator, {f.name for f in fields(kind)}, "[translator] ")
        return kind(**self.translator)

    def describe(self, figures: Mapping[str, float]) -> str:
        """Return what the page of the model says about its method."""
        if self.trained is None:
            about = "the autoregressive teacher of the others, and what they are compared with"
            if self.teacher:
                about = "an autoregressive student, which parallel models must beat"
            if self.exits is not None:
                about = "a translator that may leave after any of its decoder layers"
            exits = "" if self.exits is None else f" {self.exits.describe()}"
            return f"It writes from left to right: {about}. Its figure is greedy decoding's.{exits}"
        return self.trained.page.format(settings=self.settings_of_translator(), figures=figures)

    def config(self, vocab_size: int) -> Seq2SeqConfig:
        """Return the config of the model that the recipe trains."""
        extra: dict[str, Any] = {
            "licence": "MIT",
            "recipe": "recipe.toml",
            "trained_for": self.method,
            **self.extra,
        }
        if self.teacher:
            extra["teacher"] = Path(self.teacher).name
        extra |= asdict(self.settings_of_translator())
        if self.distill is not None:
            extra["distilled"] = asdict(self.distill)
        if self.finetune:
            extra["finetuned"] = Path(self.finetune).name
        if self.exits is not None and self.exits.changes_training:
            extra["exits"] = self.exits.weights
        ids: dict[str, Any] = {"pad": PAD, "bos": BOS, "eos": EOS, "mask": MASK}
        config = build_config(
            self.name, lambda: Seq2SeqConfig(vocab_size, extra=extra, **ids, **self.shape)
        )
        check_reported_exits(self.name, self.exits, config.decoder_layers)
        if self.trained is None:
            return config
        return self.trained.equip(config, self.settings_of_translator())


@dataclass(frozen=True)
class HeadRecipe:
    """A recipe of a head, or of a model that is tuned for a method.

    Sections: [head] (the method's settings), [texts] (OutputSettings: what the target writes),
    [train] (TrainSettings). Folders are relative to the recipe's own.

    target   name or folder of the model that the head is trained for, or that is tuned
    method   the technique that uses the result
    batch    texts per step
    context  tokens of each, at most
    stored   the numbers of a head's file; int8: the matrices in bytes, half the size
    extra    goes into the config of the result
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {"train": TrainSettings, "texts": OutputSettings}
    NEEDED: ClassVar[tuple[str, ...]] = ("train",)
    COMMAND: ClassVar[str] = "train head"

    name: str
    target: str
    method: str
    settings: TrainSettings
    head: Mapping[str, Any] = field(default_factory=dict)
    texts: OutputSettings = field(default_factory=OutputSettings)
    batch: int = 8
    context: int = 256
    stored: Literal["bfloat16", "int8"] = "bfloat16"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings_of_head()
        if self.stored != "bfloat16" and self.card.tuned is not None:
            raise TinyspecError(
                f"stored is {self.stored!r}: {self.method} tunes the model itself, which is stored "
                "in 'bfloat16'"
            )

    @property
    def teacher(self) -> str:
        """Return the model that wrote the texts."""
        return self.target

    @property
    def card(self) -> Card:
        """Return the card of the method. Raises TinyspecError if it trains nothing of its own."""
        card = find_technique(self.method)
        if card.tuned is not None:
            return card
        if card.head_of:
            raise TinyspecError(
                f"method {self.method} uses the heads of {card.head_of}: train one with method "
                f"{card.head_of}"
            )
        if card.trained is None:
            known = [
                name
                for name, other in load_techniques().items()
                if other.tuned is not None or (other.trained is not None and not other.head_of)
            ]
            elsewhere = name_other_training(card)
            raise TinyspecError(
                f"method {self.method} trains no head; {elsewhere}"
                if elsewhere
                else f"method {self.method} trains nothing; {suggest_nearest(self.method, known)}"
            )
        return card

    @property
    def trained(self) -> Trained:
        """Return what the method trains for a target that stays as it is."""
        card = self.card
        if card.trained is None or card.tuned is not None:
            raise TinyspecError(f"method {self.method} tunes the model itself and trains no head")
        return card.trained

    @property
    def tuned(self) -> Tuned:
        """Return what the method trains in the model itself."""
        if self.card.tuned is None:
            raise TinyspecError(f"method {self.method} trains a head and tunes no model")
        return self.card.tuned

    def settings_of_head(self) -> Any:
        """Return the section [head] with the method's defaults."""
        kind = (self.card.tuned or self.trained).settings
        reject_unknown_keys(self.head, {f.name for f in fields(kind)}, "[head] ")
        return kind(**self.head)


def name_other_training(card: Card) -> str:
    """Return which command trains what a method needs that has no head; empty if it needs nothing.

    That is a translation model, a model whose layers repeat, or a draft model.
    """
    command = "tinyspec train {} --recipe {} --out FOLDER"
    if card.translator is not None:
        command = command.format("mt", "FILE")
        return (
            f"its translation model is trained from a recipe with method = '{card.name}': {command}"
        )
    if card.cyclic:
        command = command.format("lm", "models/storyteller-speed/recipe.toml")
        return f"its model, whose layers repeat, is trained by: {command}"
    if not card.drafts or card.make_draft is not None:
        return ""
    own = f" and extra.draft_for = '{card.name}'" if card.own_draft else ""
    command = command.format("lm", "FILE")
    return f"its draft is trained from a recipe with a section [distill]{own}: {command}"


def check_reported_exits(recipe_name: str, exits: ExitLosses | None, n_layers: int) -> None:
    """Raise TinyspecError if a recipe asks for figures of an exit that the model lacks."""
    for layers in () if exits is None else exits.report:
        if not 1 <= layers <= n_layers:
            raise TinyspecError(
                f"recipe {recipe_name}: [exits] report: exits are 1 to {n_layers}, not {layers}"
            )


def build_config(recipe_name: str, build: Callable[[], C]) -> C:
    """Return what `build` makes of a section [shape], or say that the section is wrong."""
    try:
        return build()
    except TypeError as error:
        raise TinyspecError(f"recipe {recipe_name}: section [shape]: {error}") from error


R = TypeVar("R", Recipe, TranslationRecipe, HeadRecipe)


def read_recipe(path: str | Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read the recipe of a language model.

    overrides  sets single values, as {"train.lr": "2e-3"}, each written as TOML

    Raises TinyspecError, with the file's name, for what is wrong in it.
    """
    return _read_as(Recipe, Path(path), overrides or {})


def read_translation_recipe(
    path: str | Path, overrides: Mapping[str, str] | None = None
) -> TranslationRecipe:
    """Read the recipe of a translation model, as `read_recipe` does."""
    return _read_as(TranslationRecipe, Path(path), overrides or {})


def read_head_recipe(path: str | Path, overrides: Mapping[str, str] | None = None) -> HeadRecipe:
    """Read the recipe of a head, as `read_recipe` does."""
    return _read_as(HeadRecipe, Path(path), overrides or {})


def set_recipe_values(text: str, overrides: Mapping[str, str]) -> str:
    """Return the text of a recipe with single values set.

    >>> text = 'name = "a"\\n\\n[train]\\nlr = 1e-3\\n'
    >>> set_recipe_values(text, {"train.lr": "2e-3", "train.seed": "4", "context": "64"})
    'context = 64\\nname = "a"\\n\\n[train]\\nseed = 4\\nlr = 2e-3\\n'
    """
    for key, value in overrides.items():
        *sections, name = key.split(".")
        head = rf"(?m)^\[{re.escape(sections[0])}\].*\n" if sections else ""
        if head and not re.search(head, text):
            text = f"{text.rstrip()}\n\n[{sections[0]}]\n"
        found = re.search(head, text)
        start = found.end() if found else 0
        ends = text.find("\n[", start)
        part, after = (text[start:], "") if ends < 0 else (text[start:ends], text[ends:])
        line = f"{name} = {value}"
        old = rf"(?m)^[ \t]*{re.escape(name)}[ \t]*=[ \t]*(\[[^\]]*\]|.*$)"  # or a list's lines
        new, times = re.subn(old, line.replace("\\", r"\\"), part)
        text = text[:start] + (new if times else f"{line}\n{part}") + after
    return text


KINDS = (Recipe, TranslationRecipe, HeadRecipe)


def _list_keys(kind: type[Any]) -> set[str]:
    return {*(f.name for f in fields(kind)), "train"} - {"settings"}


def _read_as(kind: type[R], path: Path, overrides: Mapping[str, str]) -> R:
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
        tomllib.loads(set_recipe_values(text, overrides))  # it will be written beside the model
        for key, text in overrides.items():
            at = values
            *sections, last = key.split(".")
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = tomllib.loads(f"x = {text}")["x"]
        known = _list_keys(kind)
        fitting = [each for each in KINDS if values.keys() <= _list_keys(each)]
        if fitting and kind not in fitting:
            raise TinyspecError(f"this is a recipe for `tinyspec {fitting[0].COMMAND}`")
        for section in kind.NEEDED:
            if section not in values:
                raise TinyspecError(f"section [{section}] is missing")
        reject_unknown_keys(values, known)
        for section, content in kind.SECTIONS.items():
            if section in values:
                names = {f.name for f in fields(content)}
                reject_unknown_keys(values[section], names, f"[{section}] ")
                own = _lists_to_tuples(values[section])
                check_types(own, content, f"[{section}] ")
                values[section] = content(**own)
        settings, rest = values.pop("train"), _lists_to_tuples(values)
        check_types({key: rest[key] for key in rest.keys() - kind.SECTIONS.keys()}, kind)
        for name in {"batch", "context", "tokens", "longest"} & rest.keys():
            if rest[name] < 1:
                raise TinyspecError(f"{name} is {rest[name]}: it must be at least 1")
        return kind(settings=settings, **rest)
    except FileNotFoundError:
        raise TinyspecError(f"{path}: no such recipe") from None
    except (
        *(TinyspecError, ValueError, TypeError, AttributeError, RecursionError, OSError),
    ) as error:  # ValueError: no TOML, no UTF-8, a number of 5,000 digits
        raise TinyspecError(f"{path}: {error}") from error


def reject_unknown_keys(keys: Iterable[str], known: set[str], section: str = "") -> None:
    """Raise TinyspecError, with the nearest known key, if one of the keys is not known."""
    for key in keys:
        if key not in known:
            raise TinyspecError(f"{section}{key} is not known; {suggest_nearest(key, known)}")


def check_types(values: Mapping[str, Any], kind: type, section: str = "") -> None:
    """Raise TinyspecError for a value that is not of the type that a dataclass gives its field.

    Numbers must be finite. Fields of other types than numbers, texts, truth values, choices, lists
    of these and tables are not looked at.

    >>> check_types({"steps": 3, "betas": (0.9, 1), "optimizer": "muon"}, TrainSettings)
    """
    hints = get_type_hints(kind)
    for key, value in values.items():
        wanted = [one for one in get_args(hints[key]) or (hints[key],) if one is not NoneType]
        if get_origin(hints[key]) in (Literal, tuple, Mapping):
            wanted = [hints[key]]
        checks = {one: CHECKS.get(get_origin(one) or one) for one in wanted}
        if any(check is None or check(value, one) for one, check in checks.items()):
            continue
        if isinstance(value, str) and get_origin(wanted[0]) is Literal:
            hint = suggest_nearest(value, get_args(wanted[0]))
            raise TinyspecError(f"{section}{key} {describe_value(value)} is not known; {hint}")
        what = " or ".join(_describe_type(one) for one in wanted)
        raise TinyspecError(f"{section}{key} is {describe_value(value)}: it must be {what}")


def _is_number(value: Any, kind: Any = float) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


CHECKS: Mapping[Any, Callable[[Any, Any], bool]] = {
    int: lambda value, kind: type(value) is int,
    float: _is_number,
    str: lambda value, kind: isinstance(value, str),
    bool: lambda value, kind: isinstance(value, bool),
    Literal: lambda value, kind: value in get_args(kind),
    tuple: lambda values, kind: (
        isinstance(values, tuple)
        and all(CHECKS[get_args(kind)[0]](value, get_args(kind)[0]) for value in values)
    ),
    Mapping: lambda value, kind: isinstance(value, Mapping),
}
"""Whether a value is of a type, by the type or its origin."""


def _describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    names = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}
    return names.get(kind, "a list" if get_origin(kind) is tuple else "a table")


def _lists_to_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
