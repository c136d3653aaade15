"""TriForce: what is retrieved, the three levels, the residual, and what a large budget means."""

import warnings
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from tests.lm.small import GPT2, LLAMA, model
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.museum import find_toy
from tinyspec.laws.traps.triforce import (
    drafts_beyond_its_context,
    finds_the_needle,
    joint_distribution_of_three_levels,
)
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.lm.ops import attend_causal, linear
from tinyspec.speculative.integrated.triforce import decode_three_levels, select_chunks
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("triforce")
KNOBS = {"gamma1": 1, "gamma2": 3, "budget": 4, "chunk": 2, "rebuild": 5, "sink": 1, "window": 3}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def make_decoder(
    config: Config = LLAMA, sampling: SamplingParams | None = None, tokens: int = 20, **knobs: int
) -> Decoder:
    forward_log: list = []
    request = Request(
        model(config, seed=1).session(forward_log), [model(config, seed=2).session(forward_log)],
        sampling or SamplingParams(0.0), StoppingCriteria(max_new_tokens=tokens),
        forward_log=forward_log,
    )  # fmt: skip
    return CARD.make(request, **{**KNOBS, **knobs})


def finish(d: Decoder, prompt: list[int], seed: int = 0) -> list[int]:
    d.extend(prompt)
    rng = Seeded(seed)
    while not d.finished:
        d.step(rng)
    return d.new


def asked_and_kept(m: Model, ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries [T, H, hd] and keys [T, KV, hd] of every layer by one dense pass: the oracle of the
    choice.
    """
    blocks = Blocks(m.config, dict(m.weights))
    x = blocks.embed[torch.tensor(ids)]
    if m.config.positions == "learned":
        x = x + m.weights["positions"][: len(ids)]
    asked, kept = [], []
    for block in blocks.layers:
        q, k, v = blocks.project_qkv(block, x[None], *blocks.rotary_at(slice(len(ids))))
        asked.append(q[0])
        kept.append(k[0])
        x = x + linear(attend_causal(q, k, v), block.out, block.out_bias)[0]
        x = x + blocks.apply_mlp(block, x)
    return asked, kept


@pytest.mark.parametrize(("gamma1", "gamma2"), [(1, 1), (1, 3), (2, 3), (3, 2)])
def test_printed_algorithm_is_what_runs(gamma1: int, gamma2: int) -> None:
    """Each text of the second round has the same probability, on a pair of small transformers."""
    target, draft, prompt = small_network(1, 2, 2), small_network(11, 2, 2), (0, 1, 1, 0, 1)
    knobs = {"budget": 2, "chunk": 1, "rebuild": 0, "sink": 0, "window": 64}

    def second_round(rng: Exhaustive) -> tuple[Decoder, Round]:
        request = Request(target.session(), [draft.session()])
        d = CARD.make(request, gamma1=gamma1, gamma2=gamma2, **knobs)
        d.extend(prompt)
        first = d.step(Seeded(0))  # chooses the chunks
        return (d, first) if rng is None else (d, d.step(rng))  # type: ignore[redundant-expr]

    d, _ = second_round(None)  # type: ignore[arg-type]
    text, plan = d.context, d.drafter.view.plan  # type: ignore[attr-defined]
    assert plan.visible is not None

    def soft(row: torch.Tensor) -> list[float]:
        return row.softmax(-1).tolist()

    @cache
    def rows_of(tokens: tuple[int, ...]) -> list[list[float]]:
        session = target.session()
        session.extend(text)
        logits = session.view(plan).score(TokenTree.chain(tokens)).logits[-1]
        whole = [m.logits([*text, *tokens])[-1] for m in (draft, target)]
        return [soft(row) for row in (whole[0], logits, whole[1])]

    def printed(rng: Exhaustive) -> tuple[int, ...]:
        levels = (lambda tokens, i=i: rows_of(tuple(tokens))[i] for i in range(3))
        tokens = decode_three_levels(*levels, gamma1, gamma2, EnumeratedGenerator(rng))
        return tuple(map(int, tokens))

    distributions = []
    for run in (lambda rng: tuple(second_round(rng)[1].tokens), printed):
        found: dict[tuple[int, ...], float] = {}
        for tokens, probability in Exhaustive.walk(run):
            found[tokens] = found.get(tokens, 0) + float(probability)
        distributions.append(found)
    assert len(distributions[0]) > gamma2
    assert distributions[1] == pytest.approx(distributions[0], abs=1e-10)


def test_trap_retrieval_knows_what_the_window_has_passed() -> None:
    assert finds_the_needle(CARD.make).cases == 4
    with pytest.raises(AssertionError, match="retrieved key"):
        find_toy("triforce", "a window and no retrieval").check()


def test_trap_small_model_of_a_short_context_drafts_at_positions_of_its_own() -> None:
    assert drafts_beyond_its_context(CARD.make).cases == 4
    with pytest.raises(AssertionError, match="draft tokens"):
        find_toy("triforce", "a draft that ends with its context").check()
    with pytest.raises(AssertionError, match="small model of 16 positions"):
        find_toy("triforce", "a window without the first tokens").check()


def test_trap_middle_that_samples_again_after_a_rejection_is_biased() -> None:
    assert joint_distribution_of_three_levels(CARD.make).cases == 3
    with pytest.raises(AssertionError, match="joint distribution"):
        find_toy("triforce", "the middle draws again").check()


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("length", [9, 12])
def test_the_chunks_are_those_whose_mean_key_agrees_most_with_the_newest_query(
    config: Config, length: int
) -> None:
    d = make_decoder(config)
    text = TEXT[:length]
    d.extend(text)
    d.step(Seeded(0))  # the plain round: its root is the prompt's last token
    visible = d.drafter.view.plan.visible
    chunks = length // 2
    assert visible.since == 2 * chunks
    for (asked, kept), layer in zip(
        zip(*asked_and_kept(d.target.model, text), strict=True), visible.layers, strict=True
    ):
        for head, positions in enumerate(layer):
            group = config.n_heads // config.n_kv_heads
            query = asked[-1, head * group : (head + 1) * group].sum(0)
            scores = [float(kept[2 * c : 2 * c + 2, head].mean(0) @ query) for c in range(chunks)]
            best = max(range(1, chunks), key=lambda c: scores[c])
            assert positions == {0, 1, 2 * best, 2 * best + 1}


def test_first_chunk_is_always_chosen_and_the_earlier_of_equals() -> None:
    scores = torch.tensor([[-9.0, 1.0, 3.0, 3.0], [5.0, 0.0, 0.0, 0.0]])
    assert select_chunks(scores, 2) == [[0, 2], [0, 1]]
    assert select_chunks(scores, 1) == [[0], [0]]


@pytest.mark.parametrize("sampling", [SamplingParams(0.0), SamplingParams(0.8)], ids=str)
def test_a_budget_that_holds_the_context_makes_middle_and_target_agree_always(
    sampling: SamplingParams,
) -> None:
    d = make_decoder(sampling=sampling, budget=64, rebuild=0)
    d.extend(TEXT)
    rounds = [d.step(Seeded(number)) for number in range(4)]
    assert [len(round.tokens) for round in rounds[1:]] == [4, 4, 4]  # alpha = 1
    assert [len(round.verdict.rejected) for round in rounds] == [0, 0, 0, 0]
    assert all(
        sum(call.rows for call in round.calls) <= 1 for round in rounds[1:]
    )  # and the check is free: one position


def test_budget_of_the_whole_context_gives_a_warning() -> None:
    request = Request(model().session(), [model(seed=2).session()], positions=64)
    with pytest.warns(
        UserWarning, match="budget of 64 tokens holds the whole context of 64.*full cache"
    ):
        CARD.make(request, budget=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CARD.make(request, budget=32)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_greedy_text_is_plain_greedy_text(config: Config) -> None:
    plain = Decoder(
        model(config, seed=1).session(),
        BaseDrafter(),
        verify_tree,
        sampling=SamplingParams(0.0),
        stop=StoppingCriteria(max_new_tokens=20),
    )
    assert finish(make_decoder(config), TEXT) == finish(plain, TEXT)


def test_what_the_middle_computes_leaves_nothing_in_the_targets_cache() -> None:
    d = make_decoder(sampling=SamplingParams(0.8))
    d.extend(TEXT)
    for number in range(6):
        d.step(Seeded(number))
        assert d.target.cache_exact
        row = d.target.score(TokenTree()).logits[0]
        torch.testing.assert_close(row, d.target.model.logits(d.context)[-1], rtol=0, atol=1e-10)


def test_each_round_is_one_target_pass_and_the_first_is_plain() -> None:
    d = make_decoder()
    d.extend(TEXT)
    first = d.step(Seeded(0))
    assert (len(first.tokens), first.tree.tokens, first.draft_calls) == (1, (), ())
    for number in range(1, 5):
        round = d.step(Seeded(number))
        assert len(round.calls) == 1
        assert len(round.tree.tokens) == 3


def test_chunks_are_chosen_anew_every_rebuild_tokens_or_never() -> None:
    def choices(**knobs: int) -> list[int]:
        d = make_decoder(tokens=30, **knobs)
        d.extend(TEXT)
        seen = []
        while not d.finished:
            d.step(Seeded(d.rounds))
            seen.append(d.drafter.chosen_at)
        return sorted(set(seen))

    often = choices()
    assert len(often) > 2 and all(b - a >= 5 for a, b in pairwise(often))
    assert choices(rebuild=0) == [len(TEXT) + 1]


def test_a_text_rewound_before_the_choice_chooses_chunks_again() -> None:
    d = make_decoder()
    d.extend(TEXT)
    d.step(Seeded(0))
    d.rewind(5)
    d.extend([7, 7])
    assert d.step(Seeded(1)).tree.tokens == ()
    assert d.drafter.view.plan.visible.since == 6


def test_the_small_model_sees_the_first_tokens_and_half_a_window_or_more() -> None:
    """Sink 2, window 8: at most 10 tokens are in the cache, and 4 are evicted together."""
    streaming = make_decoder(sink=2, window=8).drafter.decoder.drafter
    text = list(range(13)) * 2
    for n in range(1, len(text) + 1):
        streaming.append(text[n - 1 : n])
        gap = 4 * max(-(-(n - 10) // 4), 0)
        assert list(streaming.session.text) == text[: min(n, 2)] + text[2 + gap : n]


SHORT = replace(LLAMA, max_positions=16)


def long_request(prompt: list[int], tokens: int = 30, **knobs: int) -> Decoder:
    """A target of 64 positions, and a small model of 16."""
    small = model(SHORT, seed=2).session()
    request = Request(
        model(LLAMA, seed=1).session(), [small], SamplingParams(0.0),
        StoppingCriteria(max_new_tokens=tokens),
        positions=64, draft_max_lengths=[16],
    )  # fmt: skip
    d = CARD.make(request, **{**KNOBS, "gamma1": 2, "window": 64, **knobs})
    d.extend(prompt)
    return d


def greedy_text(prompt: list[int]) -> list[int]:
    stop = StoppingCriteria(max_new_tokens=30)
    session, greedy = model(LLAMA, seed=1).session(), SamplingParams(0.0)
    return finish(Decoder(session, BaseDrafter(), verify_tree, sampling=greedy, stop=stop), prompt)


@pytest.mark.parametrize("prompt", [TEXT, TEXT * 2], ids=["grows", "starts long"])
def test_a_small_model_of_a_short_context_serves_a_long_text(prompt: list[int]) -> None:
    """It drafts in every inner round after the first, and declares what a dense pass gives."""
    d = long_request(prompt, sink=2)
    streaming, session = d.drafter.decoder.drafter, d.drafter.decoder.drafter.session
    gaps = set()
    while not d.finished:
        d.step(Seeded(0))
        text, gap = streaming.text, streaming.gap
        assert text == d.context and len(session) + 2 <= 16
        assert list(session.text) == text[:2] + text[2 + gap :]
        gaps.add(gap)
        tree = streaming.propose(d.context, 9, SamplingParams(), Seeded(0))
        expected = SamplingParams().probs(session.model.logits(list(session.text))[-1], d.context)
        assert len(tree.tokens) == 2
        assert list(tree.draft_probs[0]) == pytest.approx(list(expected), abs=1e-9)
    assert d.new == greedy_text(prompt) and len(gaps) > 2


def test_what_a_long_text_leaves_out_follows_its_length_alone() -> None:
    """Taken back and written again it reads the same as a fresh one."""
    for length in range(1, 40):
        text = [(7 * at * at + at) % 13 for at in range(40)]
        lived, fresh = long_request(text), long_request(text[:length])
        for d in (lived, fresh):
            d.drafter.decoder.drafter.rewind(length)
        one, other = (d.drafter.decoder.drafter for d in (lived, fresh))
        assert (one.text, one.gap, one.length) == (other.text, other.gap, other.length)
        assert list(one.session.text) == list(other.session.text)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_short_requests_end_where_they_should(tokens: int) -> None:
    assert len(finish(make_decoder(tokens=tokens), TEXT)) == tokens


def test_an_end_of_text_in_the_middles_draft_ends_the_text() -> None:
    text = finish(make_decoder(), TEXT)
    d = make_decoder()
    d.stop = d.drafter.ends = d.drafter.decoder.stop = StoppingCriteria(
        eos=frozenset({text[6]}), max_new_tokens=20
    )
    assert finish(d, TEXT) == text[: text.index(text[6]) + 1]


def test_a_budget_below_one_chunk_raises_an_error() -> None:
    with pytest.raises(TinyspecError, match="at least 8"):
        CARD.make(Request(model().session(), [model(seed=2).session()]), budget=4)
