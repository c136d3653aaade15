"""`tinyspec bench streams`: measure answers that several streams write, beside plain decoding.

A technique of streams writes an outline and its points (Skeleton-of-Thought), or a main text and
its details (APAR). That is another answer than plain decoding's, and often a longer one. So there
are two ratios: the time of a whole answer with its prompts, and tokens per second. Whether an
answer is good is not measured.

Plain decoding is the technique at its neutral value. All arms take turns on the same questions, and
each stream ends where the model ends it. A model that was tuned for `apar` is asked for lists of
animals that it was not trained on, any other model MT-bench's questions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from tinyspec import models
from tinyspec.bench.arms import Clock
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import name_dtype, record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.measure import order_of_turn
from tinyspec.bench.plan import ArmSpec
from tinyspec.bench.report import (
    Column,
    Grid,
    count_things,
    describe_provenance,
    format_quartiles,
    make_grid,
)
from tinyspec.bench.settings import StreamSettings
from tinyspec.bench.tally import five_number_summary
from tinyspec.bench.tasks import load_items
from tinyspec.decoding.trace import Statistics
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive import apar
from tinyspec.technique import find_technique

PLAIN = "plain"
UNSEEN = 1 << 30  # seed of the lists of animals; a recipe's is small
COLUMNS = ["question", "round", "arm", "seconds", "tokens", "passes", "is_shared"]


def measure_streams(
    given: StreamSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return all figures with their samples, at temperature 0.

    Raises TinyspecError for methods that are not of streams, or of two techniques.
    """
    arms = make_arms(given.methods)
    model = models.load(given.model, dtype=given.dtype)
    questions = choose_questions(model, given.questions)
    labels, samples, knobs = list(arms), list[list[Any]](), dict[str, Any]()
    steps = 1 + len(questions) * given.rounds
    with show_progress_bar(f"{model.name}: {len(arms)} ways to answer", steps, quiet) as tick:
        for label in labels:  # the first answer of a process is slow
            time_answer(model, questions[0], arms[label], 8, clock)
        tick()
        for round in range(given.rounds):
            for number, question in enumerate(questions):
                for label in order_of_turn(labels, round * len(questions) + number):
                    row, knobs[label] = time_answer(
                        model, question, arms[label], given.tokens, clock
                    )
                    samples.append([number, round, label, *row])
                tick()
    made = {
        "settings": {**asdict(given), "methods": list(given.methods), "model": model.name},
        "dtype": name_dtype(model.dtype),
        "knobs": {label: record_knobs(knobs[label]) for label in labels},
        "questions": questions,
        "columns": COLUMNS,
        "samples": samples,
    }
    return stamp_result({**made, "figures": summarize_streams(made)})


def make_arms(methods: Sequence[str]) -> dict[str, ArmSpec]:
    """Return the arms by their labels: plain decoding, and the methods with their knobs.

    >>> make_arms(["sot:points=4"])["plain"].label
    'sot:router=never'
    """
    specs = {label: ArmSpec.parse(label) for label in methods}
    names = list(dict.fromkeys(spec.name for spec in specs.values()))
    cards = [find_technique(name) for name in names]
    if len(cards) != 1 or cards[0].kind != "streams" or cards[0].lossy is None:
        raise TinyspecError(
            f"--methods {','.join(methods)}: give one technique of several streams, with any "
            "knobs, such as sot,sot:router=prompt"
        )
    for spec in specs.values():
        cards[0].settings(dict(spec.knobs))
    return {PLAIN: ArmSpec(names[0], (cards[0].lossy,)), **specs}


def choose_questions(model: Model, n: int) -> list[str]:
    """Return n questions, or as many as there are."""
    if model.tokenizer.find_id(apar.FORK) is not None:
        recipe = apar.AparSettings()
        trained = {asked for asked, _ in apar.make_texts(recipe.lists, recipe.seed)}
        lists = [asked for asked, _ in apar.make_texts(2 * n, UNSEEN)[::2]]  # the rest are no lists
        return [asked for asked in lists if asked not in trained][:n]
    return [item.turns[0] for item in load_items("mt_bench", n)]


def time_answer(
    model: Model, question: str, arm: ArmSpec, tokens: int, clock: Clock
) -> tuple[list[Any], Mapping[str, Any]]:
    """Answer a question. Returns seconds, tokens, passes, whether one was shared, and the knobs.

    tokens  of each stream, at most
    """
    begun, stats, is_shared = clock(), Statistics(), False
    running = start_generation(
        model,
        question,
        method=arm.name,
        chat=model.tokenizer.has_chat,
        max_new_tokens=tokens,
        **dict(arm.knobs),
    )
    for round in running:
        stats.count(round)
        is_shared = is_shared or round.is_shared
    seconds = clock() - begun
    return [seconds, stats.emitted, stats.target_calls, is_shared], running.knobs


# ---------------------------------------------------------------------- what follows from it


def summarize_streams(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of each arm, from the samples alone.

    tokens, passes  of an answer, in the mean;  tau: tokens per pass
    shared          share of the answers that several streams wrote
    time            plain decoding's seconds for an answer over its own, as five numbers
    rate            its tokens per second over plain decoding's
    """
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["samples"]]
    plain = {(row["question"], row["round"]): row for row in rows if row["arm"] == PLAIN}
    found = dict[str, Any]()
    for label in result["knobs"]:
        own = [row for row in rows if row["arm"] == label]
        times = [plain[row["question"], row["round"]]["seconds"] / row["seconds"] for row in own]
        rates = [
            time * row["tokens"] / plain[row["question"], row["round"]]["tokens"]
            for time, row in zip(times, own, strict=True)
        ]
        tokens, passes = (sum(row[name] for row in own) for name in ("tokens", "passes"))
        found[label] = {
            "tokens": tokens / len(own),
            "passes": passes / len(own),
            "tau": tokens / passes,
            "shared": mean(row["is_shared"] for row in own),
            "time": five_number_summary(times),
            "rate": five_number_summary(rates),
        }
    return found


FIGURES = (
    Column("tokens of an answer", "tokens", ".0f"),
    Column("passes of an answer", "passes", ".0f"),
    Column("tokens per pass", "tau", ".2f"),
    Column("by several streams", "shared", ".0%"),
    Column("time of an answer: times as fast", "time", format_quartiles),
    Column("tokens/s: times as fast", "rate", format_quartiles),
)


def tabulate_streams(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of the arms."""
    title = f"Answers of {result['settings']['model']}, against plain decoding of the same model"
    return [make_grid(title, result["figures"], FIGURES)]


def list_stream_notes(result: Mapping[str, Any]) -> list[str]:
    """Return the line below the table."""
    settings = result["settings"]
    return [
        f"{result['dtype']}, greedy, {count_things(len(result['questions']), 'question')}, at most "
        f"{settings['tokens']} new tokens of each stream, "
        f"{count_things(settings['rounds'], 'round')}. Times include the prompts. The quality of "
        f"the answers is not measured. {describe_provenance(result)}.",
    ]


EXPERIMENT = Experiment(measure_streams, tabulate_streams, notes=list_stream_notes)
