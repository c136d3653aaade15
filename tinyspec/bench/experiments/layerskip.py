"""`tinyspec bench layerskip`: count what exits are worth as drafts, by layer, and what they save.

For each model and exit E two figures, at every position of the model's own greedy texts:

    agreement   share of positions at which the exit's most likely token is the whole model's
    overlap     mean of sum min(p, q): the chance that a sampled draft token is accepted

Then LayerSkip runs on the same openings. Draft tokens accepted, tokens per round and layers per
token are counted from the forward log. *Layers in sequence* cannot run side by side: E for each
draft token, and all L once a round. Plain decoding has L per token. So L over the layers in
sequence per token is the most that LayerSkip could gain, if a pass over some positions takes as
long as one over one position. No clock is read, so every machine gives the same figures, up to
rounding.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch

from tinyspec import models
from tinyspec.bench.arms import decode_to_length, disable_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import name_dtype, record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.report import Column, Grid, format_speedup, make_grid
from tinyspec.bench.settings import LayerSkipSettings
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.early_exit.layerskip import resolve_exit_layer
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.model import Model


def measure_layerskip(given: LayerSkipSettings, quiet: bool = False) -> dict[str, Any]:
    """Return all figures of all models at the exits asked for.

    Raises TinyspecError for an exit that a model does not have, and texts that do not fit.
    """
    names, exits, gamma, tokens = given.models, given.exits, given.gamma, given.tokens
    if not (names and exits):
        raise TinyspecError(
            "there is nothing to measure: name --models and --exits, such as exits-layerskip "
            "and 2-8"
        )
    loaded = {name: disable_eos(models.load(name, dtype=given.dtype)) for name in names}
    texts: dict[str, list[list[int]]] = {}
    for name, model in loaded.items():
        for exit in exits:
            resolve_exit_layer(exit, model.config.n_layers, name)
        texts[name] = tokenize_openings(model, find_room(model, tokens))[: given.prompts]
    found: dict[str, Any] = {}
    steps = len(loaded) * (1 + len(exits))
    with show_progress_bar(f"{len(loaded)} models", steps, quiet) as tick:
        for name, model in loaded.items():
            depth, prompts = model.config.n_layers, texts[name]
            written = [decode_to_length(model, text, tokens)[0] for text in prompts]
            worth = _compare_exits(model, prompts, written)
            tick()
            found[name] = {"n_layers": depth, "exits": {}}
            for exit in exits:
                knobs = {"temperature": given.temperature, "exit": exit, "gamma": gamma}
                runs = [_run_once(model, text, tokens, knobs) for text in prompts]
                found[name]["exits"][str(exit)] = {
                    **worth[exit - 1],
                    **_sum_rounds(runs, depth),
                    "knobs": record_knobs(runs[0].knobs),
                }
                tick()
    settings = {
        "gamma": gamma,
        "temperature": given.temperature,
        "prompts": given.prompts,
        "tokens": tokens,
        "openings": "valid books",
        "dtype": {name: name_dtype(model.dtype) for name, model in loaded.items()},
    }
    return stamp_result({"settings": settings, "models": found})


class FinishedRun(NamedTuple):
    """A finished run.

    new     its tokens
    knobs   what it ran with
    rounds  of each round: layers run to draft and to verify, draft tokens, draft tokens accepted
    """

    new: list[int]
    knobs: Mapping[str, Any]
    rounds: list[tuple[float, float, int, int]]


def _run_once(
    model: Model, prompt: Sequence[int], tokens: int, knobs: Mapping[str, Any]
) -> FinishedRun:
    running = start_generation(model, prompt, method="layerskip", max_new_tokens=tokens, **knobs)
    rounds = [
        (
            sum(call.row_layers for call in round.draft_calls),
            sum(call.row_layers for call in round.calls),
            len(round.tree.tokens),
            len(round.verdict.accepted),
        )
        for round in running
    ]
    return FinishedRun(running.decoder.new, running.knobs, rounds)


def _compare_exits(
    model: Model, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]]
) -> list[dict[str, float]]:
    """Return agreement and overlap of every exit, at the positions that gave the written tokens."""
    wide = model.to(dtype=torch.float32)
    blocks = Blocks(wide.config, dict(wide.weights))
    same: list[list[float]] = [[] for _ in range(model.config.n_layers)]
    common: list[list[float]] = [[] for _ in range(model.config.n_layers)]
    for prompt, new in zip(prompts, written, strict=True):
        ids = torch.tensor([[*prompt, *new[:-1]]], device=wide.device)
        with torch.inference_mode():
            every = [
                blocks.compute_logits(x[0, len(prompt) - 1 :]).softmax(-1)
                for x in blocks.layer_states(ids)
            ]
        p = every[-1]
        for layer, q in enumerate(every):
            same[layer] += (q.argmax(-1) == p.argmax(-1)).tolist()
            common[layer] += torch.minimum(q, p).sum(-1).tolist()
    return [{"agreement": mean(a), "overlap": mean(b)} for a, b in zip(same, common, strict=True)]


def _sum_rounds(runs: Sequence[FinishedRun], depth: int) -> dict[str, float]:
    """Return the figures of some runs: sums over their rounds."""
    made = sum(len(run.new) for run in runs)
    rounds = [round for run in runs for round in run.rounds]
    drafting, verifying, drafted, accepted = (sum(column) for column in zip(*rounds, strict=True))
    in_sequence = drafting + depth * len(rounds)
    return {  # the keys are those of committed results
        "kept": accepted / drafted if drafted else 0.0,
        "tokens_per_round": made / len(rounds),
        "layers_per_token": (drafting + verifying) / made,
        "in_a_row_per_token": in_sequence / made,
        "bound": depth * made / in_sequence,
    }


COLUMNS = (
    Column("agreement", "agreement", ".3f"),
    Column("overlap", "overlap", ".3f"),
    Column("draft tokens accepted", "kept", ".3f"),
    Column("tokens per round", "tokens_per_round", ".2f"),
    Column("layers per token", "layers_per_token", ".2f"),
    Column("of them in sequence", "in_a_row_per_token", ".2f"),
    Column("speed-up at most", "bound", lambda bound: format_speedup(bound, "x")),
)


def tabulate_layerskip(result: dict[str, Any]) -> list[Grid]:
    """Return a table for each model, a line for each exit."""
    settings = result["settings"]
    how = f"gamma {settings['gamma']}, temperature {settings['temperature']:g}"
    return [
        make_grid(f"{name}: {of['n_layers']} layers, {how}", of["exits"], COLUMNS, first="exit")
        for name, of in result["models"].items()
    ]


EXPERIMENT = Experiment(measure_layerskip, tabulate_layerskip)
