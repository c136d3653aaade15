"""SkipDecode: nested sets of layers by place, one cost for all texts, and a loss that skips too."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import tinyspec
from tests.early_exit import decoders
from tests.early_exit.decoders import GREEDY
from tests.lm.small import GPT2, LLAMA, PROMPT
from tests.lm.small import model as network
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.skip_decode import (
    DepthSchedule,
    SkipDecodeSettings,
    SkipTarget,
    decode_with_schedule,
    plan_depths,
    skip_loss,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.models import run_dense, small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import PLACE_SETTINGS
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import skip_decode as traps
from tinyspec.lm.config import TUNED
from tinyspec.lm.model import Model
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.technique import Guarantee, Request, TrainingBatch, Tuning, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("skip_decode")
make_decoder = partial(decoders.make_decoder, CARD)
EMPTY = TokenTree()
schedules = st.builds(
    lambda speedup, depth, warmup, horizon, keep_top: plan_depths(
        speedup, depth, min(warmup, depth - 1), horizon, keep_top
    ),
    st.floats(1, 8), st.integers(1, 24), st.integers(0, 3), st.integers(0, 40), st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the schedule


@given(schedules)
def test_the_layers_of_a_token_are_among_those_of_every_token_before(
    schedule: DepthSchedule,
) -> None:
    sets = [set(schedule.layers_at(t)) for t in range(-2, schedule.horizon + 3)]
    for before, after in pairwise(sets):
        assert after <= before
    for t, chosen in zip(range(-2, schedule.horizon + 3), sets, strict=True):
        assert len(chosen) == schedule.count_layers(t)
        assert set(range(schedule.warmup)) <= chosen
        assert schedule.depth - 1 in chosen or not schedule.keep_top


def test_the_middle_is_left_out() -> None:
    schedule = DepthSchedule(12, 8, 4, 1, 10)
    assert schedule.layers_at(0) == [0, 5, 6, 7, 8, 9, 10, 11]
    assert schedule.layers_at(10) == [0, 9, 10, 11]
    assert schedule.plan_at(10).skip == frozenset(range(2, 18))


def test_the_ablation_leaves_out_the_upper_layers_at_the_same_depths() -> None:
    schedule = DepthSchedule(12, 8, 4, 1, 10, keep_top=False)
    assert schedule.layers_at(0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert schedule.layers_at(10) == [0, 1, 2, 3]
    assert schedule.plan_at(10).skip == frozenset(range(8, 24))


@pytest.mark.parametrize("speedup", [1.0, 1.25, 1.5, 2.0, 3.0, 5.0])
def test_tokens_run_the_share_of_the_layers_that_was_asked_for(speedup: float) -> None:
    schedule = plan_depths(speedup, 24, 1, 100)
    mean = sum(schedule.count_layers(t) for t in range(101)) / 101
    assert mean == pytest.approx(24 / speedup, abs=0.6)
    assert schedule.least >= 2 and schedule.most <= 24


def test_the_depth_falls_over_the_longest_text_and_without_a_limit_not_at_all() -> None:
    """From 2 layers to 1: of four tokens, 2, 1.75, 1.5 and 1.25 are rounded."""
    model = network(LLAMA)
    for tokens, expected in ((None, [2] * 4), (2, [2, 2]), (4, [2, 2, 2, 1])):
        decoder = make_decoder(model, tokens=tokens, speedup=2.0, warmup=0)
        decoder.extend(PROMPT)
        got = []
        while len(got) < 4 and not decoder.finished:
            got += decoder.step(Seeded(0)).scores.layers
        assert got == expected


@pytest.mark.parametrize("setting", PLACE_SETTINGS, ids=str)
def test_printed_algorithm_is_what_runs(setting: Any) -> None:
    """Every outcome of three tokens on a table, with the sets that were worked out by hand."""
    model, prompt = TableModel(5, 3, setting.layers, zeros=False), [0, 1]

    def by_the_paper(rng: Exhaustive) -> tuple[int, ...]:
        net, caches = model.network, [dict[int, Any]() for _ in range(setting.layers)]

        def run_layer(layer: int, state: Any, position: int) -> Any:
            caches[layer][position] = net.keys(layer, state, position)
            seen = [caches[layer][at] for at in range(position + 1)]
            return net.feed_forward(layer, net.attend(layer, state, seen))

        def layers_at(t: int) -> tuple[int, ...]:
            return setting.sets[min(max(t, 0), len(setting.sets) - 1)]  # type: ignore[no-any-return]

        generator = EnumeratedGenerator(rng)
        text = decode_with_schedule(
            net.embed, run_layer, model.head, prompt, 3, layers_at, generator
        )
        return tuple(text[2:])

    def by_the_decoder(rng: Exhaustive) -> tuple[int, ...]:
        decoder = make_decoder(model, SamplingParams(), 3, **setting.knobs)
        decoder.extend(prompt)
        for _ in range(3):
            decoder.step(rng)
        return tuple(decoder.new)

    paper, decoder = map(Exhaustive.distribution, (by_the_paper, by_the_decoder))
    assert paper == decoder and len(paper) > 3


# ---------------------------------------------------------------------- the session


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_speed_up_is_plain_greedy_decoding(config: Any, dtype: torch.dtype) -> None:
    """At 1 the session itself decodes; a schedule that leaves nothing out has the same bits."""
    model = network(config, dtype=dtype)
    plain = tinyspec.generate(model, PROMPT, max_new_tokens=9).tokens
    decoder = make_decoder(model, speedup=1.0)
    whole: Any = SkipTarget(model.session(), lambda prompt: DepthSchedule(3, 3, 3, 1, 4))
    by_schedule = replace(Request(whole, sampling=GREEDY)).decoder(
        decoder.drafter, decoder.verifier
    )
    for one in (decoder, by_schedule):
        one.extend(PROMPT)
        while len(one.new) < 9:
            one.step(Seeded(0))
        assert list(one.new) == list(plain)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("keep_top", [True, False], ids=["top", "bottom"])
def test_the_rows_are_those_of_the_masked_stream(
    config: Any, dtype: torch.dtype, keep_top: bool
) -> None:
    """Three ways: the session, the pass that is trained, and a dense pass in numpy."""
    model, schedule = network(config, dtype=dtype), DepthSchedule(3, 3, 1, 0, 4, keep_top)
    target, text = SkipTarget(model.session(), lambda prompt: schedule), list(PROMPT)
    target.extend(text)
    rows = []
    for token in (7, 8, 9, 2, 6, 5):
        rows.append(target.score(EMPTY).logits[0].numpy())
        target.commit((), token)
        text.append(token)
    steps = torch.arange(len(text) - 1)[None] - (len(PROMPT) - 1)
    skipped = schedule.mask_skipped(steps)
    *_, states = model.torch_blocks().layer_states(torch.tensor([text[:-1]]), skipped=skipped)
    trained = model.torch_blocks().compute_logits(states)[0, len(PROMPT) - 1 :]
    dense = run_dense(model, text[:-1], runs=~skipped[:, 0].numpy()).logits[len(PROMPT) - 1 :]
    within = 1e-10 if dtype == torch.float64 else 1e-4
    np.testing.assert_allclose(np.array(rows), trained.detach().numpy(), atol=within)
    np.testing.assert_allclose(np.array(rows), dense, atol=within)


def test_a_schedule_that_rises_is_an_error() -> None:
    class Rising(DepthSchedule):
        def count_layers(self, t: int) -> int:
            return 2 if t < 1 else 3

    target = SkipTarget(network(LLAMA).session(), lambda prompt: Rising(3, 2, 3, 1, 4))
    target.extend(PROMPT)
    target.score(EMPTY)
    target.commit((), 7)
    with pytest.raises(RuntimeError, match="has no keys in layer 1"):
        target.score(EMPTY)


def test_two_texts_of_a_batch_share_every_pass() -> None:
    """Their prompts differ in length; in each step both run the same layers, as one forward."""
    model = network(LLAMA)
    passes: list[list[tuple[int, Any]]] = []
    inner = model.forward

    def forward(feeds: Any) -> Any:
        passes.append([(len(feed.tokens), feed.plan.skip) for feed in feeds])
        return inner(feeds)

    def decode(prompt: list[int]) -> Any:
        def job(scheduler: Scheduler) -> list[int]:
            session = model.session([], scheduler)
            stop = StoppingCriteria(max_new_tokens=5)
            request = Request(session, sampling=GREEDY, stop=stop)
            decoder = CARD.make(request, speedup=1.2, warmup=1, horizon=3)
            decoder.extend(prompt)
            while not decoder.finished:
                decoder.step(Seeded(0))
            return decoder.new

        return job

    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    alone = [run_together([decode(prompt)])[0] for prompt in prompts]
    passes.clear()
    object.__setattr__(model, "forward", forward)
    try:
        together = run_together([decode(prompt) for prompt in prompts])
    finally:
        object.__delattr__(model, "forward")
    assert together == alone
    assert len(passes) == 1 + 5  # the prompts, and one for each step
    for (rows, skip), (other_rows, other_skip) in passes[1:]:  # type: ignore[misc]
        assert rows == other_rows == 1 and skip == other_skip
    assert len({skip for (_, skip), _ in passes[1:]}) == 2  # type: ignore[misc]


def test_rewound_text_leaves_no_trace() -> None:
    knobs = {"speedup": 1.2, "warmup": 1, "horizon": 3}
    for model in (network(LLAMA), TableModel(3, 10)):
        straight = make_decoder(model, tokens=None, **knobs)
        straight.extend([0, 1, 2])
        expected = [straight.step(Seeded(0)).tokens[0] for _ in range(6)]
        for length in (1, 3, 4, 6):
            decoder = make_decoder(model, tokens=None, **knobs)
            decoder.extend([0, 1, 2])
            for _ in range(6):
                decoder.step(Seeded(0))
            decoder.rewind(length)
            if length < 3:
                decoder.extend([0, 1, 2][length:])
            left = max(length - 3, 0)
            assert [decoder.step(Seeded(0)).tokens[0] for _ in expected[left:]] == expected[left:]


def test_text_that_follows_a_rewound_prompt_belongs_to_the_prompt() -> None:
    knobs = {"speedup": 1.2, "warmup": 1, "horizon": 3}
    rewound, fresh = (make_decoder(network(LLAMA), tokens=None, **knobs) for _ in range(2))
    rewound.extend([0, 1, 2])
    for _ in range(4):
        rewound.step(Seeded(0))
    rewound.rewind(3)
    rewound.extend([1])
    fresh.extend([0, 1, 2, 1])
    layers = [[one.step(Seeded(0)).scores.layers[0] for _ in range(4)] for one in (rewound, fresh)]
    assert layers == [[3, 3, 2, 2]] * 2


def test_forced_text_after_new_tokens_stays_on_the_schedule() -> None:
    model, schedule = network(LLAMA), DepthSchedule(3, 3, 1, 0, 4)
    target = SkipTarget(model.session(), lambda prompt: schedule)
    target.extend([1, 2])
    target.score(EMPTY)
    target.commit((), 7)
    target.extend([8, 9])
    row = target.score(EMPTY).logits[0].numpy()
    steps = torch.arange(5)[None] - 1
    runs = ~schedule.mask_skipped(steps)[:, 0].numpy()
    expected = run_dense(model, [1, 2, 7, 8, 9], runs=runs).logits[-1]
    np.testing.assert_allclose(row, expected, atol=1e-10)
    with pytest.raises(ValueError, match="no drafts"):
        target.score(TokenTree.chain([1]))
    target.end()
    assert (len(target), target.start, target.schedule) == (0, None, None)


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("keep_top", [True, False], ids=["top", "bottom"])
def test_the_loss_is_the_cross_entropy_of_what_the_decoder_would_compute(keep_top: bool) -> None:
    """Texts of different prompts, one of them without an answer."""
    model = small_network(3, vocabulary=6, layers=4)
    settings = SkipDecodeSettings(speedup=1.6, warmup=1, horizon=3, keep_top=keep_top)
    ids = torch.randint(6, (3, 9), generator=torch.Generator().manual_seed(0))
    is_answer = torch.zeros(3, 9, dtype=torch.bool)
    is_answer[0, 2:], is_answer[1, 5:] = True, True
    batch = TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)
    tuning = Tuning(model.torch_blocks(), model, settings, {}, 0.0)
    got = skip_loss(tuning, batch, torch.Generator())
    schedule, losses = plan_depths(1.6, 4, 1, 3, keep_top), []
    for row, first in ((0, 2), (1, 5)):
        text = ids[row].tolist()
        target = SkipTarget(model.session(), lambda prompt: schedule)
        target.extend(text[: first + 1])
        for token in text[first + 1 :]:
            logits = target.score(EMPTY).logits
            losses.append(float(F.cross_entropy(logits, torch.tensor([token]))))
            target.commit((), token)
    assert float(got) == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    nothing = TrainingBatch(ids, torch.zeros_like(is_answer), *[torch.empty(0)] * 3)
    assert float(skip_loss(tuning, nothing, torch.Generator())) == 0.0


def test_new_tokens_of_a_chat_are_counted_from_its_answer() -> None:
    """Text 0 has a question that the model wrote, a forced closing, and an answer from token 6 on.

    The question is part of the prompt when the model is used: it runs e_max layers.
    """
    model = small_network(3, vocabulary=6, layers=4)
    settings = SkipDecodeSettings(speedup=1.6, warmup=1, horizon=3)
    ids = torch.randint(6, (2, 10), generator=torch.Generator().manual_seed(0))
    is_answer = torch.zeros(2, 10, dtype=torch.bool)
    is_answer[0, 1:3], is_answer[0, 5:], is_answer[1, 4:] = True, True, True
    batch = TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)
    got = skip_loss(
        Tuning(model.torch_blocks(), model, settings, {}, 0.0), batch, torch.Generator()
    )
    schedule, losses = plan_depths(1.6, 4, 1, 3), []
    for row, first in ((0, 5), (1, 4)):
        text, steps = ids[row, :-1], torch.arange(9)[None] - first
        runs = ~schedule.mask_skipped(steps)[:, 0].numpy()
        logits = torch.tensor(run_dense(model, text.tolist(), runs=runs).logits)
        own = is_answer[row, :-1]
        losses += F.cross_entropy(logits[own], ids[row, 1:][own], reduction="none").tolist()
    assert float(got) == pytest.approx(sum(losses) / len(losses), abs=1e-9)


def test_a_tuned_model_knows_its_horizon() -> None:
    plain = network(LLAMA)
    extra = {TUNED: {"method": "skip_decode", "settings": {"horizon": 2}}}
    tuned = Model(replace(plain.config, extra=extra), plain.weights)
    for model, expected in ((plain, [3] * 8), (tuned, [3, 2, 2, 2, 2, 2, 2, 2])):
        decoder = make_decoder(model, tokens=1000, speedup=1.2)
        decoder.extend(PROMPT)
        assert [decoder.step(Seeded(0)).scores.layers[0] for _ in range(8)] == expected


def test_a_model_that_was_tuned_for_the_ablation_runs_the_lower_layers() -> None:
    plain, rows = network(LLAMA), []
    for keep_top in (True, False):
        settings = {"horizon": 2, "keep_top": keep_top}
        extra = {TUNED: {"method": "skip_decode", "settings": settings}}
        decoder = make_decoder(
            Model(replace(plain.config, extra=extra), plain.weights), tokens=1000, speedup=1.5
        )
        decoder.extend(PROMPT)
        target = SkipTarget(plain.session(), lambda prompt: plan_depths(1.5, 3, 1, 2, keep_top))  # noqa: B023
        target.extend(PROMPT)
        rows.append(decoder.step(Seeded(0)).scores.logits[0])
        assert torch.equal(rows[-1], target.score(EMPTY).logits[0])
    assert not torch.equal(*rows)


# ---------------------------------------------------------------------- the card


def test_the_card_promises_and_rejects() -> None:
    assert CARD.promise(speedup=1.0) is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    with pytest.raises(TinyspecError, match=r"^warmup is 3: the model has 3 layers"):
        make_decoder(network(LLAMA), warmup=3)
    for wrong in ({"speedup": 0.5}, {"warmup": -1}, {"horizon": 0}, {"speedup": math.inf}):
        with pytest.raises(TinyspecError, match=r"^\[head\] wants"):
            SkipDecodeSettings(**wrong)  # type: ignore[arg-type]
