"""What A3 holds decoding with early exits to: a model of whole numbers whose every layer, and every
stored key, is seen.

The oracle knows no cache: it takes the tokens and the layers after which they left, and runs the
text layer by layer. A token that has left keeps its state from there on ("copy"), or goes on to the
top ("recompute").
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from random import Random
from typing import Any, NamedTuple

from tinyspec.grade.a3_laws import Function, words
from tinyspec.grade.props_a3 import MODULUS, LayeredModel
from tinyspec.grade.task import Cases, GradedLaw
from tinyspec.laws.accused import Evidence, accuse

PAIR = "the new tokens come back, and the layers after which they were read"
NEVER = "a model that nobody leaves early is the full model"
HOLES = "no key or value is read that was never stored"
PROMPT = "prompt tokens before the last never leave"
COPIED = "a token that left is filled from its state at the exit, by each layer above itself (CALM, arXiv 2207.07061)"
RECOMPUTED = "with recomputation the cache is that of the full model on the same text"
READ = "the word is the likeliest of the row at the exit"
SURE = "a token leaves after the first layer whose gap reaches the threshold"
COUNTED = "each layer is run once for every token that needs it, and for no other"

THRESHOLDS: tuple[Any, ...] = (
    Fraction(1, 10),
    Fraction(1, 4),
    Fraction(1, 3),
    Fraction(0),
    math.inf,
)


class Case(NamedTuple):
    """What the function is given; `seed` and `depth` make the model."""

    seed: int
    depth: int
    prompt: tuple[int, ...]
    n: int
    threshold: Any

    def shown(self) -> dict[str, Any]:
        """In the words of the task."""
        model = f"LayeredModel(seed={self.seed}, depth={self.depth})"
        return {
            "model": model,
            "prompt": list(self.prompt),
            "n": self.n,
            "threshold": self.threshold,
        }


class Decoded(NamedTuple):
    """What came back, and what the model noted."""

    tokens: list[int]
    layers: list[int]
    trace: list[Any]


def drawn(cases: Cases) -> list[Case]:
    """The fewest layers and tokens first."""
    random, found = Random(cases.seed), list[Case]()
    for depth, n, behind in (
        (1, 1, 0),
        (2, 1, 0),
        (2, 2, 0),
        (2, 2, 1),
        (2, 3, 1),
        (3, 2, 0),
        (3, 3, 1),
        (3, 5, 2),
        (4, 6, 1),
    ):
        for seed in range(4 * cases.times):
            prompt = tuple(random.randrange(3) for _ in range(1 + behind))
            found += [
                Case((seed + 10 * cases.seed) % MODULUS, depth, prompt, n, threshold)
                for threshold in THRESHOLDS
            ]
    return found


def model_of(case: Case) -> LayeredModel:
    return LayeredModel(case.seed, case.depth)


def decoded(function: Function, case: Case) -> Decoded:
    """One run. A hole is an accusation of its own, also where the function was stopped by it."""
    model = model_of(case)
    try:
        got = function(model, list(case.prompt), case.n, case.threshold)
    finally:
        for kind, layer, position, *at in model.trace:
            if kind == "hole":
                read = f"layer {layer}, run at position {position}, read position {at[0]}, where nothing was stored"
                accuse(HOLES, "no hole", read, **case.shown())
    asked = f"{case.n} tokens and {case.n} layers from 1 to {case.depth}"
    fine = (
        isinstance(got, (tuple, list))
        and len(got) == 2
        and all(isinstance(part, (tuple, list)) for part in got)
    )
    if not fine:
        accuse(PAIR, f"a pair of lists: {asked}", words(got), **case.shown())
    for part, low, high in zip(got, (0, 1), (model.vocabulary - 1, case.depth), strict=True):
        whole = all(
            isinstance(x, int) and not isinstance(x, bool) and low <= x <= high for x in part
        )
        if len(part) != case.n or not whole:
            accuse(PAIR, asked, got, **case.shown())
    return Decoded(list(got[0]), list(got[1]), model.trace)


# ---------------------------------------------------------------------- the rule, written out again


class Text(NamedTuple):
    """A text after a fresh pass.

    states  [L + 1][n] of every token below layer 1, above layer 1, ...
    pairs   [L + 1][n] keys and values of every layer; none of layer 0
    """

    states: list[list[int]]
    pairs: list[list[int]]


def passed(case: Case, text: Sequence[int], exits: Sequence[int], recompute: bool) -> Text:
    """All tokens, layer by layer; the token at position i has left after layer exits[i]."""
    model = model_of(case)
    states, pairs = [[model.embed(token) for token in text]], [list[int]()]
    for layer in range(1, case.depth + 1):
        below = states[-1]
        pairs.append(
            [model.project(layer, position, state) for position, state in enumerate(below)]
        )
        for position, pair in enumerate(pairs[-1]):
            model.store(layer, position, pair)
        above = [model.run(layer, position, state) for position, state in enumerate(below)]
        runs = [recompute or layer <= left for left in exits]
        states.append(
            [new if ran else old for new, old, ran in zip(above, below, runs, strict=True)]
        )
    return Text(states, pairs)


def likeliest(row: Sequence[Fraction]) -> int:
    return row.index(max(row))


def by_the_rule(case: Case, recompute: bool) -> tuple[list[int], list[int]]:
    """The tokens, and the layers after which they were read."""
    model, first = model_of(case), len(case.prompt) - 1
    text, exits = list(case.prompt), [case.depth] * first
    for _ in range(case.n):
        for layer in range(1, case.depth + 1):
            row = model.row(passed(case, text, [*exits, layer], recompute).states[layer][-1])
            top = sorted(row)
            if layer == case.depth or top[-1] - top[-2] >= case.threshold:
                exits, text = [*exits, layer], [*text, likeliest(row)]
                break
    return text[first + 1 :], exits[first:]


# ---------------------------------------------------------------------- the laws


def is_the_full_model(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """At the threshold inf."""
    return _same(
        NEVER, [case for case in drawn(cases) if case.threshold == math.inf], recompute, function
    )


def leaves_when_sure(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """At every threshold."""
    return _same(SURE, drawn(cases), recompute, function)


def _same(law: str, chosen: Sequence[Case], recompute: bool, function: Function) -> Evidence:
    for case in chosen:
        got = decoded(function, case)
        tokens, layers = by_the_rule(case, recompute)
        if (got.tokens, got.layers) != (tokens, layers):
            shown = [
                f"tokens {a}, read after layers {b}"
                for a, b in ((tokens, layers), (got.tokens, got.layers))
            ]
            accuse(law, shown[0], shown[1], **case.shown())
    return Evidence(law, len(chosen))


def reads_no_hole(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """`decoded` accuses. Only cases count in which a token left early."""
    return Evidence(
        HOLES, sum(has_left_early(case, decoded(function, case)) for case in drawn(cases))
    )


def has_left_early(case: Case, got: Decoded) -> bool:
    """Whether a token left before the last layer: else nothing was missing, and nothing had to be
    filled.
    """
    return any(layer < case.depth for layer in got.layers)


def _forced(case: Case, got: Decoded, recompute: bool) -> tuple[list[int], list[int], Text]:
    """The text that was run, where its tokens left according to the function, and what that ought
    to give.
    """
    text, exits = (
        [*case.prompt, *got.tokens[:-1]],
        [case.depth] * (len(case.prompt) - 1) + got.layers,
    )
    return text, exits, passed(case, text, exits, recompute)


def keeps_the_prompt(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """Their words are known, and all that comes behind reads their keys and values."""
    chosen = drawn(cases)
    for case in chosen:
        got = decoded(function, case)
        ran = {(position, layer) for kind, layer, position, *_ in got.trace if kind == "run"}
        for position, layer in product(range(len(case.prompt) - 1), range(1, case.depth + 1)):
            if (position, layer) not in ran:
                shown = [
                    f"layer {layer} is {_run(times)} for position {position} of the prompt"
                    for times in (1, 0)
                ]
                accuse(PROMPT, shown[0], shown[1], **case.shown())
    return Evidence(PROMPT, len(chosen))


def fills_what_is_missing(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """Every state that a layer was given, and every key and value that it read, wherever the tokens
    chose to leave.
    """
    law, seen = RECOMPUTED if recompute else COPIED, 0
    for case in drawn(cases):
        got = decoded(function, case)
        seen += has_left_early(case, got)
        text, exits, right = _forced(case, got, recompute)
        stored: dict[tuple[int, int], int] = {}
        said = {"text that was run": text, "left after layers": exits}
        for kind, layer, position, *rest in got.trace:
            if kind == "store":
                stored[layer, position] = rest[0]
            elif position < len(text):
                for at in range(position + 1):
                    expected, yours = right.pairs[layer][at], stored[layer, at]
                    if yours != expected:
                        what = f"key and value of position {at} in layer {layer}, when position {position} read it: "
                        accuse(law, f"{what}{expected}", f"{what}{yours}", **case.shown(), **said)
                if rest[0] != right.states[layer - 1][position]:
                    what = f"state below layer {layer} at position {position}: "
                    accuse(
                        law,
                        f"{what}{right.states[layer - 1][position]}",
                        f"{what}{rest[0]}",
                        **case.shown(),
                        **said,
                    )
    return Evidence(law, seen)


def reads_at_the_exit(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """Wherever the tokens chose to leave."""
    chosen = drawn(cases)
    for case in chosen:
        got, model = decoded(function, case), model_of(case)
        text, exits, right = _forced(case, got, recompute)
        for step, token in enumerate(got.tokens):
            at = len(case.prompt) - 1 + step
            row = model.row(right.states[exits[at]][at])
            if token != likeliest(row):
                said = {
                    "text that was run": text[: at + 1],
                    "left after layers": exits[: at + 1],
                    "row": row,
                }
                accuse(READ, likeliest(row), token, **case.shown(), **said)
    return Evidence(READ, len(chosen))


def runs_what_is_needed(recompute: bool, function: Function, cases: Cases) -> Evidence:
    """Counted by the model: not the product with the vocabulary, not what is filled."""
    seen = 0
    for case in drawn(cases):
        got = decoded(function, case)
        seen += has_left_early(case, got)
        text, exits, _ = _forced(case, got, recompute)
        reach = [
            case.depth if recompute and at < len(text) - 1 else left
            for at, left in enumerate(exits)
        ]
        ran = Counter((position, layer) for kind, layer, position, *_ in got.trace if kind == "run")
        needed = Counter((at, layer) for at, top in enumerate(reach) for layer in range(1, top + 1))
        for position, layer in sorted(ran | needed):
            times, due = ran[position, layer], needed[position, layer]
            if times != due:
                said: dict[str, Any] = {"text": [*text, got.tokens[-1]], "left after layers": exits}
                said |= {"layers run": ran.total(), "layers needed": needed.total()}
                shown = [
                    f"layer {layer} is {_run(x)} for position {position}" for x in (due, times)
                ]
                accuse(COUNTED, shown[0], shown[1], **case.shown(), **said)
    return Evidence(COUNTED, seen)


def _run(times: int) -> str:
    return {0: "not run", 1: "run once"}.get(times, f"run {times} times")


JUDGES: dict[Callable[[bool, Function, Cases], Evidence], str] = {
    reads_no_hole: HOLES,
    keeps_the_prompt: PROMPT,
    fills_what_is_missing: COPIED,
    reads_at_the_exit: READ,
    is_the_full_model: NEVER,
    leaves_when_sure: SURE,
    runs_what_is_needed: COUNTED,
}


def laws(recompute: bool, points: Sequence[int]) -> tuple[GradedLaw, ...]:
    """Return all of them, worth so many points each, for one way to fill what is missing."""
    sentences = [RECOMPUTED if recompute and name is COPIED else name for name in JUDGES.values()]
    judges = [partial(judge, recompute) for judge in JUDGES]
    return tuple(map(GradedLaw, points, sentences, judges))
