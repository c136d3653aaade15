"""Distill a draft for any checkpoint: `tinyspec train lm --distill TARGET`.

The draft begins as the target's embeddings, first layers and final norm. It is trained on texts
that the target wrote (outputs.py), at every token towards the target's distribution there, of which
the most probable tokens are known:

    loss = lambda CE(p, q) + (1 - lambda) (1 - alpha)
    lambda = exp(-3 alpha),    alpha = sum min(p, q)

The form is train_lm's, over the known part of p; `loss` chooses a divergence of DistillSpec
instead, and `source` who writes the texts. The true alpha is at least as large. A draft is
used on the target's own texts, so it is trained on them (DistillSpec, Zhou et al. 2024,
arXiv 2310.08461). With `draft_vocab`, the draft's vocabulary is the most frequent tokens of these
texts. Embeddings and head then stay the target's and are not trained (lm/borrowed.py), so the
draft's file holds only its layers.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from tinyspec import models
from tinyspec.errors import TinyspecError
from tinyspec.lm import borrowed
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training import outputs
from tinyspec.training.driver import RecipeRun, RunOptions, find_beside, inherit_weights
from tinyspec.training.imitation import (
    cross_entropy_and_alpha,
    evaluate_draft,
    imitation_loss,
    known_probabilities,
    make_collate_fn,
    most_frequent_tokens,
)
from tinyspec.training.on_policy import DraftTexts
from tinyspec.training.recipe import Recipe, build_config, read_recipe
from tinyspec.training.text_cache import HELD, select_seen
from tinyspec.training.train import Batch, TrainingResult, autocast

JUDGED = 24  # held-out texts that the final figures use


def draft_recipe(
    target: str, name: str, layers: int, draft_vocab: int, texts: int, width: int
) -> str:
    """Return the text of a draft's recipe.

    `width` is the target's. Muon is used where matrices are small, because there it is cheap.
    """
    small = width <= 256
    return f"""# A draft of {Path(target).name}, distilled from its own outputs.
# tinyspec train lm --recipe recipe.toml --out FOLDER

name = "{name}"
teacher = "{target}"
inherit = true   # embeddings, first layers and final norm
batch = {16 if small else 8}   # texts a step
context = 256    # tokens of each, at most

[shape]
n_layers = {layers}

[distill]
draft_vocab = {draft_vocab}   # 0: all tokens, with embeddings of its own
texts = {texts}
tokens = 128
temperature = 0.8

[train]
steps = 3000
minutes = 40
optimizer = "{"muon" if small else "adamw"}"
lr = {"2e-3" if small else "1e-3"}
warmup = 50
weight_decay = 0.05
log_every = 10
valid_every = 250
"""


def distill(
    recipe: str | Path,
    out: str | Path,
    *,
    prompts: Path | None = None,
    data_folder: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> tuple[TrainingResult, dict[str, float]]:
    """Train the draft of a recipe with a section [distill] into the folder `out`; see `RecipeRun`.

    prompts      a file with prompts for the target
    data_folder  where texts for prompts lie (default: `tinyspec.data.data_folder()`)

    Returns how the training ended, and the draft's figures. The target's outputs lie in the cache.
    """
    run = RecipeRun(read_recipe, recipe, out, **options)
    plan, asking, where = run.recipe, run.recipe.distill, run.device
    if asking is None:
        raise TinyspecError(f"{run.path}: nothing is distilled: it has no section [distill]")
    source = find_beside(plan.teacher, run.path.parent, run.out) or plan.teacher
    target = models.load(source, device=where)
    config = draft_config(plan, target, asking.draft_vocab, source, run.out)
    target_prompts = outputs.make_prompts(target, asking, prompts, data_folder)
    folder = outputs.outputs_folder(target, asking, prompts)
    run.print(
        f"texts of {target.name}: {len(target_prompts)}, {asking.tokens} tokens each, in {folder}"
    )
    texts = outputs.write_outputs(target, target_prompts, asking, folder, run.console)
    held_out, seen = texts[::HELD], select_seen(texts)
    lent = set[str]()  # weights that stay the target's
    if asking.draft_vocab:
        lent = {"embed", "head"}
        config = replace(config, head_ids=most_frequent_tokens(seen, asking.draft_vocab, config))
    weights = initial_draft_weights(config, target, plan.settings.seed, plan.inherit)
    blocks = Blocks(config, {name: w.to(where) for name, w in weights.items()})
    trained = {name: w for name, w in blocks.weights.items() if name not in lent}
    n_trained = sum(w.numel() for w in trained.values())
    run.print(f"{plan.name}: {n_trained:,} weights are trained, on {where}")
    collate, collate_held_out = make_collate_fn(seen, config), make_collate_fn(held_out, config)

    def loss(*batch: Tensor) -> Tensor:
        with autocast(where):
            return imitation_loss(asking.loss, *known_probabilities(blocks, *batch))

    @torch.no_grad()
    def validate() -> dict[str, float]:
        total = count = 0.0
        with autocast(where):
            for i in range(len(held_out)):
                batch = collate_held_out([i], plan.context, where)
                known = float(batch[3].sum())
                p, log_q = known_probabilities(blocks, *batch)
                total += float(cross_entropy_and_alpha(p, log_q)[1]) * known
                count += known
        return {"refused": 1 - total / count, "alpha": total / count}

    tokenizer = target.tokenizer if target.has_tokenizer else None

    def make_draft() -> Model:
        now = {name: w.detach().to(target.dtype, copy=True) for name, w in blocks.weights.items()}
        return Model(config, now, tokenizer, plan.name)

    prompted, folder = select_seen(target_prompts), run.state / "own"
    own = DraftTexts(target, make_draft, prompted, asking, asking.refresh, asking.fresh, folder)
    share = {"target": 0.0, "mix": 0.5, "draft": 1.0}[asking.source]  # of texts by the draft

    def batches(generator: torch.Generator) -> Batch:
        def choose(texts: Sequence[Any], n: int) -> list[int]:
            drawn = torch.randint(len(texts), (n,), generator=generator, device=generator.device)
            return [int(i) for i in drawn]

        n_own = round(share * plan.batch)
        if n_own == 0:
            return collate(choose(seen, plan.batch), plan.context, where)
        mixed = [own.texts[i] for i in choose(own.texts, n_own)]
        mixed += [seen[i] for i in choose(seen, plan.batch - n_own)]
        return make_collate_fn(mixed, config)(range(plan.batch), plan.context, where)

    before_step = (lambda step, progress: own.refresh(step)) if share else None
    result = run.train(
        trained, batches, loss, validate, before_step, weigh=lambda batch: batch[3].sum()
    )
    if not result.finished:
        return result, {}
    stored = {name: w.detach().to("cpu", torch.bfloat16) for name, w in blocks.weights.items()}
    Model(config, stored, tokenizer, plan.name).save(run.out)
    judged = held_out[:JUDGED]
    figures = evaluate_draft(target, models.load(run.out, device=where), judged)
    run.print(
        "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        + f" over {len(judged)} held-out texts"
    )
    run.finish(
        "draft",
        result,
        {"training loss": result.curve("loss"), "alpha, held out": result.curve("alpha")},
        config=config,
        target=target.name,
        lender=config.extra.get(borrowed.FROM),
        trained_weights=n_trained,
        figures=figures,
        texts=len(texts),
        folder=run.out.name,
    )
    return result, figures


def draft_config(
    plan: Recipe, target: Model, draft_vocab: int, source: str | Path, out: Path
) -> Config:
    """Return the draft's config: the target's, changed by the recipe."""
    theirs = target.config
    path = models.find_model(source)
    is_name = isinstance(source, str) and os.sep not in source
    named = source if is_name or path is None else os.path.relpath(path, out)
    extra: dict[str, Any] = {
        "recipe": "recipe.toml",
        "draft_of": str(named) if is_name else target.name,
        **plan.extra,
    }
    if licence := theirs.extra.get("licence"):
        extra["licence"] = licence
    config = build_config(plan.name, lambda: replace(theirs, extra=extra, **plan.shape))
    if config.vocab_size != theirs.vocab_size:
        raise TinyspecError(
            f"recipe {plan.name}: a draft reads its target's {theirs.vocab_size} tokens: "
            "drop vocab_size"
        )
    if not draft_vocab:
        return config
    if config.d_model != theirs.d_model:
        raise TinyspecError(
            f"recipe {plan.name}: with draft_vocab the embeddings are the target's, "
            f"so d_model is {theirs.d_model}, not {config.d_model}; "
            "draft_vocab = 0 gives the draft its own"
        )
    return replace(config, tied=False, extra={**extra, borrowed.FROM: str(named)})


def initial_draft_weights(
    config: Config, target: Model, seed: int, inherit: bool
) -> dict[str, Tensor]:
    """Return float32 weights: random, or the target's where name and shape are equal."""
    weights = dict(Model.random(config, seed).weights)
    rows = borrowed.shared_weights(target.weights, config.head_ids) if config.head_ids else {}
    if inherit:
        inherit_weights(weights, target.weights, weights.keys() - rows.keys())
    return {**weights, **{name: w.detach().float().cpu() for name, w in rows.items()}}
