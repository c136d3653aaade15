"""Synergy: the draft length follows the number of requests that decode."""

from typing import Any

import pytest

from tests.speculative.batches import DRAFT, PROMPTS, TARGET, decode_batch, texts_of, verified_of
from tests.table import Table
from tinyspec.decoding.costs import MeasuredRounds
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import synergy as traps
from tinyspec.lm.model import Model
from tinyspec.speculative.batched import (
    SIZES,
    count_measured_tokens,
    find_profile,
    measure_batches,
    measure_rounds,
)
from tinyspec.speculative.integrated.synergy import SynergyRule, best_lengths, read_length_table
from tinyspec.technique import Request, find_technique


def test_trap_the_table_has_the_length_whose_tokens_take_least_time() -> None:
    assert traps.table_has_the_best_lengths(best_lengths).cases == 40


def test_trap_requests_that_draft_at_another_moment_count() -> None:
    assert traps.all_that_decode_are_counted(SynergyRule).cases > 5


def test_drafts_are_long_alone_and_short_in_a_crowd() -> None:
    table = "5@1+2@2+1@4"
    _, log = decode_batch("synergy", [[1]], n=20, table=table)
    assert verified_of(log)[:2] == [(5,), (5,)]
    prompts = [[1, 2], [4, 3], [5, 6], [3, 3]]
    rounds, log = decode_batch("synergy", prompts, table=table)
    assert {max(rows) for rows in verified_of(log) if len(rows) == 4} == {1}
    assert texts_of(rounds) == texts_of(decode_batch("autoregressive", prompts)[0])


def test_length_0_decodes_plainly_and_runs_no_draft_model() -> None:
    _, log = decode_batch("synergy", PROMPTS[:2], table="0@1")
    assert {one.model for one in log if not any(one.prefill)} == {"target"}


@pytest.mark.slow
def test_a_profile_is_measured_on_batches_that_decode() -> None:
    """A clock that forward passes move: 1 second and 1/100 a row of the target, 1/10 of the draft."""
    seconds = [0.0]

    class Clocked(Model):
        def forward(self, feeds: Any) -> Any:
            rows = sum(len(feed.tokens) for feed in feeds)
            seconds[0] += 0.1 if self.name == "draft" else 1 + 0.01 * rows
            return super().forward(feeds)

    target, draft = (Clocked(one.config, one.weights, name=one.name) for one in (TARGET, DRAFT))

    def make_request(number: int, scheduler: Any) -> Any:
        sessions = target.session(scheduler=scheduler), [draft.session(scheduler=scheduler)]
        stop = StoppingCriteria(max_new_tokens=count_measured_tokens(3))
        return Request(*sessions, stop=stop, scheduler=scheduler), PROMPTS[number % 4]

    verify, step = measure_rounds("draft", make_request, 4, 3, lambda: seconds[0])
    assert verify == pytest.approx([1 + 0.04 * (1 + n) for n in range(4)])
    assert step == pytest.approx(0.1)
    costs, reach = measure_batches("draft", make_request, 4, 3, lambda: seconds[0])
    assert costs.sizes == [*SIZES]
    assert costs.step == pytest.approx(dict.fromkeys(SIZES, 0.1))
    assert costs.verify[16] == pytest.approx([1 + 0.16 * (1 + n) for n in range(4)])
    assert len(reach) == 3 and sorted(reach, reverse=True) == [*reach]


@pytest.mark.slow
def test_acceptance_is_measured_on_the_texts_of_all_who_ask() -> None:
    """The texts are drafted unequally well."""

    def reach_of(*prompts: list[int]) -> float:
        target, draft = (Model(one.config, one.weights, name=one.name) for one in (TARGET, DRAFT))
        return find_profile(target, draft, SamplingParams(0.0), prompts, 1).reach[0]

    worst, *_, best = sorted(PROMPTS, key=reach_of)
    for both in ((worst, best), (best, worst)):
        assert reach_of(worst) < reach_of(*both) < reach_of(best)


def test_a_size_between_two_measured_ones_takes_the_nearest() -> None:
    costs = MeasuredRounds({1: [], 4: [], 16: []}, {})
    assert [costs.nearest(n) for n in (1, 2, 3, 10, 11, 99)] == [1, 1, 4, 4, 16, 16]


def test_a_table_by_hand_is_checked() -> None:
    assert read_length_table("1@8+5@1") == {8: 1, 1: 5}
    many = "+".join(f"1@{size}" for size in range(1, 66))
    for wrong in ("", "5", "x@1", "3@0", "-2@1", "1@2@3", many):
        with pytest.raises(TinyspecError, match="draft lengths by batch size"):
            read_length_table(wrong)


def test_a_target_without_times_has_no_profile() -> None:
    decoder = find_technique("synergy").make(Request(Table(0, 3), [Table(1, 3)]))
    decoder.extend((0,))
    with pytest.raises(TinyspecError, match="only a transformer has them"):
        decoder.drafter.propose((0,), 4, decoder.sampling, None)  # type: ignore[arg-type]
