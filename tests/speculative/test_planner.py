"""The planner: its model of throughput, its measurements, and its recommendation.

The recommendation is compared with a clock and with models.
"""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.table import Table
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps.auto import Watch
from tinyspec.laws.traps.planner import (
    FAIR,
    GOOD,
    POOR,
    Draft,
    constant_model,
    exact_throughput,
    recommends_the_fastest,
    repeat_requests,
)
from tinyspec.laws.traps.planner import advise as planned
from tinyspec.speculative.drafting.planner import (
    DraftProfile,
    measure_throughput,
    needed_tar,
    plan_drafts,
    profile_draft,
    profile_target,
    recommend_drafts,
    tokens_per_second,
)
from tinyspec.technique import Request, find_technique

DRAFTS = [
    Draft("deep", GOOD, 0.4),
    Draft("wide", FAIR, 0.05),
    Draft("poor", POOR, 0.02),
    Draft("dear", FAIR, 0.3),
]


def test_trap_what_is_recommended_is_the_fastest_by_the_clock_not_the_best_accepted() -> None:
    assert recommends_the_fastest(planned).cases
    watch = Watch()
    requests = {draft.name: repeat_requests(draft, 0.02, watch) for draft in DRAFTS}
    verify, profiles, advice = plan_drafts(requests, 4, watch)
    assert advice[0].draft == "wide"
    assert (
        max(profiles, key=lambda p: p.tar(4)).name == "deep"
    )  # a higher TAR, and a lower throughput
    assert verify == pytest.approx([1 + 0.02 * n for n in range(5)])


def test_every_forecast_is_near_what_decoding_then_takes() -> None:
    watch = Watch()
    requests = {
        draft.name: repeat_requests(draft, 0.02, watch, texts=12, tokens=30) for draft in DRAFTS
    }
    advice = plan_drafts(requests, 4, watch)[2]
    slope = {draft.name: draft for draft in DRAFTS}
    rates: dict[str | None, float] = {None: 1.0}
    for found in advice:
        if found.draft is not None:
            rates[found.draft], tar = measure_throughput(
                requests[found.draft], found.n, watch, seed=100
            )
            rate = rates[found.draft]
            assert found.rate == pytest.approx(rate, rel=0.15)
            assert found.rate == pytest.approx(
                float(exact_throughput(slope[found.draft], found.n, 0.02)), rel=0.15
            )
            assert found.tar == pytest.approx(tar, rel=0.15, abs=0.1)
    assert max(rates, key=lambda name: rates[name]) == advice[0].draft


@given(st.floats(0, 8), st.integers(0, 8), st.floats(0, 2), st.floats(0.1, 4), st.floats(0.1, 4))
def test_the_needed_tar_is_the_inverse_of_the_gain(
    tar: float, n: int, step: float, verify: float, plain: float
) -> None:
    gain = tokens_per_second(tar, n, step, verify) * plain
    assert needed_tar(gain, n, step, verify, plain) == pytest.approx(tar, abs=1e-9)


def test_slower_draft_shows_what_it_lacks() -> None:
    verify = [1.0, 1.0, 1.0]
    best, other, plain = recommend_drafts(
        verify, [DraftProfile("slow", 0.2, (0.7, 0.5)), DraftProfile("fast", 0.0, (0.6, 0.4))]
    )
    assert (best.draft, best.n, best.missing, plain.draft) == ("fast", 2, 0.0, None)
    assert other.draft == "slow" and other.missing is not None
    lifted = DraftProfile("slow", 0.2, (0.7 + other.missing, 0.5))
    assert max(tokens_per_second(lifted.tar(n), n, 0.2, 1.0) for n in (1, 2)) == pytest.approx(
        best.rate
    )
    hopeless = recommend_drafts(
        verify, [DraftProfile("hopeless", 9.0, (0.9, 0.8)), DraftProfile("fast", 0.0, (0.6, 0.4))]
    )
    assert [a.missing for a in hopeless if a.draft == "hopeless"] == [None]


def test_where_no_draft_pays_plain_decoding_is_recommended() -> None:
    best = recommend_drafts([1.0, 2.0], [DraftProfile("dear", 1.0, (1.0,))])[0]
    assert (best.draft, best.n, best.gain) == (None, 0, 1.0)


def test_an_accepted_draft_is_worth_its_tokens_and_one_more() -> None:
    watch, same = Watch(), Draft("same", GOOD, 0.0)  # the target's own distribution
    profile = profile_draft("same", repeat_requests(same, 0.0, watch), 3, watch)
    assert profile.reach == (1.0, 1.0, 1.0)
    assert measure_throughput(repeat_requests(same, 0.0, watch), 3, watch)[0] == pytest.approx(4.0)


def test_bad_input_raises_a_one_line_error() -> None:
    def short() -> Iterator[tuple[Request, Sequence[int]]]:
        yield (
            Request(Table(1), [Table(2, zeros=False)], stop=StoppingCriteria(max_new_tokens=3)),
            [0],
        )

    with pytest.raises(TinyspecError, match="no text had room for 5 draft tokens"):
        profile_draft("small", short, 5, Watch())
    with pytest.raises(TinyspecError, match="take longer texts"):
        profile_target(short, 5, Watch())
    with pytest.raises(TinyspecError, match="no candidate"):
        plan_drafts({}, 2, Watch())
    with pytest.raises(TinyspecError, match="no draft length"):
        recommend_drafts([1.0], [DraftProfile("a", 0.1, (0.5,))])
    with pytest.raises(TinyspecError, match="measured seconds"):
        recommend_drafts([], [])
    with pytest.raises(TinyspecError, match="tinyspec bench plan-draft"):
        find_technique("planner").make(Request(Table(1)))


def test_texts_that_end_early_are_profiled_as_far_as_they_go() -> None:
    def ending() -> Iterator[tuple[Request, Sequence[int]]]:
        for seed in range(8):
            stop = StoppingCriteria(frozenset({2}), max_new_tokens=40)
            yield (
                Request(constant_model((1, 1, 1)).session(), [Table(seed, zeros=False)], stop=stop),
                [0],
            )

    profile = profile_draft("x", ending, 2, Watch())
    assert 0 <= profile.reach[1] <= profile.reach[0] <= 1
