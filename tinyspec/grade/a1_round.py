"""What `verify` of assignment A1 is held to: one round, on every outcome of its chance.

The first laws look at one draft at a time, so that their counterexamples are small; the last is the
theorem: drafted from q and verified, the tokens have the law of the target. Its expected values
come from `laws.forms`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any, NamedTuple

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.grade.a1_laws import Function, close
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Counterexample, Evidence, LawViolated, accuse
from tinyspec.laws.cases import CheckCase, cases_of_kind, shrink_case
from tinyspec.laws.forms import OutcomeProbs, RunOutcome, VerifierForm
from tinyspec.laws.small import Exact

TOKENS = "a round returns the first tokens of the draft, none to all, and one token more"
BONUS = "after a draft that is accepted whole stands a draw from the target's last row"
KEPT = "from left to right, each draft token is accepted with its acceptance probability"
JOINT = "joint distribution: drafted and verified, the tokens have the target's distribution"

Text = tuple[int, ...]


class Given(NamedTuple):
    """What verify is given: p_rows [gamma + 1, V], q_rows [gamma, V], draft [gamma]."""

    p: list[Exact]
    q: list[Exact]
    draft: Text

    def shown(self) -> dict[str, Any]:
        """In the words of the hand-out."""
        return {
            "p_rows (target)": [list(row) for row in self.p],
            "q_rows (draft)": [list(row) for row in self.q],
            "draft": list(self.draft),
        }


def said(verify: Function, given: Given, chance: Exhaustive) -> Text:
    """One run of verify on rows of its own; its tokens, which must be some of the draft and one
    more.
    """
    tokens = verify(
        [list(row) for row in given.p], [list(row) for row in given.q], list(given.draft), chance
    )
    vocabulary, most = len(given.p[0]), len(given.p)
    fits = isinstance(tokens, (list, tuple)) and 1 <= len(tokens) <= most
    fits = fits and all(type(token) is int and 0 <= token < vocabulary for token in tokens)
    if not fits:
        expected = f"a list of {'1 token' if most == 1 else f'1 to {most} tokens'} from 0 to {vocabulary - 1}"
        accuse(TOKENS, expected, tokens, **given.shown())
    if tuple(tokens[:-1]) != given.draft[: len(tokens) - 1]:
        accuse(TOKENS, "the draft's first tokens and one more", list(tokens), **given.shown())
    return tuple(tokens)


def rounds(cases: Cases) -> Iterator[CheckCase]:
    """Targets and drafts, the smallest first: a law for each place, then one for each text."""
    times, seed = cases.times, cases.seed
    for vocabulary, gamma, whole, count in (
        (2, 1, 2, 27),
        (2, 1, 3, 40),
        (2, 2, 3, 40),
        (3, 1, 3, 30),
        (3, 2, 3, 8),
    ):
        yield from cases_of_kind(
            vocabulary, gamma, gamma + 1, whole, (gamma + 1, gamma), "length", count * times, seed
        )
    yield from cases_of_kind(2, 2, 3, 3, (7, 3), "text", 8 * times, seed)
    yield from cases_of_kind(2, 3, 4, 3, (4, 3), "length", 6 * times, seed)


def drafts(case: CheckCase) -> Iterator[Given]:
    """What verify may be given under these laws: every draft that q can make."""
    for draft in case.q.joint(case.gamma):
        yield given(case, draft)


def given(case: CheckCase, draft: Text) -> Given:
    """The rows of a draft, and the draft."""
    p = [case.p.law(draft[:place]) for place in range(case.gamma + 1)]
    return Given(p, [case.q.law(draft[:place]) for place in range(case.gamma)], draft)


def every(function: Callable[[Exhaustive], Text], evidence: Evidence) -> dict[Text, Any]:
    """The outcomes and their probabilities; the branches are counted."""
    law: dict[Text, Any] = {}
    for tokens, probability in Exhaustive.walk(function):
        law[tokens] = law.get(tokens, 0) + probability
        evidence.branches += 1
    evidence.cases += 1
    return law


def tokens(verify: Function, cases: Cases) -> Evidence:
    """What comes out is a beginning of the draft and one token; with no draft at all, one token."""
    evidence = Evidence(TOKENS)
    for case in rounds(cases):
        if case.vocabulary == 2 and case.gamma == 1:
            alone = Given([case.p.laws[0]], [], ())
            every(partial(said, verify, alone), evidence)
        for each in drafts(case):
            every(partial(said, verify, each), evidence)
    return evidence


def bonus(verify: Function, cases: Cases) -> Evidence:
    """Where p = q nothing is refused: the draft, and a draw from the row behind it."""
    evidence = Evidence(BONUS)
    for case in rounds(cases):
        agreed = replace(case, q=replace(case.p, laws=case.p.laws[: len(case.q.laws)]))
        for each in drafts(agreed):
            got = every(partial(said, verify, each), evidence)
            expected = {(*each.draft, token): x for token, x in enumerate(each.p[-1]) if x}
            if not alike(expected, got):
                accuse(BONUS, expected, got, **each.shown())
    return evidence


def kept(verify: Function, cases: Cases) -> Evidence:
    """The first i tokens of a draft are kept with the product of their acceptances."""
    evidence = Evidence(KEPT)
    for case in rounds(cases):
        for each in drafts(case):
            law = every(partial(said, verify, each), evidence)
            ratios = [
                min(Fraction(1), p[x] / q[x])
                for p, q, x in zip(each.p[:-1], each.q, each.draft, strict=True)
            ]
            for count in range(1, case.gamma + 1):
                expected = prod(ratios[:count], start=Fraction(1))
                got = sum(mass for text, mass in law.items() if len(text) > count)
                if not close(expected, got):
                    asked = f"the probability that the first {count} draft tokens are accepted"
                    accuse(KEPT, expected, got, **each.shown(), acceptances=ratios, compared=asked)
    return evidence


def joint(verify: Function, cases: Cases) -> Evidence:
    """Over all drafts that q makes, each with its probability, the tokens of a round have the
    target's joint law.
    """
    evidence = Evidence(JOINT)
    form = VerifierForm(verify)

    def law(case: CheckCase) -> OutcomeProbs:
        outcomes: OutcomeProbs = {}

        def play(chance: Exhaustive) -> RunOutcome:
            draft: Text = ()
            for _ in range(case.gamma):
                draft = (*draft, chance.draw(case.q.law(draft)))
            return RunOutcome(draft, said(verify, given(case, draft), chance))

        for outcome, mass in Exhaustive.walk(play):
            outcomes[outcome] = outcomes.get(outcome, 0) + mass
            evidence.branches += 1
        return outcomes

    def broken(case: CheckCase) -> bool:
        return form.judge(case, law(case)) is not None

    for case in rounds(cases):
        evidence.cases += 1
        if broken(case):
            smallest = shrink_case(case, broken)
            found = form.judge(smallest, law(smallest))
            assert found is not None
            raise LawViolated(named(found))
    return evidence


def named(found: Counterexample) -> Counterexample:
    """The counterexample of `laws.forms` in the words of the hand-out."""
    words = {"p": "p (target rows)", "q": "q (draft rows)"}
    if isinstance(found.case["draft"], dict):
        words["draft"] = "drafts, and how probable each is"
    case = {words.get(name, name): value for name, value in found.case.items()}
    if "compared" in case:
        case["compared"] = str(case["compared"]).replace("the law of", "the distribution of")
    return Counterexample(JOINT, case, found.expected, found.got)


def alike(expected: dict[Text, Any], got: dict[Text, Any]) -> bool:
    """Whether two laws are equal."""
    return all(
        close(expected.get(text, Fraction(0)), got.get(text, 0)) for text in {*expected, *got}
    )
