"""Tune a model for a method that needs a model of its own: `tinyspec train head`, as for SPACE.

Some methods train no head beside the target but the target itself. The target writes texts
(outputs.py), and all of its weights are trained on them in float32, by the loss of the technique's
file. The result is an ordinary model folder. Its config.json says for which method, from which
model and by which settings it was tuned. A technique may train further tensors beside the model,
and count tables on the texts; they become its extras, as a head of the method.

The output of such a method follows the tuned model. So the page tells what tuning cost and what it
gave, before and after:

    perplexity       of a held-out text: of books that no model here was trained on, if they are on
                     this machine, else of texts that the target wrote
    tokens per pass  of the method, at temperature 0, on prompts of held-out texts
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from tinyspec import data, models
from tinyspec.errors import TinyspecError
from tinyspec.generation import generate
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import TUNED
from tinyspec.lm.heads import RANKS, FrozenTarget, add_head, freeze_target
from tinyspec.lm.model import Model
from tinyspec.technique import Trained, TrainingBatch, TrainingExample, Tuning
from tinyspec.training.corpus import Document, bits_per_byte, clean_book, encode_document
from tinyspec.training.driver import RecipeRun, RunOptions, find_beside
from tinyspec.training.heads import TextBatches, count_answer_tokens, measure_ranks, prepare_texts
from tinyspec.training.outputs import TargetOutput
from tinyspec.training.recipe import read_head_recipe
from tinyspec.training.text_cache import select_seen
from tinyspec.training.train import TrainingResult, autocast

BOOK_CHARACTERS = 20_000  # of each book whose perplexity is measured
WINDOW = 512  # tokens of the context in which the perplexity is measured
TIMED_TEXTS = 24  # held-out texts whose prompts the method continues
TIMED_TOKENS = 64  # new tokens of each


def train_tuned(
    recipe: str | Path,
    out: str | Path,
    *,
    prompts: Path | None = None,
    data_folder: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> tuple[TrainingResult, dict[str, float]]:
    """Tune the target of a recipe into the model folder `out`; see `RecipeRun`.

    prompts      a file with prompts for the target
    data_folder  where texts for prompts and the held-out books lie (default:
                 `tinyspec.data.data_folder()`)

    Returns how the training ended, and the model's figures. The texts lie in the cache.
    """
    run = RecipeRun(read_head_recipe, recipe, out, **options)
    plan, where, card, tuned = run.recipe, run.device, run.recipe.card, run.recipe.tuned
    source = find_beside(plan.target, run.path.parent, run.out) or plan.target
    author = models.load(source, device=where)
    settings = plan.settings_of_head()
    target = tuned.add_tokens(author) if tuned.tokens else author
    frozen = freeze_target(target, None, torch.float32, layers=False)
    begun = tuned.initialize(frozen, settings, plan.settings.seed)
    texts, n_made = list[TargetOutput](), 0
    if tuned.examples is not None:
        texts = [as_output(example) for example in tuned.examples(target, settings)]
        n_made = len(texts)
        run.print(f"texts that were made for {plan.method}: {n_made}")
    written, _ = prepare_texts(run, author, prompts, data_folder)
    # Texts of one training have equally many distributions, and those that were made have none.
    texts += [drop_distributions(text) for text in written] if n_made else written

    def copy_to_float32(weight: Tensor) -> Tensor:
        return weight.detach().to(where, torch.float32, copy=True)

    weights = {name: copy_to_float32(weight) for name, weight in target.weights.items()}
    beside = {name: copy_to_float32(weight) for name, weight in begun.items()}
    counted = tuned.tables(
        target.config, settings, [text.ids for text in select_seen(texts)], plan.settings.seed
    )
    tables = {name: table.to(where) for name, table in counted.items()}
    further = {f"{card.head_method}/{name}": weight for name, weight in beside.items()}
    n_trained = sum(w.numel() for w in (*weights.values(), *beside.values()))
    run.print(f"{plan.name}: {n_trained:,} weights are trained, on {where}")
    batches = TextBatches(texts, plan, target.config, where)
    tuning = Tuning(Blocks(target.config, weights), target, settings, {**beside, **tables}, 0.0)

    def begin_step(step: int, progress: float) -> None:
        nonlocal tuning
        tuning = tuning._replace(progress=progress)

    def loss(*batch: Tensor) -> Tensor:
        # The seed comes from the step's own random numbers, so a resumed step draws the same.
        generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        with autocast(where):
            return tuned.loss(tuning, TrainingBatch(*batch), generator)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        """Return the loss on the held-out texts, with the same random numbers each time."""
        at_the_end, losses = tuning._replace(progress=1.0), list[float]()
        for number, batch in enumerate(batches.held_batches):
            generator = torch.Generator().manual_seed(number)
            with autocast(where):
                losses.append(float(tuned.loss(at_the_end, batch, generator)))
        return {"held_out": batches.average_held_out(losses)}

    result = run.train(
        {**weights, **further},
        batches.draw,
        loss,
        validate,
        begin_step,
        rates=dict.fromkeys(further, tuned.rate),
        weigh=count_answer_tokens,
    )
    if not result.finished:
        return result, {}
    origin = {"method": plan.method, "from": target.name, "settings": dict(vars(settings))}
    extra: dict[str, Any] = {"recipe": "recipe.toml", **plan.extra, TUNED: origin}
    if licence := target.config.extra.get("licence"):
        extra.setdefault("licence", licence)
    stored = {name: w.detach().to("cpu", torch.bfloat16) for name, w in weights.items()}
    tokenizer = target.tokenizer if target.has_tokenizer else None
    model = Model(replace(target.config, extra=extra), stored, tokenizer, plan.name)
    if beside or tables:
        own = {name: w.detach().to("cpu", torch.bfloat16) for name, w in beside.items()}
        own |= {name: table.cpu() for name, table in tables.items()}
        known = vars(settings)
        if card.trained is not None:
            if card.trained.predict is not None:
                own[RANKS] = measure_heads(card.trained, tuning, batches.held_batches)
            known = {name: known[name] for name in vars(card.trained.small)}
        model = add_head(model, card.head_method, own, known)
    model.save(run.out)
    # The figures belong to the weights as they are stored.
    held = [texts[number] for number in batches.held]
    documents, text_name = read_held_out_text(target, held, data_folder)
    figures: dict[str, float] = {}
    for when, one in {"before": target, "after": models.load(run.out, device=where)}.items():
        figures[f"perplexity_{when}"] = measure_perplexity(one, documents)
        if when == "after" or card.trained is None:  # the target has no head of the method
            figures[f"tokens_per_pass_{when}"] = measure_pace(one, plan.method, held)
    run.print("  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    run.finish(
        "tuned",
        result,
        {"training loss": result.curve("loss"), "held-out loss": result.curve("held_out")},
        target=target.name,
        settings=origin["settings"],
        trained_weights=n_trained,
        figures={"held_out": result.best, **figures},
        text_name=text_name,
        held=len(held),
        timed=min(len(held), TIMED_TEXTS),
        timed_tokens=TIMED_TOKENS,
        texts=len(texts),
        made_texts=n_made,
        licence=extra.get("licence"),
        folder=run.out.name,
    )
    return result, figures


def as_output(example: TrainingExample) -> TargetOutput:
    """Return a text that was made as if a target had written it, without its distributions."""
    positions = torch.arange(example.first - 1, len(example.ids) - 1)
    nothing = torch.empty(len(positions), 0)
    return TargetOutput(torch.tensor(example.ids), positions, nothing.int(), nothing.half())


def drop_distributions(text: TargetOutput) -> TargetOutput:
    """Return a text of a target without its distributions."""
    return as_output(TrainingExample(text.ids.tolist(), int(text.positions[0]) + 1))


@torch.no_grad()
def measure_heads(trained: Trained, tuning: Tuning, batches: Sequence[TrainingBatch]) -> Tensor:
    """Return how often each candidate of the heads beside a model is right: [depths, RANKED]."""
    blocks, settings = tuning.blocks, tuning.settings
    target = FrozenTarget(blocks.config, blocks.embed, blocks.vocabulary, None, None, settings)
    layers = trained.layers(blocks.config, settings)
    with autocast(blocks.device):
        with_states = [
            batch._replace(states=blocks.hidden_states(batch.ids, layers)) for batch in batches
        ]
        return measure_ranks(trained, tuning.beside, target, with_states)[0]


def read_held_out_text(
    model: Model, texts: Sequence[TargetOutput], data_folder: str | Path | None
) -> tuple[list[Document], str]:
    """Return texts that the model was not trained on, and what they are, in words."""
    with suppress(TinyspecError):
        books = data.read_books("valid", data_folder)
        end = next(iter(model.config.eos), 0)
        cleaned = [clean_book(book.text) for book in books]
        documents = [
            encode_document(model.tokenizer, text, end, BOOK_CHARACTERS) for text in cleaned
        ]
        return documents, "the beginnings of the valid books"
    return [Document(text.ids.tolist(), 0) for text in texts], "held-out texts of the target"


def measure_perplexity(model: Model, documents: Sequence[Document]) -> float:
    """Return the perplexity of texts, computed in float32.

    perplexity = exp(mean over all tokens of -log p(token | the tokens before it))
    """
    per_token = [Document(tokens, len(tokens) - 1) for tokens, _ in documents]
    context = min(model.config.max_positions, WINDOW)
    teach = model.to(dtype=torch.float32).training_logits
    bits = bits_per_byte(teach, per_token, context, max(context // 2, 1), model.device)
    return math.exp2(bits)


def measure_pace(model: Model, method: str, texts: Sequence[TargetOutput]) -> float:
    """Return the tokens per target pass of a method that continues the texts' prompts greedily."""
    tokens = passes = 0
    for text in texts[:TIMED_TEXTS]:
        prompt = text.ids[: int(text.positions[0]) + 1].tolist()
        output = generate(model, prompt, method=method, max_new_tokens=TIMED_TOKENS)
        assert not isinstance(output, list)
        tokens, passes = tokens + output.stats.emitted, passes + output.stats.target_calls
    return tokens / max(passes, 1)
