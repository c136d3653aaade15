"""BASS: a ragged batch with one draft length."""

from functools import partial

from tests.speculative.batches import DRAFT, TARGET, decode_batch, texts_of, verified_of
from tinyspec.generation import start_generation
from tinyspec.laws.traps import bass as traps
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.speculative.integrated.bass import BassRule, next_length


def test_trap_the_length_follows_what_each_request_accepted() -> None:
    assert traps.length_follows_the_batch(BassRule).cases == 60


def test_the_length_rises_by_two_when_one_request_accepts_all() -> None:
    assert next_length(7, [0, 7, 1], False, 32) == (9, False)
    assert next_length(31, [31], True, 32) == (32, False)


def test_the_length_falls_by_a_tenth_and_faster_the_second_time() -> None:
    assert next_length(20, [3], False, 32) == (18, True)
    assert next_length(18, [3], True, 32) == (15, True)


def test_the_length_never_falls_below_what_was_accepted_nor_below_one() -> None:
    assert next_length(7, [0, 6], False, 32) == (6, True)
    assert next_length(7, [6, 6], True, 32) == (6, True)
    assert next_length(2, [0], True, 32) == (1, True)


def test_a_draft_that_was_cut_short_says_nothing() -> None:
    rule = BassRule(7, 32)
    assert rule.decide({0: None, 1: None}, 2) == {0: 7, 1: 7}
    assert rule.decide({0: None, 1: 7}, 2) == {0: 9, 1: 9}
    assert rule.decide({0: None}, 1) == {0: 9}


def test_the_length_changes_when_every_request_that_decodes_has_asked() -> None:
    rule = BassRule(7, 32)
    assert rule.decide({0: 7}, 2) == {0: 7}
    assert rule.decide({1: 2}, 2) == {1: 9}
    assert rule.decide({0: 1}, 1) == {0: 8}  # the other one has ended


def test_a_round_is_over_when_a_request_asks_again() -> None:
    """Two requests decode, and one of them with a method that never asks."""
    rule = BassRule(7, 32)
    assert rule.decide({0: None}, 2) == {0: 7}
    assert rule.decide({0: 7}, 2) == {0: 9}
    assert rule.decide({0: 9}, 2) == {0: 11}
    assert rule.decide({0: 1}, 2) == {0: 9}
    assert rule.decide({0: 1}, 2) == {0: 7}, "the second fall is faster"


def test_two_that_ask_beside_one_that_does_not_have_one_length() -> None:
    rule = BassRule(7, 32)
    assert rule.decide({0: None, 1: None}, 3) == {0: 7, 1: 7}
    assert rule.decide({0: 7, 1: 2}, 3) == {0: 9, 1: 9}
    assert rule.decide({0: 2, 1: 3}, 3) == {0: 8, 1: 8}


def test_the_length_moves_beside_a_request_that_decodes_plainly() -> None:
    """The text stays that of plain decoding."""

    def decode(method: str, scheduler: Scheduler) -> tuple[list[int], list[int]]:
        running = start_generation(
            TARGET, [1, 2], method=method, draft=DRAFT, max_new_tokens=30, scheduler=scheduler
        )
        lengths = [len(round.tree.tokens) for round in running]
        return running.result().tokens, lengths

    jobs = [partial(decode, "bass"), partial(decode, "autoregressive")]
    (text, lengths), (plain, _) = run_together(jobs)
    assert text == plain
    assert len(set(lengths[:-1])) > 2, lengths


def test_the_drafts_of_a_round_have_one_length_and_each_request_keeps_what_it_accepted() -> None:
    prompts = [[1, 2], [4, 3], [5, 6], [3, 3]]
    rounds, log = decode_batch("bass", prompts, n=30, first=3, limit=6)
    together = [rows for rows in verified_of(log) if len(rows) == 4]
    assert len(together) > 3
    assert all(len(set(rows)) == 1 for rows in together[:-2])  # the last of a text is shorter
    accepted = [[len(one.verdict.accepted) for one in own] for own in rounds]
    assert len({sum(own) for own in accepted}) > 1  # ragged
    assert texts_of(rounds) == texts_of(decode_batch("autoregressive", prompts, n=30)[0])
