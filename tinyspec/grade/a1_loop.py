"""Laws of `generate` of assignment A1: the whole loop, on every outcome of its random decisions.

The joint distribution must be that of plain decoding, which `laws.exact.joint` calculates from the
target's rows. A cache that is left dirty can hide from it: a draft that reads rejected tokens is
only a worse draft. So the sessions remember what was asked of them, and three more laws read that:
what stood in the caches, whether each token comes from a forward pass, and how often the target
ran.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.grade.a1_position import HALF, ONE, THIRD, ZERO, Knobs
from tinyspec.grade.a1_round import Text
from tinyspec.grade.props_a1 import Session, find_row
from tinyspec.grade.task import Cases, Function, Task, expect_close, graded_law, is_close, is_token
from tinyspec.laws.checking.cases import CheckCase, SmallModel, cases_of_kind, shrink_case
from tinyspec.laws.evidence import accuse
from tinyspec.laws.exact.joint import Reference, apply_warpers
from tinyspec.laws.exact.rational import Exact

STOPS = "the text ends after n tokens or at the end token, wherever in a block that is"
JOINT = "joint distribution: over all rounds, the text has the distribution of plain decoding"
CACHES = (
    "at every forward pass the cache holds what was accepted: nothing rejected, nothing read twice"
)
READ = (
    "tokens come from forward passes: the target reads all but the last, the draft what its tokens "
    "follow; n = 0 needs none"
)
CALLS = "one forward pass of the target a round, and rounds as long as the rule allows"

PLAIN: Knobs = (ONE, None, None)

# ---------------------------------------------------------------------- what generate is given


@dataclass(frozen=True)
class LoopInput:
    """What generate is given.

    The models' weights are the rows of a `CheckCase`, made whole numbers.
    """

    case: CheckCase
    prompt: Text = (0,)
    eos: int | None = None
    knobs: Knobs = PLAIN

    def session(self, name: str) -> Session:
        """Return a session of the model `p` or `q` that has read nothing."""
        return Session(self.weights[name], getattr(self.case, name).by)

    def row(self, name: str, text: Sequence[int]) -> list[Fraction]:
        """Return the weights that a model gives after a text."""
        return list(find_row(self.weights[name], getattr(self.case, name).by, text))

    @cached_property
    def weights(self) -> dict[str, list[list[Fraction]]]:
        """Return the rows of both models, each times the greatest of its denominators."""

        def to_whole(row: Exact) -> list[Fraction]:
            return [x * max(y.denominator for y in row) for x in row]

        return {name: list(map(to_whole, getattr(self.case, name).probs)) for name in "pq"}

    @cached_property
    def sampling(self) -> SamplingParams:
        """Return the settings as the library has them."""
        temperature, top_k, top_p = self.knobs
        return SamplingParams(float(temperature), top_k, top_p)

    def probs(self, name: str, text: Sequence[int]) -> list[Any]:
        """Return a model's distribution after a text, under the settings."""
        row = tuple(self.row(name, text))
        if row not in self.known_probs:
            self.known_probs[row] = apply_warpers(row, (), self.sampling)
        return self.known_probs[row]

    @cached_property
    def known_probs(self) -> dict[Any, list[Any]]:
        """Return the distributions that were calculated so far, by their weights."""
        return {}

    def is_ended(self, new: Text) -> bool:
        """Return whether a text of these new tokens has ended."""
        return len(new) >= self.case.tokens or (bool(new) and new[-1] == self.eos)

    def shown(self) -> dict[str, Any]:
        """Return it in the words of the hand-out."""
        names = ("temperature", "top_k", "top_p")
        return {
            "target": self._shown_weights("p"),
            "draft": self._shown_weights("q"),
            "prompt": list(self.prompt),
            "n": self.case.tokens,
            "gamma": self.case.gamma,
            "eos": self.eos,
            **(dict(zip(names, self.knobs, strict=True)) if self.knobs != PLAIN else {}),
        }

    def _shown_weights(self, name: str) -> dict[Any, list[Fraction]]:
        """Return the weights of a model after every text that matters here."""
        rows, by = self.weights[name], getattr(self.case, name).by
        first, n = len(self.prompt), self.case.tokens
        if by == "length":
            lengths = range(first, min(len(rows), first + n - 1) + 1)
            after = {f"after {k} token{'s' * (k > 1)}": rows[k - 1] for k in lengths}
            return after or {"after any text": rows[-1]}
        if by == "last":
            return {f"after token {token}": row for token, row in enumerate(rows)}
        new = (product(range(self.case.vocabulary), repeat=count) for count in range(n))
        texts = [(*self.prompt, *tokens) for several in new for tokens in several]
        return {text: self.row(name, text) for text in texts}


def draw_endings(cases: Cases) -> list[LoopInput]:
    """Return models that are sure of every next token: all small n, gamma, prompt and eos."""
    rng = random.Random(f"endings {cases.seed}")
    small = product(range(5), range(3), ((0,), (0, 1)), (None, 1))
    found = []
    for (n, gamma, prompt, eos), _ in product(small, range(8 * cases.times)):
        target = [rng.randrange(3) for _ in range(3)]  # what follows each token
        other = [rng.choice((token, 1, 2)) for token in target]
        draft = rng.choice((target, other, [1, 1, 1]))
        p, q = (SmallModel(sure_rows(following), "last") for following in (target, draft))
        found.append(LoopInput(CheckCase(p, q, gamma, n), prompt, eos))
    return sorted(found, key=lambda given: given.case.tokens + given.case.gamma + len(given.prompt))


def sure_rows(following: Sequence[int]) -> tuple[Exact, ...]:
    """Return the rows of a model in which `following[x]` follows token x."""
    return tuple(tuple(Fraction(x == token) for x in range(len(following))) for token in following)


def loop_inputs(cases: Cases) -> Iterator[LoopInput]:
    """Yield small models under all kinds of settings; a row per length first, then per text."""
    times, seed = cases.times, cases.seed
    warm: Knobs = (HALF, None, None)
    for vocabulary, gamma, n, whole, lengths, by, count, knobs, eos in (
        (2, 1, 2, 2, (2, 2), "length", 25, PLAIN, None),
        (2, 1, 2, 3, (2, 2), "length", 10, PLAIN, None),
        (2, 2, 3, 2, (3, 3), "length", 16, PLAIN, None),
        (2, 1, 2, 4, (2, 2), "length", 8, warm, None),
        (2, 1, 3, 3, (3, 3), "length", 6, PLAIN, 1),
        (2, 1, 4, 1, (4, 4), "length", 4, PLAIN, None),
        (3, 1, 2, 5, (2, 2), "length", 5, (ONE, 2, None), None),
        (3, 1, 2, 6, (2, 2), "length", 5, (ONE, None, Fraction(3, 4)), None),
        (3, 2, 3, 4, (3, 3), "length", 4, (ZERO, None, None), None),
        (2, 2, 3, 3, (7, 7), "text", 6, PLAIN, None),
        (2, 1, 4, 2, (7, 7), "text", 4, PLAIN, None),
        (2, 3, 4, 2, (4, 4), "length", 3, PLAIN, 1),
        (2, 2, 4, 2, (5, 5), "text", 3, (THIRD, 2, Fraction(9, 10)), 1),
        (3, 2, 3, 3, (7, 7), "text", 3, (HALF, 2, None), 2),
        (2, 2, 3, 5, (7, 7), "text", 10, PLAIN, None),
        (3, 2, 3, 6, (5, 5), "text", 3, PLAIN, 2),
    ):
        for case in cases_of_kind(vocabulary, gamma, n, whole, lengths, by, count * times, seed):
            yield LoopInput(case, (0,), eos, knobs)
            if by == "length" and lengths in ((3, 3), (4, 4)):
                yield LoopInput(replace(case, q=case.p), (0,), eos, knobs)
    for case in cases_of_kind(2, 2, 3, 3, (7, 7), "text", 2 * times, seed + 1):
        yield LoopInput(case, (1, 0), None, PLAIN)


# ---------------------------------------------------------------------- runs


class LoopRun(NamedTuple):
    """One way a run can go.

    new            the new tokens
    target, draft  the forward passes of both models: (cache before, tokens) each
    """

    new: Text
    target: tuple[tuple[Text, Text], ...]
    draft: tuple[tuple[Text, Text], ...]


def run_loop(generate: Function, given: LoopInput, law: str, rng: Exhaustive) -> LoopRun:
    """Run it on fresh sessions. The output must be a list of tokens, for the law STOPS at most n.

    Other laws look at the first n tokens of a longer text: to stop too late is one mistake, and
    costs once.
    """
    target, draft, case = given.session("p"), given.session("q"), given.case
    prompt, n = list(given.prompt), case.tokens
    new = generate(target, draft, prompt, n, case.gamma, given.eos, given.knobs, rng)
    if law != STOPS and isinstance(new, (list, tuple)):
        new = new[: case.tokens]
    fits = isinstance(new, (list, tuple)) and len(new) <= case.tokens
    if not fits or not all(is_token(token, case.vocabulary) for token in new):
        most = f"{case.tokens} token{'s' * (case.tokens != 1)}"
        expected = f"a list of at most {most} from 0 to {case.vocabulary - 1}"
        accuse(STOPS, expected, new, **given.shown())
    return LoopRun(tuple(new), forward_passes(target), forward_passes(draft))


def forward_passes(session: Session) -> tuple[tuple[Text, Text], ...]:
    """Return what a session was asked to read: (cache before, tokens) each."""
    asked = [(before, tokens) for what, before, tokens in session.trace if what == "score"]
    return tuple((tuple(before), tuple(tokens)) for before, tokens in asked)


def run_distribution(generate: Function, given: LoopInput, law: str) -> dict[LoopRun, Any]:
    """Return the probability of each way a run can go."""
    return Exhaustive.distribution(partial(run_loop, generate, given, law))


# ---------------------------------------------------------------------- the laws


@graded_law(6, STOPS)
def text_ends_where_it_should(generate: Function, cases: Cases) -> Iterator[bool]:
    """Check that a target that is sure of what follows is obeyed, whatever the draft proposes."""
    for given in draw_endings(cases):
        expected: Text = ()
        while not given.is_ended(expected):
            expected = (*expected, given.probs("p", (*given.prompt, *expected)).index(1))
        for run in run_distribution(generate, given, STOPS):
            if run.new != expected:
                accuse(STOPS, list(expected), list(run.new), **given.shown())
        yield True


def plain_decoding(given: LoopInput) -> dict[Text, Any]:
    """Return the distribution of the text under plain decoding."""
    stop = StoppingCriteria(eos=frozenset(() if given.eos is None else (given.eos,)))
    reference = Reference(partial(given.row, "p"), given.sampling, stop)
    return dict(reference.distribution(given.case.tokens, given.prompt))


@graded_law(9, JOINT)
def loop_has_the_joint_distribution(generate: Function, cases: Cases) -> Iterator[bool]:
    """Check that every text has its probability under plain decoding with the same settings."""

    def texts_of(given: LoopInput) -> dict[Text, Any]:
        texts: dict[Text, Any] = {}
        for run, mass in run_distribution(generate, given, JOINT).items():
            texts[run.new] = texts.get(run.new, 0) + mass
        return texts

    def is_broken(given: LoopInput) -> bool:
        return not is_close(plain_decoding(given), texts_of(given))

    for given in loop_inputs(cases):
        if is_broken(given):

            def is_still_broken(case: CheckCase, given: LoopInput = given) -> bool:
                return is_broken(replace(given, case=case))

            found = replace(given, case=shrink_case(given.case, is_still_broken))
            accuse(JOINT, plain_decoding(found), texts_of(found), **found.shown())
        yield True


def common_length(one: Text, other: Text) -> int:
    """Return how many tokens two texts have in common, from the first on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_caches(given: LoopInput, run: LoopRun) -> None:
    """Accuse the first forward pass whose cache holds something else than it should.

    The target has to have read what was accepted of its last block. The draft has to have read what
    the target is about to verify.
    """
    text: Text = (*given.prompt, *run.new)

    def blame(model: str, tokens: Text, compared: str, expected: Any, got: Text) -> None:
        call = f"{model}.score({list(tokens)})"
        shown = {"text in the end": list(text), "call": call, "compared": compared}
        accuse(CACHES, expected, list(got), **given.shown(), **shown)

    before_pass = "its cache before the forward pass"
    after: Text = ()
    for before, tokens in run.target:
        wanted = after[: common_length(after, text)]
        if before != wanted:
            blame("target", tokens, before_pass, list(wanted), before)
        after = (*before, *tokens)
    verified, after = [(*before, *tokens) for before, tokens in run.target], ()
    for before, tokens in run.draft:
        read = (*before, *tokens)
        while verified and verified[0][: len(read)] != read:
            verified.pop(0)
        if not verified:
            expected = "a beginning of a text that the target reads later"
            blame("draft", tokens, "what it has read after the forward pass", expected, read)
        wanted = after[: common_length(after, verified[0])]
        if before != wanted:
            blame("draft", tokens, before_pass, list(wanted), before)
        after = read


@graded_law(6, CACHES)
def caches_are_clean(generate: Function, cases: Cases) -> Iterator[bool]:
    """Check the caches at every forward pass. Only cases count in which the draft ran."""
    for given in loop_inputs(cases):
        runs = run_distribution(generate, given, CACHES)
        for run in runs:
            check_caches(given, run)
        yield any(run.draft for run in runs)


def check_tokens_read(given: LoopInput, run: LoopRun) -> None:
    """Accuse the first token that came without the forward pass that it needs.

    A target that read all of the text but its last token was asked about every token. What it
    reads beyond the text that is known by then was drafted, after tokens that the draft has read.
    """
    text: Text = (*given.prompt, *run.new)

    def blame(compared: str, expected: Any, got: Any) -> None:
        shown = {"text in the end": list(text), "compared": compared}
        accuse(READ, expected, got, **given.shown(), **shown)

    def require_read(passes: Sequence[Text], wanted: Text, compared: str) -> None:
        best: Text = max(passes, key=lambda read: common_length(read, wanted), default=())
        if not passes or common_length(best, wanted) < len(wanted) - 1:
            blame(compared, list(wanted[:-1]), list(best))

    target: list[Text] = [(*before, *tokens) for before, tokens in run.target]
    draft: list[Text] = [(*before, *tokens) for before, tokens in run.draft]
    if given.case.tokens == 0:
        calls = [f"target.score({list(read)})" for read in target]
        calls += [f"draft.score({list(read)})" for read in draft]
        if calls:
            blame("the forward passes", "none", calls)
        return
    require_read(target, text, "what the target has read of the text in the end")
    known = len(given.prompt)
    for read in target:
        if len(read) > known + given.case.gamma:
            what = f"how many tokens after {list(read[:known])}"
            compared = f"{what} the target reads in one forward pass"
            blame(compared, f"at most {given.case.gamma}", len(read) - known)
        if len(read) > known:
            require_read(draft, read, f"what the draft has read before it drafts {read[-1]}")
        known = common_length(read, text) + 1


@graded_law(3, READ)
def tokens_come_from_forward_passes(generate: Function, cases: Cases) -> Iterator[bool]:
    """Check that no token comes unasked, and that n = 0 runs no model.

    Only cases count in which the draft ran.
    """
    for given in (*draw_endings(cases), *loop_inputs(cases)):
        runs = run_distribution(generate, given, READ)
        for run in runs:
            check_tokens_read(given, run)
        yield any(run.draft for run in runs)


def needed_passes(given: LoopInput) -> Any:
    """Return how many forward passes of the target the rule needs on average.

    With mass min(p, q), on which both distributions agree, the round goes on.
    """
    n, gamma = given.case.tokens, given.case.gamma

    def from_new_round(new: Text) -> Any:
        return 0 if given.is_ended(new) else 1 + in_round(new, min(gamma, n - len(new) - 1))

    def in_round(new: Text, drafts_left: int) -> Any:
        p, q = (given.probs(name, (*given.prompt, *new)) for name in "pq")
        average: Any = 0
        for token, (a, b) in enumerate(zip(p, q, strict=True)):
            longer = (*new, token)
            agreed = min(a, b) if drafts_left else 0
            if agreed and not given.is_ended(longer):
                average += agreed * in_round(longer, drafts_left - 1)
            average += (a - agreed) * from_new_round(longer) if a > agreed else 0
        return average

    return from_new_round(())


@graded_law(6, CALLS)
def target_runs_as_often_as_needed(generate: Function, cases: Cases) -> Iterator[bool]:
    """Check that the target runs on average as often as the rule needs, no more and no less."""
    for given in loop_inputs(cases):
        runs = run_distribution(generate, given, CALLS)
        got = sum(mass * len(run.target) for run, mass in runs.items())
        compared = "forward passes of the target, on average"
        expect_close(CALLS, needed_passes(given), got, **given.shown(), compared=compared)
        yield True


GENERATE_TASK = Task(
    "generate",
    "A1.5 The loop",
    (
        text_ends_where_it_should,
        loop_has_the_joint_distribution,
        caches_are_clean,
        tokens_come_from_forward_passes,
        target_runs_as_often_as_needed,
    ),
    uses=("warp", "acceptance", "residual", "verify"),
)
