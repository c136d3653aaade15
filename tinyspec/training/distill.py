"""`tinyspec train lm --distill TARGET`: a small draft for any checkpoint, from the target's own
outputs.

The draft begins as the target's embeddings, first layers and final norm. It is trained on texts
that the target wrote (outputs.py), at every token towards the target's law there, of which the most
probable tokens are known:

    loss = lambda CE(p, q) + (1 - lambda) (1 - alpha),    alpha = sum min(p, q),    lambda = exp(-3 alpha)

The form is train_lm's, over the known part of p: what is left out can only make alpha larger than
it is said to be. The target's own texts are where a draft is asked (DistillSpec, Zhou et al. 2024,
arXiv 2310.08461). With `draft_vocab`, the draft may say the tokens that are most frequent in those
texts; embeddings and head stay the target's (lm/borrowed.py) and are not trained, so that the file
holds nothing but layers.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tinyspec import models
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm import borrowed
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training import outputs
from tinyspec.training.card import draw_curve
from tinyspec.training.imitation import (
    cross_entropy_and_alpha,
    evaluate_draft,
    make_collate_fn,
    most_frequent_tokens,
)
from tinyspec.training.outputs import OutputSettings
from tinyspec.training.recipe import Recipe, read_recipe
from tinyspec.training.train import Batch, TrainingResult, train
from tinyspec.training.train_lm import autocast as autocast

HELD = 20  # every so many texts, one is held out
JUDGED = 24  # held-out texts on which the figures at the end are exact


def draft_recipe(
    target: str, name: str, layers: int, draft_vocab: int, texts: int, width: int
) -> str:
    """The recipe of a draft. `width` is the target's: Muon is cheap where matrices are small."""
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


def set_recipe_values(text: str, overrides: Mapping[str, str]) -> str:
    """A recipe with single values set, so that the file says what was followed.

    >>> text = 'name = "a"\\n\\n[train]\\nlr = 1e-3\\n'
    >>> set_recipe_values(text, {"train.lr": "2e-3", "train.seed": "4", "context": "64"})
    'context = 64\\nname = "a"\\n\\n[train]\\nseed = 4\\nlr = 2e-3\\n'
    """
    for key, value in overrides.items():
        *sections, name = key.split(".")
        head = f"[{sections[0]}]\n" if sections else ""
        if head and head not in text:
            text += f"\n{head}"
        start = text.index(head) + len(head)
        ends = text.find("\n[", start)
        before, part, after = (
            text[:start],
            *((text[start:], "") if ends < 0 else (text[start:ends], text[ends:])),
        )
        line = f"{name} = {value}"
        found = re.subn(rf"(?m)^{re.escape(name)} = .*$", line.replace("\\", r"\\"), part)
        text = before + (found[0] if found[1] else f"{line}\n{part}") + after
    return text


def distill(
    recipe: str | Path,
    out: str | Path,
    *,
    prompts: Path | None = None,
    data_folder: str | Path | None = None,
    device: str | None = None,
    minutes: float | None = None,
    restart: bool = False,
    overrides: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> tuple[TrainingResult, dict[str, float]]:
    """Train the draft of a recipe with a section [distill] into the folder `out`; how it ended, and
    its figures.

    An interrupted training leaves its state in out/.tinyspec, the target's outputs lie in the
    cache; the same call goes on.
    Raises TinyspecError for an unusable recipe, a target that is not there, and a folder that holds
    the finished draft.
    """
    path, out = Path(recipe), Path(out)
    changed = {
        **(overrides or {}),
        **({} if minutes is None else {"train.minutes": str(float(minutes))}),
    }
    plan = read_recipe(path, changed)
    words, asking = read_distill_section(plan, path)
    state = out / ".tinyspec"
    if restart:
        kept = path.read_bytes()
        shutil.rmtree(state, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept)
    elif (out / "model.safetensors").exists() and not (state / "state.pt").exists():
        raise TinyspecError(f"{out} already holds a trained model; --restart trains it again")
    say = (console or Console(quiet=True)).print

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source = find_target(plan.teacher, path.parent, out)
    target = models.load(source, device=where)
    config = draft_config(plan, target, words, source, out)
    asked = outputs.make_prompts(target, asking, prompts, data_folder)
    kept_at = outputs.outputs_folder(target, asking, prompts)
    say(f"texts of {target.name}: {len(asked)}, {asking.tokens} tokens each, in {kept_at}")
    texts = outputs.write_outputs(target, asked, asking, kept_at, console)
    if words:
        config = replace(config, says=most_frequent_tokens(texts, words, config))
    weights = initial_draft_weights(config, target, plan.settings.seed, plan.inherit)
    learnt = {name: w for name, w in weights.items() if not (words and name in ("embed", "head"))}
    held, seen = texts[::HELD], [text for i, text in enumerate(texts) if i % HELD] or texts
    say(f"{plan.name}: {sum(w.numel() for w in learnt.values()):,} weights are trained, on {where}")

    blocks = Blocks(config, {name: w.to(where) for name, w in weights.items()})
    learnt = {name: blocks.weights[name] for name in learnt}
    row = make_collate_fn(seen, config)
    check = make_collate_fn(held, config)

    def loss(*batch: Tensor) -> Tensor:
        with autocast(where):
            cross, alpha = cross_entropy_and_alpha(blocks, *batch)
        lead = torch.exp(-3 * alpha.detach())
        return lead * cross + (1 - lead) * (1 - alpha)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        parts = [check([i], plan.context, where) for i in range(len(held))]
        known = sum(float(part[3].sum()) for part in parts)
        with autocast(where):
            alpha = (
                sum(
                    float(cross_entropy_and_alpha(blocks, *part)[1]) * float(part[3].sum())
                    for part in parts
                )
                / known
            )
        return {"refused": 1 - alpha, "alpha": alpha}

    def batches(generator: torch.Generator) -> Batch:
        chosen = torch.randint(
            len(seen), (plan.batch,), generator=generator, device=generator.device
        )
        return row(chosen.tolist(), plan.context, where)

    ended = train(
        learnt,
        batches,
        loss,
        plan.settings,
        state,
        validate=validate,
        console=console,
        title=plan.name,
    )
    if not ended.finished:
        say(f"stopped at step {ended.step:,}; the same command goes on from there")
        return ended, {}
    made = {name: w.detach().to("cpu", torch.bfloat16) for name, w in blocks.weights.items()}
    stored = Model(config, made, target.tokenizer if target.has_tokenizer else None, plan.name)
    stored.save(out)
    final = evaluate_draft(target, models.load(out, device=where), held[:JUDGED])
    say(
        "  ".join(f"{name} {value:.4f}" for name, value in final.items())
        + f" over {len(held[:JUDGED])} held-out texts"
    )
    shutil.copyfile(state / "log.jsonl", out / "log.jsonl")
    if path.resolve() != (out / "recipe.toml").resolve():
        shutil.copyfile(path, out / "recipe.toml")
    write_card(out, stored, plan, target, asking, ended, final, len(texts), where)
    shutil.rmtree(state)
    return ended, final


def read_distill_section(plan: Recipe, path: Path) -> tuple[int, OutputSettings]:
    """Section [distill]: how many words the draft has (0: all), and what is asked of the target."""
    given = dict(plan.distill)
    words = given.pop("draft_vocab", 0)
    known = {field.name for field in fields(OutputSettings)}
    for name in given:
        if name not in known:
            raise TinyspecError(
                f"{path}: [distill] {name} is not known; {suggest_nearest(name, {*known, 'draft_vocab'})}"
            )
    if not plan.teacher:
        raise TinyspecError(
            f"{path}: a draft is distilled from a target: teacher = NAME is missing"
        )
    if not isinstance(words, int) or words < 0:
        raise TinyspecError(
            f"{path}: [distill] draft_vocab is {words!r}: a number of tokens, or 0 for all of them"
        )
    return words, OutputSettings(**given)


def find_target(name: str, *beside: Path) -> str | Path:
    """The target: a folder beside the recipe or the draft, or a model by name."""
    return next((at / name for at in beside if (at / name / "config.json").is_file()), name)


def draft_config(plan: Recipe, target: Model, words: int, source: str | Path, out: Path) -> Config:
    """The draft's config: the target's, but for what the recipe says."""
    theirs = target.config
    path = models.find_model(source)
    bare = isinstance(source, str) and os.sep not in source
    named = source if bare or path is None else os.path.relpath(path, out)
    extra: dict[str, Any] = {
        "recipe": "recipe.toml",
        "draft_of": str(named) if bare else target.name,
        **plan.extra,
    }
    if licence := theirs.extra.get("licence"):
        extra["licence"] = licence
    try:
        config = replace(theirs, extra=extra, **plan.shape)
    except TypeError as error:
        raise TinyspecError(f"recipe {plan.name}: section [shape]: {error}") from error
    if config.vocab_size != theirs.vocab_size:
        raise TinyspecError(
            f"recipe {plan.name}: a draft reads its target's {theirs.vocab_size} tokens: drop vocab_size"
        )
    if not words:
        return config
    if config.d_model != theirs.d_model:
        raise TinyspecError(
            f"recipe {plan.name}: with draft_vocab the embeddings are the target's, so d_model is {theirs.d_model}, "
            f"not {config.d_model}; draft_vocab = 0 gives the draft its own"
        )
    return replace(config, tied=False, extra={**extra, borrowed.FROM: str(named)})


def initial_draft_weights(
    config: Config, target: Model, seed: int, inherit: bool
) -> dict[str, Tensor]:
    """float32 weights: random, but for those that the target has in the same shape under the same
    name.
    """
    weights = dict(Model.random(config, seed).weights)
    theirs = borrowed.rows(target.weights, config.says) if config.says else {}
    names = weights.keys() & set(target.weights) if inherit else set()
    for name in names:
        if name not in theirs and target.weights[name].shape == weights[name].shape:
            weights[name] = target.weights[name].detach().float().cpu().clone()
    return {**weights, **{name: w.detach().float().cpu() for name, w in theirs.items()}}


def write_card(
    out: Path,
    model: Model,
    plan: Recipe,
    target: Model,
    asking: OutputSettings,
    ended: TrainingResult,
    final: Mapping[str, float],
    texts: int,
    device: torch.device,
) -> None:
    """README.md and loss.svg, from the recipe, the log and the figures alone."""
    c = model.config
    series = {
        "training loss": [(e["tokens"], e["loss"]) for e in ended.log if "loss" in e],
        "alpha, held out": [(e["tokens"], e["alpha"]) for e in ended.log if "alpha" in e],
    }
    svg = draw_curve(
        {name: line for name, line in series.items() if line},
        "tokens seen",
        f"training of {plan.name}",
    )
    (out / "loss.svg").write_text(svg, encoding="utf-8")
    machine = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    own = sum(
        w.numel() for name, w in model.weights.items() if not (c.says and name in ("embed", "head"))
    )
    lent = (
        f"; embeddings, head rows and tokenizer are `{c.extra[borrowed.FROM]}`'s, which must be on the machine"
        if c.says
        else ""
    )
    words = (
        f"{len(c.says):,} of {c.vocab_size:,} tokens ({final['sayable']:.1%} of what the target says)"
        if c.says
        else "all"
    )
    text = f"""# {plan.name}

A draft of `{target.name}`, distilled from the target's own outputs.

- **shape**: {c.n_layers} layers of {c.d_model}, MLP of {c.d_ff}, of the target's architecture; it began as its first layers
- **weights**: {own:,}, stored in bfloat16{lent}
- **words**: {words}
- **quality**: alpha = mean of sum min(p, q) = {final["alpha"]:.3f} at temperature 1; at temperature 0 it says what the target
  says at {final["agreement"]:.1%} of the places; both over whole laws, on held-out texts of the target
- **data**: {texts:,} texts drawn from the target at temperature {asking.temperature:g}, {asking.tokens} tokens each at most
- **training**: {ended.tokens:,} tokens in {ended.step:,} steps, {ended.seconds / 60:.1f} minutes on {machine}
- **licence**: {c.extra.get("licence", "the target's")}

Made by `recipe.toml` (log in `log.jsonl`):

    tinyspec train lm --recipe {out.name}/recipe.toml --out {out.name}

![training curve](loss.svg)
"""
    (out / "README.md").write_text(text, encoding="utf-8")
