"""Laws of `verify` of assignment A1: one round, on every outcome of its random decisions.

The first laws look at one draft at a time, so that their counterexamples are small. The last one is
the theorem: drafted from q and verified, the tokens have the target's distribution. Its expected
values come from `laws.checking.forms`.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any, NamedTuple

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.grade.task import Cases, Function, Task, expect_close, graded_law, is_token
from tinyspec.laws.checking.cases import CheckCase, cases_of_kind, shrink_case
from tinyspec.laws.checking.forms import OutcomeProbs, RunOutcome, VerifierForm
from tinyspec.laws.evidence import Counterexample, LawViolated, accuse
from tinyspec.laws.exact.rational import Exact

TOKENS = "a round returns the first tokens of the draft, none to all, and one token more"
BONUS = "after a draft that is accepted whole stands a draw from the target's last row"
KEPT = "from left to right, each draft token is accepted with its acceptance probability"
JOINT = "joint distribution: drafted and verified, the tokens have the target's distribution"

Text = tuple[int, ...]


class RoundInput(NamedTuple):
    """What verify is given: p_rows [gamma + 1, V], q_rows [gamma, V], draft [gamma]."""

    p: list[Exact]
    q: list[Exact]
    draft: Text

    def shown(self) -> dict[str, Any]:
        """Return it in the words of the hand-out."""
        return {
            "p_rows (target)": [list(row) for row in self.p],
            "q_rows (draft)": [list(row) for row in self.q],
            "draft": list(self.draft),
        }


def run_round(verify: Function, given: RoundInput, rng: Exhaustive) -> Text:
    """Return the tokens of one run, which must be some of the draft and one more."""
    p_rows, q_rows = ([list(row) for row in rows] for rows in (given.p, given.q))
    tokens = verify(p_rows, q_rows, list(given.draft), rng)
    vocabulary, most = len(given.p[0]), len(given.p)
    fits = isinstance(tokens, (list, tuple)) and 1 <= len(tokens) <= most
    if not fits or not all(is_token(token, vocabulary) for token in tokens):
        count = "1 token" if most == 1 else f"1 to {most} tokens"
        accuse(TOKENS, f"a list of {count} from 0 to {vocabulary - 1}", tokens, **given.shown())
    if tuple(tokens[:-1]) != given.draft[: len(tokens) - 1]:
        accuse(TOKENS, "the draft's first tokens and one more", list(tokens), **given.shown())
    return tuple(tokens)


def round_distribution(verify: Function, given: RoundInput) -> dict[Text, Any]:
    """Return the probability of each output."""
    return Exhaustive.distribution(partial(run_round, verify, given))


def draw_rounds(cases: Cases) -> Iterator[CheckCase]:
    """Yield targets and drafts, the smallest first: a row per position, then a row per text."""
    times, seed = cases.times, cases.seed
    for vocabulary, gamma, whole, count in (
        (2, 1, 2, 27),
        (2, 1, 3, 40),
        (2, 2, 3, 40),
        (3, 1, 3, 30),
        (3, 2, 3, 8),
    ):
        lengths = (gamma + 1, gamma)
        yield from cases_of_kind(
            vocabulary, gamma, gamma + 1, whole, lengths, "length", count * times, seed
        )
    yield from cases_of_kind(2, 2, 3, 3, (7, 3), "text", 8 * times, seed)
    yield from cases_of_kind(2, 3, 4, 3, (4, 3), "length", 6 * times, seed)


def each_draft(case: CheckCase) -> Iterator[RoundInput]:
    """Yield what verify may be given in a case, for every draft that q can make."""
    for draft in case.q.joint(case.gamma):
        yield make_input(case, draft)


def make_input(case: CheckCase, draft: Text) -> RoundInput:
    """Return the rows of a draft, and the draft."""
    p = [case.p.next_probs(draft[:place]) for place in range(case.gamma + 1)]
    return RoundInput(p, [case.q.next_probs(draft[:place]) for place in range(case.gamma)], draft)


@graded_law(3, TOKENS)
def returns_a_part_and_one_token(verify: Function, cases: Cases) -> Iterator[bool]:
    """Check the form of the output; without a draft it is one token."""
    for case in draw_rounds(cases):
        if case.vocabulary == 2 and case.gamma == 1:
            round_distribution(verify, RoundInput([case.p.probs[0]], [], ()))
            yield True
        for given in each_draft(case):
            round_distribution(verify, given)
            yield True


@graded_law(5, BONUS)
def draws_the_bonus(verify: Function, cases: Cases) -> Iterator[bool]:
    """Check that p = q gives the whole draft, and a draw from the row after it."""
    for case in draw_rounds(cases):
        agreed = replace(case, q=replace(case.p, probs=case.p.probs[: len(case.q.probs)]))
        for given in each_draft(agreed):
            expected = {(*given.draft, token): x for token, x in enumerate(given.p[-1]) if x}
            expect_close(BONUS, expected, round_distribution(verify, given), **given.shown())
            yield True


@graded_law(7, KEPT)
def accepts_from_left_to_right(verify: Function, cases: Cases) -> Iterator[bool]:
    """Check that the first i tokens are accepted with the product of their acceptances."""
    for case in draw_rounds(cases):
        for given in each_draft(case):
            outputs = round_distribution(verify, given)
            triples = zip(given.p[:-1], given.q, given.draft, strict=True)
            ratios = [min(Fraction(1), p[x] / q[x]) for p, q, x in triples]
            for count in range(1, case.gamma + 1):
                expected = prod(ratios[:count], start=Fraction(1))
                got = sum(mass for text, mass in outputs.items() if len(text) > count)
                compared = f"the probability that the first {count} draft tokens are accepted"
                shown = {**given.shown(), "acceptances": ratios, "compared": compared}
                expect_close(KEPT, expected, got, **shown)
            yield True


@graded_law(10, JOINT, KEPT)
def round_has_the_joint_distribution(verify: Function, cases: Cases) -> Iterator[bool]:
    """Check the theorem over all drafts that q makes, each with its probability."""
    form = VerifierForm(verify)

    def play(case: CheckCase, rng: Exhaustive) -> RunOutcome:
        draft: Text = ()
        for _ in range(case.gamma):
            draft = (*draft, rng.draw(case.q.next_probs(draft)))
        return RunOutcome(draft, run_round(verify, make_input(case, draft), rng))

    def judge(case: CheckCase) -> Counterexample | None:
        outcomes: OutcomeProbs = Exhaustive.distribution(partial(play, case))
        return form.judge(case, outcomes)

    for case in draw_rounds(cases):
        if judge(case) is not None:
            found = judge(shrink_case(case, lambda smaller: judge(smaller) is not None))
            assert found is not None
            raise LawViolated(in_words_of_the_handout(found))
        yield True


def in_words_of_the_handout(found: Counterexample) -> Counterexample:
    """Return the counterexample of `laws.checking.forms` with the names that the hand-out uses."""
    words = {"p": "p (target rows)", "q": "q (draft rows)"}
    if isinstance(found.case["draft"], dict):
        words["draft"] = "drafts, and how probable each is"
    case = {words.get(name, name): value for name, value in found.case.items()}
    return Counterexample(JOINT, case, found.expected, found.got)


VERIFY_TASK = Task(
    "verify",
    "A1.4 One round",
    (
        returns_a_part_and_one_token,
        draws_the_bonus,
        accepts_from_left_to_right,
        round_has_the_joint_distribution,
    ),
    uses=("acceptance", "residual"),
)
