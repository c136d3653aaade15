"""LayerSkip writes the whole model's text and runs the layers below the exit once.

Draft and verification share one cache. The drafts are those of the model cut off after the exit.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch

from tests.lm.small import GPT2, LLAMA, close, same_cache
from tests.lm.small import model as network
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.layerskip import (
    count_layer_evaluations,
    draft_and_verify,
    resolve_exit_layer,
)
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import layerskip as traps
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.speculative_decoding import verify_chain
from tinyspec.technique import Guarantee, Request, find_technique
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule

CARD = find_technique("layerskip")
GREEDY = SamplingParams(temperature=0.0)
FIVE = replace(LLAMA, n_layers=5)


def make_decoder(
    session: Any,
    sampling: SamplingParams = GREEDY,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    forward_log: list[ForwardRecord] = session.forward_log
    return CARD.make(
        Request(
            session,
            sampling=sampling,
            stop=stop or StoppingCriteria(max_new_tokens=20),
            forward_log=forward_log,
        ),
        **knobs,
    )


def finish(decoder: Decoder, prompt: list[int]) -> list[Round]:
    decoder.extend(prompt)
    rounds = []
    while not decoder.finished:
        rounds.append(decoder.step(Seeded(decoder.rounds)))
    return rounds


def plain(
    model: Model,
    prompt: list[int],
    sampling: SamplingParams = GREEDY,
    stop: StoppingCriteria | None = None,
) -> list[int]:
    decoder = Decoder(
        model.session(),
        BaseDrafter(),
        verify_tree,
        sampling=sampling,
        stop=stop or StoppingCriteria(max_new_tokens=20),
    )
    finish(decoder, prompt)
    return decoder.new


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_and_its_recipe_pass_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize(("exit", "gamma"), [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_printed_algorithm_is_what_runs(exit: int, gamma: int) -> None:
    """Each outcome of a round has the same probability, in fractions, on tables of three layers."""
    for seed, text in product((1, 2), ((0,), (0, 2, 1))):
        model = TableModel(seed, 3, 3, zeros=False)
        net = model.network

        def run_layers(states: list[Any], first: int, last: int, net: Any = net) -> list[Any]:
            for layer in range(first, last):
                keys = [net.keys(layer, state, at) for at, state in enumerate(states)]
                states = [
                    net.feed_forward(layer, net.attend(layer, state, keys[: at + 1]))
                    for at, state in enumerate(states)
                ]
            return states

        def embed(tokens: Any, net: Any = net) -> list[Any]:
            return [net.embed(token) for token in tokens]

        def early(draft: list[int], text: Any = text, run: Any = run_layers) -> Any:
            return run(embed((*text, *draft)), 0, exit)[-1]

        def late(states: list[Any], text: Any = text, run: Any = run_layers) -> list[Any]:
            below = run(embed(text[:-1]), 0, exit)
            return run([*below, *states], exit, 3)[len(below) :]

        def read(state: Any, model: Any = model) -> list[Fraction]:
            row = model.head(state)
            return [Fraction(x) / sum(row) for x in row]

        def printed(rng: Exhaustive, early: Any = early, late: Any = late, read: Any = read) -> Any:
            tokens = draft_and_verify(
                early, late, read, gamma, verify_chain, EnumeratedGenerator(rng)
            )
            return tuple(map(int, tokens))

        def runs(rng: Exhaustive, model: Any = model, text: Any = text) -> tuple[int, ...]:
            decoder = CARD.make(Request(model.session([])), exit=exit, gamma=gamma)
            decoder.extend(text)
            return decoder.step(rng).tokens

        found = Exhaustive.distribution(runs)
        assert found == Exhaustive.distribution(printed)
        assert len(found) > 3


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(0.5, top_k=2)], ids=str
)
@pytest.mark.parametrize(("exit", "gamma"), [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_the_joint_distribution_is_the_whole_models(
    sampling: SamplingParams, exit: int, gamma: int
) -> None:
    reference = exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )
    assert (
        exact_distribution(
            lambda: CARD.make(Request(Table(1), sampling=sampling), exit=exit, gamma=gamma), 2
        )
        == reference
    )


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_a_transformer_it_is_greedy_decoding_at_every_exit(
    config: Any, dtype: torch.dtype
) -> None:
    model = network(config, seed=1, dtype=dtype)
    text = plain(model, [1, 2, 3])
    for exit, gamma in product((1, 2, 3), (1, 3)):
        decoder = make_decoder(model.session(), exit=exit, gamma=gamma)
        finish(decoder, [1, 2, 3])
        assert decoder.new == text


def test_draft_from_the_last_layer_is_always_accepted() -> None:
    for sampling in (GREEDY, SamplingParams(0.7)):
        rounds = finish(make_decoder(network(LLAMA).session(), sampling, exit=3, gamma=4), [1, 2])
        assert [len(round.tokens) for round in rounds] == [5] * 4
        assert not any(round.verdict.rejected for round in rounds)


# ----------------------------------------------------------------- what it costs, and what it keeps


@pytest.mark.parametrize(("exit", "gamma"), [(1, 1), (1, 4), (2, 3), (4, 2), (5, 2)])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8)], ids=str)
def test_a_round_costs_n_times_the_exit_to_draft_and_the_layers_above_for_all(
    exit: int, gamma: int, sampling: SamplingParams
) -> None:
    rounds = finish(
        make_decoder(network(FIVE, seed=2).session(), sampling, exit=exit, gamma=gamma), [1, 2, 3]
    )
    for round in rounds:
        n = len(round.tree.tokens)
        work = [
            sum(call.row_layers for call in calls) for calls in (round.draft_calls, round.calls)
        ]
        assert (
            work
            == list(count_layer_evaluations(n, exit, 5))
            == [n * exit, exit + (5 - exit) * (n + 1)]
        )
        assert [call.rows for call in round.draft_calls] == [1] * n, (
            "one row a guess, the prompt is never read again"
        )
        assert sum(call.rows for call in round.calls) == n + 1


def test_round_reads_the_head_once_per_draft_token_and_position() -> None:
    for round in finish(make_decoder(network(FIVE).session(), exit=2, gamma=3), [1, 2]):
        n = len(round.tree.tokens)
        assert sum(call.head_rows for call in round.draft_calls) == n
        assert sum(call.head_rows for call in round.calls) == n + 1


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8)], ids=str)
def test_after_every_round_all_layers_hold_the_text_but_its_newest_token(
    sampling: SamplingParams,
) -> None:
    """prompt + emitted - 1 positions at every layer, and they are what a fresh pass over the text
    leaves there.
    """
    session = network(FIVE, seed=1).session()
    decoder = make_decoder(session, sampling, exit=2, gamma=3)
    decoder.extend([1, 2, 3])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
        n = 3 + len(decoder.new)
        assert len(session) == n
        assert session.cache.present[: n - 1].all()
        same_cache(session)
    assert session.cache_exact


def test_rejected_token_leaves_nothing_in_the_early_layers() -> None:
    session = network(FIVE, seed=1).session()
    decoder = make_decoder(session, SamplingParams(0.8), exit=2, gamma=3)
    decoder.extend([1, 2, 3])
    refused = 0
    while not decoder.finished:
        round = decoder.step(Seeded(decoder.rounds))
        refused += bool(round.verdict.rejected)
        assert not session.committed[-1].children, (
            "what hung below the text and was not kept is gone"
        )
    assert refused > 2


def test_draft_is_sampled_from_the_model_cut_off_after_the_exit() -> None:
    model = network(FIVE, seed=3)
    cut = Model(
        replace(FIVE, n_layers=2), {k: w for k, w in model.weights.items() if k[0] not in "234"}
    )
    decoder = make_decoder(model.session(), SamplingParams(), exit=2, gamma=3)
    decoder.extend([1, 2, 3])
    for _ in range(4):
        text = list(decoder.context)
        round = decoder.step(Seeded(decoder.rounds))
        for at, row in enumerate(round.tree.draft_probs):
            expected = cut.logits([*text, *round.tree.tokens[:at]])[-1].softmax(-1)
            close(torch.as_tensor(row), expected)


# ---------------------------------------------------------------------- edges and bad input


@pytest.mark.parametrize("wanted", [0, 1])
def test_budgets_of_no_and_one_token_need_no_draft(wanted: int) -> None:
    decoder = make_decoder(network(LLAMA).session(), stop=StoppingCriteria(max_new_tokens=wanted))
    rounds = finish(decoder, [1])
    assert len(decoder.new) == len(rounds) == wanted
    assert all(not round.tree.tokens for round in rounds)


def test_an_end_of_text_ends_it_as_the_first_token_and_inside_a_draft() -> None:
    model = network(LLAMA, seed=1)
    text = plain(model, [1, 2, 3])
    for eos in {text[0], text[3]}:
        stop = StoppingCriteria(eos=frozenset({eos}), max_new_tokens=20)
        decoder = make_decoder(model.session(), stop=stop, exit=2, gamma=6)
        finish(decoder, [1, 2, 3])
        assert decoder.new == text[: text.index(eos) + 1] == plain(model, [1, 2, 3], stop=stop)


@pytest.mark.parametrize("left", [1, 2, 5])
def test_at_the_limit_of_the_context_it_drafts_no_further(left: int) -> None:
    model = network(LLAMA, seed=1)
    prompt = [1 + i % 9 for i in range(64 - left)]
    session = model.session()
    decoder = CARD.make(Request(session, sampling=GREEDY, positions=64), exit=1, gamma=6)
    finish(decoder, prompt)
    assert len(decoder.new) == left


def test_an_exit_out_of_range_is_named_with_the_range() -> None:
    with pytest.raises(
        TinyspecError, match="exit 4 is out of range: model has 3 layers; layerskip takes 1 to 3"
    ):
        make_decoder(network(LLAMA).session(), exit=4)
    with pytest.raises(TinyspecError, match="exit is -1: it must be from 0 to 1024"):
        make_decoder(network(LLAMA).session(), exit=-1)
    with pytest.raises(TinyspecError, match="gamma is 0: it must be from 1 to 1024"):
        make_decoder(network(LLAMA).session(), gamma=0)


def test_by_default_a_quarter_of_the_layers_draft() -> None:
    assert [resolve_exit_layer(0, depth) for depth in (1, 3, 4, 10, 12, 32)] == [1, 1, 1, 3, 3, 8]
    assert CARD.guarantee is Guarantee.EXACT


def test_generate_takes_it_by_name() -> None:
    model = network(replace(LLAMA, max_positions=40), seed=1, dtype=torch.float32)
    arms: list[dict[str, Any]] = [
        {"method": "autoregressive"},
        {"method": "layerskip", "exit": 1, "gamma": 2},
    ]
    texts = [
        start_generation(model, [1, 2, 3], max_new_tokens=9, temperature=0.0, **arm) for arm in arms
    ]
    assert len({tuple(token for round in text for token in round.tokens) for text in texts}) == 1


# ---------------------------------------------------------------------- what the recipe is for

TINY = Config(
    vocab_size=12, d_model=32, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48,
    max_positions=64
)  # fmt: skip


def texts(random: torch.Generator, count: int, length: int) -> torch.Tensor:
    """Nine tokens of ten follow from the two before them. One layer cannot know them, all four
    can.
    """
    ids = torch.randint(12, (count, length), generator=random)
    for at in range(2, length):
        ruled = torch.rand(count, generator=random) < 0.9
        ids[:, at] = torch.where(
            ruled, (5 * ids[:, at - 2] + 7 * ids[:, at - 1] + 3) % 12, ids[:, at]
        )
    return ids


def trained(exits: ExitLosses, steps: int = 90) -> Model:
    model, course, random = (
        Model.random(TINY, scale=0.1),
        ExitLossSchedule(exits, 4, steps),
        torch.Generator().manual_seed(1),
    )
    optimizer = torch.optim.AdamW([w.requires_grad_() for w in model.weights.values()], lr=1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for step in range(steps):
            course.begin_step(step, step / steps)
            ids = texts(random, 12, 20)
            course.loss(model.torch_blocks(), ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return model.to(dtype=torch.float32)


@pytest.mark.slow
def test_a_model_that_was_taught_so_drafts_better_from_its_middle_than_one_that_was_not() -> None:
    kept, prompts = {}, texts(torch.Generator().manual_seed(9), 5, 6).tolist()
    recipe = ExitLosses("sum", curriculum="rotational", rotation=2, p_max=0.1)
    for name, exits in (("plain", ExitLosses()), ("layerskip", recipe)):
        model, drafted, accepted = trained(exits), 0, 0
        for prompt in prompts:
            decoder = make_decoder(model.session(), exit=2, gamma=3)
            rounds = finish(decoder, prompt)
            assert decoder.new == plain(model, prompt)
            drafted += sum(len(round.tree.tokens) for round in rounds)
            accepted += sum(len(round.verdict.accepted) for round in rounds)
        kept[name] = accepted / drafted
    assert kept["layerskip"] > kept["plain"] + 0.1, kept
