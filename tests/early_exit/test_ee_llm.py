"""EE-LLM: two ways to finish that give the same tokens, a clock, and the gradients of stages."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyspec
from tests.early_exit import decoders
from tests.early_exit.decoders import GREEDY
from tests.lm.small import GPT2, LLAMA, PROMPT, same_cache
from tests.lm.small import model as network
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit import ee_llm
from tinyspec.early_exit.ee_llm import (
    ProbableRule,
    count_pipeline_steps,
    decode_with_list,
    parse_exits,
    split_layers,
    stage_gradients,
)
from tinyspec.early_exit.exits import ExitPoint, ExitTarget
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import exit_of_token, row_after_layers
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import ee_llm as traps
from tinyspec.technique import Guarantee, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("ee_llm")
make_decoder = partial(decoders.make_decoder, CARD)
M = network(LLAMA)
L = LLAMA.n_layers


def finish(decoder: Decoder, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Return the new tokens, and after how many layers each was read."""
    decoder.extend(prompt)
    layers = list[int]()
    while not decoder.finished:
        layers += decoder.step(Seeded(decoder.rounds)).scores.layers
    return decoder.new, layers


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


@pytest.mark.parametrize(
    ("exits", "threshold", "cap"),
    [((1,), 0.5, 9), ((1, 2), 0.5, 2), ((2, 3), 0.4, 1), ((1, 3), 0.0, 2)],
)
def test_printed_algorithm_is_what_runs(exits: Any, threshold: float, cap: int) -> None:
    """Every outcome of three tokens on a table of four layers: texts, and layers of each token."""
    model, depth, prompt = TableModel(5, 3, 4, zeros=False), 4, [0, 1]

    def by_the_paper(rng: Exhaustive) -> Any:
        net, caches = model.network, [dict[int, Any]() for _ in range(depth)]

        def run_block(block: list[tuple[int, int]], layers: int) -> Any:
            for position, token in block:
                state = net.embed(token)
                for layer in range(layers):
                    caches[layer][position] = net.keys(layer, state, position)
                    seen = [caches[layer][at] for at in range(position + 1)]
                    state = net.feed_forward(layer, net.attend(layer, state, seen))
            return model.head(state)

        run_block(list(enumerate(prompt[:-1])), depth)
        generator = EnumeratedGenerator(rng)
        text, layers = decode_with_list(
            run_block, prompt, 3, exits, depth, threshold, cap, generator
        )
        return tuple(text[2:]), tuple(layers)

    def by_the_decoder(rng: Exhaustive) -> Any:
        knobs = {"exits": ",".join(map(str, exits)), "threshold": threshold, "cap": cap}
        decoder = make_decoder(model, SamplingParams(), 3, **knobs)
        decoder.extend(prompt)
        layers = [decoder.step(rng).scores.layers[0] for _ in range(3)]
        return tuple(decoder.new), tuple(layers)

    paper, decoder = map(Exhaustive.distribution, (by_the_paper, by_the_decoder))
    assert paper == decoder and len(paper) > 3


# ---------------------------------------------------------------------- two ways, one text


@pytest.mark.parametrize("threshold", [0.0, 0.15, 0.2, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8)], ids=str)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_both_ways_are_leaving_and_finishing_in_silence(
    config: Any, sampling: SamplingParams, threshold: float
) -> None:
    """The third way runs the whole text anew for each token, with no cache at all."""
    model, exits = network(config, seed=1), (1, 2)
    text, layers = [1, 2], list[int]()
    for at in range(9):
        layers.append(exit_of_token(model, text, exits, threshold, None))
        row = torch.from_numpy(row_after_layers(model, text, layers[-1]))
        probs = sampling.probs(row, text)
        rng = Seeded(at)
        text.append(
            int(row.argmax()) if sampling is GREEDY else rng.split("verify", at).draw(probs)
        )
    ways = {
        way: finish(
            make_decoder(
                model, sampling, exits="1,2", threshold=threshold, inference=way, cap=1000
            ),
            [1, 2],
        )
        for way in ("recompute", "pipeline")
    }
    assert ways["recompute"] == ways["pipeline"]
    if sampling is GREEDY:
        assert ways["pipeline"] == (text[2:], layers)
    assert threshold or set(layers) == {1}
    assert threshold < 1 or set(layers) == {L}


@pytest.mark.parametrize("way", ["recompute", "pipeline"])
def test_the_cache_is_that_of_the_whole_model(way: str) -> None:
    model = network(LLAMA, seed=1)
    decoder = make_decoder(
        model, SamplingParams(0.8), 14, exits="1,2", threshold=0.2, cap=3, inference=way
    )
    decoder.extend([1, 2])
    target: Any = decoder.target
    lists = set[int]()
    while not decoder.finished:
        round = decoder.step(Seeded(decoder.rounds))
        lists.add(len(target.unfilled))
        if list(round.scores.layers) == [L]:
            assert target.unfilled == [] or way == "pipeline"
            same_cache(target.session)
    assert target.cache_exact
    assert way == "pipeline" or max(lists) == 3, "the cap is reached, and never exceeded"


def test_a_token_that_is_scored_again_leaves_where_it_left() -> None:
    """It does not wait for itself: a cap of one token is not reached yet."""
    target: Any = make_decoder(M, exits="1", threshold=0.0, cap=1).target
    target.extend(PROMPT)
    assert [list(target.score(TokenTree()).layers) for _ in range(2)] == [[1], [1]]
    target.commit((), 7)
    assert list(target.score(TokenTree()).layers) == [L]


def test_a_rewound_text_knows_who_waited() -> None:
    """Of two tokens that leave, one waits, at each place: also if a full pass has run it since."""
    for cap, expected in ((1, [1, L] * 4), (2, [1, 1, L] * 3)):
        for forced in range(3):
            decoder = make_decoder(M, tokens=None, exits="1", threshold=0.0, cap=cap)
            decoder.extend(PROMPT)
            run = [decoder.step(Seeded(0)).scores.layers[0] for _ in range(len(expected))]
            assert run == expected
            if forced:  # it begins a new list; a rewind before it goes back to the old one
                decoder.extend(PROMPT[:forced])
                assert decoder.step(Seeded(0)).scores.layers[0] == 1
            for back in (1, 2, 3, 5):
                decoder.rewind(len(PROMPT) + len(expected) - back)
                again = [decoder.step(Seeded(0)).scores.layers[0] for _ in range(back)]
                assert again == expected[-back:]


def test_the_greatest_probability_is_found_without_a_loop_over_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ee_llm, "UNCHANGED", SimpleNamespace(probs=decoders.row_of_one_op))
    row = [0.25, 0.5, 0.25]
    for threshold, leaves in ((0.6, False), (0.5, True)):
        rule = ProbableRule((1,), threshold)
        assert rule.layers_of(0, 3) == (1,)
        assert rule.should_exit(ExitPoint(1, 0, row, ())) is leaves


def test_a_list_that_is_run_again_costs_more_than_states_that_wait() -> None:
    """The same exits and the same tokens: layers of all rows, and layers in a row."""
    work, texts = {}, []
    for fill in ("postpone", "restart"):
        log: list[Any] = []
        model = network(LLAMA, seed=1)
        target: Any = ExitTarget(model.session(log), ProbableRule((1,), 0.4), fill)
        decoder = Decoder(
            target,
            BaseDrafter(),
            verify_tree,
            sampling=SamplingParams(0.9),
            stop=StoppingCriteria(max_new_tokens=16),
            forward_log=log,
        )
        texts.append(finish(decoder, [1, 2]))
        work[fill] = (
            sum(call.row_layers for call in log),
            sum(call.row_layers / call.rows for call in log),
        )
    assert texts[0] == texts[1] and 1 in texts[0][1] and L in texts[0][1]
    assert work["restart"][0] > work["postpone"][0]
    assert work["restart"][1] == work["postpone"][1] < L * (16 + 1)


def test_beyond_every_probability_it_is_plain_decoding() -> None:
    plain = list(tinyspec.generate(M, PROMPT, max_new_tokens=9).tokens)
    for threshold in (1.0, math.inf):
        assert finish(make_decoder(M, threshold=threshold), PROMPT)[0] == plain


# ---------------------------------------------------------------------- the clock


def simulate_pipeline(exits: list[int], depth: int, stages: int) -> list[int]:
    """Step by step: where each token is, one layer a step, and one token in each stage."""
    stage_of = [stage for stage, layers in enumerate(split_layers(depth, stages)) for _ in layers]
    done, known, now = [0] * len(exits), dict[int, int](), 0
    while len(known) < len(exits):
        busy = dict[int, int]()
        for token in range(len(exits)):
            if token and known.get(token - 1, now + 1) > now:
                break  # what it reads is not known yet
            if done[token] == depth:
                continue
            stage = stage_of[done[token]]
            enters = not done[token] or stage_of[done[token] - 1] != stage
            is_taken = any(
                0 < done[other] < depth and stage_of[done[other] - 1] == stage
                and stage_of[done[other]] == stage
                for other in range(token)
            ) or stage in busy  # fmt: skip
            waits = enters and (is_taken or any(
                done[other] < depth and stage_of[done[other]] <= stage for other in range(token)
            ))  # fmt: skip
            if not waits:
                busy[stage] = token
        now += 1
        for token in busy.values():
            done[token] += 1
            if done[token] == exits[token]:
                known[token] = now
    return [known[token] for token in range(len(exits))]


@given(st.data(), st.integers(1, 10), st.integers(1, 4))
def test_the_clock_is_that_of_a_simulation_step_by_step(data: Any, depth: int, stages: int) -> None:
    stages = min(stages, depth)
    exits = data.draw(st.lists(st.integers(1, depth), min_size=1, max_size=8))
    assert count_pipeline_steps(exits, depth, stages) == simulate_pipeline(exits, depth, stages)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.sampled_from([1, 2, 3, 4, 6]))
def test_a_pipeline_is_never_faster_than_its_exits_and_never_slower_than_all_layers(
    exits: list[int], stages: int
) -> None:
    times = count_pipeline_steps(exits, 12, stages)
    assert sum(exits) <= times[-1] <= 12 * len(exits)
    assert count_pipeline_steps([12] * len(exits), 12, stages)[-1] == 12 * len(exits)
    if stages == 1:  # one stage finishes a token before it begins the next
        assert times[-1] == 12 * (len(exits) - 1) + exits[-1]


# ---------------------------------------------------------------------- stages


def test_microbatches_in_any_order_have_the_gradients_of_the_batch() -> None:
    model = small_network(3, vocabulary=5, layers=4)
    ids = torch.randint(5, (4, 7), generator=torch.Generator().manual_seed(0))
    weights = (0.25, 0.5, 0.0, 1.0)

    def gradients(rows: list[int]) -> dict[str, torch.Tensor]:
        return stage_gradients(
            model.config, model.weights, ids[rows, :-1], ids[rows, 1:], weights, 4
        )

    whole = gradients([0, 1, 2, 3])
    for order in ([[0], [1], [2], [3]], [[3], [1], [0], [2]], [[2, 3], [0, 1]]):
        parts = [gradients(rows) for rows in order]
        for name, expected in whole.items():
            mean = torch.stack([part[name] for part in parts]).mean(dim=0)
            torch.testing.assert_close(mean, expected, atol=1e-12, rtol=0)


def test_stages_without_an_exit_of_their_own_pass_gradients_on() -> None:
    """Also the last one, which no gradient enters; and more stages than layers are as many."""
    model = small_network(3, vocabulary=5, layers=4)
    ids = torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(0))
    for weights in ((0.5, 0.0, 0.0, 0.0), (0.0, 0.5, 0.25, 0.0), (0.25, 0.5, 0.0, 1.0)):
        whole, *others = (
            stage_gradients(model.config, model.weights, ids[:, :-1], ids[:, 1:], weights, stages)
            for stages in (1, 2, 4, 5)
        )
        for found in others:
            for name, expected in whole.items():
                torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=0)


def test_the_layers_are_shared_out() -> None:
    for depth in range(1, 13):
        for stages in range(1, depth + 1):
            layers = split_layers(depth, stages)
            assert [at for part in layers for at in part] == list(range(depth))
            assert max(map(len, layers)) - min(map(len, layers)) <= 1


# ---------------------------------------------------------------------- the card


def test_the_card_promises_and_rejects() -> None:
    assert CARD.promise(threshold=math.inf) is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    assert parse_exits("", 3) == (1,) and parse_exits("", 1) == ()
    for wrong in ("3", "0", "1,x", "4,8", "1.5"):
        with pytest.raises(TinyspecError, match=r"^exits is '"):
            make_decoder(M, exits=wrong)
