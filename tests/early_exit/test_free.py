"""FREE: two depths, one block for the tokens that wait, and a threshold that is fitted to them."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyspec
from tests.early_exit import decoders
from tests.early_exit.decoders import GREEDY, finish
from tests.lm.small import GPT2, LLAMA, PROMPT, same_cache
from tests.lm.small import model as network
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.free import (
    MAX_FITS,
    FreeSettings,
    ThresholdEstimator,
    TwoDepthRule,
    align_layers,
    beta_log_density,
    choose_threshold,
    decode_in_two_depths,
    distill_layers,
    fit_beta,
    free_loss,
    resolve_shallow_depth,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import row_after_layers
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import free as traps
from tinyspec.lm.config import TUNED
from tinyspec.lm.forward import Plan
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import Guarantee, Request, TrainingBatch, Tuning, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("free")
make_decoder = partial(decoders.make_decoder, CARD, clock=lambda: 0.0)
M = network(LLAMA)
L = LLAMA.n_layers
GRID = [0.3 + 0.6 * i / 9 for i in range(10)]


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


@pytest.mark.parametrize(("shallow", "threshold"), [(1, 0.2), (1, 0.4), (3, 0.0), (3, 0.3)])
def test_printed_algorithm_is_what_runs(shallow: int, threshold: float) -> None:
    """Every outcome of three tokens on a table of four layers: texts and blocks."""
    model, depth, prompt = TableModel(5, 3, 4, zeros=False), 4, [0, 1]

    def by_the_paper(rng: Exhaustive) -> Any:
        net, caches, waiting = model.network, [list[Any]() for _ in range(depth)], list[int]()

        def run(layers: range, state: Any, at: int) -> Any:
            for layer in layers:
                caches[layer].append(net.keys(layer, state, at))
                state = net.feed_forward(layer, net.attend(layer, state, caches[layer]))
            return state

        def run_shallow(token: int) -> Any:
            waiting.append(len(caches[0]))
            return run(range(shallow), net.embed(token), waiting[-1])

        def run_deep(states: list[Any]) -> list[Any]:
            places, waiting[:] = list(waiting), []
            return [
                run(range(shallow, depth), state, at)
                for state, at in zip(states, places, strict=True)
            ]

        for token in prompt[:-1]:
            run_deep([run_shallow(token)])
        text, blocks = decode_in_two_depths(
            run_shallow, run_deep, model.head, prompt[-1:], 3, threshold, EnumeratedGenerator(rng)
        )
        return tuple(text[1:]), tuple(blocks)

    def by_the_decoder(rng: Exhaustive) -> Any:
        knobs = {"shallow": shallow, "threshold": threshold, "adaptive": False}
        decoder = make_decoder(model, SamplingParams(), 3, **knobs)
        decoder.extend(prompt)
        calls = [call for _ in range(3) for call in decoder.step(rng).calls]
        deep = depth - shallow  # layers; never as many as a shallow pass
        blocks = [call.rows for call in calls if call.row_layers == call.rows * deep]
        return tuple(decoder.new), tuple(blocks)

    paper, decoder = map(Exhaustive.distribution, (by_the_paper, by_the_decoder))
    assert paper == decoder and len(paper) > 3


# ---------------------------------------------------------------------- the cache


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("threshold", [0.05, 0.15, 0.4])
def test_after_every_block_the_cache_is_that_of_the_whole_model(
    config: Any, threshold: float
) -> None:
    model = network(config, seed=1)
    decoder = make_decoder(model, SamplingParams(0.9), 12, shallow=1, threshold=threshold)
    decoder.extend([1, 2, 3])
    target: Any = decoder.target
    blocks = 0
    while not decoder.finished:
        round = decoder.step(Seeded(decoder.rounds))
        if list(round.scores.layers) == [L]:
            blocks += 1
            full = model.logits(decoder.context[:-1])[-1]
            torch.testing.assert_close(round.scores.logits[0], full, atol=1e-10, rtol=0)
            assert target.unfilled == []
            same_cache(target.session)
    assert target.cache_exact and (blocks or threshold < 0.1)


def test_beyond_every_confidence_it_is_plain_greedy_decoding() -> None:
    plain = tinyspec.generate(M, PROMPT, max_new_tokens=9).tokens
    for threshold, shallow in product((1.0, math.inf), (0, 1, 2)):
        got = finish(make_decoder(M, threshold=threshold, shallow=shallow, adaptive=False), PROMPT)
        assert list(got) == list(plain)


def test_below_every_confidence_the_other_layers_never_run() -> None:
    """The text is that of the model cut off after L_S layers."""
    cut, expected = M.session(), list[int]()
    cut.extend(PROMPT)
    while len(expected) < 9:
        row = cut.view(Plan(last=1)).score(TokenTree()).logits[0]
        expected.append(int(row.argmax()))
        cut.commit((), expected[-1])
    decoder = make_decoder(M, threshold=0.0, shallow=1, adaptive=False)
    decoder.extend(PROMPT)
    while not decoder.finished:
        calls = decoder.step(Seeded(0)).calls
        assert sum(call.row_layers for call in calls) == 1
    assert decoder.new == expected


def test_the_last_tokens_of_a_text_are_never_finished() -> None:
    decoder = make_decoder(M, threshold=0.0, shallow=1, adaptive=False, tokens=3)
    finish(decoder, PROMPT)
    target: Any = decoder.target
    assert len(target.unfilled) == 3
    decoder.end()
    assert target.unfilled == []


# ---------------------------------------------------------------------- the fit


@given(st.floats(0.2, 20), st.floats(0.2, 20))
def test_the_fit_by_moments_recovers_a_beta_distribution(a: float, b: float) -> None:
    """Two points with the mean and the standard deviation of Beta(a, b)."""
    mean = a / (a + b)
    spread = math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))
    fit = fit_beta([mean - spread, mean + spread])
    assert fit is not None
    assert fit == pytest.approx((a, b), rel=1e-6)


def test_the_density_integrates_to_one() -> None:
    grid = (np.arange(4000) + 0.5) / 4000
    for a, b in ((2.0, 3.0), (1.0, 1.0), (5.5, 1.5)):
        total = sum(math.exp(beta_log_density(float(x), a, b)) for x in grid) / 4000
        assert total == pytest.approx(1, abs=1e-3)


def test_nothing_is_fitted_to_too_few_or_equal_confidences() -> None:
    assert fit_beta([]) is None and fit_beta([0.5]) is None and fit_beta([0.5, 0.5]) is None
    assert choose_threshold([0.8, 0.9], [0.2], 0.4, GRID) is None
    estimator = ThresholdEstimator(0.7, 0.4, 0.3)
    for confidence, is_match in ((1.0, True), (0.0, True), (0.5, False)):
        estimator.add_pair(confidence, is_match)
    assert estimator.refit() == 0.7 and estimator.confidences[1] == [1 - 1e-4, 1e-4]


def test_the_threshold_rises_where_matches_and_others_overlap() -> None:
    matches, found = [0.7, 0.8, 0.9, 0.95], []
    for shift in (0.0, 0.1, 0.2, 0.3, 0.4):
        others = [0.05 + shift, 0.2 + shift, 0.35 + shift]
        threshold = choose_threshold(matches, others, 0.4, GRID)
        assert threshold is not None
        found.append(threshold)
    assert found == sorted(found) and found[0] < found[-1]


def test_all_greater_values_must_be_trusted_too() -> None:
    """Matches in the middle and others at both ends: no value below the upper end will do."""
    matches, others = [0.5, 0.52, 0.54, 0.56], [0.01, 0.02, 0.98, 0.99]
    assert choose_threshold(matches, others, 0.4, GRID) == GRID[-1]


def test_the_fits_end() -> None:
    estimator = ThresholdEstimator(0.9, 0.4, 0.3)
    for confidence in (0.1, 0.2):
        estimator.add_pair(confidence, False)
        estimator.add_pair(1 - confidence, True)
    for _ in range(MAX_FITS):
        assert estimator.is_learning
        threshold = estimator.refit()
    assert not estimator.is_learning
    estimator.add_pair(0.99, False)
    assert estimator.refit() == threshold


@pytest.mark.parametrize("first", [0.05, 0.99])
def test_the_estimator_moves_the_threshold_to_where_both_depths_agree(first: float) -> None:
    """The paper's idea, and its ablation: `adaptive` off. Half of the tokens match.

    Their confidences are Beta(8, 2), those of the others Beta(2, 8). From 0.48 on, more than zeta
    of the tokens with one confidence are matches, so 0.5 is the threshold of the grid.
    """
    random = np.random.default_rng(0)
    is_match = random.random(2400) < 0.5
    confidence = np.where(is_match, random.beta(8, 2, 2400), random.beta(2, 8, 2400))
    estimator = ThresholdEstimator(first, 0.4, 0.3)
    for c, match in zip(confidence[:400], is_match[:400], strict=True):
        estimator.add_pair(float(c), bool(match))
    found = []
    for adaptive in (True, False):
        rule = TwoDepthRule(1, first, (lambda: estimator) if adaptive else None)
        rule.begin(None)
        leaves = confidence[400:] > rule.threshold
        found.append((rule.threshold, leaves.mean(), is_match[400:][leaves].mean()))
    (threshold, share, agreement), (fixed, share_fixed, agreement_fixed) = found
    assert threshold == pytest.approx(0.5, abs=0.07) and fixed == first
    assert agreement > 0.95 and 0.45 < share < 0.55
    assert agreement_fixed < 0.6 if first < 0.5 else share_fixed < 0.02


def test_the_estimator_pays_for_the_rows_that_it_reads() -> None:
    """A product with the output matrix for each token of a block, and none if nothing is fitted."""
    for adaptive in (True, False):
        model = network(LLAMA, seed=1)
        decoder = make_decoder(model, tokens=12, shallow=1, threshold=0.2, adaptive=adaptive)
        decoder.extend([1, 2, 3])
        while not decoder.finished:
            for call in decoder.step(Seeded(decoder.rounds)).calls[1:]:
                assert call.head_rows == (call.rows if adaptive else 1)


def test_each_set_of_knobs_has_its_own_pairs() -> None:
    def find_estimator(**knobs: Any) -> ThresholdEstimator:
        target: Any = make_decoder(M, **{"shallow": 1, **knobs}).target
        estimator: ThresholdEstimator = target.rule.find_estimator()
        return estimator

    first = find_estimator()
    assert find_estimator() is first
    for knobs in ({"shallow": 2}, {"threshold": 0.5}, {"zeta": 0.5}, {"lowest": 0.1}):
        assert find_estimator(**knobs) is not first


def test_in_a_batch_the_threshold_stays_as_it_is_given() -> None:
    """There is no clock: a text must be the one that it gets alone."""
    request = Request(M.session(), sampling=GREEDY, stop=StoppingCriteria(max_new_tokens=5))
    decoder = CARD.make(request, shallow=1, threshold=0.05)
    finish(decoder, PROMPT)
    target: Any = decoder.target
    assert target.rule.find_estimator is None and target.rule.threshold == 0.05


def test_a_translators_texts_share_their_pairs() -> None:
    """Each source makes a model of its own, over the same weights."""
    config = Seq2SeqConfig(
        20, d_model=8, n_heads=2, d_ff=12, encoder_layers=1, decoder_layers=3, max_positions=32,
        pad=0, bos=1, eos=2, mask=3,
    )  # fmt: skip
    translator = Seq2Seq.create(config, torch.Generator().manual_seed(0), torch.float64)
    estimators = []
    for source in ([5, 6], [7, 8, 9]):
        model = translator.with_log([]).condition_on(source)
        decoder = make_decoder(model, shallow=1, threshold=0.05)
        finish(decoder, [1])
        target: Any = decoder.target
        estimators.append(target.rule.find_estimator())
    assert estimators[0] is estimators[1]


# ---------------------------------------------------------------------- training


def training_batch(model: Any) -> TrainingBatch:
    ids = torch.randint(6, (3, 9), generator=torch.Generator().manual_seed(0))
    is_answer = torch.zeros(3, 9, dtype=torch.bool)
    is_answer[0, 2:], is_answer[1, 5:] = True, True
    return TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)


def test_the_losses_of_both_exits_are_weighted_by_their_depth() -> None:
    """Each text by itself, through the model and the model cut off."""
    model = small_network(3, vocabulary=6, layers=4)
    batch, total, count = training_batch(model), 0.0, 0
    for row, first in ((0, 2), (1, 5)):
        text = batch.ids[row].tolist()
        for at in range(first, 8):
            count += 1
            for layers in (2, 4):
                logits = row_after_layers(model, text[: at + 1], layers)
                total -= layers * float(torch.from_numpy(logits).log_softmax(-1)[text[at + 1]])
    tuning = Tuning(model.torch_blocks(), model, FreeSettings(2, 0.0), {}, 0.0)
    got = float(free_loss(tuning, batch, torch.Generator()))
    assert got == pytest.approx(total / count / 6, abs=1e-9)
    nothing = TrainingBatch(batch.ids, torch.zeros_like(batch.is_answer), *[torch.empty(0)] * 3)
    assert float(free_loss(tuning, nothing, torch.Generator())) == 0.0


def test_the_distance_of_the_states_is_part_of_the_loss() -> None:
    """One layer first, which is drawn to the last one: at the tokens that the model wrote alone."""
    model = small_network(3, vocabulary=6, layers=4)
    batch, squares = training_batch(model), list[torch.Tensor]()
    for row, first in ((0, 2), (1, 5)):
        blocks = model.torch_blocks()
        states = list(
            map(blocks.apply_final_norm, blocks.layer_states(batch.ids[row : row + 1, :8]))
        )
        squares.append((states[0] - states[3])[0, first:].detach().square())
    distance = float(torch.cat(squares).mean())
    losses = [
        float(free_loss(tuning, batch, torch.Generator()))
        for tuning in (
            Tuning(model.torch_blocks(), model, FreeSettings(1, alpha), {}, 0.0)
            for alpha in (0.0, 0.5)
        )
    ]
    assert losses[1] - losses[0] == pytest.approx(0.5 * distance, abs=1e-9) and distance > 0.01


def test_the_length_of_a_state_costs_nothing() -> None:
    """A layer that only lengthens the states leaves nothing to learn: they are compared normed.

    Compared before the norm they would be far apart, and longer first states would make the later
    ones longer still.
    """
    model = small_network(3, vocabulary=6, layers=2)
    blocks = model.torch_blocks()
    blocks.layer_states = lambda ids: iter(  # type: ignore[assignment, misc]
        [blocks.embed[ids] * length for length in (1e3, 1e5)]
    )
    batch = training_batch(model)
    losses = [
        float(
            free_loss(
                Tuning(blocks, model, FreeSettings(1, alpha), {}, 0.0), batch, torch.Generator()
            )
        )
        for alpha in (0.0, 0.5)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_layers_are_aligned_from_the_top_down_and_never_cross() -> None:
    assert align_layers([[9, 9, 9], [9, 9, 9], [0, 1, 2]]) == [0, 0, 0]
    assert align_layers([[0, 5, 5], [5, 0, 5], [5, 5, 0]]) == [0, 1, 2]
    assert align_layers([[5, 5, 0], [5, 4, 0], [5, 5, 0]]) == [0, 1, 2]


def test_the_distillation_moves_the_first_layers_alone() -> None:
    """Six layers, two of them first: each is drawn to layer 3 or 6, which are constants."""
    generator = torch.Generator().manual_seed(1)
    states = [
        torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(6)
    ]
    distill_layers(states, 2).backward()  # type: ignore[no-untyped-call]
    assert [state.grad is not None for state in states] == [True, True, *[False] * 4]
    with torch.no_grad():
        states[0].copy_(states[2])
        states[1].copy_(states[5])
        assert float(distill_layers(states, 2)) == 0.0


def test_a_tuned_model_knows_its_exit() -> None:
    extra = {TUNED: {"method": "free", "settings": {"shallow": 2}}}
    tuned = Model(replace(M.config, extra=extra), M.weights)
    for model, shallow, expected in ((M, 0, 1), (tuned, 0, 2), (tuned, 1, 1)):
        target: Any = make_decoder(model, shallow=shallow).target
        assert target.rule.layers == (expected,)
    with pytest.raises(TinyspecError, match=r"^\[head\] wants"):
        FreeSettings(alpha=-1.0)


# ---------------------------------------------------------------------- the card


def test_the_card_promises_and_rejects() -> None:
    assert CARD.promise(threshold=math.inf) is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    defaults = {knob.name: knob.default for knob in CARD.knobs}
    assert defaults == {
        "threshold": 0.9, "shallow": 0, "adaptive": True, "zeta": 0.4, "lowest": 0.3
    }  # fmt: skip
    assert resolve_shallow_depth(0, 1) == 1
    with pytest.raises(
        TinyspecError, match=r"^shallow is 9: .* has 3 layers: set shallow to at most 3$"
    ):
        make_decoder(M, shallow=9)
