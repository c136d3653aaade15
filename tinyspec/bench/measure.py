"""Time the arms: in each turn of each round every arm does the same job, in a changing order.

Machines are shared and noisy. Arms that are timed one after the other meet different loads. Here
all arms do a job within one turn, another arm goes first in every turn, and ratios are taken within
a turn (`tally.py`). The clock is a parameter, so that tests need no wall time.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinyspec.bench.arms import Arm, Clock, check_token_balance, collect_garbage
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.tasks import Job

T = TypeVar("T")
WARM_SEED = 1 << 30  # no round has this seed, so no round remembers the warm-up
WARM_UP = 8  # tokens that every arm writes untimed: first calls fill caches and thread pools


def order_of_turn(arms: Sequence[T], turn: int) -> list[T]:
    """Return the arms in the order of a turn: rotated by one each turn, reversed each rotation.

    >>> ["".join(order_of_turn("abc", turn)) for turn in range(6)]
    ['abc', 'bca', 'cab', 'cba', 'acb', 'bac']
    """
    at = turn % len(arms)
    order = [*arms[at:], *arms[:at]]
    return order if turn // len(arms) % 2 == 0 else order[::-1]


def count_left(book: SampleBook, jobs: Sequence[Job], arms: Sequence[Arm]) -> int:
    """Return how many requests are still to be timed."""
    labels = [arm.label for arm in arms]
    turns = ((job, round) for round in range(book.settings.rounds) for job in jobs)
    return len(arms) * sum(not book.has_turn(job, round, labels) for job, round in turns)


def warm_up_arms(arms: Sequence[Arm], job: Job, clock: Clock) -> None:
    """Let every arm write some tokens that are not counted."""
    for arm in arms:
        arm.run(job._replace(tokens=min(job.tokens, WARM_UP)), WARM_SEED, clock)


def run_turns(
    book: SampleBook,
    jobs: Sequence[Job],
    arms: Sequence[Arm],
    clock: Clock,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Do every turn that the book does not have yet, and save the book after each.

    Rounds are outermost, so an interrupted run leaves a whole measurement of fewer rounds. A
    technique that remembers the requests of its round answers those of an earlier process again,
    untimed.
    """
    labels, greedy = [arm.label for arm in arms], book.settings.temperature == 0
    for round in range(book.settings.rounds):
        before = list[Job]()  # turns of an earlier process
        for number, job in enumerate(jobs):
            if book.has_turn(job, round, labels):
                before.append(job)
                continue
            for arm in (arm for arm in arms if getattr(arm, "persistent", False)):
                for earlier in before:
                    arm.run(earlier, book.settings.seed + round, clock)
            before.clear()
            done: dict[str, Sample] = {}
            for arm in order_of_turn(arms, round * len(jobs) + number):
                done[arm.label] = _time_request(arm, job, round, book, clock, greedy)
                tick()
            book.add_turn([done[label] for label in labels])
            book.save()


def _time_request(
    arm: Arm, job: Job, round: int, book: SampleBook, clock: Clock, greedy: bool
) -> Sample:
    collect_garbage()
    made = arm.run(job, book.settings.seed + round, clock)
    check_token_balance(made, job, arm.label)
    same = count_agreeing(made.ids, book.references[job.key]) if greedy else None
    counts = {name: value for name, value in made._asdict().items() if name in Sample._fields}
    tokens = len(made.ids)
    return Sample(
        job.task,
        job.prompt,
        job.turn,
        arm.label,
        round,
        tokens=tokens,
        timed=tokens - made.early,
        read=len(job.ids) - (made.early == 0),  # the last one is read with the first new token
        same=same,
        **counts,
    )


def count_agreeing(ids: Sequence[int], reference: Sequence[int]) -> int:
    """Return how many ids at the front equal the reference's. The reference may be longer.

    >>> count_agreeing([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(ids, reference, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(reference)))
