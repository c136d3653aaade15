"""The run itself: rounds of turns, in each of which every arm does the same job, in an order that
moves on.

Machines are shared and noisy. Arms that are timed one after the other compare two moods of the
machine; here all arms do a job within one turn, who goes first changes with every turn, and ratios
are taken within a turn (`tally.py`). The clock is handed in, so that the tests of all this need no
wall time.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinyspec.bench.arms import Arm, Clock, check_token_balance, collect_garbage
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.tasks import Job

T = TypeVar("T")
WARM_SEED = 1 << 30  # no round's: what is remembered of a round is not remembered of the warm-up
WARM_UP = 8  # tokens that every arm makes before any is timed: first calls pay for caches and thread pools


def order_of_turn(arms: Sequence[T], turn: int) -> list[T]:
    """The arms in the order of a turn: rotated by one each turn, and the other way round after
    every full rotation.

    >>> ["".join(order_of_turn("abc", turn)) for turn in range(6)]
    ['abc', 'bca', 'cab', 'cba', 'acb', 'bac']
    """
    at = turn % len(arms)
    order = [*arms[at:], *arms[:at]]
    return order if turn // len(arms) % 2 == 0 else order[::-1]


def count_left(book: SampleBook, jobs: Sequence[Job], arms: Sequence[Arm]) -> int:
    """How many requests are still to be timed."""
    labels = [arm.label for arm in arms]
    turns = ((job, round) for round in range(book.settings.rounds) for job in jobs)
    return len(arms) * sum(not book.has(job, round, labels) for job, round in turns)


def warm_up_arms(arms: Sequence[Arm], job: Job, clock: Clock) -> None:
    """Let every arm make some tokens that are not counted."""
    for arm in arms:
        arm.run(job._replace(tokens=min(job.tokens, WARM_UP)), WARM_SEED, clock)


def run_turns(
    book: SampleBook,
    jobs: Sequence[Job],
    arms: Sequence[Arm],
    clock: Clock,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Do every turn that the book does not have yet, and save the book after each. Rounds are
    outermost, so that what an interrupted run leaves is a whole measurement of fewer rounds."""
    labels, greedy = [arm.label for arm in arms], book.settings.temperature == 0
    for round in range(book.settings.rounds):
        for number, job in enumerate(jobs):
            if book.has(job, round, labels):
                continue
            done: dict[str, Sample] = {}
            for arm in order_of_turn(arms, round * len(jobs) + number):
                done[arm.label] = _time_request(arm, job, round, book, clock, greedy)
                tick()
            book.add([done[label] for label in labels])
            book.save()


def _time_request(
    arm: Arm, job: Job, round: int, book: SampleBook, clock: Clock, greedy: bool
) -> Sample:
    collect_garbage()
    made = arm.run(job, book.settings.seed + round, clock)
    check_token_balance(made, job, arm.label)
    same = count_agreeing(made.ids, book.references[job.key]) if greedy else None
    return Sample(
        job.task, job.prompt, job.turn, arm.label, round, made.prefill, made.decode, len(made.ids),
        len(made.ids) - made.early, made.calls, made.draft_calls, made.nodes, made.accepted, made.silent,
        made.truncated, made.row_layers, same, made.stopped, made.state, made.held,
    )  # fmt: skip


def count_agreeing(ids: Sequence[int], reference: Sequence[int]) -> int:
    """How many ids at the front are the reference's. The reference may be longer.

    >>> count_agreeing([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(ids, reference, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(reference)))
