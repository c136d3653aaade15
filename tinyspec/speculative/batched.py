"""Draft lengths that the requests of a batch decide together.

A pass over many rows costs more than a pass over few. So the best length of a draft depends on how
many other requests share the pass. Before each draft every request asks a `BatchRule`. The rule
answers when all requests of the scheduler wait: it sees all that ask at one moment, and a schedule
does not depend on which thread is faster. A request without a scheduler is a batch of one.

Any rule is exact whose answer does not depend on the tokens that are drawn: it may be asked before
the draft, or after it about what was known before each token (TETRIS).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.policies import TimedPolicy
from tinyspec.lm.scheduler import BatchRule, Scheduler, run_together
from tinyspec.lm.session import Session
from tinyspec.speculative.drafting.planner import NewRequests, profile_draft
from tinyspec.technique import Clock, Request
from tinyspec.tree import TokenTree

MakeRule = Callable[[], BatchRule]


class BatchDrafter(ModelDrafter):
    """Sample a chain from a draft model. The batch decides how long it is.

    longest    most tokens of a draft
    rule_name  those who ask under one name ask the same rule
    context    the text so far
    """

    context: Sequence[int] = ()

    def __init__(self, request: Request, longest: int, rule_name: Any, make_rule: MakeRule):
        super().__init__(request.drafts[0], longest, request.stop.eos, request.draft_max_length)
        self.longest, self.rule_name, self.make_rule = longest, rule_name, make_rule
        self.scheduler, self.override = request.scheduler, request.choose
        self._own_rule: BatchRule | None = None

    def question(self) -> Any:
        """Return what the rule is told about this request."""
        raise NotImplementedError

    def ask(self, question: Any) -> int:
        """Return the rule's answer, at most `longest`."""
        if self.scheduler is not None:
            answer: int = self.scheduler.consult(self.rule_name, self.make_rule, question)
        else:
            self._own_rule = self._own_rule or self.make_rule()
            answer = self._own_rule.decide({0: question}, 1)[0]
        return min(answer, self.longest)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.context = context
        if self.override is None:
            self.gamma = self.ask(self.question())
        else:
            self.gamma = self.override(self.longest + 1, rng)
        return super().propose(context, max_draft_depth, sampling, rng)


# ---------------------------------------------------------------------- measurements

SIZES = (1, 2, 4, 8, 16)  # batch sizes that are measured
REPEATS = 4  # passes of each length: the fastest counts, as a disturbance only makes it slower
SAMPLED_TOKENS = 192  # of all texts together, on which acceptance is measured


class BatchProfile(NamedTuple):
    """What was measured of a target and its draft model, before requests are served.

    verify  [longest + 1] seconds of a target pass over 0, 1, ... draft tokens of each request, by
            the number of requests
    step    seconds of a draft step of so many requests
    reach   [longest] share of rounds in which at least 1, 2, ... draft tokens were accepted
    """

    verify: Mapping[int, Sequence[float]]
    step: Mapping[int, float]
    reach: Sequence[float]

    @property
    def sizes(self) -> list[int]:
        """Return the batch sizes that were measured."""
        return sorted(self.verify)

    def nearest(self, n_requests: int) -> int:
        """Return the measured size that is nearest; of two, the smaller one."""
        return min(self.sizes, key=lambda size: (abs(size - n_requests), size))


def measure_rounds(
    model: Model, text: Sequence[int], size: int, longest: int, clock: Clock
) -> list[float]:
    """Return the least seconds of a round of `size` requests, over 0, 1, ... draft tokens each.

    It lasts from one shared forward pass to the next one: what the requests do between them counts.
    """
    policy = TimedPolicy(clock)
    lengths = [n for _ in range(REPEATS) for n in range(longest + 1)]
    text = text[-(model.config.max_positions - len(lengths) - longest - 2) :]

    def job(scheduler: Scheduler) -> None:
        session = model.session(scheduler=scheduler)
        session.extend(text)
        for n in (0, *lengths, 0):  # the last one shows when the one before it has ended
            session.score(TokenTree.chain([0] * n))
            session.commit((), 1)  # it was not drafted, so it is computed in the next round

    run_together([job] * size, Scheduler(policy))
    seconds: list[list[float]] = [[] for _ in range(longest + 1)]
    for n, (start, end) in zip(lengths, pairwise(policy.times[-len(lengths) - 1 :]), strict=True):
        seconds[n].append(end - start)
    return [min(found) for found in seconds]


def measure_batches(
    target: Model, draft: Model, requests: NewRequests, longest: int, clock: Clock
) -> BatchProfile:
    """Measure a pair of models. `requests` are of both, with prompts, on sessions of their own."""
    text = next(iter(requests()))[1]
    verify = {size: measure_rounds(target, text, size, longest, clock) for size in SIZES}
    step = {size: measure_rounds(draft, text, size, 0, clock)[0] for size in SIZES}
    reach = profile_draft(draft.name, requests, longest, clock).reach
    return BatchProfile(verify, step, reach)


_profiles: WeakKeyDictionary[Model, WeakKeyDictionary[Model, BatchProfile]] = WeakKeyDictionary()


def read_models(request: Request) -> tuple[Model, Model]:
    """Return the target and the draft model of a request. Raises TinyspecError if it has tables."""
    sessions = request.target, request.drafts[0]
    if not all(isinstance(one, Session) for one in sessions):
        raise TinyspecError(
            "the draft length of a batch follows from measured times, and only a transformer has "
            "them: use speculative_decoding"
        )
    target, draft = (cast(Model, cast(Session, one).model) for one in sessions)
    return target, draft


def find_profile(
    target: Model,
    draft: Model,
    sampling: SamplingParams,
    prompts: Sequence[Sequence[int]],
    longest: int,
) -> BatchProfile:
    """Return the profile of a pair of models. It is measured once for each pair, on these prompts.

    Nothing else may run meanwhile: a rule asks for it when all requests wait. Lengths that do not
    fit into the contexts are not measured.
    """
    limits = [one.config.max_positions for one in (target, draft)]
    longest = min(longest, (min(limits) - REPEATS - 3) // (REPEATS + 1))
    if longest < 1:
        raise TinyspecError(
            f"a context of {min(limits)} is too short to measure drafts: use speculative_decoding"
        )
    tokens = min(max(SAMPLED_TOKENS // len(prompts), 2 * longest), min(limits) // 2)
    known = _profiles.setdefault(target, WeakKeyDictionary())
    if draft not in known or len(known[draft].reach) < longest:

        def new_requests() -> Iterator[tuple[Request, Sequence[int]]]:
            for prompt in prompts:
                log: list[ForwardRecord] = []
                yield (
                    Request(
                        target.session(log),
                        [draft.session(log)],
                        sampling,
                        StoppingCriteria(max_new_tokens=tokens),
                        positions=limits[0],
                        draft_max_lengths=limits[1:],
                        forward_log=log,
                    ),
                    prompt[tokens - min(limits) :],
                )

        known[draft] = measure_batches(target, draft, new_requests, longest, perf_counter)
    return known[draft]
