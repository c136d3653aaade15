"""SmartSpec: draft lengths by the goodput of the batch."""

import pytest

from tests.speculative.batches import decode_batch, texts_of
from tinyspec.decoding.costs import MeasuredRounds
from tinyspec.decoding.decode import Round
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import smartspec as traps
from tinyspec.speculative.batched import BatchProfile
from tinyspec.speculative.integrated.smartspec import (
    TRIAL_ROUNDS,
    DraftHistory,
    SmartSpecDrafter,
    SmartSpecRule,
    choose_equal_lengths,
    choose_lengths,
    seconds_of,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("smartspec")
COSTS = MeasuredRounds({1: [1.0, 1.1, 1.2, 1.3], 4: [1.0, 2.0, 3.0, 4.0]}, {1: 0.1, 4: 0.1})
PROFILE = BatchProfile(COSTS, [0.8, 0.6, 0.5])


def test_trap_no_other_lengths_have_more_goodput() -> None:
    assert traps.lengths_have_the_greatest_goodput(choose_lengths).cases == 40


def test_trap_no_other_equal_lengths_have_more_goodput() -> None:
    assert traps.equal_lengths_have_the_greatest_goodput(choose_equal_lengths).cases == 40


def test_trap_the_rate_counts_the_tokens_that_were_tested() -> None:
    assert traps.rate_counts_tested_tokens(CARD.make).cases == 6


def test_the_seconds_of_unequal_drafts_lie_between_those_of_equal_ones() -> None:
    assert seconds_of([2], COSTS) == pytest.approx(1.2 + 0.2)
    assert seconds_of([0, 0, 0, 2], COSTS) == pytest.approx(1.5 + 0.2)
    assert seconds_of([3, 3, 3, 3], COSTS) == pytest.approx(4.0 + 0.3)


def test_a_request_alone_drafts_and_a_crowd_does_not() -> None:
    rule = SmartSpecRule(lambda text: PROFILE, 3)
    question = DraftHistory((), 10, 9)
    assert rule.decide({0: question}, 1)[0] == 3
    assert rule.decide(dict.fromkeys(range(4), question), 4) == dict.fromkeys(range(4), 0)
    assert rule.decide({0: question}, 4) == {0: 0}  # the three others do not ask at this moment


def test_a_batch_has_one_length_where_each_request_would_have_its_own() -> None:
    """One request is drafted well, the other badly. Per request the bad one drafts nothing."""
    profile = BatchProfile(MeasuredRounds({2: [1.0, 1.2, 1.8]}, {2: 0.1}), [0.8, 0.6])
    questions = {0: DraftHistory((), 96, 92), 1: DraftHistory((), 96, 7)}  # rates near 0.9 and 0.1
    rule = {per: SmartSpecRule(lambda texts: profile, 2, per) for per in ("request", "batch")}
    assert rule["request"].decide(questions, 2) == {0: 2, 1: 0}
    assert rule["batch"].decide(questions, 2) == {0: 1, 1: 1}


def test_a_request_that_is_drafted_badly_stops_and_tries_again_later() -> None:
    draft = TableModel(1, 3, positions=200).session()
    drafter = SmartSpecDrafter(Request(draft, [draft]), 3, "x", lambda: None)  # type: ignore[arg-type,return-value]
    empty, failed = TokenTree(), TokenTree.chain([1, 2, 0])
    for tree, verdict in (
        (failed, Verdict((), 2, (0,))),
        *[(empty, Verdict((), 2))] * TRIAL_ROUNDS,
    ):
        assert drafter.tested == (tree is empty)
        drafter.observe(Round(tree, None, verdict, (2,), ()))  # type: ignore[arg-type]
    assert (drafter.tested, drafter.accepted) == (0, 0)


@pytest.mark.parametrize("per", ["request", "batch"])
@pytest.mark.slow
def test_a_batch_writes_what_plain_decoding_writes(per: str) -> None:
    plain = texts_of(decode_batch("autoregressive")[0])
    assert texts_of(decode_batch("smartspec", per=per)[0]) == plain
