"""`tinyspec bench exits`: measure what early exits save and cost, the survey's second experiment.

CALM's three measures run over a sweep of thresholds. They must beat one fixed exit for all tokens,
which runs too. There are two ways:

    forced  the text goes on as its book does: how often is the exit's token the full model's, after
            the same text? what is the perplexity of the book?
    free    the model goes on by itself at temperature 0: how much of the text is the full model's?
            what probability does the full model give it?

In both ways, earlier tokens have left early, and their states were copied up.

Work is counted, not timed, and all of it: layers run, keys and values made for skipped layers, and
products with the vocabulary matrix, which the softmax measure needs at every layer where it may
exit. Layers per token alone look better than the work is. The unit is multiplications of weights
over the full model's; those of attention are left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinyspec import data, models
from tinyspec.bench.arms import disable_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import (
    name_dtype,
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import Column, Grid, describe_provenance, make_grid
from tinyspec.bench.settings import MEASURES, ExitSettings
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import decode
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.technique import Request, find_technique
from tinyspec.training import corpus
from tinyspec.tree import TokenTree

FIXED, FULL = "fixed", "full"


def read_classics() -> list[str]:
    """Return the valid books."""
    return [corpus.clean_book(book.text) for book in data.read_books("valid")]


class Passage(NamedTuple):
    """A piece of a book: a prompt, and what comes after it."""

    prompt: list[int]
    rest: list[int]


class ExitSample(NamedTuple):
    """One passage, one way, under one setting.

    right    forced: tokens of the exit that are the full model's; free: tokens that are those of
             the full model's text
    bits     forced: of the passage under the exits' distributions; free: of the text under the
             full model
    layers   (position, layer) evaluations
    fills    keys and values copied up
    heads    products with the vocabulary matrix
    """

    way: str
    passage: int
    tokens: int
    right: int
    bits: float
    layers: float
    fills: int
    heads: int


def draw_passages(
    model: Model, texts: Sequence[str], n: int, prompt: int, tokens: int, seed: int
) -> list[Passage]:
    """Draw n passages independently. Each place of the texts is as likely as any other."""
    if prompt + tokens > model.config.max_positions:
        raise TinyspecError(
            f"{prompt} tokens of a passage and {tokens} new ones do not fit into the context of "
            f"{model.name} ({model.config.max_positions}): fewer --tokens or --prompt-tokens"
        )
    ids = [model.tokenizer.encode(text) for text in texts]
    room = [max(len(text) - prompt - tokens + 1, 0) for text in ids]
    if not sum(room):
        raise TinyspecError(
            f"no text has {prompt + tokens} tokens: give longer ones, or fewer --tokens"
        )
    random, found = np.random.default_rng(seed), list[Passage]()
    for place in random.integers(sum(room), size=n).tolist():
        which = 0
        while place >= room[which]:
            place, which = place - room[which], which + 1
        end = place + prompt
        found.append(Passage(ids[which][place:end], ids[which][end : end + tokens]))
    return found


def make_exit_decoder(
    model: Model, tokens: int, forward_log: list[ForwardRecord], knobs: Mapping[str, Any]
) -> Decoder:
    """Return a decoder of CALM at temperature 0, with no text yet."""
    stop = StoppingCriteria(frozenset(model.config.eos), max_new_tokens=tokens)
    return find_technique("calm").make(
        Request(
            model.session(forward_log),
            sampling=SamplingParams(0.0),
            stop=stop,
            forward_log=forward_log,
        ),
        **knobs,
    )


def decode_with_exits(
    model: Model,
    prompt: Sequence[int],
    tokens: int,
    forward_log: list[ForwardRecord],
    knobs: Mapping[str, Any],
) -> list[int]:
    """Return the text that CALM writes at temperature 0."""
    return decode(make_exit_decoder(model, tokens, forward_log, knobs), prompt, Seeded(0))[0]


def count_relative_work(config: Config, layers: float, fills: float, heads: float) -> float:
    """Return the multiplications of weights, over those of the full model for one token."""
    shapes = config.shapes()
    layer = sum(math.prod(shapes[f"0.{part}.weight"]) for part in ("qkv", "out", "up", "down"))
    head = (len(config.head_ids) or config.vocab_size) * config.d_model
    kv = 2 * config.kv_dim * config.d_model
    return (layers * layer + fills * kv + heads * head) / (config.n_layers * layer + head)


# ---------------------------------------------------------------------- the experiment


def measure_exits(
    given: ExitSettings, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Return all samples and what follows from them.

    With `out`, each setting is written when it is done; with `resume`, the run goes on there.
    """
    thresholds, measures = given.thresholds, given.measures
    texts = given.texts or read_classics()
    model = disable_eos(models.load(given.model, dtype=given.dtype))
    found = draw_passages(
        model, texts, given.prompts, given.prompt_tokens, given.tokens, given.seed
    )
    knobs = {"decay": given.decay, "tau": given.tau, "min_exit": given.min_exit}
    if missing := [m for m in measures if m not in MEASURES]:
        raise TinyspecError(f"there is no measure '{missing[0]}': {', '.join(MEASURES)}")
    for measure in measures:  # a missing classifier is reported before anything is run
        for threshold in thresholds or (0.5,):
            make_exit_decoder(model, 1, [], {**knobs, "measure": measure, "threshold": threshold})
    settings = {
        "model": model.name,
        "n_layers": model.config.n_layers,
        "dtype": name_dtype(model.dtype),
        "prompts": given.prompts,
        "prompt_tokens": given.prompt_tokens,
        "tokens": given.tokens,
        "seed": given.seed,
        **knobs,
    }
    done: dict[str, list[Any]] = read_unfinished(out, resume, "exits", settings, _read_samples, {})
    asked = dict(_list_arms(measures, thresholds, knobs, model.config.n_layers))
    calm = find_technique("calm")
    ran = {label: record_knobs(calm.settings(chosen)) for label, chosen in asked.items()}
    result: dict[str, Any] = {}
    with show_progress_bar(f"{model.name}: exits", len(asked), quiet) as tick:
        whole = [_run_full_model(model, passage) for passage in found]
        for label, chosen in asked.items():
            if label not in done:
                done[label] = [
                    list(s)
                    for at, p in enumerate(found)
                    for s in _run_forced_and_free(model, at, p, whole[at], chosen)
                ]
            made = {
                "settings": settings,
                "knobs": ran,
                "columns": list(ExitSample._fields),
                "samples": done,
            }
            shape = {name: getattr(model.config, name) for name in SHAPE}
            result = stamp_result({**made, "config": shape})
            save_result(out, result)
            tick()
    result["figures"] = summarize_exits(result, model.config)
    save_result(out, result)
    return result


def _list_arms(
    measures: Sequence[str], thresholds: Sequence[float], knobs: Mapping[str, Any], depth: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the full model, fixed exits, and each measure at each threshold, by their names."""
    yield FULL, {"threshold": math.inf}
    for layer in range(1, depth):  # every token reaches threshold 0, at the first exit allowed
        yield f"{FIXED} {layer}", {"threshold": 0.0, "decay": "constant", "min_exit": layer}
    for measure in measures:
        for threshold in thresholds:
            yield f"{measure} {threshold:g}", {**knobs, "measure": measure, "threshold": threshold}


SHAPE = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")


class FullModelOutput(NamedTuple):
    """The full model on a passage: its prediction of each token of it, and its own text."""

    words: list[int]
    text: list[int]


def _run_full_model(model: Model, passage: Passage) -> FullModelOutput:
    rows = model.logits([*passage.prompt, *passage.rest])[len(passage.prompt) - 1 : -1]
    knobs = {"threshold": math.inf}
    text = decode_with_exits(model, passage.prompt, len(passage.rest), [], knobs)
    return FullModelOutput(rows.argmax(-1).tolist(), text)


def _run_forced_and_free(
    model: Model, at: int, passage: Passage, whole: FullModelOutput, knobs: Mapping[str, Any]
) -> Iterator[ExitSample]:
    """Run a passage both ways: forced, and free."""
    n, forward_log = len(passage.rest), list[ForwardRecord]()
    target = make_exit_decoder(model, n, forward_log, knobs).target
    target.extend(passage.prompt)
    right, bits = 0, 0.0
    for word, token in zip(whole.words, passage.rest, strict=True):
        row = target.score(TokenTree()).logits[0].double()
        right, bits = right + (int(row.argmax()) == word), bits + _bits(row, token)
        target.commit((), token)
    yield ExitSample("forced", at, n, right, bits, *count_work(forward_log))
    forward_log.clear()
    text = decode_with_exits(model, passage.prompt, n, forward_log, knobs)
    rows = model.logits([*passage.prompt, *text])[len(passage.prompt) - 1 : -1].double()
    same = sum(a == b for a, b in zip(text, whole.text, strict=True))
    bits = sum(_bits(row, token) for row, token in zip(rows, text, strict=True))
    yield ExitSample("free", at, n, same, bits, *count_work(forward_log))


def _bits(row: Any, token: int) -> float:
    return float(row.logsumexp(0) - row[token]) / math.log(2)


def count_work(forward_log: Sequence[ForwardRecord]) -> tuple[float, int, int]:
    """Return layers, fills and head products after the prompt."""
    calls = [call for call in forward_log if not call.prefill]
    return (
        sum(c.row_layers for c in calls),
        sum(c.fills for c in calls),
        sum(c.head_rows for c in calls),
    )


def _read_samples(found: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that an interrupted run has finished."""
    return {
        str(label): [list(ExitSample(*row)) for row in rows]
        for label, rows in found["samples"].items()
    }


# ---------------------------------------------------------------------- what follows from it


def summarize_exits(result: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return figures by setting and way, from the samples alone.

    front  whether no cheaper setting agrees as often
    """
    found: dict[str, Any] = {}
    for label, rows in result["samples"].items():
        samples = [ExitSample(*row) for row in rows]
        found[label] = {
            way: _average_samples([s for s in samples if s.way == way], config)
            for way in ("forced", "free")
        }
    for one in found.values():
        mine = one["forced"]
        better = [f["forced"] for f in found.values() if f["forced"]["work"] <= mine["work"]]
        one["front"] = all(
            other["agreement"] <= mine["agreement"] or other is mine for other in better
        )
    return found


def _average_samples(samples: Sequence[ExitSample], config: Config) -> dict[str, float]:
    n = sum(s.tokens for s in samples)
    layers, fills, heads = (
        sum(getattr(s, name) for s in samples) / n for name in ("layers", "fills", "heads")
    )
    return {
        "layers": layers,
        "fills": fills,
        "heads": heads,
        "work": count_relative_work(config, layers, fills, heads),
        "agreement": sum(s.right for s in samples) / n,
        "perplexity": 2 ** (sum(s.bits for s in samples) / n),
    }


COLUMNS = (
    Column("layers per token", ("forced", "layers"), ".2f"),
    Column("K/V fills", ("forced", "fills"), ".2f"),
    Column("head products", ("forced", "heads"), ".2f"),
    Column("work", ("forced", "work"), ".2f"),
    Column("agreement", ("forced", "agreement"), ".1%"),
    Column("perplexity", ("forced", "perplexity"), ".2f"),
    Column("free: work", ("free", "work"), ".2f"),
    Column("same text", ("free", "agreement"), ".1%"),
    Column("perplexity, full model's", ("free", "perplexity"), ".2f"),
)


def tabulate_exits(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of settings."""
    rows = {label + (" *" if of["front"] else ""): of for label, of in result["figures"].items()}
    model = result["settings"]["model"]
    title = (
        f"Early exits of {model}: work over the full model's; * nothing is cheaper and agrees more"
    )
    return [make_grid(title, rows, COLUMNS)]


def chart_exits(result: Mapping[str, Any]) -> Chart:
    """Draw agreement and perplexity on forced text over the work, a line for each measure."""
    of, settings = result["figures"], result["settings"]
    full = of[FULL]["forced"]["perplexity"]
    agreement, perplexity = dict[str, dict[float, float]](), dict[str, dict[float, float]]()
    for label, row in of.items():
        if label != FULL:
            name, forced = label.partition(" ")[0], row["forced"]
            name = "one exit for all tokens" if name == FIXED else name
            agreement.setdefault(name, {})[forced["work"]] = forced["agreement"]
            perplexity.setdefault(name, {})[forced["work"]] = min(forced["perplexity"] / full, 4.0)
    across: dict[str, Any] = {"x_label": "work of a token, over the full model's", "vertical": 1}
    return Chart(
        f"{settings['model']}: what early exits save, and what they cost",
        [
            Lines("agreement with the full model", agreement, top=1.0, **across),
            Lines("perplexity over the full model's, to 4", perplexity, top=4.0, **across),
        ],
        [
            "Work: layers, fills and head products of a token, all together; the upright line is "
            "the full model.",
            f"{settings['prompts']} passages of {settings['tokens']} tokens; threshold "
            f"{settings['decay']}; {settings['dtype']}; {describe_provenance(result)}",
        ],
        "; ".join(
            f"{name}: agreement {max(line.values()):.2f} at best"
            for name, line in agreement.items()
        ),
    )


EXPERIMENT = Experiment(measure_exits, tabulate_exits, chart_exits)
