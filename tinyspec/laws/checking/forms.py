"""The signatures that a reader's function may have, and how each is called and judged.

    verify(p_rows, q_rows, draft, rng) -> tokens     one round on plain rows
    verify(tree, p, rng) -> Verdict                  one round, as the library's verifiers do it
    draft(q, context, gamma, rng) -> (tokens, rows)  a draft, and the row each token was drawn from
    draft(context, rng) -> (tokens, rows)            the same, with a model of its own
    generate(p, q, gamma, n, rng) -> tokens          a whole decoding function

A last argument called `source` or `chance` gets the library's `RandomSource`; a function without
a generator draws from `numpy.random`, `random` or `torch`. Rows are lists of Fractions, and where
the function cannot compute with those, float64 arrays of numpy, or else tensors of torch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from tinyspec.decoding.decode import TargetProbs
from tinyspec.decoding.exhaustive import Exhaustive, _Script
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.decoding.verify import Verdict
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.cases import (
    CheckCase,
    SmallModel,
    deep_draft_cases,
    deep_generation_cases,
    deep_round_cases,
    draft_cases,
    empty_draft_cases,
    generation_cases,
    near_round_cases,
    random_draft_cases,
    random_generation_cases,
    random_round_cases,
    round_cases,
    wide_round_cases,
)
from tinyspec.laws.checking.generators import (
    EnumeratedGenerator,
    replace_generators,
    replace_torch_generators,
)
from tinyspec.laws.checking.trees import (
    TREE_KINDS,
    Shape,
    ShapedCase,
    deep_tree_cases,
    describe_shape,
    draw_shape_tokens,
    empty_tree_cases,
    penalty_cases,
    plain_shape,
    random_tree_cases,
)
from tinyspec.laws.evidence import Counterexample, format_value
from tinyspec.laws.stage import format_sampling
from tinyspec.lm.forward import Scores
from tinyspec.tree import ROOT, TokenTree

Tokens = tuple[int, ...]
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
GENERATORS = (
    "source", "rng", "generator", "random_state", "uniforms", "random", "u", "us", "chance",
)  # fmt: skip
"""Names under which a function may take its generator."""


ROUND_TOKENS = "tokens of a round"
TOKENS_ASKED_FOR = "tokens asked for"
UNTOUCHED = "arguments are left as they were"
POSITIONS = "each position of the text has a uniform of its own"
MOST_TEXTS_SHOWN = 16  # of a counterexample; where more were compared, those that differ


class Misfit(TinyspecError):
    """The function has another form than the one it was given as."""


class RunOutcome(NamedTuple):
    """The end of one run: the draft, the output, the declared distributions, and what is wrong.

    law  the one that the problem breaks
    """

    draft: Tokens
    tokens: Tokens
    draft_probs: tuple[Any, ...] = ()
    problem: str = ""
    law: str = ROUND_TOKENS


OutcomeProbs = dict[RunOutcome, Any]
"""The probability of every outcome."""


NUMBERS: tuple[str, ...] = ("fractions", "numpy", "torch")
"""What rows are made of, in the order in which they are offered to a function."""


def convert_rows(row: Any, numbers: str) -> Any:
    """Return a copy of a row, or a list of rows, in the numbers that the function is given."""
    if numbers == "fractions":
        return [list(x) if isinstance(x, (list, tuple)) else x for x in row]
    array = np.array(row, np.float64)
    return array if numbers == "numpy" else torch.tensor(array)


def copy_as_lists(given: Any) -> Any:
    """Return a copy of a row, or of a list of rows, as lists; anything else as it is."""
    if hasattr(given, "tolist"):
        return given.tolist()
    return [copy_as_lists(x) for x in given] if isinstance(given, (list, tuple)) else given


def draw_chain(case: CheckCase, rng: Exhaustive) -> Tokens:
    """Draw gamma draft tokens from q, one after another."""
    chain: Tokens = ()
    for _ in range(case.gamma):
        chain = (*chain, rng.draw(case.q.next_probs(chain)))
    return chain


def read_token_ids(result: Any, what: str) -> Tokens:
    """Return the token ids that a function returned; raises Misfit for anything else."""
    try:
        tokens = result.tolist() if hasattr(result, "tolist") else list(result)
        if len(tokens) == 1 and isinstance(tokens[0], (list, tuple)):
            tokens = tokens[0]  # a batch of one
        return tuple(int(x) for x in tokens)
    except (TypeError, ValueError):
        raise Misfit(
            f"a {what} returns a list of token ids; this one returned {result!r}"
        ) from None


def to_small_fraction(x: Any) -> Any:
    """Return a float that is a small fraction up to rounding as that fraction."""
    if not isinstance(x, float):
        return x
    near = Fraction(x).limit_denominator(5000)
    return near if abs(x - near) < 1e-11 else x


@lru_cache(64)
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none where they cannot be seen."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


@lru_cache(64)
def takes_random_source(function: Callable[..., Any]) -> bool:
    """Return whether a function expects the library's `RandomSource` as its generator.

    Its first argument is called `tree` (a verifier of the library's form), or its last one `source`
    or `rng`.
    """
    names = list(parameters_of(function))
    return bool(names) and (names[0] == "tree" or names[-1] in ("source", "chance"))


def count_required(function: Callable[..., Any]) -> int:
    """Return how many arguments a function requires; a large number where that cannot be seen."""
    parameters = parameters_of(function).values()
    if not parameters or any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return 99
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.default is x.empty and x.kind in kinds for x in parameters)


@lru_cache(64)
def find_generator(function: Callable[..., Any], given: int) -> str | None:
    """Return how a function takes its generator beside `given` arguments.

    "" means last in line; a name means by keyword; None means not at all.
    """
    if count_required(function) > given:
        return ""
    return next((name for name in parameters_of(function) if name in GENERATORS), None)


def check_signature(function: Any, what: str, signature: str, given: int) -> None:
    """Raise TinyspecError, in one line, unless a function can be called with `given` arguments.

    The generator is not counted: it is given last, by name, or not at all, as `find_generator`
    says.
    """
    if not callable(function):
        raise TinyspecError(f"a {what} is a function, called as {signature}; this is {function!r}")
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):  # some compiled functions do not tell their arguments
        return
    keyword = find_generator(function, given)
    arguments = [None] * (given + (keyword == ""))
    try:
        own.bind(*arguments, **({keyword: None} if keyword else {}))
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise TinyspecError(
            f"a {what} is called as {signature}; {name}{own} does not take these arguments"
        ) from None


@dataclass
class Form:
    """One reader's function; subclasses say how to play a case and how to judge the outcomes."""

    function: Callable[..., Any]
    tolerance: float = 1e-6
    worst: float = 0.0  # the largest deviation that was still let pass
    rare: str = ""  # what happens too rarely to count
    lost: float = 0.0  # probability of the runs of this case that were not followed to their end
    lent: list[tuple[str, Any, Any]] = field(default_factory=list)  # (name, object, its copy)
    what = "function"
    law = "joint distribution"
    about = ""  # a note for the evidence
    limits = ""  # what no case covers
    numbers = NUMBERS  # what rows may be made of
    corner_hint = ""  # what to do about a counterexample that needs a uniform of exactly 0

    def cases(self, seed: int) -> Iterator[Any]:
        """Yield the fixed cases, the smallest first, then the deep ones."""
        raise NotImplementedError

    def random_cases(self, seed: int) -> Iterator[Any]:
        """Yield random cases that reach beyond the fixed ones."""
        raise NotImplementedError

    def float_cases(self) -> Iterator[Any]:
        """Yield fixed cases that have no exact form: they are judged on float64 rows alone."""
        return iter(())

    def empty_cases(self) -> Iterator[Any]:
        """Yield cases without a draft, for functions that take one; others are not accused."""
        return iter(())

    def play(
        self, case: Any, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        raise NotImplementedError

    def judge(self, case: Any, outcomes: OutcomeProbs) -> Counterexample | None:
        raise NotImplementedError

    def shown(self, case: Any) -> dict[str, Any]:
        return {"p": case.p.shown(case.gamma), "q": case.q.shown(case.gamma - 1)}

    @contextmanager
    def replaced_generators(self, dice: EnumeratedGenerator) -> Iterator[None]:
        """Answer every generator that the function may draw from inside the block."""
        with np.errstate(all="ignore"), replace_generators(dice), replace_torch_generators(dice):
            yield

    def call(self, dice: EnumeratedGenerator, **given: Any) -> Any:
        """Call the function on these arguments, the generator last, by name, or not at all.

        Copies are kept, to see whether the function writes into what it is lent.
        """
        self.lent = [(name, thing, copy_as_lists(thing)) for name, thing in given.items()]
        keyword = find_generator(self.function, len(given))
        generator: Any = dice.rng if takes_random_source(self.function) else dice
        if keyword is None:
            return self.function(*given.values())
        if keyword == "":
            return self.function(*given.values(), generator)
        return self.function(*given.values(), **{keyword: generator})

    def as_function(self, name: str, model: SmallModel, numbers: str) -> Callable[[Any], Any]:
        """Return a model as the function of a context that a reader's code calls."""

        def next_row(context: Any) -> Any:
            text = read_token_ids(context, "context")
            row = convert_rows(model.next_probs(text), numbers)
            self.lent.append((f"{name}({list(text)})", row, copy_as_lists(row)))
            return row

        return next_row

    def accuse_of_writing(self, outcome: RunOutcome) -> RunOutcome:
        """Return the outcome, with a problem if the run wrote into what it was given."""
        for name, thing, before in self.lent:
            if (now := copy_as_lists(thing)) != before:
                problem = f"{name} as it was given, not changed to {format_value(now)}"
                return outcome._replace(problem=problem, law=UNTOUCHED)
        return outcome

    def same(self, expected: Any, got: Any) -> bool:
        """Return whether two numbers agree: as Fractions, or as floats up to the tolerance.

        Probability that was not followed to its end widens the tolerance.
        """
        if not isinstance(expected - got, float):
            return bool(expected == got)
        apart = abs(float(expected - got))
        if not apart <= self.tolerance + self.lost:
            return False
        self.worst = max(self.worst, apart)
        return True

    def has_ids(self, case: CheckCase, outcome: RunOutcome) -> bool:
        """Return whether the output consists of token ids of the vocabulary."""
        return all(0 <= token < case.vocabulary for token in outcome.tokens)

    def too_rare(self, outcome: RunOutcome, mass: Any) -> bool:
        """Return whether a wrong outcome is below the tolerance, where it is only noted.

        Sums in float32 miss 1 by 1e-7, so such outcomes occur in correct functions.
        """
        if mass > self.tolerance:
            return False
        self.rare = f"a run of probability {float(mass):.0e} returns {list(outcome.tokens)}"
        return True

    def find_forbidden_token(
        self, case: Any, outcomes: OutcomeProbs, number: int
    ) -> Counterexample | None:
        """Find a token that p forbids but that comes out where a uniform is exactly 0."""
        for draft, tokens, *_ in outcomes:
            for place, token in enumerate(tokens[: case.tokens]):
                is_token = 0 <= token < case.vocabulary
                if not is_token or case.target.next_probs(tokens[:place])[token] > 0:
                    continue
                shown = self.shown(case) | ({"draft": list(draft)} if draft else {})
                which = ORDINALS[number] if number < len(ORDINALS) else f"{number + 1}th"
                uniform = f"the {which} one drawn is exactly 0.0, which a generator may return"
                shown["uniforms"] = uniform
                if self.corner_hint:
                    shown["hint"] = self.corner_hint
                expected = f"no token {token}: p forbids it"
                return Counterexample("impossible token", shown, expected, list(tokens))
        return None

    def follows_target(self, case: CheckCase, outcomes: OutcomeProbs) -> bool:
        """Return whether the token after any text that the output goes beyond has distribution p.

        It is so if and only if the output, continued with p, has the target's joint distribution;
        and it is seen without listing all texts.
        """
        beyond, emitted = dict[Tokens, Any](), dict[Tokens, Any]()
        for outcome, mass in outcomes.items():
            tokens = outcome.tokens[: case.tokens]
            for n in range(len(tokens)):
                beyond[tokens[:n]] = beyond.get(tokens[:n], 0) + mass
                emitted[tokens[: n + 1]] = emitted.get(tokens[: n + 1], 0) + mass
        return all(
            self.same(mass * x, emitted.get((*text, token), 0))
            for text, mass in beyond.items()
            for token, x in enumerate(case.target.next_probs(text))
        )

    def compare(self, case: CheckCase, outcomes: OutcomeProbs) -> Counterexample | None:
        """Compare the distribution of the first token, of the first two, ... with the target's.

        Outputs that are shorter are continued with p.
        """
        if self.follows_target(case, outcomes):
            return None
        for count in range(1, case.tokens + 1):
            expected, got = case.target.joint(count), dict[Tokens, Any]()
            for outcome, mass in outcomes.items():
                texts = {outcome.tokens[:count]: mass}
                if len(outcome.tokens) < count:
                    texts = case.target.joint(count, outcome.tokens, mass)
                for text, x in texts.items():
                    got[text] = got.get(text, 0) + x
            if all(
                self.same(expected.get(text, Fraction(0)), got.get(text, 0))
                for text in {*expected, *got}
            ):
                continue
            return Counterexample(self.law, *self.report(case, outcomes, count, expected, got))
        return None

    def report(
        self,
        case: CheckCase,
        outcomes: OutcomeProbs,
        count: int,
        expected: dict[Tokens, Any],
        got: dict[Tokens, Any],
    ) -> tuple[dict[str, Any], Any, Any]:
        """Return the case, the expected and the found distribution, as the reader would write
        them."""
        drafts: dict[Tokens, Any] = {}
        outputs: dict[Tokens, dict[Tokens, Any]] = {}
        for outcome, mass in outcomes.items():
            drafts[outcome.draft] = drafts.get(outcome.draft, 0) + mass
            came = outputs.setdefault(outcome.draft, {})
            came[outcome.tokens] = came.get(outcome.tokens, 0) + mass
        shown = self.shown(case)
        if len(drafts) == 1:
            shown["draft"] = list(next(iter(drafts)))
        else:
            shown["draft"] = _small_fractions(drafts)
            if sum(map(len, outputs.values())) <= 12:
                shown["output of each draft"] = {
                    draft: _small_fractions({text: x / drafts[draft] for text, x in came.items()})
                    for draft, came in sorted(outputs.items())
                }
        texts = sorted({*expected, *got})
        if count == 1:
            shown["compared"] = "the distribution of the first token"
            texts = [(token,) for token in range(case.vocabulary)]
        else:
            first = f"the distribution of the first {count} tokens"
            shown["compared"] = f"{first} (a shorter round is continued by sampling from p)"
            if len(texts) > MOST_TEXTS_SHOWN:
                shown["compared"] += "; shown are the texts that differ"
                texts = [
                    text
                    for text in texts
                    if not self.same(expected.get(text, Fraction(0)), got.get(text, 0))
                ]
        both: list[Any] = []
        for probs in (expected, got):
            row = {text: to_small_fraction(probs.get(text, Fraction(0))) for text in texts}
            both.append(list(row.values()) if count == 1 else row)
        return shown, *both


def _small_fractions(probs: dict[Tokens, Any]) -> dict[Tokens, Any]:
    return {text: to_small_fraction(mass) for text, mass in sorted(probs.items())}


class VerifierForm(Form):
    """A verifier of a chain: verify(p_rows, q_rows, draft, rng) -> tokens."""

    what = "verifier"
    limits = "larger vocabularies and longer drafts"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        yield from round_cases(seed)
        yield from deep_round_cases()
        yield from near_round_cases()
        yield from wide_round_cases()

    def empty_cases(self) -> Iterator[CheckCase]:
        return empty_draft_cases()

    def random_cases(self, seed: int) -> Iterator[CheckCase]:
        return random_round_cases(seed)

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        draft = draw_chain(case, rng)
        texts = [draft[:place] for place in range(case.gamma + 1)]
        p = convert_rows([case.p.next_probs(text) for text in texts], numbers)
        q = convert_rows([case.q.next_probs(text) for text in texts], numbers)[:-1]  # [gamma, V]
        result = self.call(dice, p=p, q=q, draft=list(draft))
        return RunOutcome(draft, read_token_ids(result, self.what))

    def judge(self, case: CheckCase, outcomes: OutcomeProbs) -> Counterexample | None:
        for outcome, mass in outcomes.items():
            least = min(1, case.gamma)  # without a draft, a rule without a bonus token says nothing
            fits = least <= len(outcome.tokens) <= case.tokens and self.has_ids(case, outcome)
            if (outcome.problem or not fits) and not self.too_rare(outcome, mass):
                due = f"1 to {case.tokens} token ids below {case.vocabulary}"
                expected, got = outcome.problem or due, list(outcome.tokens)
                shown = self.shown(case) | {"draft": list(outcome.draft)}
                return Counterexample(outcome.law, shown, expected, got)
        return self.compare(case, outcomes)


class HouseVerifierForm(VerifierForm):
    """A verifier in the library's own form: verify(tree, p, rng) -> Verdict, on one kind of
    tree."""

    kind = "chain"
    numbers = ("fractions", "numpy")
    limits = "larger trees and vocabularies"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        cases = [case for case in round_cases(seed) if case.gamma < 3]
        yield from cases if self.kind == "chain" else cases[::4]
        yield from deep_tree_cases(self.kind)

    def empty_cases(self) -> Iterator[CheckCase]:
        return empty_tree_cases() if self.kind == "chain" else iter(())

    def float_cases(self) -> Iterator[CheckCase]:
        return penalty_cases(self.kind)

    def random_cases(self, seed: int) -> Iterator[CheckCase]:
        return random_tree_cases(self.kind, seed)

    def shown(self, case: CheckCase) -> dict[str, Any]:
        shown = super().shown(case)
        if case.context:
            shown["context"] = list(case.context)
        if isinstance(case, ShapedCase) and case.sampling != UNCHANGED:
            shown["sampling"] = format_sampling(case.sampling)
        if isinstance(case, ShapedCase) or self.kind == "mixed":
            return shown | {"tree": describe_shape(self.shape(case))}
        words = TREE_KINDS[self.kind]
        return shown | {"tree": f"two {words}" if words.startswith("siblings") else words}

    def shape(self, case: CheckCase) -> Shape:
        """Return the shape of the case's tree."""
        if isinstance(case, ShapedCase):
            return case.shape
        return plain_shape(self.kind, case.gamma)

    @contextmanager
    def replaced_generators(self, dice: EnumeratedGenerator) -> Iterator[None]:
        """Replace nothing: such a verifier draws from the source that it is given."""
        with np.errstate(all="ignore"):
            yield

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        tree = draw_shape_tokens(case, self.shape(case), rng.split("draft", 0))
        rows = [None if row is None else convert_rows(row, numbers) for row in tree.draft_probs]
        given = TokenTree(tuple(tree.tokens), tuple(tree.parents), rows, tuple(tree.probe))
        p = make_target_probs(given, case, numbers)
        source = PositionSource(rng._script)
        verdict: Verdict = self.function(given, p, source)
        if not hasattr(verdict, "accepted"):
            raise Misfit(f"verify(tree, p, rng) returns a Verdict; this one returned {verdict!r}")
        problem = find_wrong_path(tree, verdict)
        tokens = () if problem else tree.tokens_on(verdict.accepted)
        output = (*tokens, *(() if verdict.next is None else (verdict.next,)))
        law = ROUND_TOKENS
        if not problem and (problem := source.find_wrong_positions(len(case.context), len(output))):
            law = POSITIONS
        return RunOutcome(tuple(tree.tokens), output, (), problem, law)


class PositionSource(Exhaustive):
    """An exhaustive source that notes the positions of the text for which it drew.

    A uniform that is drawn for another position, or twice, is shared by two tokens. In one round
    this need not show: the next round may be the second.
    """

    def __init__(self, script: _Script) -> None:
        super().__init__(script)
        self.positions = list[int]()

    def draw_at(self, row: Any, position: int) -> int:
        self.positions.append(position)
        return self.draw(row)

    def find_wrong_positions(self, start: int, count: int) -> str:
        """Return what the positions should have been in a round of `count` tokens; else ""."""
        due = range(start, start + count)
        if len(set(self.positions)) == len(self.positions) and set(self.positions) <= set(due):
            return ""
        return f"uniforms of the positions {list(due)}, each once, not of {self.positions}"


def find_wrong_path(tree: TokenTree, verdict: Verdict) -> str:
    """Return what a verdict should have been where its nodes are no path, or probes; else ""."""
    text: Tokens = ()
    for node in verdict.accepted:  # siblings may be equal: a child of either goes on
        is_node = 0 <= node < len(tree.tokens)
        if not is_node or tree.tokens_on(tree.path(tree.parents[node])) != text:
            nodes = list(verdict.accepted)
            return f"a path down the tree with parents {list(tree.parents)}, not the nodes {nodes}"
        text = (*text, tree.tokens[node])
    tested = [node for node in (*verdict.accepted, *verdict.rejected) if tree.probe[node]]
    return f"no probe accepted or rejected: nodes {tested} are probes" if tested else ""


def make_target_probs(tree: TokenTree, case: CheckCase, numbers: str) -> TargetProbs:
    """Return the target's distributions as a decoder gives them to its verifier."""
    texts = [tree.tokens_on(tree.path(node)) for node in range(ROOT, len(tree.tokens))]
    rows: Any = [list(case.p.next_probs(text)) for text in texts]
    if numbers != "fractions":
        rows = np.log(np.array(rows, np.float64))
    sampling = case.sampling if isinstance(case, ShapedCase) else UNCHANGED
    scores = Scores(rows, None, ())  # type: ignore[arg-type]
    return TargetProbs(scores, sampling, case.context, tree)


class GenerationForm(Form):
    """A decoding function: generate(p, q, gamma, n, rng) -> tokens."""

    what = "decoding function"
    limits = "larger vocabularies, longer drafts and texts, and texts after a prompt"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        yield from generation_cases(seed)
        yield from deep_generation_cases()
        yield from (case for case in near_round_cases() if case.gamma == 1)  # others: rare runs

    def random_cases(self, seed: int) -> Iterator[CheckCase]:
        return random_generation_cases(seed)

    def shown(self, case: CheckCase) -> dict[str, Any]:
        shown = {}
        for name, model in (("p", case.p), ("q", case.q)):
            rows: Any = model.shown(case.tokens - 1)
            if len(model.probs) == 1:
                rows = {"any context": list(model.probs[0])}
            elif isinstance(rows, list):
                rows = {f"{length} tokens before": row for length, row in enumerate(rows)}
            shown[name] = rows
        return shown | {"gamma": case.gamma, "n": case.tokens}

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        p, q = self.as_function("p", case.p, numbers), self.as_function("q", case.q, numbers)
        result = self.call(dice, p=p, q=q, gamma=case.gamma, n=case.tokens)
        return RunOutcome((), read_token_ids(result, self.what), law=TOKENS_ASKED_FOR)

    def judge(self, case: CheckCase, outcomes: OutcomeProbs) -> Counterexample | None:
        for outcome, mass in outcomes.items():
            fits = len(outcome.tokens) == case.tokens and self.has_ids(case, outcome)
            if (outcome.problem or not fits) and not self.too_rare(outcome, mass):
                due = f"{case.tokens} token ids below {case.vocabulary}"
                expected, got = outcome.problem or due, list(outcome.tokens)
                return Counterexample(outcome.law, self.shown(case), expected, got)
        return self.compare(case, outcomes)

    def report(self, *given: Any) -> Any:
        shown, expected, got = super().report(*given)
        del shown["draft"]
        return shown, expected, got


class DrafterForm(Form):
    """A drafter: draft(q, context, gamma, rng) -> (tokens, distributions)."""

    what, law = "drafter", "truthful drafter"
    limits = "larger vocabularies, longer drafts and contexts"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        yield from draft_cases(seed)
        yield from deep_draft_cases()
        for case in near_round_cases():
            yield replace(case, p=case.q, tokens=case.gamma)

    def random_cases(self, seed: int) -> Iterator[CheckCase]:
        return random_draft_cases(seed)

    def shown(self, case: CheckCase) -> dict[str, Any]:
        context = {"context": list(case.context)} if case.context else {}
        q = case.q.shown(len(case.context) + case.gamma - 1)
        return {"q": q} | context | {"gamma": case.gamma}

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        q, context = self.as_function("q", case.q, numbers), list(case.context)
        outcome = self.outcome(self.call(dice, q=q, context=context, gamma=case.gamma))
        if len(outcome.tokens) <= case.gamma:
            return outcome
        problem = f"at most gamma = {case.gamma} tokens"
        return outcome._replace(problem=problem, law=TOKENS_ASKED_FOR)

    def outcome(self, result: Any) -> RunOutcome:
        """Return what a drafter returned as an outcome; raises Misfit if it is of another form."""
        try:
            tokens, rows = result
        except (TypeError, ValueError):
            raise Misfit(
                f"a drafter returns (tokens, distributions); this one returned {result!r}"
            ) from None
        kept = tuple(
            None if row is None else tuple(row.tolist() if hasattr(row, "tolist") else row)
            for row in rows
        )
        if len(tokens) != len(kept):
            raise Misfit(
                "a drafter returns one distribution (or None) a token; "
                f"this one returned {len(kept)} for {len(tokens)}"
            )
        return RunOutcome((), read_token_ids(tokens, self.what), kept)

    def judge(self, case: CheckCase, outcomes: OutcomeProbs) -> Counterexample | None:
        """Check that each token has its declared distribution, given the tokens before it.

        The condition holds wherever the token is kept.
        """
        for outcome, mass in outcomes.items():
            if outcome.problem and not self.too_rare(outcome, mass):
                shown, got = self.shown(case), list(outcome.tokens)
                return Counterexample(outcome.law, shown, outcome.problem, got)
        for place in range(max(len(outcome.tokens) for outcome in outcomes)):
            reached: dict[Tokens, Any] = {}
            kept: dict[tuple[Tokens, Any], list[Any]] = {}
            for outcome, mass in outcomes.items():
                before = outcome.tokens[:place]
                reached[before] = reached.get(before, 0) + mass
                declared = outcome.draft_probs[place] if len(outcome.tokens) > place else None
                if declared is None:
                    continue
                token = outcome.tokens[place]
                if not 0 <= token < len(declared):
                    shown = self.shown_declared(case, before, declared)
                    return Counterexample(self.law, shown, f"a token below {len(declared)}", token)
                kept.setdefault((before, declared), [0] * len(declared))[token] += mass
            for (before, declared), masses in kept.items():
                whole, pairs = sum(masses), list(zip(declared, masses, strict=True))
                if all(self.same(x * whole, mass) for x, mass in pairs):
                    continue
                part = all(mass <= reached[before] * x + 1e-9 for x, mass in pairs)
                expected = "tokens drawn from the declared distribution"
                expected += ", kept whatever they are" if part else ""
                shown = self.shown_declared(case, before, declared)
                got = [to_small_fraction(mass / whole) for mass in masses]
                return Counterexample("presence" if part else self.law, shown, expected, got)
        return None

    def shown_declared(self, case: Any, before: Tokens, declared: Sequence[Any]) -> dict[str, Any]:
        """Return a case with the tokens drafted before one, and its declared distribution."""
        row = [to_small_fraction(x) for x in declared]
        return self.shown(case) | {"drafted before": list(before), "declared": row}

    def find_forbidden_token(
        self, case: CheckCase, outcomes: OutcomeProbs, number: int
    ) -> Counterexample | None:
        return None


@dataclass(frozen=True)
class DraftContext:
    """The context that a drafter with a model of its own is asked to continue."""

    text: Tokens
    gamma: int = 8  # uniforms it may index
    tokens: int = 0
    vocabulary: int = 0
    p = SmallModel(())


class OwnDrafterForm(DrafterForm):
    """A drafter with a model of its own: draft(context, rng) -> (tokens, distributions)."""

    limits = "other tokens than 0 and 1 in the context, and longer contexts"

    def cases(self, seed: int) -> Iterator[DraftContext]:  # type: ignore[override]
        return _binary_contexts(range(4))

    def random_cases(self, seed: int) -> Iterator[DraftContext]:  # type: ignore[override]
        return _binary_contexts(range(4, 9))

    def shown(self, case: DraftContext) -> dict[str, Any]:  # type: ignore[override]
        return {"context": list(case.text)}

    def play(  # type: ignore[override]
        self, case: DraftContext, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        return self.outcome(self.call(dice, context=list(case.text)))


def _binary_contexts(lengths: Sequence[int]) -> Iterator[DraftContext]:
    """Yield every text of these lengths over the tokens 0 and 1."""
    for length in lengths:
        for text in product((0, 1), repeat=length):
            yield DraftContext(text)
