"""Train a head for a target that stays as it is: `tinyspec train head`.

The target writes texts (outputs.py), and its hidden states on them are computed once (features.py).
Then the target is no longer needed: a step reads cached states, so it is cheap, and many epochs are
too. What is trained, and by which loss, stands in the technique's file and comes from its card.

At the end the head is measured on texts that it was not trained on:

    a[i][r] = share of the positions where candidate r of depth i is the token that the target wrote
    s[i]    = share of the positions where the first candidates of the depths 0 to i are all right
    chain   = s[0] + s[1] + ..., the mean number of them that are right one after another
    alpha   = s[i] / s[i - 1], the acceptance rate of first candidates at depth i

The texts were drawn from the target. So alpha is that of sampling at the texts' temperature, where
a first candidate x is accepted with the target's probability of x.

The table a is stored in the head's file. Techniques build their trees from it. What guesses no
tokens has figures of its own, which its technique's file defines.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from tinyspec import models
from tinyspec.errors import TinyspecError
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.config import Config
from tinyspec.lm.heads import (
    RANKED,
    RANKS,
    TOKEN_MAP,
    FrozenTarget,
    HeadFile,
    freeze_target,
    store_in_bytes,
    write_head,
)
from tinyspec.lm.model import Model
from tinyspec.technique import HeadWeights, Trained, TrainingBatch
from tinyspec.training import outputs
from tinyspec.training.driver import RecipeRun, RunOptions, find_beside
from tinyspec.training.features import make_feature_collate, write_states
from tinyspec.training.imitation import most_frequent_tokens
from tinyspec.training.outputs import TargetOutput
from tinyspec.training.recipe import HeadRecipe, read_head_recipe
from tinyspec.training.text_cache import HELD, select_seen
from tinyspec.training.train import Batch, TrainingResult, autocast


def head_recipe(
    target: str, method: str, name: str, minutes: float = 10, is_tuned: bool = False
) -> str:
    """Return the text of the recipe of a head, or of a model that is tuned for a method."""
    model = Path(target).name
    what = f"A head of {model} for {method}, trained on the target's own outputs."
    if is_tuned:
        what = f"{model}, tuned for {method} on its own outputs."
    return f"""# {what}
# tinyspec train head --recipe recipe.toml --out FOLDER

name = {json.dumps(name)}
target = {json.dumps(target)}
method = "{method}"
batch = {8 if is_tuned else 16}   # texts a step
context = 256    # tokens of each, at most

[head]

[texts]
texts = 1500
tokens = 128
temperature = 0.8

[train]
steps = 3000
minutes = {minutes:g}
lr = {"1e-4" if is_tuned else "1e-3"}
warmup = 50
weight_decay = 0.0
log_every = 20
valid_every = 250
"""


def train_head(
    recipe: str | Path,
    out: str | Path,
    *,
    prompts: Path | None = None,
    data_folder: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> tuple[TrainingResult, dict[str, float]]:
    """Train the head of a recipe into the folder `out`; see `RecipeRun`.

    prompts      a file with prompts for the target
    data_folder  where texts for prompts lie (default: `tinyspec.data.data_folder()`)

    Returns how the training ended, and the head's figures. Texts and states lie in the cache.
    """
    run = RecipeRun(read_head_recipe, recipe, out, **options)
    plan, where, trained = run.recipe, run.device, run.recipe.trained
    source = find_beside(plan.target, run.path.parent, run.out) or plan.target
    target = models.load(source, device=where)
    settings = plan.settings_of_head()
    layers = trained.layers(target.config, settings)
    if settings.draft_vocab > target.config.vocab_size:
        raise TinyspecError(
            f"{run.path}: [head] draft_vocab is {settings.draft_vocab}, but {target.name} has "
            f"{target.config.vocab_size} tokens"
        )
    texts, folder = prepare_texts(run, target, prompts, data_folder)
    states = None
    if layers:
        states = write_states(target, texts, layers, plan.texts.batch, folder, run.console)
    token_map = None
    if settings.draft_vocab:
        seen = select_seen(texts)
        words = most_frequent_tokens(seen, settings.draft_vocab, target.config)
        token_map = torch.tensor(words, device=where)
    frozen = freeze_target(target, token_map, torch.float32, layers=not layers)
    frozen = frozen._replace(settings=settings)
    begun = trained.initialize(frozen, settings, plan.settings.seed)
    weights = {name: w.detach().to(where, torch.float32, copy=True) for name, w in begun.items()}
    n_trained = sum(w.numel() for w in weights.values())
    run.print(f"{plan.name}: {n_trained:,} weights are trained, on {where}")
    batches = TextBatches(texts, plan, target.config, where, states)

    def loss(*batch: Tensor) -> Tensor:
        with autocast(where):
            return trained.loss(weights, frozen, TrainingBatch(*batch))

    @torch.no_grad()
    def validate() -> dict[str, float]:
        losses = [float(loss(*batch)) for batch in batches.held_batches]
        with autocast(where):
            figures, _ = measure_head(trained, weights, frozen, batches.held_batches)
        return {"held_out": batches.average_held_out(losses), **figures}

    result = run.train(weights, batches.draw, loss, validate, weigh=count_answer_tokens)
    if not result.finished:
        return result, {}
    with torch.no_grad(), autocast(where):
        figures, ranks = measure_head(trained, weights, frozen, batches.held_batches)
    stored: dict[str, Tensor] = {name: w.to(torch.bfloat16) for name, w in weights.items()}
    if plan.stored == "int8":
        stored = store_in_bytes(weights)
    if ranks is not None:
        stored[RANKS] = ranks
    if token_map is not None:
        stored[TOKEN_MAP] = token_map
    values: dict[str, Any] = {"model_type": plan.method, "tinyspec": dict(plan.extra)}
    check = embedding_checksum(target.weights["embed"])
    shown = dict(vars(settings))
    write_head(run.out, HeadFile(plan.method, target.name, check, shown, values, stored))
    run.finish(
        "head",
        result,
        {"training loss": result.curve("loss"), "held-out loss": result.curve("held_out")},
        target=target.name,
        settings=shown,
        trained_weights=n_trained,
        figures=figures,
        ranks=[] if ranks is None else ranks.tolist(),
        held=len(batches.held),
        texts=len(texts),
        folder=run.out.name,
    )
    return result, figures


def prepare_texts(
    run: RecipeRun[HeadRecipe],
    target: Model,
    prompts: Path | None,
    data_folder: str | Path | None,
) -> tuple[list[TargetOutput], Path]:
    """Return the texts that the target writes for a recipe, and their folder in the cache."""
    plan = run.recipe
    target_prompts = outputs.make_prompts(target, plan.texts, prompts, data_folder)
    folder = outputs.outputs_folder(target, plan.texts, prompts)
    run.print(f"texts of {target.name}: {len(target_prompts)}, in {folder}")
    return outputs.write_outputs(target, target_prompts, plan.texts, folder, run.console), folder


class TextBatches:
    """Batches of a target's texts. One of HELD texts is held out.

    states  [layers, n - 1, d] of each text of n tokens; None: the batches have none
    held    numbers of the texts that are held out; held_batches: all of them
    """

    def __init__(
        self,
        texts: Sequence[TargetOutput],
        plan: HeadRecipe,
        config: Config,
        device: torch.device,
        states: Sequence[Tensor] | None = None,
    ):
        if states is None:
            states = [torch.empty(0, len(text.ids) - 1, config.d_model) for text in texts]
        self.plan, self.device = plan, device
        self.collate = make_feature_collate(texts, states)
        numbers = range(len(texts))
        self.held = [i for i in numbers if i % HELD == 0]
        self.seen = [i for i in numbers if i % HELD] or self.held
        self.held_batches = [
            self.collate(self.held[i : i + 8], plan.context, device)
            for i in range(0, len(self.held), 8)
        ]

    def average_held_out(self, losses: Sequence[float]) -> float:
        """Return the mean of the held-out batches' losses, by the tokens that the target wrote."""
        return float(np.average(losses, weights=[*map(count_answer_tokens, self.held_batches)]))

    def draw(self, generator: torch.Generator) -> Batch:
        """Return a batch of texts that are not held out."""
        shape = (self.plan.batch,)
        drawn = torch.randint(len(self.seen), shape, generator=generator, device=generator.device)
        numbers = [self.seen[i] for i in drawn.tolist()]
        return self.collate(numbers, self.plan.context, self.device)


def count_answer_tokens(batch: Batch) -> int:
    """Return how many tokens of a `TrainingBatch` the target wrote."""
    return int(batch[1].sum())


def measure_head(
    trained: Trained, weights: HeadWeights, target: FrozenTarget, batches: list[TrainingBatch]
) -> tuple[dict[str, float], Tensor | None]:
    """Return the figures of a head, and its table of ranks; None: it drafts no tokens."""
    if trained.predict is not None:
        ranks, right = measure_ranks(trained, weights, target, batches)
        figures = {"top1": float(ranks[0, 0]), "chain": float(right.sum())}
        before = torch.cat((torch.ones(1), right[:-1])).clamp_min(torch.finfo().tiny)
        alphas = enumerate((right / before).tolist(), 1)
        return figures | {f"alpha_{depth}": alpha for depth, alpha in alphas}, ranks
    totals: dict[str, Tensor] = {}
    for batch in batches if trained.figures is not None else ():
        assert trained.figures is not None
        for name, counts in trained.figures(weights, target, batch).items():
            totals[name] = totals.get(name, torch.zeros(2)) + counts.cpu()
    return {name: float(count / by.clamp(min=1)) for name, (count, by) in totals.items()}, None


def measure_ranks(
    trained: Trained, weights: HeadWeights, target: FrozenTarget, batches: list[TrainingBatch]
) -> tuple[Tensor, Tensor]:
    """Return the shares a [depths, RANKED] and s [depths] of this file's head.

    Counted where the target wrote all tokens that are guessed. A token that the head cannot propose
    counts as wrong.
    """
    depths = trained.depths(weights)
    right, in_a_row, count = torch.zeros(depths, RANKED), torch.zeros(depths), 0
    for batch in batches:
        last = 1 + depths  # row t guesses the tokens t + 2 to t + last
        width = batch.ids.shape[1] - last
        if width <= 0:
            continue
        written = torch.stack([batch.is_answer[:, 1 + i : 1 + i + width] for i in range(depths)])
        known = written.all(0)  # [B, width]
        chain = torch.ones(int(known.sum()), device=batch.ids.device)
        guesses = trained.predict_all(weights, target, batch.ids, batch.states)
        for depth, logits in enumerate(guesses):
            logits = logits[:, :width][known].float()
            rows = target.row_of[batch.ids[:, 2 + depth : 2 + depth + width]][known]
            of_right = logits.gather(1, rows.clamp_min(0)[:, None])
            before = torch.arange(logits.shape[1], device=rows.device) < rows[:, None]  # of ties
            is_ahead = (logits > of_right) | ((logits == of_right) & before)
            rank = is_ahead.sum(1).masked_fill(rows < 0, RANKED)
            right[depth] += torch.bincount(rank.cpu(), minlength=RANKED)[:RANKED]
            chain = chain * (rank == 0)
            in_a_row[depth] += chain.sum().cpu()
        count += int(known.sum())
    if not count:
        raise TinyspecError(
            "the held-out texts are too short to measure the head: write longer ones"
        )
    return right / count, in_a_row / count
