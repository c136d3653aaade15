"""The statistical demo: its tests keep their level and have the power that they state.

Its control, a known mistake, fails.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction as F
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from tests.laws.test_theorems import killed
from tests.lm.small import LLAMA, PROMPT, model
from tinyspec.decoding.decode import BaseDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import statistics
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.exact.models import add_random_head, run_dense
from tinyspec.laws.exact.rational import distributions
from tinyspec.laws.statistics import STRENGTHS, EValue
from tinyspec.technique import Request, load_techniques

stats = pytest.importorskip("scipy.stats")
TARGET, DRAFT = model(LLAMA), model(replace(LLAMA, n_layers=1), seed=3)
NULL = {"a": 0.5, "b": 0.2, "c": 0.2, "d": 0.1}


# -------------------------------------------------------------------------------------- the e-value

MARTINGALE = "the wealth is a martingale under the null (Ville)"


def betting_wealth(
    outcomes: Sequence[Any], null: Mapping[Any, Any], strengths: Sequence[int] = STRENGTHS
) -> Any:
    """Return the e-value of outcomes in order, by the formulas, in the numbers of `null`."""
    wealths: list[Any] = []
    for m in strengths:
        wealth: Any = 1
        counts = dict.fromkeys(null, 0)
        for n, x in enumerate(outcomes):
            wealth *= (counts[x] + m * null[x]) / (n + m) / null[x]
            counts[x] += 1
        wealths.append(wealth)
    return sum(wealths) / len(strengths)


@collect_evidence(MARTINGALE)
def wealth_is_martingale(
    bet: Callable[[Sequence[int], Mapping[int, F]], F], length: int = 4
) -> Iterator[int]:
    """Check that the wealth after outcomes, bet(outcomes, null), is a martingale under the null.

    It starts at 1, is never negative, and its mean after one more outcome is what it is. Every
    sequence of up to `length` outcomes is tried, exactly: no simulation.
    """
    for n, whole, cells in product(range(length), range(2, 5), (2, 3)):
        for row in distributions(cells, whole):
            null = {x: mass for x, mass in enumerate(row) if mass}
            for past in product(null, repeat=n):
                now = bet(past, null) if past else F(1)
                ahead = {x: bet((*past, x), null) for x in null}
                mean = sum((null[x] * ahead[x] for x in null), F(0))
                if mean != now or min(ahead.values()) < 0:
                    accuse(MARTINGALE, now, mean, null=row, outcomes=past, wealth_after=ahead)
                yield 0


def bets(shrunk, mean=lambda wealths: sum(wealths) / len(wealths)):
    """Wealths by another bet: shrunk(count before, n before, m, p)."""

    def bet(outcomes, null):
        wealths = []
        for m in (1, 3):
            value, counts = F(1), dict.fromkeys(null, 0)
            for n, x in enumerate(outcomes):
                value *= shrunk(counts[x], n, m, null[x]) / null[x]
                counts[x] += 1
            wealths.append(value)
        return mean(wealths)

    return bet


def test_two_outcomes_make_the_wealth_that_the_formula_says() -> None:
    half = F(1, 2)
    assert betting_wealth(["a", "a"], {"a": half, "b": half}, strengths=[2]) == F(4, 3)


def test_the_wealth_is_a_martingale_exactly() -> None:
    assert (
        wealth_is_martingale(lambda outcomes, null: betting_wealth(outcomes, null, (1, 3))).cases
        > 400
    )
    wealth_is_martingale(bets(lambda count, n, m, p: (count + m * p) / (n + m)))


@pytest.mark.parametrize(
    "bet",
    [
        bets(lambda count, n, m, p: (count + 1 + m * p) / (n + 1 + m)),
        bets(lambda count, n, m, p: (count + m * p) / (n + 1 + m)),
        bets(lambda count, n, m, p: (count + F(1, 2)) / (n + 1)),
        bets(lambda count, n, m, p: (count + m * p) / (n + m), max),
        bets(lambda count, n, m, p: F(n + 2, n + 1) * p),
    ],
    ids=[
        "looks before it bets",
        "keeps something back",
        "half a text for each cell",
        "the best of the bets",
        "grows",
    ],
)
def test_a_wealth_that_is_none_is_accused(bet) -> None:
    killed(MARTINGALE, lambda: wealth_is_martingale(bet))


def test_the_running_e_value_is_the_wealth() -> None:
    outcomes = np.random.default_rng(0).choice(list(NULL), 60, p=[0.2, 0.3, 0.1, 0.4]).tolist()
    running = EValue(NULL)
    highest = 1.0
    for n, x in enumerate(outcomes, 1):
        running.see(x)
        now = betting_wealth(outcomes[:n], NULL)
        highest = max(highest, now)
        assert math.exp(running.log) == pytest.approx(now)
        assert running.p == pytest.approx(1 / highest)
    assert running.refuted(0.05) and running.seen == 60
    other = EValue(NULL)
    for x in sorted(outcomes):
        other.see(x)
    assert other.log == pytest.approx(running.log)  # only what came counts, not in which order


def test_an_impossible_outcome_refutes_the_distribution_at_once() -> None:
    running = EValue(NULL)
    for x in "aez":
        running.see(x)
    assert running.p == 0 and running.refuted(1e-300)
    for null in ({}, {"a": 0.5}, {"a": 1.0, "b": 0.0}):
        with pytest.raises(ValueError, match="positive probabilities"):
            EValue(null)


def streams(law: dict[str, float], n: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice(list(law), (n, length), p=list(law.values()))


def test_looking_after_every_text_keeps_the_level() -> None:
    """Ville: at most alpha of the streams are ever refuted (here up to three standard deviations of
    300 streams).
    """
    alpha, refuted = 0.1, 0
    for stream in streams(NULL, 300, 300):
        running = EValue(NULL)
        for x in stream:
            running.see(x)
        refuted += running.refuted(alpha)
    assert refuted <= 300 * alpha + 3 * math.sqrt(300 * alpha * (1 - alpha))
    assert refuted > 0  # it does bet


def test_looking_at_the_g_test_after_every_text_does_not() -> None:
    """The control of the test above: a p-value that is valid once is not valid after 300 looks."""
    critical, expected = stats.chi2.isf(0.1, 3), np.array(list(NULL.values()))
    counts = np.cumsum(streams(NULL, 300, 300)[..., None] == np.array(list(NULL)), axis=1)[:, 49:]
    g = statistics._g_statistic(counts, expected * np.arange(50, 301)[:, None])
    assert (g[:, -1] >= critical).mean() < 0.17
    assert (g >= critical).any(axis=1).mean() > 0.25


def test_a_wrong_distribution_is_refuted_sooner_or_later() -> None:
    law = {"a": 0.45, "b": 0.25, "c": 0.2, "d": 0.1}
    running = EValue(NULL)
    for x in streams(law, 1, 5000)[0]:
        running.see(x)
    assert running.refuted(1e-3)


# --------------------------------------------------------------------------------------- the G-test


def test_the_statistic_is_scipy_s_where_no_cell_is_small() -> None:
    counts = {"a": 60, "b": 10, "c": 20, "d": 10}
    found = statistics.g_test(counts, NULL)
    theirs = stats.power_divergence(
        list(counts.values()), [50, 20, 20, 10], lambda_="log-likelihood"
    )
    assert found == pytest.approx((theirs.statistic, 3, theirs.pvalue))


def test_small_cells_are_put_together() -> None:
    law = dict.fromkeys(range(64), 1 / 64)
    groups = statistics.pool_cells(law, 100)
    assert sorted(x for group in groups for x in group) == list(range(64))
    assert all(len(group) * 100 / 64 >= statistics.LEAST for group in groups)
    assert statistics.g_test({0: 1}, law).freedom == 0 and statistics.g_test({0: 1}, law).p == 1
    assert statistics.g_test({"e": 1, "a": 99}, NULL)[::2] == (math.inf, 0)


def test_the_power_that_is_stated_is_the_power() -> None:
    for texts, alpha in ((300, 0.05), (2000, 0.01)):
        share = statistics.smallest_detectable_share(NULL, "b", texts, alpha)
        assert share is not None
        assert statistics.g_test_power(NULL, share, "b", texts, alpha) == pytest.approx(
            0.9, abs=1e-3
        )
        assert statistics.simulated_power(NULL, share, "b", texts, alpha) == pytest.approx(
            0.9, abs=0.03
        )
        assert statistics.g_test_power(NULL, 0.0, "b", texts, alpha) == pytest.approx(
            alpha, abs=1e-6
        )
        assert statistics.simulated_power(NULL, 0.0, "b", texts, alpha) == pytest.approx(
            alpha, abs=0.02
        )
    assert statistics.smallest_detectable_share(NULL, "b", 4, 0.01) is None
    assert statistics.moved_variation(NULL, 0.1, "a") == pytest.approx(0.05)


# ---------------------------------------------------------------------------------------- the texts


def logs(text: list[int]) -> np.ndarray:
    """Return the log of the distribution of the next token at temperature 0.7."""
    row = run_dense(TARGET, text).logits[-1] / 0.7
    return row - np.log(np.exp(row).sum())


def test_cells_are_the_coarsened_distribution() -> None:
    cells = statistics.TextCells(TARGET, PROMPT, 2, 3, 0.7)
    assert math.fsum(cells.probs.values()) == pytest.approx(1)
    assert len(cells.probs) == 3 * 4 + 1
    assert cells.greedy == (
        first := int(logs(PROMPT).argmax()),
        int(logs([*PROMPT, first]).argmax()),
    )
    fine: dict[statistics.TextCell, float] = {}
    root = logs(PROMPT)
    for first in range(LLAMA.vocab_size):
        for second, log in enumerate(logs([*PROMPT, first])):
            cell = cells.of((first, second))
            fine[cell] = fine.get(cell, 0.0) + math.exp(root[first] + log)
    assert fine == pytest.approx(cells.probs)
    ends = replace(LLAMA, eos=(max(cells.probs, key=lambda cell: cells.probs[cell])[0],))
    assert (ends.eos[0],) in statistics.TextCells(model(ends), PROMPT, 2, 3, 0.7).probs


def test_a_text_that_cannot_be_is_no_cell() -> None:
    cells = statistics.TextCells(TARGET, PROMPT, 2, LLAMA.vocab_size, 1.0)
    assert len(cells.probs) == LLAMA.vocab_size**2
    for text in ((LLAMA.vocab_size, 0), (3,), ()):
        assert cells.of(text) not in cells.probs


def test_every_text_has_noise_of_its_own_and_the_same_seed_the_same_texts() -> None:
    request = Request(TARGET.session(), stop=statistics.generation.stopping_criteria(TARGET, (), 3))
    first, again = (request.decoder(BaseDrafter(), verify_tree) for _ in "ab")
    for decoder in (first, again):
        decoder.target = TARGET.session()
        decoder.extend(PROMPT)
    drawn = list(islice(statistics.sample_texts(first, 7), 20))
    assert drawn == list(islice(statistics.sample_texts(again, 7), 20))
    assert len(set(drawn)) > 10 and first.context == PROMPT


# ----------------------------------------------------------------------------------------- the demo


def quick(**options):
    card = load_techniques()[options.get("method", "autoregressive")]
    target = add_random_head(TARGET, card, 0)
    return statistics.run_demo(
        target, DRAFT, prompt=PROMPT, **{"samples": 100, "width": 3, **options}
    )


@pytest.mark.parametrize(
    "method",
    [
        name
        for name, card in load_techniques().items()
        if card.kind == "decoder" and not card.fills_masks  # which extends translations alone
    ],
)
def test_the_demo_finds_nothing_in_what_is_right_and_its_control_fails(method: str) -> None:
    card = load_techniques()[method]
    neutral = dict([card.lossy]) if card.lossy is not None else {}  # away from it, it may be found
    result = quick(method=method, **neutral)
    assert result["texts"] == sum(n for _, n in result["counts"]) == 100
    assert not result["refuted"] and result["control_failed"]
    assert result["power"]["simulated"] == pytest.approx(0.9, abs=0.05)
    page = statistics.format_demo(result)
    assert "evidence, not proof" in page and "nothing found" in page and method in page


def test_the_demo_is_deterministic() -> None:
    one, two = quick(samples=40), quick(samples=40)
    for result in (one, two):
        del result["seconds"]
    assert one == two
    assert quick(samples=40, seed=1)["counts"] != one["counts"]


def test_without_a_number_of_texts_it_runs_until_it_refutes_or_is_interrupted() -> None:
    request = Request(TARGET.session(), stop=statistics.generation.stopping_criteria(TARGET, (), 2))
    broken = request.decoder(statistics.SoftGreedy(TARGET.session(), 2), verify_tree)
    broken.extend(PROMPT)
    cells = statistics.TextCells(TARGET, PROMPT, 2, 3, 1.0)
    found = statistics.sample_and_test(broken, cells, samples=None, seed=0, alpha=0.01)
    assert found["e"]["refuted"] and found["e"]["after"] == found["texts"]
    assert (
        found["g"] is None
    )  # its p would not be valid: the number of texts was not chosen beforehand

    def patience(running: EValue) -> None:
        if running.seen == 30:
            raise KeyboardInterrupt

    result = quick(samples=None, watch=patience)
    assert result["texts"] == 30 and result["g"] is None and result["power"] is None
    assert "G-test   " not in statistics.format_demo(result)


def test_a_refutation_and_a_blind_control_are_reported() -> None:
    result = quick(samples=40)
    assert "refuted: the texts do not" in statistics.format_demo({**result, "refuted": True})
    assert "void" in statistics.format_demo({**result, "control_failed": False})
    cells = statistics.TextCells(TARGET, PROMPT, 2, LLAMA.vocab_size, 1.0)
    del cells.probs[max(cells.probs, key=lambda cell: cells.probs[cell])]
    cells.probs = {cell: mass / sum(cells.probs.values()) for cell, mass in cells.probs.items()}
    request = Request(TARGET.session(), stop=statistics.generation.stopping_criteria(TARGET, (), 2))
    decoder = request.decoder(BaseDrafter(), verify_tree)
    decoder.extend(PROMPT)
    found = statistics.sample_and_test(decoder, cells, samples=100, seed=0, alpha=0.01)
    assert (
        found["e"]["p"] == 0 and found["e"]["log10"] is found["g"]["statistic"] is None
    )  # JSON has no infinity
    assert "G = infinite" in statistics.format_demo(
        {**result, **found}
    ) and "10^infinite" in statistics.format_demo({**result, **found})


def test_what_cannot_be_sampled_is_an_error(monkeypatch) -> None:
    with pytest.raises(TinyspecError, match="temperature above 0"):
        quick(temperature=0.0)
    with pytest.raises(TinyspecError, match="samples is 0"):
        quick(samples=0)

    def gone(name: str):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(TinyspecError, match=r'needs scipy: pip install .*test\]"'):
        statistics.g_test({"a": 100}, NULL)


def test_the_control_is_the_field_s_mistake() -> None:
    """It proposes the draft's best token and declares the whole distribution."""
    session = DRAFT.session()
    session.extend(PROMPT)
    tree = statistics.SoftGreedy(session, 1).propose(
        PROMPT, 1, statistics.SamplingParams(), Seeded(0)
    )
    assert tree.tokens[0] == int(np.argmax(tree.draft_probs[0])) and max(tree.draft_probs[0]) < 1
