"""The exact joint distribution of a decoder's first tokens over several rounds.

`exact_distribution` runs a whole decoder under `Exhaustive` random choices and walks every outcome.
After each round, branches that reached the same state are merged; sameness is the digest of
everything the decoder holds. `Reference` is what that distribution must equal: plain decoding,
written here once more over the target's rows and over sampling settings of its own, so that it
shares no line with what it judges.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive, _Script
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, expect_equal
from tinyspec.laws.exact.digest import compute_digest

Tokens = tuple[int, ...]
Conditional = Callable[[Tokens], Any]
"""context -> row of the target, unwarped: [V] Fractions, or float64 logits."""

BranchChoice = tuple[int, int]  # which of how many branches

JOINT = "joint distribution"
QUIET = "global random states untouched"
REPEATS = "the same choices make the same run"


class JointDistribution(dict[Tokens, Any]):
    """The probabilities of texts of new tokens, as Fractions or floats.

    branches  outcomes of rounds that were walked
    states    decoder states, after merging
    """

    branches = 0
    states = 0


def exact_distribution(
    factory: Callable[[], Decoder],
    tokens: int = 3,
    prompt: Sequence[int] = (0,),
    merge: bool = True,
    outside: Callable[[Decoder], Iterable[object]] = lambda decoder: (),
    rounds: int | None = None,
) -> JointDistribution:
    """Return the exact joint distribution of the first `tokens` new tokens.

    Texts are shorter where the decoder stopped.

    factory  makes the decoder anew for every branch; where its text is empty, the prompt is given
             to it
    merge    whether branches that are in the same state after a round are walked on once
    outside  parts of a decoder that cannot change what it will do (its forward log is one always)
    rounds   stop after so many rounds; texts are then as long as they are

    Raises LawViolated where the decoder touched a global random state, or did not repeat itself:
    neither has an exact distribution.
    """
    noise = _global_noise()
    joint = JointDistribution()
    # state -> (choices that lead there, probability)
    waiting: dict[Any, tuple[list[BranchChoice], Any]] = {b"": ([], 1)}
    done = 0
    first: tuple[list[BranchChoice], Tokens, Any] | None = None
    while waiting:
        ahead: dict[Any, tuple[list[BranchChoice], Any]] = {}
        replay = partial(_replay, factory, prompt, done)
        for choices, probability in waiting.values():
            joint.states += 1
            for (decoder, before), after, taken in walk_below(replay, choices):
                joint.branches += 1
                first = first or (taken, tuple(decoder.context), after)
                mass = probability * (after / before)
                if decoder.finished or len(decoder.new) >= tokens or done + 1 == rounds:
                    text = tuple(decoder.new[:tokens])
                    joint[text] = joint.get(text, 0) + mass
                    continue
                key: Any = joint.branches
                if merge:
                    key = compute_digest(decoder, (decoder.forward_log, *outside(decoder)))
                known = ahead.get(key)
                ahead[key] = (taken, mass) if known is None else (known[0], known[1] + mass)
        waiting, done = ahead, done + 1
    if first is not None:  # the first branch again, now that all others have been walked
        replay = partial(_replay, factory, prompt, 0)
        (decoder, _), after, _ = next(iter(walk_below(replay, first[0])))
        got = (tuple(decoder.context), after)
        expect_equal(REPEATS, first[1:], got, choices_so_far=[at for at, _ in first[0]])
    if _global_noise() != noise:
        untouched = "random, numpy.random and torch as they were"
        accuse(QUIET, untouched, "a global random state was used", prompt=tuple(prompt))
    return joint


def _replay(
    factory: Callable[[], Decoder], prompt: Sequence[int], done: int, rng: Exhaustive
) -> tuple[Decoder, Any]:
    """Return a decoder after `done` + 1 rounds, and the probability of the first `done`."""
    decoder = factory()
    if not decoder.context:
        decoder.extend(prompt)
    before: Any = rng.probability
    for number in range(done + 1):
        before = rng.probability if number == done else before
        if not decoder.finished:
            decoder.step(rng)
    return decoder, before


class _Path(_Script):
    """Choices to follow, and how many options each had when this way was first taken."""

    def __init__(self, fixed: Sequence[BranchChoice], choices: Sequence[int]):
        super().__init__(choices)
        self.fixed = fixed

    def branch(self, options: Sequence[tuple[Any, Any]]) -> Any:
        at = len(self.taken)
        then = self.fixed[at][1] if at < len(self.fixed) else len(options)
        if then != len(options) or (at < len(self.choices) and self.choices[at] >= len(options)):
            expected, got = (f"{n} next choices" for n in (then, len(options)))
            accuse(REPEATS, expected, got, choices_so_far=[choice for choice, _ in self.taken])
        return super().branch(options)


def walk_below(
    function: Callable[[Exhaustive], Any], fixed: list[BranchChoice]
) -> Iterator[tuple[Any, Any, list[BranchChoice]]]:
    """Walk every outcome below a fixed beginning; also yield the choices of each outcome."""
    choices = [choice for choice, _ in fixed]
    while True:
        script = _Path(fixed, choices)
        outcome = function(Exhaustive(script))
        trail = script.taken
        if len(trail) < len(fixed):
            expected, got = (f"{len(choices)} choices" for choices in (fixed, trail))
            accuse(REPEATS, expected, got, choices_so_far=[at for at, _ in fixed])
        yield outcome, script.probability, list(trail)
        while len(trail) > len(fixed) and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if len(trail) <= len(fixed):
            return
        choices = [choice for choice, _ in trail[:-1]] + [trail[-1][0] + 1]


def _global_noise() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), state[1].tobytes(), state[2], torch.get_rng_state().numpy().tobytes()


# ---------------------------------------------------------------------- the reference


@dataclass
class Reference:
    """Plain decoding: draw from the target's warped row, until a stop.

    row     the target's conditionals
    sampling  the user's sampling settings
    """

    row: Conditional
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StoppingCriteria = field(default_factory=StoppingCriteria)
    limit: int | None = None  # positions of the context, prompt included
    _rows: dict[Tokens, Any] = field(default_factory=dict)

    def next(self, context: Tokens) -> list[Any]:
        """Return the warped row after a context, in Fractions or floats."""
        if context not in self._rows:
            self._rows[context] = apply_warpers(self.row(context), context, self.sampling)
        return self._rows[context]  # type: ignore[no-any-return]

    def distribution(self, tokens: int = 3, prompt: Sequence[int] = (0,)) -> JointDistribution:
        """Return the joint distribution of the first `tokens` new tokens."""
        joint, prompt = JointDistribution(), tuple(prompt)
        left = None if self.limit is None else self.limit - len(prompt)
        wanted = min(n for n in (tokens, self.stop.max_new_tokens, left) if n is not None)
        open_texts: list[tuple[Tokens, Any]] = [((), 1)]
        for text, probability in open_texts:  # grows while it is walked
            if len(text) >= wanted or self._ended(text):
                joint[text] = joint.get(text, 0) + probability
                continue
            for token, x in enumerate(self.next((*prompt, *text))):
                if x > 0:
                    open_texts.append(((*text, token), probability * x))
        return joint

    def _ended(self, text: Tokens) -> bool:
        by_token = bool(text) and text[-1] in self.stop.eos
        return by_token or any(text[-len(s) :] == s for s in self.stop.sequences)


def apply_warpers(row: Any, context: Sequence[int], sampling: SamplingParams) -> list[Any]:
    """Return the distribution after the warpers: weights in Fractions exactly, logits in floats."""
    if isinstance(row, (list, tuple)):
        temperature = Fraction(str(sampling.temperature or 1)).limit_denominator(9)
        power = round(1 / temperature)
        weights: list[Any] = [Fraction(x) ** power for x in row]
        number: Callable[[Any], Any] = lambda x: Fraction(str(x))  # noqa: E731
    else:
        scores = [float(x) for x in row]
        for token in set(context):
            x = scores[token]
            scores[token] = (
                x * sampling.repetition_penalty if x < 0 else x / sampling.repetition_penalty
            )
        top = max(scores)
        weights = [math.exp((x - top) / (sampling.temperature or 1.0)) for x in scores]
        weights = [float(x == top) for x in scores] if sampling.temperature == 0 else weights
        number = float
    by_weight = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept = by_weight[: 1 if sampling.temperature == 0 else sampling.top_k]
    if sampling.top_p is not None and sampling.temperature > 0:
        whole, reached, nucleus = sum(weights[t] for t in kept), 0, list[int]()
        for token in kept:
            if nucleus and reached >= number(sampling.top_p) * whole:
                break
            nucleus.append(token)
            reached = reached + weights[token]
        kept = nucleus
    floor = 0 if sampling.min_p is None else number(sampling.min_p) * weights[by_weight[0]]
    kept = [token for token in kept if weights[token] >= floor and weights[token] > 0]
    mass = sum(weights[token] for token in kept)
    return [weights[t] / mass if t in kept else 0 * weights[t] for t in range(len(weights))]


# ---------------------------------------------------------------------- the comparison


def first_differing_text(
    expected: dict[Tokens, Any], got: dict[Tokens, Any], within: float = 0.0
) -> Tokens | None:
    """Return the shortest text whose probabilities differ: at all, or by more than `within`."""
    for text in sorted({*expected, *got}, key=lambda text: (len(text), text)):
        ours, theirs = got.get(text, 0), expected.get(text, 0)
        if ours != theirs if within == 0 else not abs(ours - theirs) <= within:
            return text
    return None


def compare_distributions(
    expected: dict[Tokens, Any],
    got: dict[Tokens, Any],
    within: float = 0.0,
    law: str = JOINT,
    **case: Any,
) -> None:
    """Raise LawViolated unless two distributions agree: exactly, or within a tolerance.

    The error names the first text that differs.
    """
    text = first_differing_text(expected, got, within)
    if text is not None:
        accuse(law, {text: expected.get(text, 0)}, {text: got.get(text, 0)}, **case)
