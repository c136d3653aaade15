"""PPD writes the whole model's tokens, and its clock follows from the draft tokens that match.

Nodes that were run part of the way become the text.
"""

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyspec
from tests.lm.small import GPT2, LLAMA, same_cache
from tests.lm.small import model as network
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.pipeline import Upcoming
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.ppd import (
    count_layer_steps,
    decode_pipelined,
    expected_cost,
    resolve_guess_layer,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.joint import Reference
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import likeliest_drafts
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import ppd as traps
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("ppd")
GREEDY = SamplingParams(temperature=0.0)


def make_decoder(
    target: Any,
    sampling: SamplingParams = GREEDY,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    forward_log = getattr(target, "forward_log", None)
    forward_log = target.forward_log if forward_log is None else forward_log
    return CARD.make(
        Request(
            target,
            sampling=sampling,
            stop=stop or StoppingCriteria(max_new_tokens=9),
            forward_log=forward_log,
        ),
        **knobs,
    )


def finish(decoder: Decoder, prompt: list[int]) -> list[tuple[ForwardRecord, ...]]:
    decoder.extend(prompt)
    calls = []
    while not decoder.finished:
        calls.append(decoder.step(Seeded(decoder.rounds)).calls)
    return calls


def plain(
    model: Any, prompt: list[int], sampling: SamplingParams = GREEDY, n: int = 9
) -> list[int]:
    decoder = Decoder(
        model.session(),
        BaseDrafter(),
        verify_tree,
        sampling=sampling,
        stop=StoppingCriteria(max_new_tokens=n),
    )
    finish(decoder, prompt)
    return decoder.new


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(0.5, top_k=2)], ids=str
)
@pytest.mark.parametrize(("layer", "k"), [(2, 1), (2, 3), (3, 2)])
def test_the_joint_distribution_is_the_whole_models(
    sampling: SamplingParams, layer: int, k: int
) -> None:
    reference = exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )
    assert (
        exact_distribution(
            lambda: CARD.make(Request(Table(1), sampling=sampling), layer=layer, k=k), 2
        )
        == reference
    )


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_a_transformer_it_is_greedy_decoding_at_every_layer_and_k(
    config: Any, dtype: torch.dtype
) -> None:
    model = network(config, seed=1, dtype=dtype)
    text = plain(model, [1, 2, 3], n=12)
    for layer, k in product((2, 3), (1, 3, 99)):
        decoder = make_decoder(
            model.session(), stop=StoppingCriteria(max_new_tokens=12), layer=layer, k=k
        )
        finish(decoder, [1, 2, 3])
        assert decoder.new == text


@pytest.mark.parametrize("k", [1, 3])
def test_what_stands_in_the_cache_after_every_round_is_a_fresh_forward(k: int) -> None:
    session = network(LLAMA, seed=1).session()
    decoder = make_decoder(session, SamplingParams(0.7), k=k, layer=2)
    decoder.extend([1, 2, 3])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
        same_cache(session)
    assert session.cache_exact


def test_repetition_penalty_changes_the_draft_tokens() -> None:
    """A penalty changes the likeliest tokens, so a draft token without it would miss them."""
    model, penalty = network(LLAMA, seed=3), SamplingParams(0.0, repetition_penalty=1.7)
    decoder = make_decoder(model.session(), penalty, layer=3, k=1)
    decoder.extend([1, 2, 3])
    pipeline: Any = decoder.target
    scores = pipeline.session.score(TokenTree())
    best = int(penalty.probs(scores.logits[0], [1, 2, 3]).argmax())
    assert pipeline.guess_next(scores, Upcoming([1, 2, 3], penalty, 1)).tokens == [best]
    finish(decoder, [])
    assert decoder.new == plain(model, [1, 2, 3], penalty)


# ---------------------------------------------------------------------- the clock (theorem)


@given(st.data(), st.integers(1, 40), st.integers(1, 5), st.integers(1, 30))
def test_the_theorem_is_the_sum_of_its_rounds(data: Any, depth: int, k: int, tokens: int) -> None:
    """E[steps] and E[evaluations] are linear in the matches, so they hold of every run with its own
    share.
    """
    layer = data.draw(st.integers((depth + 1) // 2, depth))
    held = data.draw(st.lists(st.booleans(), min_size=tokens - 1, max_size=tokens - 1))
    clock, evaluations, begun = 0, 0, False
    for at in range(tokens):
        own = [
            ForwardRecord("m", 1, layer - begun * (depth - layer), 1)
        ]  # up to the draft token; then the branches beside the rest
        beside = [
            ForwardRecord("m", k, k * (depth - layer), 0),
            ForwardRecord("m", 1, depth - layer, 1),
        ]
        calls = (
            own + beside
            if at + 1 < tokens
            else [ForwardRecord("m", 1, depth - begun * (depth - layer), 1)]
        )
        clock, evaluations = (
            clock + count_layer_steps(calls),
            evaluations + sum(call.row_layers for call in calls),
        )
        begun = at + 1 < tokens and held[at]
    share = Fraction(sum(held), max(tokens - 1, 1))
    assert (clock, evaluations) == expected_cost(depth, layer, k, share, tokens)


@pytest.mark.parametrize(("depth", "layer", "k"), [(3, 2, 1), (4, 2, 2), (6, 4, 1)])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.5), GREEDY], ids=str)
def test_over_all_outcomes_the_clock_is_the_theorems(
    depth: int, layer: int, k: int, sampling: SamplingParams
) -> None:
    """E[steps] = d l - (l - 1) p (d - dbar), in fractions. p is the mean probability that the text
    goes on with a draft token.
    """
    model, tokens = TableModel(5, 3, depth, zeros=False), 3

    def run(rng: Exhaustive) -> tuple[Any, Any]:
        decoder = make_decoder(
            model.session([]), sampling, StoppingCriteria(max_new_tokens=tokens), layer=layer, k=k
        )
        decoder.extend([0])
        rounds = [decoder.step(rng).calls for _ in range(tokens)]
        return sum(map(count_layer_steps, rounds)), sum(
            call.row_layers for calls in rounds for call in calls
        )

    outcomes = list(Exhaustive.walk(run))
    got = tuple(sum(Fraction(cost[i]) * mass for cost, mass in outcomes) for i in (0, 1))
    texts = Reference(model.row, sampling).distribution(tokens - 1, (0,))
    held = sum(
        mass
        * sum(
            text[at] in likeliest_drafts(model, (0, *text[:at]), layer, k)
            for at in range(tokens - 1)
        )
        for text, mass in texts.items()
    )
    assert got == expected_cost(depth, layer, k, Fraction(held) / (tokens - 1), tokens)


@pytest.mark.parametrize(("depth", "layer", "k"), [(3, 2, 1), (4, 2, 2), (3, 3, 1)])
def test_printed_algorithm_is_what_runs(depth: int, layer: int, k: int) -> None:
    """Each outcome (text, steps, evaluations) has the same probability, in fractions."""
    model, prompt, tokens = TableModel(5, 3, depth, zeros=False), (0, 1), 3

    def row_after(text: list[int], layers: int) -> list[Fraction]:
        row = model.row(tuple(map(int, text)), Plan(last=layers))
        return [Fraction(x) / sum(row) for x in row]

    def printed(rng: Exhaustive) -> Any:
        text, clock, work = decode_pipelined(
            row_after, prompt, tokens, depth, layer, k, EnumeratedGenerator(rng)
        )
        return tuple(map(int, text)), clock, work

    def runs(rng: Exhaustive) -> Any:
        decoder = make_decoder(
            model.session([]),
            SamplingParams(),
            StoppingCriteria(max_new_tokens=tokens),
            layer=layer,
            k=k,
        )
        decoder.extend(prompt)
        rounds = [decoder.step(rng).calls for _ in range(tokens)]
        work = sum(call.row_layers for calls in rounds for call in calls)
        return tuple(decoder.context), sum(map(count_layer_steps, rounds)), work

    found = Exhaustive.distribution(runs)
    assert found == Exhaustive.distribution(printed)
    assert len(found) >= 27


def test_more_draft_tokens_match_no_less_often() -> None:
    """The text is the same, and the k likeliest tokens are among the k + 1 likeliest."""
    model = network(LLAMA, seed=2)
    clocks = []
    for k in (1, 2, 4, 8, 13):
        decoder = make_decoder(model.session(), stop=StoppingCriteria(max_new_tokens=20), k=k)
        clocks.append(sum(map(count_layer_steps, finish(decoder, [1, 2]))))
    assert clocks == sorted(clocks, reverse=True)
    assert (
        clocks[-1] == 20 * 3 - 19
    )  # all tokens are draft tokens: every one after the first saves d - dbar = 1


def test_at_the_last_layer_nothing_is_begun_and_nothing_is_gained() -> None:
    decoder = make_decoder(network(LLAMA).session(), layer=3, k=3)
    calls = finish(decoder, [1, 2])
    assert [[(c.rows, c.row_layers, c.head_rows) for c in round] for round in calls] == [
        [(1, 3.0, 1)]
    ] * 9


def test_each_round_reads_the_head_twice_and_no_branch_reads_it() -> None:
    decoder = make_decoder(network(LLAMA).session(), layer=2, k=5)
    calls = finish(decoder, [1, 2])
    assert [tuple(c.head_rows for c in round) for round in calls] == [(1, 0, 1)] * 8 + [(1,)]
    assert [round[1].rows for round in calls[:-1]] == [5] * 8


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_threads_change_no_token_and_no_bit(dtype: torch.dtype, temperature: float) -> None:
    """Main process and branches run at the same time, so the forward passes of a round may be
    logged in another order.
    """
    model, found = network(LLAMA, seed=4, dtype=dtype), []
    for threads in (False, True):
        decoder = make_decoder(
            model.session(),
            SamplingParams(temperature),
            StoppingCriteria(max_new_tokens=40),
            layer=2,
            k=1,
            threads=threads,
        )
        decoder.extend([1, 2])
        shown = []
        while not decoder.finished:
            round = decoder.step(Seeded(decoder.rounds))
            shown.append((round.scores.logits.numpy().tobytes(), count_layer_steps(round.calls)))
        found.append((decoder.new, shown))
    assert found[0] == found[1]


def test_a_failure_in_the_branches_thread_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(network(LLAMA).session(), layer=2, threads=True)
    decoder.extend([1, 2])
    pipeline: Any = decoder.target
    advance = pipeline.session.run_to_layer

    def fails(tree: Any, layer: int, **how: Any) -> Any:
        if len(tree.tokens) and layer:
            raise ZeroDivisionError
        return advance(tree, layer, **how)

    monkeypatch.setattr(pipeline.session, "run_to_layer", fails)
    with pytest.raises(ZeroDivisionError):
        decoder.step(Seeded(0))


def test_every_prompt_in_a_batch_has_the_text_it_has_alone_with_threads_or_without() -> None:
    model, prompts = network(LLAMA, dtype=torch.float32), [[1, 2, 3], [4], [5, 6]]
    alone = [tinyspec.generate(model, p, max_new_tokens=8).tokens for p in prompts]
    for threads in (False, True):
        rows = tinyspec.generate(model, prompts, method="ppd", max_new_tokens=8, threads=threads)
        assert [row.tokens for row in rows] == alone


# ---------------------------------------------------------------------- edges


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_small_budgets_begin_with_nothing_that_is_not_wanted(wanted: int) -> None:
    decoder = make_decoder(Table(1), stop=StoppingCriteria(max_new_tokens=wanted), layer=2, k=2)
    calls = finish(decoder, [0])
    assert len(decoder.new) == len(calls) == wanted
    assert sum(call.rows == 2 for round in calls for call in round) == max(wanted - 1, 0)


def test_the_end_of_text_ends_it_at_once() -> None:
    decoder = make_decoder(
        Table(1), SamplingParams(), StoppingCriteria(eos=frozenset({0, 1, 2}), max_new_tokens=9)
    )
    finish(decoder, [0])
    assert len(decoder.new) == 1 and decoder.finished == "eos"


def test_it_fills_the_context_to_its_last_position() -> None:
    model = network(LLAMA, dtype=torch.float32)
    limit = model.config.max_positions
    for room in (0, 1, 2):
        prompt = [1 + at % 5 for at in range(limit - room)]
        made_here = tinyspec.generate(model, prompt, method="ppd", max_new_tokens=9)
        assert made_here.tokens == tinyspec.generate(model, prompt, max_new_tokens=9).tokens
        assert len(made_here.tokens) == room and made_here.finish_reason == "context"


def test_a_text_that_is_taken_back_and_corrected_goes_on_as_if_it_had_been_the_prompt() -> None:
    model = network(LLAMA, seed=1)
    decoder = make_decoder(model.session(), stop=StoppingCriteria(max_new_tokens=6), layer=2)
    finish(decoder, [1, 2, 3])
    decoder.rewind(5)
    decoder.extend([4])
    finish(decoder, [])
    assert decoder.new == plain(model, decoder.context[:6], n=6)
    decoder.end()
    decoder.rewind(0)
    assert finish(decoder, [7]) and decoder.new == plain(model, [7], n=6)


def test_layers_per_token_count_the_branches() -> None:
    """`generate` reports the number of evaluations of the theorem: every figure counts the draft
    tokens.
    """
    model = network(LLAMA, seed=2, dtype=torch.float32)
    stats = tinyspec.generate(model, [1, 2], method="ppd", layer=2, k=13, max_new_tokens=10).stats
    assert stats.layers_per_token * 10 == expected_cost(3, 2, 13, 1, 10)[1]
    assert stats.tokens_per_call == 1 and stats.drafted == 0


def test_the_default_layer_is_two_thirds_and_never_below_half() -> None:
    assert [resolve_guess_layer(0, depth) for depth in (1, 2, 3, 4, 5, 6, 10, 12, 30)] == [
        1,
        1,
        2,
        3,
        3,
        4,
        7,
        8,
        20,
    ]
    assert all(resolve_guess_layer(0, depth) * 2 >= depth for depth in range(1, 100))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"layer": 1}, "below half of the 3 layers .* ppd takes 2 to 3"),
        ({"layer": 4}, "layer is 4: table has 3 layers: set layer to 0, or from 2 to 3"),
        ({"layer": -1}, "layer is -1: it must be from 0 to 1024"),
        ({"k": 0}, "k is 0: it must be from 1 to 1024"),
        ({"depth": 2}, "ppd has no knob 'depth'"),
    ],
)
def test_what_is_out_of_range_raises_a_one_line_error(knobs: dict[str, int], message: str) -> None:
    with pytest.raises(TinyspecError, match=message) as error:
        make_decoder(Table(1), **knobs)
    assert "\n" not in str(error.value)
