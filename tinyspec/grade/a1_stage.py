"""The situations that `generate` of assignment A1 is judged in, and how it is run in them: small
models, all kinds of knobs.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.grade.a1_laws import HALF, ONE, THIRD, ZERO, Function, Knobs
from tinyspec.grade.a1_round import Text
from tinyspec.grade.props_a1 import Session, behind
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.cases import CheckCase, SmallModel, cases_of_kind
from tinyspec.laws.exact import apply_warpers
from tinyspec.laws.small import Exact

STOPS = "the text ends after n tokens or at the end token, wherever in a block that is"

PLAIN: Knobs = (ONE, None, None)


@dataclass(frozen=True)
class Situation:
    """What generate is given. The rows of both models are the laws of a `Case`, times their
    denominators.
    """

    case: CheckCase
    prompt: Text = (0,)
    eos: int | None = None
    knobs: Knobs = PLAIN

    def session(self, name: str) -> Session:
        """A session of the model called `p` or `q` that has read nothing."""
        return Session(self.weights[name], getattr(self.case, name).by)

    def row(self, name: str, text: Sequence[int]) -> list[Fraction]:
        """The weights that a model gives behind a text."""
        return list(behind(self.weights[name], getattr(self.case, name).by, text))

    @cached_property
    def weights(self) -> dict[str, list[list[Fraction]]]:
        """The rows of both models."""
        wholes = {
            name: [(law, max(x.denominator for x in law)) for law in getattr(self.case, name).laws]
            for name in "pq"
        }
        return {
            name: [[x * whole for x in law] for law, whole in laws] for name, laws in wholes.items()
        }

    def law(self, name: str, text: Sequence[int]) -> list[Any]:
        """The warped row of a model behind a text."""
        temperature, top_k, top_p = self.knobs
        row = tuple(self.row(name, text))
        if row not in self.remembered:
            self.remembered[row] = apply_warpers(
                row, (), SamplingParams(float(temperature), top_k, top_p)
            )
        return self.remembered[row]

    @cached_property
    def remembered(self) -> dict[Any, list[Any]]:
        """The warped rows that were asked for."""
        return {}

    def shown(self) -> dict[str, Any]:
        """In the words of the hand-out."""
        temperature, top_k, top_p = self.knobs
        knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return {
            "target": self.said_by("p"),
            "draft": self.said_by("q"),
            "prompt": list(self.prompt),
            "n": self.case.tokens,
            "gamma": self.case.gamma,
            "eos": self.eos,
            **{name: value for name, value in knobs.items() if self.knobs != PLAIN},
        }

    def said_by(self, name: str) -> dict[Any, list[Fraction]]:
        """The weights of a model behind every text that matters here."""
        rows, by, first, n = (
            self.weights[name],
            getattr(self.case, name).by,
            len(self.prompt),
            self.case.tokens,
        )
        if by == "length":
            most = min(len(rows), first + n - 1)
            several = {
                f"after {length} token{'s' * (length > 1)}": rows[length - 1]
                for length in range(first, most + 1)
            }
            return several or {"after any text": rows[-1]}
        if by == "last":
            return {f"after token {token}": row for token, row in enumerate(rows)}
        texts = [
            (*self.prompt, *new)
            for count in range(n)
            for new in product(range(self.case.vocabulary), repeat=count)
        ]
        return {text: self.row(name, text) for text in texts}


class Run(NamedTuple):
    """One way a run can go: the new tokens, and the calls of both models, (cache before, tokens)
    each.
    """

    new: Text
    target: tuple[tuple[Text, Text], ...]
    draft: tuple[tuple[Text, Text], ...]


def run(generate: Function, given: Situation, chance: Exhaustive, law: str = STOPS) -> Run:
    """Run it on fresh sessions. What comes out must be a list of tokens, and for the law STOPS at
    most n.

    Other laws look at the first n tokens of a longer text: to stop too late is one mistake, and
    costs once.
    """
    target, draft, case = given.session("p"), given.session("q"), given.case
    new = generate(
        target, draft, list(given.prompt), case.tokens, case.gamma, given.eos, given.knobs, chance
    )
    if law is not STOPS and isinstance(new, (list, tuple)):
        new = new[: case.tokens]
    fits = isinstance(new, (list, tuple)) and len(new) <= case.tokens
    if not fits or not all(type(token) is int and 0 <= token < case.vocabulary for token in new):
        most = f"{case.tokens} token{'s' * (case.tokens != 1)}"
        accuse(
            STOPS, f"a list of at most {most} from 0 to {case.vocabulary - 1}", new, **given.shown()
        )
    return Run(tuple(new), calls(target), calls(draft))


def calls(session: Session) -> tuple[tuple[Text, Text], ...]:
    """What a session was asked to read."""
    return tuple(
        (tuple(before), tuple(tokens)) for what, before, tokens in session.trace if what == "score"
    )


def every(generate: Function, given: Situation, evidence: Evidence) -> dict[Run, Any]:
    """The outcomes and their probabilities; the branches are counted."""
    law: dict[Run, Any] = {}
    for outcome, probability in Exhaustive.walk(
        lambda chance: run(generate, given, chance, evidence.law)
    ):
        law[outcome] = law.get(outcome, 0) + probability
        evidence.branches += 1
    return law


def successors(says: Sequence[int]) -> tuple[Exact, ...]:
    """The rows of a model that says `says[x]` behind token x, whatever stands before it."""
    return tuple(tuple(Fraction(x == token) for x in range(len(says))) for token in says)


def endings(cases: Cases) -> Iterator[Situation]:
    """Models that know what follows each token: the target's, the draft's, n, gamma, prompt and
    eos.
    """
    rng = random.Random(f"endings {cases.seed}")
    small = product(range(5), range(3), ((0,), (0, 1)), (None, 1))
    for (n, gamma, prompt, eos), _ in product(small, range(8 * cases.times)):
        says = [rng.randrange(3) for _ in range(3)]
        others = [rng.choice((token, 1, 2)) for token in says]
        p, q = (
            SmallModel(successors(each), "last")
            for each in (says, rng.choice((says, others, [1, 1, 1])))
        )
        yield Situation(CheckCase(p, q, gamma, n), prompt, eos)


def situations(cases: Cases) -> Iterator[Situation]:
    """Small models under all kinds of knobs; rows by the length of the text first, then by the
    text.
    """
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
            yield Situation(case, (0,), eos, knobs)
            if by == "length" and lengths in ((3, 3), (4, 4)):
                yield Situation(replace(case, q=case.p), (0,), eos, knobs)
    for case in cases_of_kind(2, 2, 3, 3, (7, 7), "text", 2 * times, seed + 1):
        yield Situation(case, (1, 0), None, PLAIN)
