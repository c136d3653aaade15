"""A recipe of a translation model: the TOML file beside its checkpoint that says how it was
trained.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.training.bitext import BOS, EOS, MASK, PAD
from tinyspec.training.distilled import BeamSettings
from tinyspec.training.recipe import read_sections, reject_unknown_keys
from tinyspec.training.schedule import TrainSettings

METHODS = ("teacher", "nat", "mask_predict")


@dataclass(frozen=True)
class TranslationRecipe:
    """All that decides what is trained. Sections: [shape] (Seq2SeqConfig), [train] (Settings),
    [distill] (Writing).
    """

    name: str
    shape: Mapping[str, Any]
    settings: TrainSettings
    method: str = "teacher"  # whose loss: teacher (autoregressive), nat, mask_predict
    vocab_size: int = 4800  # of the tokenizer that is trained, where there is no teacher
    tokens: int = 2048  # places of a batch, on either side
    longest: int = 100  # tokens: longer pairs are not trained on
    dropout: float = 0.3
    smoothing: float = 0.1  # of the labels
    teacher: str = (
        ""  # a folder beside the recipe's own: tokenizer, distilled targets, first weights
    )
    inherit: tuple[
        str, ...
    ] = ()  # weights that begin as the teacher's, by the beginnings of their names
    finetune: str = ""  # nat: a folder beside the recipe's own, whose NAT is fine-tuned by the teacher's word-level laws
    judged: int = 1014  # valid sentences that are translated at each validation
    extra: Mapping[str, Any] = field(default_factory=dict)
    distill: BeamSettings | None = (
        None  # how the teacher wrote the targets; none: the targets are people's
    )

    def config(self, vocab_size: int) -> Seq2SeqConfig:
        extra: dict[str, Any] = {
            "licence": "MIT",
            "recipe": "recipe.toml",
            "trained_for": self.method,
            **self.extra,
        }
        if self.teacher:
            extra["teacher"] = Path(self.teacher).name
        if self.distill is not None:
            extra["distilled"] = asdict(self.distill)
        try:
            return Seq2SeqConfig(
                vocab_size, pad=PAD, bos=BOS, eos=EOS, mask=MASK, extra=extra, **self.shape
            )
        except TypeError as error:
            raise TinyspecError(f"recipe {self.name}: section [shape]: {error}") from error


def read_translation_recipe(
    path: str | Path, overrides: Mapping[str, str] | None = None
) -> TranslationRecipe:
    """A recipe file. `overrides` sets single values, as {"train.lr": "2e-3"}, each written as
    TOML.
    """
    values, shape, settings = read_sections(path, overrides)
    reject_unknown_keys(path, values, TranslationRecipe)
    reject_unknown_keys(path, settings, TrainSettings, "[train] ")
    reject_unknown_keys(path, values.get("distill", ()), BeamSettings, "[distill] ")
    try:
        if "betas" in settings:
            settings["betas"] = tuple(settings["betas"])
        if "distill" in values:
            values["distill"] = BeamSettings(**values["distill"])
        values["inherit"] = tuple(values.get("inherit", ()))
        plan = TranslationRecipe(shape=shape, settings=TrainSettings(**settings), **values)
    except TypeError as error:
        raise TinyspecError(f"{path}: {error}") from error
    if plan.method not in METHODS:
        raise TinyspecError(
            f"{path}: method {plan.method} cannot be trained; {suggest_nearest(plan.method, METHODS)}"
        )
    if not plan.teacher and (plan.distill is not None or plan.inherit or plan.finetune):
        raise TinyspecError(
            f"{path}: [distill], inherit and finetune need a teacher: teacher = FOLDER is missing"
        )
    if plan.finetune and plan.method != "nat":
        raise TinyspecError(f"{path}: finetune is a stage of nat: method {plan.method} has none")
    return plan
