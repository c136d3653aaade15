"""Draft lengths that the requests of a batch decide together.

A pass over many rows costs more than a pass over few. So the best length of a draft depends on how
many other requests share the pass. Before each draft every request asks a `BatchRule`. The rule
answers when all requests of the scheduler wait: it sees all that ask at one moment, and a schedule
does not depend on which thread is faster. A request without a scheduler is a batch of one.

A rule is exact if its answer about a token depends neither on that token nor on later ones. So it
may be asked before the draft is drawn. Or it is asked after, and is told only what was known before
each token was drawn (TETRIS).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from tinyspec.decoding.costs import CostModel, ForecastRounds, MeasuredRounds, RowCosts
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.policies import LockstepPolicy, Pending
from tinyspec.lm.scheduler import BatchRule, Scheduler, run_together
from tinyspec.lm.session import Session
from tinyspec.speculative.drafting.planner import profile_draft, start_decoder
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
ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows of the passes that are measured
REPEATS = 4  # rounds of each length: the fastest counts, as a disturbance only makes it slower
SAMPLED_TOKENS = 192  # of all texts together, on which acceptance is measured

MakeRequest = Callable[[int, Scheduler | None], tuple[Request, Sequence[int]]]
"""Number, scheduler -> a request of a target and a draft model, and its prompt."""


class BatchProfile(NamedTuple):
    """What was measured of a target and its draft model, while the requests that asked first wait.

    costs  of rounds in batches of several sizes
    reach  [longest] share of rounds in which at least 1, 2, ... draft tokens were accepted
    """

    costs: MeasuredRounds
    reach: Sequence[float]


class DraftsFirst(LockstepPolicy):
    """Hold rounds while a prompt is read, and passes of the target while a draft is made.

    So all requests begin each round together.
    """

    def __init__(self, draft: str):
        self.draft = draft

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        prompts = [one for one in waiting if one.is_prefill]
        drafts = [one for one in waiting if one.model == self.draft]
        return super().pick(prompts or drafts or waiting)


class LengthsInTurn(ModelDrafter):
    """Draft 0, 1, ... tokens in turn.

    begun    when each round began
    drafted  when its draft was made
    """

    def __init__(self, request: Request, longest: int, clock: Clock):
        super().__init__(request.drafts[0], longest, request.stop.eos, request.draft_max_length)
        self.longest, self.clock = longest, clock
        self.begun, self.drafted = list[float](), list[float]()

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.gamma = len(self.begun) % (self.longest + 1)
        self.begun.append(self.clock())
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.drafted.append(self.clock())
        return tree


def count_measured_tokens(longest: int) -> int:
    """Return the most tokens that a request writes while rounds are measured.

    >>> count_measured_tokens(1)  # rounds over 0 and 1 draft tokens, and one at the end
    13
    """
    return REPEATS * (longest + 1) * (longest + 2) // 2 + 1


def measure_rounds(
    draft: str, make_request: MakeRequest, size: int, longest: int, clock: Clock
) -> tuple[list[float], float]:
    """Measure `size` requests that decode together. Returns `verify` and `step` of this size.

    draft  name of the draft model

    All that a round does counts: passes, sampling, and the threads that take turns.
    """
    drafters = dict[int, LengthsInTurn]()

    def decode(number: int, scheduler: Scheduler) -> None:
        request, prompt = make_request(number, scheduler)
        drafters[number] = LengthsInTurn(request, longest, clock)
        decoder = start_decoder(request.decoder(drafters[number], verify_tree), prompt)
        for _ in range(REPEATS * (longest + 1) + 1):
            decoder.step(Seeded(number))
        decoder.end()

    jobs = [partial(decode, number) for number in range(size)]
    run_together(jobs, Scheduler(DraftsFirst(draft)))
    begun, drafted = drafters[0].begun, drafters[0].drafted
    verify = [end - made for made, end in zip(drafted, begun[1:], strict=False)]
    drafts = [made - start for start, made in zip(begun, drafted, strict=True)]
    lengths = range(longest + 1)
    least = [min(verify[n :: longest + 1]) for n in lengths]
    return least, min(min(drafts[n :: longest + 1]) / n for n in lengths[1:])


def measure_batches(
    draft: str, make_request: MakeRequest, n_texts: int, longest: int, clock: Clock
) -> BatchProfile:
    """Measure a pair of models. Requests number 0 to n_texts - 1 have texts of their own.

    draft  name of the draft model
    """

    def list_requests() -> Iterator[tuple[Request, Sequence[int]]]:
        return (make_request(number, None) for number in range(n_texts))

    found = {size: measure_rounds(draft, make_request, size, longest, clock) for size in SIZES}
    verify = {size: one[0] for size, one in found.items()}
    step = {size: one[1] for size, one in found.items()}
    reach = profile_draft(draft, list_requests, longest, clock).reach
    return BatchProfile(MeasuredRounds(verify, step), reach)


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
    fits = [n for n in range(1, longest + 1) if count_measured_tokens(n) < min(limits)]
    if not fits:
        raise TinyspecError(
            f"a context of {min(limits)} is too short to measure drafts: use speculative_decoding"
        )
    longest = fits[-1]
    share = max(SAMPLED_TOKENS // len(prompts), 2 * longest)

    def make_request(number: int, scheduler: Scheduler | None) -> tuple[Request, Sequence[int]]:
        tokens = min(
            share if scheduler is None else count_measured_tokens(longest), min(limits) - 1
        )
        log: list[ForwardRecord] = []
        request = Request(
            target.session(log, scheduler),
            [draft.session(log, scheduler)],
            sampling,
            StoppingCriteria(max_new_tokens=tokens),
            positions=limits[0],
            draft_max_lengths=limits[1:],
            forward_log=log,
            scheduler=scheduler,
        )
        return request, prompts[number % len(prompts)][tokens - min(limits) :]

    known = _profiles.setdefault(target, WeakKeyDictionary())
    if draft not in known or len(known[draft].reach) < longest:
        n_texts = len(prompts)
        known[draft] = measure_batches(draft.name, make_request, n_texts, longest, perf_counter)
    return known[draft]


# ---------------------------------------------------------------------- passes alone


class BatchTimes(NamedTuple):
    """What a request of a batch plans by.

    n_decoding  requests that share a pass
    costs       of their rounds
    """

    n_decoding: int
    costs: CostModel


class TimesRule:
    """Tell every request how many decode, and what rounds take.

    models  the target, then the draft model if there is one
    """

    def __init__(self, models: Sequence[Model], clock: Clock):
        self.models, self.clock = models, clock

    def decide(self, questions: Mapping[int, Any], n_decoding: int) -> Mapping[int, BatchTimes]:
        """Measure the models first, if nobody has. All requests wait meanwhile."""
        target, *drafts = (
            RowCosts(one.name, find_row_seconds(one, self.clock)) for one in self.models
        )
        costs = ForecastRounds(target, drafts[0] if drafts else 0.0)
        return dict.fromkeys(questions, BatchTimes(n_decoding, costs))


_row_seconds: WeakKeyDictionary[Model, dict[int, float]] = WeakKeyDictionary()


def find_row_seconds(model: Model, clock: Clock) -> dict[int, float]:
    """Return the seconds of a pass by its rows, measured once for each model.

    The rows are those of one text. The fastest of several passes counts. No size is faster than a
    smaller one.
    """
    if model not in _row_seconds:
        found, most = dict[int, float](), 0.0
        for rows in ROWS:
            if rows > model.config.max_positions:
                break
            chain = TokenTree.chain([0] * (rows - 1))
            most = max(most, min(_time_pass(model, chain, clock) for _ in range(REPEATS)))
            found[rows] = most
        _row_seconds[model] = found
    return _row_seconds[model]


def _time_pass(model: Model, tree: TokenTree, clock: Clock) -> float:
    session = model.session()
    session.append([0])
    began = clock()
    session.score(tree)
    return clock() - began
