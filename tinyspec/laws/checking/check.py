"""`tinyspec.laws.check`: prove or refute a reader's own verifier, drafter or decoding function.

The function is run on every outcome of its random choices, on small targets and drafts. The fixed
cases come first: many of two to four tokens, then a few with eight tokens, chains of five, several
siblings, contexts or rounds, and rows that are almost equal. They are a proof: exact in Fractions
where the function computes with them, and in float64 up to a tolerance. An empty draft is tried
too, if the function takes one. Random cases that reach further follow, and then the smallest cases
again and again, for faults that begin late. All of it is counted, so that every machine looks at
the same cases. A refutation is a small case, in the words of the task. Where time runs out before
the fixed cases are done, the verdict is "not proved".
"""

import inspect
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive, _Script
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.cases import CheckCase, shrink_case
from tinyspec.laws.checking.forms import (
    DraftContext,
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
from tinyspec.laws.checking.trees import TREE_KINDS, ShapedCase, most_siblings
from tinyspec.laws.checking.uniforms import NotEnumerable
from tinyspec.laws.evidence import (
    CheckResult,
    Counterexample,
    Evidence,
    LawViolated,
    format_value,
)
from tinyspec.laws.exact.joint import REPEATS, walk_below

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
"""Runs of an accused case that must agree; where they do not, the function has its own noise, or
keeps state. Twelve, because state that alternates among two, three or four then repeats itself."""
MOST_OUTCOMES = 2000
"""Outcomes of a random case; one that has more is left out, and counted."""
QUICK_CASES, QUICK_RUNS = 100, 20
"""How many of the smallest cases are run again and again, and how often before each judgement: a
fault that begins late needs many calls."""
WAITING = 6
"""How many times its seconds of computing a check may last by the clock: code may sleep."""
OWN_NOISE = (
    "gives other results when it is run again: it draws from a generator that cannot be "
    "enumerated, or keeps state between calls. Draw from the rng that it is given, or from "
    "numpy.random, random or torch"
)


def check(
    verifier: Callable[..., Any] | None = None,
    *,
    drafter: Callable[..., Any] | None = None,
    generate: Callable[..., Any] | None = None,
    trees: Sequence[str] = tuple(TREE_KINDS),
    corners: bool = True,
    seed: int = 0,
    random_cases: int = 50,
    calls: int = 20_000,
    seconds: float = 120.0,
    tolerance: float = 1e-6,
) -> CheckResult:
    """Prove a function exact on every small case, or find the smallest case that it gets wrong.

    Prints the verdict and returns it: what was covered, and what was not. The result is true where
    everything was proved, so that a test reads `assert check(my_verifier)`;
    `check(...).counterexample` has law, case, expected and got.

    verifier    verify(p_rows, q_rows, draft, rng) -> tokens: one round on a chain of gamma draft
                tokens. p_rows [gamma + 1, V] and q_rows [gamma, V] are target and draft
                probabilities, draft [gamma] the token ids drawn from q_rows; returns the accepted
                tokens and one more. Or the library's own form, verify(tree, p, rng) -> Verdict: a
                function whose first argument is called `tree`
    drafter     draft(q, context, gamma, rng) -> (tokens, distributions): q(context) is the draft
                model's row [V]; returns gamma tokens at most, and for each the row it was drawn
                from, or None. Or draft(context, rng), which has a model of its own
    generate    generate(p, q, gamma, n, rng) -> tokens: the first n after the empty context, and no
                more
    trees       the kinds of trees that a verifier of the library's form is judged on: "chain",
                "point masses", "siblings", "without replacement", "mixed"
    corners     whether to try uniforms of exactly 0.0, which a generator may return: they must not
                let a token of target probability 0 pass, as a test u <= p / q does
    seed        of the larger cases, which are drawn at random
    random_cases
                how many larger cases follow the fixed ones; for trees, of each kind
    calls       how often the function is called at least: a fault may begin late
    seconds     of computing for each function, at most. If the fixed cases need more, the verdict
                is "not proved"; where the others do, the verdict says how many were looked at
    tolerance   in float64; the largest deviation that passed is noted

    Rows are lists of Fractions, float64 arrays or tensors: the first that the function can compute
    with. rng stands for a numpy.random.Generator, for a function without arguments, or for a list
    of gamma + 1 uniforms; a function without rng draws from numpy.random, random or torch. It must
    not write into its arguments, nor into the rows that p and q return. The fixed cases have
    vocabularies of two to eight tokens and up to five draft tokens, the random ones up to six: the
    verdict says which.

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
    by_function: dict[Any, list[_Search]] = {}
    for form in forms:
        form.corner_hint = CORNER_HINT
        by_function.setdefault((form.what, form.function), []).append(_Search(form))
    evidence, counterexample = list[Evidence](), None
    for searches in by_function.values():  # a verifier of the library's form has one for each kind
        left = seconds
        try:
            for search in searches:
                left -= search.prove(seed, corners, left)
            for search in searches:
                left -= search.explore(seed, random_cases, calls // len(searches), left)
                evidence.append(search.evidence(in_full=True))
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
    numbers: tuple[str, ...] = (),
    through: tuple[type[Exception], ...] = (),
) -> Evidence:
    """Judge a function in its form on the fixed cases of `check`; for laws that are made of forms.

    most     cases that are looked at; the same ones on every machine, where `seconds` of computing
             leaves time for them
    numbers  what rows are made of, in the order in which they are offered; those of the form
    through  exceptions of the function that end the search, instead of being taken for one case in
             which it fails
    """
    search = _Search(form, most, through)
    search.numbers = numbers or form.numbers
    try:
        search.prove(seed, corners, seconds)
        return search.evidence()
    except LawViolated as accused:
        raise accused.with_traceback(None) from None


def _format_span(numbers: Iterable[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


@dataclass
class _Coverage:
    """What a number of cases covered, as sets of what they have."""

    seen: dict[str, set[Any]] = field(default_factory=dict)
    cases: int = 0
    branches: int = 0

    def add(self, case: Any, form: Form) -> None:
        """Count a case."""
        self.cases += 1
        facts: dict[str, Any] = {}
        if isinstance(case, CheckCase):
            facts = {"V": case.vocabulary, "gamma": case.gamma}
        if isinstance(case, ShapedCase):
            if (siblings := most_siblings(case.shape)) > 1:
                facts["siblings"] = siblings
            self.seen.setdefault("settings", set()).add(case.sampling)
        if isinstance(form, GenerationForm):
            facts["tokens"] = case.tokens
        if isinstance(form, DrafterForm):
            text = case.text if isinstance(case, DraftContext) else case.context
            facts["tokens of context"] = len(text)
        for name, value in facts.items():
            self.seen.setdefault(name, set()).add(value)

    def __str__(self) -> str:
        """Return the spans in words.

        >>> str(_Coverage({"V": {2, 4}, "gamma": {1}}))
        'V 2-4, gamma 1'
        """
        seen = dict(self.seen)
        settings = seen.pop("settings", set())
        words = [
            f"{name} {_format_span(values)}"
            if name in ("V", "gamma")
            else f"{_format_span(values)} {name}"
            for name, values in seen.items()
        ]
        return ", ".join([*words, *([f"{len(settings)} sampling settings"] if settings else [])])


class _OutOfTime(BaseException):
    """The time is over, perhaps in the middle of a case."""


class _TooManyOutcomes(BaseException):
    """A random case has more outcomes than are walked."""


class _NotRepeated(Exception):
    """The same random choices did not make the same run."""


class _Search:
    """The search for a counterexample to one function, smallest cases first."""

    def __init__(
        self, form: Form, most: int | None = None, through: tuple[type[Exception], ...] = ()
    ):
        self.form, self.most = form, most
        self.through: tuple[type[Exception], ...] = (NotEnumerable, Misfit, *through)
        # Those that the function was not seen to fail with while later ones worked.
        self.numbers = form.numbers
        self.worked = ""  # the numbers it computed with last
        self.crash: tuple[Any, dict[str, Exception]] | None = None
        self.branches = self.made = self.calls = 0
        self.seconds = 0.0  # that the part of the search which runs now may compute
        self.until = self.latest = float("inf")  # by the processor's time, and by the clock
        self.took = 0.0  # seconds by the clock
        self.told = dict[str, Any]()  # what a counterexample says beside its case
        self.cases = list[Any]()
        self.fixed, self.floats, self.random = _Coverage(), _Coverage(), _Coverage()
        self.exactness, self.left_out, self.is_proved = "", 0, False
        self.fails_on = ""  # an empty draft, if the function cannot do without one

    def start_clocks(self, seconds: float) -> None:
        """Begin a part of the search that may compute so long."""
        self.seconds = seconds
        self.until = time.process_time() + seconds
        self.latest = time.monotonic() + WAITING * seconds

    def prove(self, seed: int, corners: bool, seconds: float) -> float:
        """Judge the fixed cases; return the seconds of computing. Raises LawViolated."""
        began, computing = time.perf_counter(), time.process_time()
        self.start_clocks(seconds)
        self.cases = list(islice(self.form.cases(seed), self.most))
        try:
            self.judge_cases(self.cases, self.fixed)
            if self.crash is None and corners:
                self.try_corners()
            if self.crash is None:
                self.try_empty_drafts()
            self.exactness, self.fixed.branches = self.describe_exactness(), self.branches
            if self.crash is None:
                self.judge_in_floats()
                self.is_proved = self.crash is None
        except _OutOfTime:
            if not self.exactness:
                self.exactness, self.fixed.branches = self.describe_exactness(), self.branches
        if self.crash is not None:
            self.raise_crash(*self.crash)
        self.took += time.perf_counter() - began
        return time.process_time() - computing

    def explore(self, seed: int, random_cases: int, calls: int, seconds: float) -> float:
        """Judge random cases, then call the function until it was called so often.

        Returns the seconds of computing. Raises LawViolated.
        """
        if not self.is_proved:
            return 0.0
        began, computing = time.perf_counter(), time.process_time()
        self.start_clocks(seconds)
        try:
            self.judge_random_cases(seed, random_cases)
            self.judge_many_calls(calls)
        except _OutOfTime:
            pass
        if self.crash is not None:
            self.raise_crash(*self.crash)
        self.took += time.perf_counter() - began
        return time.process_time() - computing

    def evidence(self, in_full: bool = False) -> Evidence:
        """Return what was looked at; with what was covered beside the fixed cases, and what not."""
        notes = [self.form.about, self.exactness, str(self.fixed), self.form.rare]
        if not self.is_proved:
            notes.insert(3, f"{self.fixed.cases} of {len(self.cases)} fixed cases")
        return Evidence(
            self.form.law,
            self.fixed.cases,
            self.fixed.branches,
            self.took,
            [note for note in notes if note],
            self.describe_coverage() if in_full else [],
            self.is_proved,
        )

    def describe_exactness(self) -> str:
        """Return in which numbers the function was compared."""
        if not self.worked:
            return ""
        if self.worked == "fractions" and not self.form.worst:
            return "exactly"
        return f"in floating point, to {max(self.form.worst, 1e-16):.0e}"

    def describe_coverage(self) -> list[str]:
        """Return what was covered beside the fixed cases, and what was not."""
        lines = list[str]()
        if self.floats.cases:
            lines.append(f"the same on float64 rows: {self.floats.cases} cases")
        if self.random.cases:
            counts = f"{self.random.cases} random cases, {self.random.branches} outcomes"
            lines.append(f"then {counts} ({self.random})")
        if self.left_out:
            lines.append(f"{self.left_out} more random cases had over {MOST_OUTCOMES} outcomes")
        limits = f"{self.form.limits}{self.fails_on}; a fault that begins after call {self.calls}"
        return [*lines, f"not covered: {limits}"]

    def judge_cases(self, cases: Iterable[Any], coverage: _Coverage) -> None:
        """Judge one case after the other; stop where the first ones all fail."""
        for tried, case in enumerate(cases):
            outcomes = self.outcome_probs(case)
            if outcomes is None:
                if not coverage.cases and tried + 1 == GIVE_UP:
                    return
                continue
            coverage.add(case, self.form)
            if self.form.judge(case, outcomes) is not None:
                self.accuse(case)

    def judge_in_floats(self) -> None:
        """Judge a function that computes with Fractions on float64 rows too.

        It need not accept arrays. Every function is judged on the cases of floats alone.
        """
        if "numpy" not in self.numbers:
            return
        if self.worked != "fractions":
            self.judge_cases(self.form.float_cases(), self.fixed)
            return
        before, self.numbers = self.numbers, ("numpy",)
        self.told = {"rows": "float64 (on Fractions it is right)"}
        self.judge_cases(self.cases, self.floats)
        self.told = {}
        self.judge_cases(self.form.float_cases(), self.floats)
        self.numbers, self.worked = before, "fractions"
        if not self.floats.cases:
            self.crash = None

    def judge_random_cases(self, seed: int, most: int) -> None:
        """Judge so many random cases, in turn on both kinds of numbers."""
        exact = self.numbers
        for number, case in enumerate(islice(self.form.random_cases(seed), most)):
            self.numbers = ("numpy",) if self.floats.cases and number % 2 else exact
            before = self.branches
            try:
                outcomes = self.outcome_probs(case, most=MOST_OUTCOMES)
            except _TooManyOutcomes:
                self.left_out += 1
                continue
            if outcomes is None:
                return
            self.random.add(case, self.form)
            self.random.branches += self.branches - before
            if self.form.judge(case, outcomes) is not None:
                self.accuse(case)
        self.numbers = exact

    def judge_many_calls(self, calls: int) -> None:
        """Run the smallest cases again and again until the function was called so often."""
        if self.floats.cases:
            self.numbers = ("numpy",)
        for case in cycle(self.cases[:QUICK_CASES]):
            if self.calls >= calls:
                return
            outcomes = self.outcome_probs(case, times=QUICK_RUNS)
            if outcomes is None:
                return
            if self.form.judge(case, outcomes) is not None:
                self.accuse(case)

    def try_corners(self) -> None:
        """Pin uniforms to 0 in small cases in which p forbids a token."""
        small = [
            case
            for case in self.cases
            if case.vocabulary == 2 and case.tokens <= 3
            if any(0 in row for row in case.p.probs)
        ]
        for case in small[:CORNERS]:
            self.try_zero_uniforms(case)

    def try_empty_drafts(self) -> None:
        """Judge a function without a draft too. If it fails there, that is noted, and no fault."""
        before, coverage = (self.numbers, self.worked), _Coverage()
        self.judge_cases(self.form.empty_cases(), coverage)
        if self.crash is not None:
            error = list(self.crash[1].values())[-1]
            self.fails_on = f"; an empty draft, where it ends in {type(error).__name__}"
        (self.numbers, self.worked), self.crash = before, None

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

    def outcome_probs(
        self, case: Any, zero: int | None = None, most: int | None = None, times: int = 1
    ) -> OutcomeProbs | None:
        """Return the probability of every outcome; None if the function raises.

        zero   the number of the uniform that is exactly 0
        most   outcomes after which _TooManyOutcomes is raised
        times  that all outcomes are walked; the last time counts
        """
        errors = dict[str, Exception]()
        for place, numbers in enumerate(self.numbers):
            try:
                with warnings.catch_warnings():
                    if numbers == "torch":  # numpy warns of a function that hands it tensors
                        warnings.simplefilter("ignore", DeprecationWarning)
                    outcomes = self.enumerate(case, numbers, zero, most, times)
            except _NotRepeated:
                self.judge_not_repeated(case, numbers)
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

    def enumerate(
        self,
        case: Any,
        numbers: str,
        zero: int | None = None,
        most: int | None = None,
        times: int = 1,
    ) -> OutcomeProbs:
        """Run the function once for each way its random choices can go.

        Raises _NotRepeated if the same choices do not make the same run.
        """
        dice = EnumeratedGenerator(Exhaustive(_Script(())), zero, case.gamma + 1)

        def play(rng: Exhaustive) -> Any:
            if time.process_time() > self.until or time.monotonic() > self.latest:
                raise _OutOfTime
            dice.restart(rng)
            self.calls += 1
            try:
                return self.form.accuse_of_writing(self.form.play(case, numbers, dice, rng))
            except Negligible:
                return None
            except LawViolated:
                raise
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
        with self.form.replaced_generators(dice):
            for _ in range(times):
                probs.clear()
                self.form.lost, total = 0.0, 0
                try:
                    for walked, (outcome, mass, _) in enumerate(walk_below(play, [])):
                        if most is not None and walked >= most:
                            raise _TooManyOutcomes
                        self.branches, total = self.branches + 1, total + mass
                        if outcome is None:
                            self.form.lost += float(mass)
                        else:
                            probs[outcome] = probs.get(outcome, 0) + mass
                except LawViolated as violated:
                    raise _NotRepeated from violated
                if abs(total - 1) > NEGLIGIBLE:
                    raise _NotRepeated
        if self.form.lost:
            self.form.worst = max(self.form.worst, self.form.lost)
            return {outcome: float(mass) for outcome, mass in probs.items()}
        return probs

    def accuse(self, case: Any) -> None:
        """Raise LawViolated with the smallest case that this one leads to."""

        def broken(other: Any) -> bool:
            try:
                outcomes = self.outcome_probs(other, most=MOST_OUTCOMES)
            except _TooManyOutcomes:
                return False
            return outcomes is not None and self.form.judge(other, outcomes) is not None

        crash, found = self.crash, case
        self.add_time()  # shrinking and running again may take as long once more
        try:
            found = shrink_case(case, broken) if isinstance(case, CheckCase) else case
        except _OutOfTime:
            self.add_time()
        self.crash = crash
        first = self.outcome_probs(found)
        assert first is not None
        if any(self.outcome_probs(found) != first for _ in range(AGAIN)):
            self.judge_state(found, self.worked)
        counterexample = self.form.judge(found, first)
        assert counterexample is not None
        raise LawViolated(replace(counterexample, case=counterexample.case | self.told))

    def add_time(self) -> None:
        """Allow the search as much time again."""
        self.until = max(self.until, time.process_time()) + self.seconds
        self.latest = max(self.latest, time.monotonic()) + WAITING * self.seconds

    def judge_not_repeated(self, case: Any, numbers: str) -> None:
        """Say what is wrong where the same choices did not make the same run.

        A fault that began in this very case is accused by the law that it breaks from now on.
        """
        found = None
        try:
            outcomes = self.enumerate(case, numbers)
            if self.enumerate(case, numbers) == outcomes:
                found = self.form.judge(case, outcomes)
        except Exception:  # it still does not repeat itself, or fails
            found = None
        if found is not None:
            raise LawViolated(found)
        self.judge_state(case, numbers)

    def judge_state(self, case: Any, numbers: str) -> None:
        """Say whether a function keeps state (LawViolated), or has noise of its own (Misfit).

        State makes what follows a function of what was called before: once the same calls have been
        made again and again, the results come again in the same order. Noise does not.
        """

        def describe_run() -> Any:
            try:
                outcomes = self.enumerate(case, numbers)
            except _NotRepeated:
                return "another output when it is called again"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            masses = dict[Any, Any]()
            for outcome, mass in outcomes.items():
                masses[outcome.tokens] = masses.get(outcome.tokens, 0) + mass
            return masses

        self.add_time()
        rows = [[describe_run() for _ in range(AGAIN)] for _ in range(3)]
        if rows[1] != rows[2]:
            raise Misfit(f"no verdict: the {self.form.what} {OWN_NOISE}")
        results = [result for place, result in enumerate(rows[2]) if result not in rows[2][:place]]
        expected = "the same output for the same random numbers, whatever was called before"
        got = results if len(results) > 1 else "another output when it is called again"
        raise LawViolated(Counterexample(REPEATS, self.form.shown(case) | self.told, expected, got))

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
