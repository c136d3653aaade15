"""`tinyspec bench layerskip`: what the exits of models are worth as drafts, by layer, and what
LayerSkip makes of them.

Per model and exit E: *agreement*, how often the exit's likeliest token is the whole model's, and
*overlap*, the mean of sum min(p, q), which is the chance that a sampled guess is accepted; both at
every position of the model's own greedy texts, by one dense pass. Then LayerSkip is run on the same
openings: guesses kept, tokens a round, and layers a token, counted from the forward log. "In a row"
are the layers that cannot run side by side: E for each guess, and all L once a round; plain
decoding has L a token, so L over it is the most that LayerSkip could gain where a pass over some
rows takes as long as one over one row. No clock is read: the figures are the same on every machine,
up to rounding.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch

from tinyspec import models
from tinyspec.bench.arms import without_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.report import Grid, format_number, format_speedup
from tinyspec.bench.settings import LayerSkipSettings
from tinyspec.bench.tasks import read_openings
from tinyspec.early_exit.layerskip import resolve_exit_layer
from tinyspec.errors import TinyspecError
from tinyspec.generation import prompt_ids, start_generation
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.model import Model

METHOD = "layerskip"


def measure_layerskip(given: LayerSkipSettings, quiet: bool = False) -> dict[str, Any]:
    """Return all figures of all models, at the exits that each has. Raises TinyspecError for none,
    and texts that do not fit.
    """
    names, exits, gamma, temperature = given.models, given.exits, given.gamma, given.temperature
    prompts, tokens = given.prompts, given.tokens
    if not (names and exits):
        raise TinyspecError(
            "there is nothing to measure: name --models and --exits, such as exits-layerskip and 2-8"
        )
    found: dict[str, Any] = {}
    loaded = {name: without_eos(models.load(name, dtype=given.dtype)) for name in names}
    for name, model in loaded.items():
        for exit in exits:
            resolve_exit_layer(exit, model.config.n_layers, name)
        if model.config.max_positions <= tokens:
            raise TinyspecError(
                f"{tokens} new tokens do not fit into the context of {name}: fewer --tokens"
            )
    with show_progress(f"{len(loaded)} models", len(loaded) * (1 + len(exits)), quiet) as tick:
        for name, model in loaded.items():
            texts = [
                prompt_ids(model, text)[-(model.config.max_positions - tokens) :]
                for text in read_openings()[:prompts]
            ]
            written = [_decode(model, text, tokens, "autoregressive").new for text in texts]
            worth = _compare_exits(model, texts, written)
            tick()
            found[name] = {"n_layers": model.config.n_layers, "exits": {}}
            for exit in exits:
                runs = [
                    _decode(model, text, tokens, METHOD, temperature, exit=exit, gamma=gamma)
                    for text in texts
                ]
                found[name]["exits"][str(exit)] = {
                    **worth[exit - 1],
                    **_sum_rounds(runs, model.config.n_layers),
                }
                tick()
    settings = {
        "gamma": gamma, "temperature": temperature, "prompts": prompts, "tokens": tokens, "openings": "valid books",
        "dtype": {name: str(model.dtype).removeprefix("torch.") for name, model in loaded.items()},
    }  # fmt: skip
    return stamp_result({"settings": settings, "models": found})


class FinishedRun(NamedTuple):
    """A finished run: its tokens, and of every round the layers run to draft, to verify, and the
    guesses.
    """

    new: list[int]
    rounds: list[tuple[float, float, int, int]]  # drafting, verification, drafted, kept


def _decode(
    model: Model,
    prompt: Sequence[int],
    tokens: int,
    method: str,
    temperature: float = 0.0,
    **knobs: Any,
) -> FinishedRun:
    running = start_generation(
        model, list(prompt), method=method, max_new_tokens=tokens, temperature=temperature, **knobs
    )
    rounds = [
        (
            sum(call.row_layers for call in round.draft_calls),
            sum(call.row_layers for call in round.calls),
            len(round.tree.tokens),
            len(round.verdict.accepted),
        )
        for round in running
    ]
    return FinishedRun(running.decoder.new, rounds)


def _compare_exits(
    model: Model, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]]
) -> list[dict[str, float]]:
    """Agreement and overlap of every exit with the last layer, over the rows that said the written
    tokens.
    """
    wide = model.to(dtype=torch.float32)
    blocks = Blocks(wide.config, dict(wide.weights))
    same: list[list[float]] = [[] for _ in range(model.config.n_layers)]
    common: list[list[float]] = [[] for _ in range(model.config.n_layers)]
    for prompt, new in zip(prompts, written, strict=True):
        ids = torch.tensor([[*prompt, *new[:-1]]], device=wide.device)
        with torch.inference_mode():
            laws = [blocks.head(x[0, len(prompt) - 1 :]).softmax(-1) for x in blocks.stream(ids)]
        for layer, q in enumerate(laws):
            same[layer] += (q.argmax(-1) == laws[-1].argmax(-1)).tolist()
            common[layer] += torch.minimum(q, laws[-1]).sum(-1).tolist()
    return [{"agreement": mean(a), "overlap": mean(b)} for a, b in zip(same, common, strict=True)]


def _sum_rounds(runs: Sequence[FinishedRun], depth: int) -> dict[str, float]:
    """What the rounds of some runs add up to."""
    made, rounds = (
        sum(len(run.new) for run in runs),
        [round for run in runs for round in run.rounds],
    )
    drafting, verifying, drafted, kept = (sum(column) for column in zip(*rounds, strict=True))
    in_a_row = drafting + depth * len(rounds)
    return {
        "kept": kept / drafted if drafted else 0.0,
        "tokens_per_round": made / len(rounds),
        "layers_per_token": (drafting + verifying) / made,
        "in_a_row_per_token": in_a_row / made,
        "bound": depth * made / in_a_row,
    }


def tabulate_layerskip(result: dict[str, Any]) -> list[Grid]:
    """A table a model, a row an exit."""
    settings, made = result["settings"], []
    header = [
        "exit", "agreement", "overlap", "draft tokens accepted", "tokens per round", "layers per token",
        "of them in sequence", "speed-up at most",
    ]  # fmt: skip
    for name, of in result["models"].items():
        rows = [
            [
                exit,
                format_number(f["agreement"], 3),
                format_number(f["overlap"], 3),
                format_number(f["kept"], 3),
                format_number(f["tokens_per_round"], 2),
                format_number(f["layers_per_token"], 2),
                format_number(f["in_a_row_per_token"], 2),
                format_speedup(f["bound"], "x"),
            ]
            for exit, f in of["exits"].items()
        ]
        title = f"{name}: {of['n_layers']} layers, gamma {settings['gamma']}, temperature {settings['temperature']:g}"
        made.append(Grid(title, header, rows))
    return made


EXPERIMENT = Experiment(measure_layerskip, tabulate_layerskip)
