"""Typical acceptance: the threshold, the printed rule against what runs, and what is lost by it."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.traps import begin_decoder, run_all_rounds
from tinyspec.laws.traps import typical_acceptance as traps
from tinyspec.laws.traps.blockwise import write_greedy_text
from tinyspec.lm.model import Model
from tinyspec.speculative.verification.typical_acceptance import (
    extend_by_typical_path,
    typical_threshold,
    typical_verifier,
)
from tinyspec.technique import Guarantee, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("typical_acceptance")
SAMPLED, HOT = SamplingParams(), SamplingParams(2.0)


def headed_network(seed: int, vocabulary: int = 8) -> Model:
    return add_random_head(small_network(seed, vocabulary), CARD, seed)


def write(model: Model, sampling: SamplingParams = SAMPLED, n: int = 12, **knobs: Any) -> Any:
    """Return a decoder that has written n tokens after 0, 1, and its rounds."""
    decoder = begin_decoder(CARD.make, [model], (0, 1), sampling, n, **knobs)
    return decoder, run_all_rounds(decoder)


# ---------------------------------------------------------------------- the threshold


def test_trap_the_threshold_is_that_of_the_targets_distribution() -> None:
    assert traps.threshold_is_of_the_target(typical_verifier).cases == 3 * (6 + 32 + 27)


def test_trap_the_likeliest_token_passes() -> None:
    assert traps.likeliest_token_passes(typical_verifier).cases > 1000


def test_trap_the_longest_path_is_kept() -> None:
    evidence = traps.longest_path_is_kept(typical_verifier)
    assert evidence.cases == 120
    assert evidence.branches > 300  # accepted paths, the empty one included


@pytest.mark.parametrize(
    ("p", "threshold"),
    [
        ([1.0, 0.0], 0.09),  # no entropy: exp(-H) is 1
        ([0.5, 0.5], 0.09),
        ([0.0625] * 16, 0.3 / 16),
        ([0.5, *[0.0625] * 8], 0.3 * 2**-2.5),
    ],
)
def test_the_threshold_falls_with_the_entropy(p: list[float], threshold: float) -> None:
    assert typical_threshold(np.array(p), 0.09, 0.3) == pytest.approx(threshold, rel=1e-12)


def test_a_uniform_distribution_is_at_its_own_threshold_if_delta_is_1() -> None:
    """So the likeliest token passes below 1 only."""
    p = np.full(4, 0.25)
    assert typical_threshold(p, 1.0, 1.0) == pytest.approx(0.25)
    tree, rows = TokenTree.chain([2]), {ROOT: p, 0: p}
    assert typical_verifier(1.0, 0.999, "argmax")(tree, rows, Seeded(0)).accepted == (0,)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what runs


@pytest.mark.parametrize("sampling", [SAMPLED, HOT, SamplingParams(0.7, top_k=3)])
@pytest.mark.parametrize("knobs", [{}, {"epsilon": 0.4}, {"epsilon": 0.2, "delta": 0.9}])
def test_the_printed_rule_is_what_runs(sampling: SamplingParams, knobs: Any) -> None:
    lengths = set[int]()
    for seed in range(6):
        model = headed_network(seed)
        decoder = begin_decoder(CARD.make, [model], (0, 1, 2), sampling, nodes=12, **knobs)
        epsilon = knobs.get("epsilon", 0.09)
        delta = knobs.get("delta", math.sqrt(epsilon))

        def p(text: list[int], model: Model = model) -> Any:
            return sampling.probs(model.logits(text)[-1].numpy())

        for number in range(5):
            before = list(decoder.context)
            round = decoder.step(Seeded(number))
            tree = round.tree
            paths = [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]
            expected = extend_by_typical_path(p, before, paths, epsilon, delta)
            assert decoder.context == expected
            lengths.add(len(round.tokens))
    assert len(lengths) > 1


@pytest.mark.parametrize("epsilon", [0.0, 0.09, 1.0, math.inf])
@pytest.mark.parametrize("bonus", ["argmax", "typical"])
def test_at_temperature_0_the_text_is_plain_decodings(epsilon: float, bonus: str) -> None:
    for seed in range(4):
        model = headed_network(seed)
        decoder, _ = write(model, SamplingParams(0.0), epsilon=epsilon, bonus=bonus)
        assert decoder.context == write_greedy_text(model, 14)


def test_without_a_sampled_bonus_every_seed_gives_the_same_text() -> None:
    model, texts = headed_network(1), set[tuple[int, ...]]()
    for seed in range(5):
        decoder = begin_decoder(CARD.make, [model], (0, 1), HOT, 20)
        while not decoder.finished:
            decoder.step(Seeded(100 * seed + decoder.rounds))
        texts.add(tuple(decoder.new))
    assert len(texts) == 1


def test_a_sampled_bonus_is_typical_and_depends_on_the_seed() -> None:
    model, texts = headed_network(1), set[tuple[int, ...]]()
    for seed in range(5):
        decoder = begin_decoder(CARD.make, [model], (0, 1), HOT, 20, epsilon=0.3, bonus="typical")
        while not decoder.finished:
            round = decoder.step(Seeded(100 * seed + decoder.rounds))
            for token, row in zip(round.tokens, round.output_probs, strict=True):
                assert row[token] >= typical_threshold(row, 0.3, math.sqrt(0.3))
        texts.add(tuple(decoder.new))
    assert len(texts) > 1


def test_a_sampled_bonus_follows_p_without_the_tokens_below_the_threshold() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    assert 0.05 < typical_threshold(p, 0.3, 0.3) < 0.15
    law = Exhaustive.distribution(
        lambda rng: typical_verifier(0.3, 0.3, "typical")(TokenTree(), {ROOT: p}, rng).next  # type: ignore[arg-type]
    )
    assert law == pytest.approx({0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95})


def test_a_bonus_is_found_where_rounding_leaves_no_typical_token() -> None:
    for n in range(2, 60):
        p = np.full(n, 1 / n)
        verdict = typical_verifier(1.0, 1.0, "typical")(TokenTree(), {ROOT: p}, Seeded(n))  # type: ignore[arg-type]
        assert verdict.next in range(n)


# ---------------------------------------------------------------------- the knob


@pytest.mark.parametrize("knobs", [{}, {"delta": 0.5}, {"bonus": "typical"}])
def test_at_infinity_nothing_is_accepted_and_the_next_token_is_a_sample(knobs: Any) -> None:
    model = headed_network(2)

    def first(rng: Exhaustive) -> int:
        decoder = begin_decoder(CARD.make, [model], (0, 1), SAMPLED, epsilon=math.inf, **knobs)
        round = decoder.step(rng)
        assert round.tree.tokens and len(round.tokens) == 1
        return round.tokens[0]

    law, p = Exhaustive.distribution(first), SAMPLED.probs(model.logits([0, 1])[-1].numpy())
    assert [law.get(token, 0) for token in range(8)] == pytest.approx(p, abs=NETWORK_TOLERANCE)


def test_the_promise_depends_on_epsilon_alone() -> None:
    assert CARD.promise() is CARD.promise(epsilon=1.0) is Guarantee.LOSSY
    assert CARD.promise(epsilon=math.inf, delta=0.5) is Guarantee.EXACT


def count_accepted(model: Model, text: tuple[int, ...], **knobs: Any) -> int:
    decoder = begin_decoder(CARD.make, [model], text, HOT, nodes=20, **knobs)
    return len(decoder.step(Seeded(0)).verdict.accepted)


@pytest.mark.parametrize("name", ["epsilon", "delta"])
def test_a_smaller_threshold_accepts_more(name: str) -> None:
    """The other one of the two does not decide here."""
    other = {"epsilon": {"delta": 1.0}, "delta": {"epsilon": 1.0}}[name]
    ladder = (1.0, 0.6, 0.3, 0.1, 0.01)
    totals = [0] * len(ladder)
    for seed in range(5):
        model = headed_network(seed)
        for text in ((0, 1), (2, 0, 3), (5, 7, 1)):
            counts = [count_accepted(model, text, **other, **{name: value}) for value in ladder]
            assert all(a <= b for a, b in pairwise(counts))
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
    assert totals[0] < totals[-1]


# ---------------------------------------------------------------------- edges


def test_a_token_without_probability_is_never_accepted() -> None:
    p = np.array([1.0, 0.0])
    rows: Any = {ROOT: p, 0: p, 1: p}
    tree = TokenTree((1, 0), (ROOT, ROOT), (None, None), (False, False))
    verdict = typical_verifier(0.0, 0.0, "argmax")(tree, rows, Seeded(0))
    assert (verdict.accepted, verdict.next) == ((1,), 0)


def test_what_was_rejected_are_the_children_of_the_last_accepted_token() -> None:
    rows: Any = {node: np.array([0.6, 0.4, 0.0]) for node in range(ROOT, 4)}
    tree = TokenTree((0, 2, 2, 1), (ROOT, ROOT, 0, ROOT), (None,) * 4, (False,) * 4)
    verdict = typical_verifier(0.09, 0.3, "argmax")(tree, rows, Seeded(0))
    assert (verdict.accepted, verdict.next, verdict.rejected) == ((0,), 0, (2,))


def test_rows_on_a_device_are_read_on_the_host() -> None:
    row = torch.tensor([0.6, 0.4], dtype=torch.float64)
    tree, rows = TokenTree.chain([1]), {ROOT: row, 0: row}
    for bonus in ("argmax", "typical"):
        verdict = typical_verifier(0.09, 0.3, bonus)(tree, rows, Seeded(0))  # type: ignore[arg-type]
        assert verdict.accepted == (0,) and verdict.next in (0, 1)


def test_the_text_ends_inside_an_accepted_path() -> None:
    """Every token may end the text, so a round commits one of them."""
    model = headed_network(3)
    decoder = begin_decoder(CARD.make, [model], (0, 1), HOT, 9, eos=frozenset(range(8)))
    rounds = run_all_rounds(decoder)
    assert len(decoder.new) == 1 and decoder.finished == "eos" and len(rounds) == 1


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_a_text_has_the_tokens_that_are_wanted(n: int) -> None:
    decoder, rounds = write(headed_network(4), HOT, n, nodes=20)
    assert len(decoder.new) == n
    assert all(max(round.tree.depths(), default=0) < n for round in rounds)


def test_a_prompt_of_one_token_has_no_draft_and_an_empty_one_is_named() -> None:
    decoder = begin_decoder(CARD.make, [headed_network(5)], (1,), HOT)
    assert decoder.step(Seeded(0)).tree == TokenTree()
    with pytest.raises(TinyspecError, match="the prompt is empty"):
        begin_decoder(CARD.make, [headed_network(5)], ())


def test_the_text_ends_with_the_context() -> None:
    model = headed_network(6)
    decoder = begin_decoder(CARD.make, [model], [0, 1] * 30, HOT, nodes=20)
    decoder.positions = model.config.max_positions
    run_all_rounds(decoder)
    assert len(decoder.context) == 64 and decoder.finished == "context"
