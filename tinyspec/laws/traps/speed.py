"""SPEED (Hooper et al. 2023): one tick runs all tokens in flight, and guesses save repetitions."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import (
    NETWORK_TOLERANCE,
    likeliest_token,
    repeat_layers,
    run_dense,
    small_network,
)
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.lm.cyclic import run_repetition
from tinyspec.lm.forward import ForwardBatch, ForwardFn, Plan, Scores
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated.speed import CyclicPipeline, count_ticks

TICKS = "a token takes as many ticks as repetitions are left when it is known"
ONE_PASS = "the tokens in flight run in one pass, a row each"
SAME_ROWS = "a token that was begun as a guess has the row of a plain pass"

TOKENS, PROMPT = 12, (0, 1, 2)
SHAPES = [(3, 3), (4, 2), (6, 3), (8, 4)]
"""Layers, and how often the group of layers with weights runs."""


@lru_cache(maxsize=32)
def cyclic_network(seed: int, layers: int = 3, repeat: int = 3) -> Model:
    """Return a small transformer whose layers repeat."""
    return repeat_layers(small_network(seed, layers=layers), repeat)


def ran_before(model: Model, text: list[int], exit: int) -> int:
    """Return how many repetitions the last token of a text had run when it became known.

    The guess is that of a dense pass that stops after `exit` repetitions.
    """
    config = model.config
    plan = Plan(last=exit * config.distinct_layers)
    guess = likeliest_token(run_dense(model, text[:-1], plan).logits[-1])
    return config.repeat - exit if guess == text[-1] else 0


@collect_evidence(TICKS)
def ticks_follow_from_the_guesses(build: Build) -> Iterator[int]:
    """Check the ticks of every round against guesses of dense passes."""
    for (layers, repeat), seed, temperature in (
        (shape, seed, t) for shape in SHAPES for seed in range(2) for t in (0.0, 1.0)
    ):
        model = cyclic_network(seed, layers, repeat)
        for exit in (1, 2):
            sampling = SamplingParams(temperature)
            decoder = begin_decoder(build, [model], PROMPT, sampling, TOKENS, exit=exit)
            known = 0
            while not decoder.finished:
                round = decoder.step(Seeded(seed).split("round", decoder.rounds))
                got = count_ticks(round.calls, model.config.distinct_layers)
                case: dict[str, Any] = {
                    "layers": layers,
                    "repeat": repeat,
                    "exit": exit,
                    "network": seed,
                }
                case |= {"text": decoder.context, "counted": "ticks"}
                expect_equal(TICKS, repeat - known, got, **case)
                known = ran_before(model, decoder.context, min(exit, repeat))
                yield 1


@collect_evidence(ONE_PASS)
def tokens_in_flight_share_a_pass(build: Build) -> Iterator[int]:
    """Check the passes of a first round: one for each tick, with one more token in each."""
    for layers, repeat in SHAPES:
        model = cyclic_network(1, layers, repeat)
        decoder = begin_decoder(build, [model], PROMPT, max_new_tokens=TOKENS, exit=1)
        session: Any = decoder.target.session  # type: ignore[attr-defined]
        rows, inner = list[int](), session.forward

        def forward(
            feeds: Sequence[ForwardBatch], rows: list[int] = rows, inner: ForwardFn = inner
        ) -> list[Scores]:
            rows.append(sum(len(feed.tokens) for feed in feeds))
            return inner(feeds)

        session.forward = forward
        decoder.step(Seeded(0))
        expect_equal(ONE_PASS, list(range(1, repeat + 1)), rows, layers=layers, repeat=repeat)
        yield repeat


@collect_evidence(SAME_ROWS)
def rows_are_those_of_a_plain_pass(build: Build) -> Iterator[int]:
    """Check the row of every round against a dense pass over the text."""
    for layers, repeat in SHAPES:
        for seed in (1, 2):
            model = cyclic_network(seed, layers, repeat)
            decoder = begin_decoder(build, [model], PROMPT, SamplingParams(1.0), TOKENS)
            while not decoder.finished:
                text = list(decoder.context)
                round = decoder.step(Seeded(seed).split("round", decoder.rounds))
                row, expected = round.scores.logits[0].numpy(), run_dense(model, text).logits[-1]
                if abs(row - expected).max() > NETWORK_TOLERANCE:
                    case = {"layers": layers, "repeat": repeat, "network": seed, "text": text}
                    accuse(SAME_ROWS, expected.tolist(), row.tolist(), **case)
                yield 1


TRAPS = [
    Trap(TICKS, ticks_follow_from_the_guesses, card("speed")),
    Trap(ONE_PASS, tokens_in_flight_share_a_pass, card("speed")),
    Trap(SAME_ROWS, rows_are_those_of_a_plain_pass, card("speed")),
]

_speed = partial(Toy, technique="speed")

TOYS = [
    _speed(
        "a pass for each token in flight",
        "scores = session.forward(feeds)",
        "scores = [session.forward([feed])[0] for feed in feeds]",
        run_repetition,
        law=ONE_PASS,
    ),
    _speed(
        "one guess in flight",
        "if is_asked and last < upcoming.room:",
        "if is_asked and last < min(upcoming.room, 1):",
        CyclicPipeline.run_tick,
        law=TICKS,
    ),
    _speed(
        "a guess after the first repetition, whatever was asked for",
        "self._repetitions(last) + 1 == self.exit",
        "self._repetitions(last) + 1 == 1",
        CyclicPipeline.run_tick,
        law=TICKS,
    ),
    _speed(
        "one cache for all repetitions",
        "session.cache.layer_range(at // 2, group)",
        "session.cache.layer_range(0, group)",
        run_repetition,
        law=SAME_ROWS,
    ),
]
