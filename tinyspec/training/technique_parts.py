"""Train the parts that techniques use: CALM's exit classifier, SpecInfer's draft models.

Labels and losses stand in the techniques' files. Here the trainer is applied to them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.early_exit.calm import BIAS, WEIGHT, agreement_labels, balanced_loss
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.speculative.verification import specinfer
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import Batch, Batches, TrainingResult, train


def train_exit_classifier(
    model: Model, crops: Batches, settings: TrainSettings, folder: Path, **watch: Any
) -> tuple[TrainingResult, Mapping[str, Tensor]]:
    """Train CALM's exit classifier of a frozen model.

    crops   samples texts [B, T]
    folder  where `train` keeps its state
    """
    frozen = model.to(dtype=torch.float32)
    weights = {WEIGHT: torch.zeros(model.config.d_model), BIAS: torch.zeros(())}

    def batches(generator: torch.Generator) -> Batch:
        return agreement_labels(frozen, crops(generator)[0])

    seeds = [settings.seed - i for i in range(1, 5)]
    texts = [crops(torch.Generator().manual_seed(seed))[0] for seed in seeds]
    held_out = agreement_labels(frozen, torch.cat(texts))

    def loss(agrees: Tensor, states: Tensor) -> Tensor:
        return balanced_loss(agrees, states, weights[WEIGHT], weights[BIAS])

    @torch.no_grad()
    def validate() -> dict[str, float]:
        return {"held_out": float(loss(*held_out))}

    ended = train(
        weights,
        batches,
        loss,
        settings,
        folder,
        validate=validate,
        title="exit classifier",
        **watch,
    )
    return ended, {name: weight.detach() for name, weight in weights.items()}


class BoostedDrafts(NamedTuple):
    """The result of boosting.

    drafts    the tuned models, on the device of the target, in float32
    own       share of all prompts on which each agrees with the target
    together  share on which at least one of the first n does
    """

    drafts: list[Model]
    own: list[float]
    together: list[float]


def boost_drafts(
    target: Model,
    drafts: Sequence[Model],
    prompts: Tensor,
    settings: TrainSettings,
    folder: str | Path,
    length: int = 8,
    batch: int = 32,
) -> BoostedDrafts:
    """Tune draft models so that together they cover the target's greedy answers to these prompts.

    prompts  [N, T] ids
    length   tokens of the target's answers, which are the labels
    folder   where the trainings' states and logs are kept, a folder for each draft; an interrupted
             one continues from there

    Raises TinyspecError if there are no drafts or prompts, or if a prompt and its answer do not fit
    a model's context, and KeyboardInterrupt if a training was interrupted.
    """
    if not drafts or not len(prompts):
        raise TinyspecError("boosting needs one draft model and one prompt at least")
    longest = min(model.config.max_positions for model in (target, *drafts))
    if prompts.shape[1] + length > longest:
        raise TinyspecError(
            f"prompts of {prompts.shape[1]} tokens and answers of {length} "
            f"outgrow a context of {longest}"
        )
    texts = specinfer.append_greedy_answers(target, prompts.to(target.device), length)

    def tune(draft: tuple[int, Model], left: Sequence[int]) -> tuple[int, Model]:
        number, model = draft
        weights = {
            name: w.detach().to(texts.device, torch.float32, copy=True)
            for name, w in model.weights.items()
        }
        tokenizer = model.tokenizer if model.has_tokenizer else None
        own = Model(model.config, weights, tokenizer, model.name)
        rows = texts[list(left)]

        def batches(generator: torch.Generator) -> Batch:
            chosen = torch.randint(len(rows), (batch,), generator=generator, device=rows.device)
            return (rows[chosen],)

        def loss(text: Tensor) -> Tensor:
            return specinfer.answer_loss(own, text, length)

        state = Path(folder) / str(number)
        if not train(own.weights, batches, loss, settings, state, title=f"draft {number}").finished:
            raise KeyboardInterrupt  # the state is saved, and the next draft depends on this one
        return number, own.to()

    matches: dict[int, Tensor] = {}

    def covers(draft: tuple[int, Model], prompt: int) -> bool:
        if id(draft) not in matches:
            matches[id(draft)] = specinfer.answers_match(draft[1], texts, length)
        return bool(matches[id(draft)][prompt])

    given = [(number, model.to(texts.device, torch.float32)) for number, model in enumerate(drafts)]
    tuned = specinfer.tune_collectively(given, range(len(texts)), tune, covers)
    agree = torch.stack(  # [drafts, N]
        [specinfer.answers_match(model, texts, length) for _, model in tuned]
    )
    together = agree.cummax(dim=0).values
    shares = (part.float().mean(dim=1).tolist() for part in (agree, together))
    return BoostedDrafts([model for _, model in tuned], *shares)
