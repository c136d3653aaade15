"""`tinyspec.laws.check`: prove or refute a reader's own verifier, drafter or decoding function.

The function is run on every outcome of its random choices, on targets and drafts of two to four
tokens, the smallest first. A proof is exact on these cases: in Fractions where the function
computes with them, else in float64 up to a tolerance. A refutation is the smallest case found, in
the words of the task.
"""

import inspect
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.cases import CheckCase, shrink_case
from tinyspec.laws.checking.forms import (
    NUMBERS,
    TREE_KINDS,
    DrafterForm,
    Form,
    GenerationForm,
    HouseVerifierForm,
    Misfit,
    OutcomeProbs,
    OwnDrafterForm,
    VerifierForm,
    check_signature,
    count_required,
    takes_random_source,
)
from tinyspec.laws.checking.generators import NEGLIGIBLE, EnumeratedGenerator, Negligible
from tinyspec.laws.checking.uniforms import NotEnumerable
from tinyspec.laws.evidence import CheckResult, Evidence, LawViolated, format_value

GIVE_UP = 25
"""Cases that may raise before the first that does not; then the function does not fit its form."""
CORNERS = 60
"""Cases in which p forbids a token that are tried with a uniform of exactly 0."""
VERIFIER = "verify(p_rows [gamma + 1, V], q_rows [gamma, V], draft [gamma], rng) -> tokens"
HOUSE_VERIFIER = "verify(tree, p, rng) -> Verdict"
DRAFTER = "draft(q, context, gamma, rng) -> (tokens, distributions), or as draft(context, rng)"
GENERATE = "generate(p, q, gamma, n, rng) -> tokens"
CORNER_HINT = "accept where u < p / q, not where u <= p / q; corners=False leaves this case out"
AGAIN = 12
"""Runs of an accused case that must agree; where they do not, the function has its own noise."""


def check(
    verifier: Callable[..., Any] | None = None,
    *,
    drafter: Callable[..., Any] | None = None,
    generate: Callable[..., Any] | None = None,
    trees: Sequence[str] = tuple(TREE_KINDS),
    corners: bool = True,
    seed: int = 0,
    seconds: float = 10.0,
    tolerance: float = 1e-6,
) -> CheckResult:
    """Prove a function exact on every small case, or find the smallest case that it gets wrong.

    Prints the verdict and returns it. The result is true where nothing was broken, so that a test
    reads `assert check(my_verifier)`; `check(...).counterexample` has law, case, expected and got.

    verifier    verify(p_rows, q_rows, draft, rng) -> tokens: one round on a chain of gamma draft
                tokens. p_rows [gamma + 1, V] and q_rows [gamma, V] are target and draft
                probabilities, draft [gamma] the token ids drawn from q_rows; returns the accepted
                tokens and one more. Or the library's own form, verify(tree, p, rng) -> Verdict: a
                function whose first argument is called `tree`
    drafter     draft(q, context, gamma, rng) -> (tokens, distributions): q(context) is the draft
                model's row [V]; returns, for each token, the row it was drawn from, or None. Or
                draft(context, rng), which has a model of its own
    generate    generate(p, q, gamma, n, rng) -> tokens: the first n after the empty context
    trees       the kinds of trees that a verifier of the library's form is judged on: "chain",
                "point masses", "siblings", "without replacement"
    corners     whether to try uniforms of exactly 0.0, which a generator may return: they must not
                let a token of target probability 0 pass, as a test u <= p / q does
    seed        of the larger cases, which are drawn at random
    seconds     of computing for each function, after which the search stops and says so
    tolerance   in float64; the largest deviation that passed is noted

    Rows are lists of Fractions, float64 arrays or tensors: the first that the function can compute
    with. rng stands for a numpy.random.Generator, for a function without arguments, or for a list
    of gamma + 1 uniforms; a function without rng draws from numpy.random, random or torch. Cases
    have vocabularies of two to four tokens and up to three draft tokens: the verdict says which.

    Raises TinyspecError where no verdict is possible: the function is called in another way, fails
    on every small case, or draws in a way that cannot be enumerated.
    """
    forms: list[Form] = []
    if verifier is not None:
        if not callable(verifier) or not takes_random_source(verifier):
            check_signature(verifier, "verifier", VERIFIER, 3)
            forms.append(VerifierForm(verifier, tolerance))
        else:
            check_signature(verifier, "verifier", HOUSE_VERIFIER, 2)
            for kind in trees:
                if kind not in TREE_KINDS:
                    raise TinyspecError(
                        f"no trees of the kind {kind!r}: there are {', '.join(TREE_KINDS)}"
                    )
                house = HouseVerifierForm(verifier, tolerance)
                house.kind, house.about = kind, TREE_KINDS[kind]
                forms.append(house)
    if drafter is not None:
        own = callable(drafter) and count_required(drafter) <= 2
        check_signature(drafter, "drafter", DRAFTER, 1 if own else 3)
        forms.append((OwnDrafterForm if own else DrafterForm)(drafter, tolerance))
    if generate is not None:
        check_signature(generate, "decoding function", GENERATE, 4)
        forms.append(GenerationForm(generate, tolerance))
    if not forms:
        raise TinyspecError(
            "nothing to check: give a verifier, a drafter or a decoding function (generate=)"
        )
    evidence, counterexample = list[Evidence](), None
    for form in forms:
        form.corner_hint = CORNER_HINT
        share = len(trees) if isinstance(form, HouseVerifierForm) else 1
        try:
            evidence.append(_Search(form, seconds / share).run(seed, corners))
        except LawViolated as accused:
            counterexample = accused.counterexample
            break
    result = CheckResult(tuple(evidence), counterexample)
    print(result)
    return result


def prove_form(
    form: Form,
    seed: int = 0,
    *,
    most: int | None = None,
    corners: bool = False,
    seconds: float = 60.0,
    numbers: tuple[str, ...] = NUMBERS,
    through: tuple[type[Exception], ...] = (),
) -> Evidence:
    """Judge a function in its form, as `check` does; for laws that are made of forms.

    most     cases that are looked at; the same ones on every machine, where `seconds` of computing
             leaves time for them
    numbers  what rows are made of, in the order in which they are offered
    through  exceptions of the function that end the search, instead of being taken for one case in
             which it fails
    """
    search = _Search(form, seconds, most, through)
    search.numbers = numbers
    try:
        return search.run(seed, corners)
    except LawViolated as accused:
        raise accused.with_traceback(None) from None


def _format_span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


class _OutOfTime(BaseException):
    """A case has too many outcomes for the time that is left."""


class _Search:
    """The search for a counterexample to one function, smallest cases first."""

    def __init__(
        self,
        form: Form,
        seconds: float,
        most: int | None = None,
        through: tuple[type[Exception], ...] = (),
    ):
        self.form, self.seconds, self.most = form, seconds, most
        self.through: tuple[type[Exception], ...] = (NotEnumerable, Misfit, *through)
        # Those that the function was not seen to fail with while later ones worked.
        self.numbers = NUMBERS
        self.worked = ""  # the numbers it computed with last
        self.crash: tuple[Any, dict[str, Exception]] | None = None
        self.branches = self.made = 0
        self.until = 0.0

    def run(self, seed: int, corners: bool) -> Evidence:
        """Return the evidence, or raise LawViolated."""
        began = time.perf_counter()
        self.until = time.process_time() + self.seconds
        cases, notes = 0, list[str]()
        small = list[Any]()
        sizes: set[tuple[int, int]] = set()  # vocabulary and gamma of each case
        try:
            for tried, case in enumerate(islice(self.form.cases(seed), self.most)):
                outcomes = self.outcome_probs(case)
                if outcomes is None:
                    if not cases and tried + 1 == GIVE_UP:
                        break
                    continue
                cases += 1
                sizes.add((case.vocabulary, case.gamma))
                if self.form.judge(case, outcomes) is not None:
                    self.accuse(case)
                is_small = case.vocabulary == 2 and case.tokens <= 3
                if is_small and any(0 in row for row in case.p.probs):
                    small.append(case)
            if self.crash is None and corners:
                for case in small[:CORNERS]:
                    self.try_zero_uniforms(case)
        except _OutOfTime:
            notes.append(f"stopped after {self.seconds:g} s")
        if self.crash is not None:
            self.raise_crash(*self.crash)
        if not cases:
            raise TinyspecError(f"no verdict: the smallest case took more than {self.seconds:g} s")
        notes.extend([self.form.rare] if self.form.rare else [])
        exactly = self.worked == "fractions" and not self.form.worst
        rounding = f"in floating point, to {max(self.form.worst, 1e-16):.0e}"
        notes.insert(0, "exactly" if exactly else rounding)
        if isinstance(case, CheckCase):
            vocabularies, gammas = zip(*sizes, strict=True)
            notes.insert(1, f"V {_format_span(vocabularies)}, gamma {_format_span(gammas)}")
        notes = [self.form.about, *notes] if self.form.about else notes
        return Evidence(self.form.law, cases, self.branches, time.perf_counter() - began, notes)

    def raise_crash(self, case: Any, errors: dict[str, Exception]) -> None:
        """Raise TinyspecError with the case at which the function failed, and how it failed.

        It names the numbers that the function otherwise computes with, else each kind. A TypeError
        on lists of fractions says only that the function wants arrays: then it names what the
        function did with arrays.
        """
        if len(errors) > 1 and isinstance(errors.get("fractions"), TypeError):
            errors = {kind: error for kind, error in errors.items() if kind != "fractions"}
        elif self.worked in errors:
            errors = {self.worked: errors[self.worked]}
        kinds = dict[str, list[str]]()
        for numbers, error in errors.items():
            file = inspect.getsourcefile(self.form.function)
            lines = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == file
            ]
            where = f" in line {lines[-1]}" if lines else ""
            kinds.setdefault(f"{type(error).__name__}: {error}{where}", []).append(numbers)
        how = "; ".join(
            f"{text} (on rows of {', '.join(numbers)})" for text, numbers in kinds.items()
        )
        shown = "; ".join(
            f"{name} = {format_value(value)}" for name, value in self.form.shown(case).items()
        )
        last = list(errors.values())[-1]
        raise TinyspecError(f"no verdict: the {self.form.what} failed at {shown}: {how}") from last

    def outcome_probs(self, case: Any, zero: int | None = None) -> OutcomeProbs | None:
        """Return the probability of every outcome; None if the function raises."""
        errors = dict[str, Exception]()
        for place, numbers in enumerate(self.numbers):
            try:
                with warnings.catch_warnings():
                    if numbers == "torch":  # numpy warns of a function that hands it tensors
                        warnings.simplefilter("ignore", DeprecationWarning)
                    outcomes = self.enumerate(case, numbers, zero)
            except self.through:
                raise
            except Exception as error:  # whatever the reader's code raises
                errors[numbers] = error
                continue
            self.numbers, self.worked = self.numbers[place:], numbers
            return outcomes
        if self.crash is None and zero is None:
            self.crash = (case, errors)
        return None

    def enumerate(self, case: Any, numbers: str, zero: int | None) -> OutcomeProbs:
        """Run the function once for each way its random choices can go."""

        def play(rng: Exhaustive) -> Any:
            if time.process_time() > self.until:
                raise _OutOfTime
            dice = EnumeratedGenerator(rng, zero, case.gamma + 1)
            try:
                return self.form.play(case, numbers, dice, rng)
            except Negligible:
                return None
            except Exception as error:
                if rng.probability > NEGLIGIBLE:
                    raise
                self.form.rare = (
                    f"a run of probability {float(rng.probability):.0e} "
                    f"ends in {type(error).__name__}: {error}"
                )
                return None
            finally:
                self.made = max(self.made, dice.made)

        probs: OutcomeProbs = {}
        self.form.lost = 0.0
        for outcome, probability in Exhaustive.walk(play):
            self.branches += 1
            if outcome is None:
                self.form.lost += float(probability)
            else:
                probs[outcome] = probs.get(outcome, 0) + probability
        if self.form.lost:
            return {outcome: float(mass) for outcome, mass in probs.items()}
        return probs

    def accuse(self, case: Any) -> None:
        """Raise LawViolated with the smallest case that this one leads to."""

        def broken(other: Any) -> bool:
            outcomes = self.outcome_probs(other)
            return outcomes is not None and self.form.judge(other, outcomes) is not None

        crash, found = self.crash, case
        self.until += self.seconds  # shrinking and running again may take as long once more
        try:
            found = shrink_case(case, broken) if isinstance(case, CheckCase) else case
        except _OutOfTime:
            self.until += self.seconds
        self.crash = crash
        first = self.outcome_probs(found)
        assert first is not None
        for _ in range(AGAIN):
            if self.outcome_probs(found) != first:
                raise Misfit(
                    f"no verdict: the {self.form.what} gives other results when it is run again: "
                    "it draws from a generator that cannot be enumerated. Draw from the rng that "
                    "it is given, or from numpy.random, random or torch"
                )
        counterexample = self.form.judge(found, first)
        assert counterexample is not None
        raise LawViolated(counterexample)

    def try_zero_uniforms(self, case: Any) -> None:
        """Pin one uniform after the other to exactly 0."""
        number, self.made = 0, 1
        while number < self.made:
            outcomes = self.outcome_probs(case, zero=number)
            if outcomes is not None:
                found = self.form.find_forbidden_token(case, outcomes, number)
                if found is not None:
                    raise LawViolated(found)
            number += 1
