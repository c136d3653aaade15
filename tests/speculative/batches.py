"""Small batches of requests on a small transformer and its draft model."""

from collections.abc import Sequence
from typing import Any

from tests.lm.small import GPT2, LLAMA, model
from tinyspec.decoding.decode import Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.lm.policies import AlignedPolicy
from tinyspec.lm.scheduler import Scheduler, SharedPass, run_together
from tinyspec.technique import Clock, Request, find_technique

TARGET, DRAFT = model(LLAMA, 0), model(GPT2, 1)
TARGET.name, DRAFT.name = "target", "draft"
PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8], [3, 3])


def decode_batch(
    method: str,
    prompts: Sequence[list[int]] = PROMPTS,
    n: int = 12,
    temperature: float = 0.0,
    references: Sequence[list[int]] = (),
    batch_clock: Clock | None = None,
    **knobs: Any,
) -> tuple[list[list[Round]], list[SharedPass]]:
    """Return the rounds of each request, and the pass log."""

    def decode(number: int, scheduler: Scheduler) -> list[Round]:
        log: list[Any] = []
        request = Request(
            target=TARGET.session(log, scheduler),
            drafts=[DRAFT.session(log, scheduler)],
            sampling=SamplingParams(temperature),
            stop=StoppingCriteria(max_new_tokens=n),
            forward_log=log,
            scheduler=scheduler,
            references=references,
            batch_clock=batch_clock,
        )
        decoder = find_technique(method).make(request, **knobs)
        decoder.extend(prompts[number])
        return list(decoder.run(Seeded(number)))

    scheduler = Scheduler(AlignedPolicy())
    jobs = [lambda s, number=number: decode(number, s) for number in range(len(prompts))]
    return run_together(jobs, scheduler), list(scheduler.pass_log)


def texts_of(rounds: Sequence[Sequence[Round]]) -> list[list[int]]:
    """Return the new tokens of each request."""
    return [[token for round in own for token in round.tokens] for own in rounds]


def verified_of(log: Sequence[SharedPass]) -> list[tuple[int, ...]]:
    """Return how many draft tokens of each request the target verified, by pass."""
    passes = [one for one in log if one.model == "target" and not any(one.prefill)]
    return [tuple(rows - 1 for rows in one.rows) for one in passes]
