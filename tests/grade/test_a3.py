"""A3: the reference keeps every law, and the law meant for each mistake catches it.

The mistakes are those of students and of the field.
"""

import doctest
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.grade.tiny import ASSIGNMENTS_FOLDER, load_reference
from tinyspec.grade import a3_calibration, a3_confidence, a3_exits, a3_jacobi, a3_viterbi
from tinyspec.grade.assignments import A3 as ASSIGNMENT
from tinyspec.grade.grading import PUBLIC, grade_folder
from tinyspec.grade.props_a3 import CountedLattice, CountedModel, LayeredModel
from tinyspec.grade.starter import make_starter
from tinyspec.grade.task import Cases
from tinyspec.laws import exit_laws
from tinyspec.laws.evidence import LawViolated

FOLDER = ASSIGNMENTS_FOLDER / "A3"
TASKS = {task.name: task for task in ASSIGNMENT.tasks}
SURE = Fraction(1, 20)


REFERENCE = load_reference("A3")


def find_broken_law(name: str, function: Callable[..., Any], cases: Cases = PUBLIC) -> str | None:
    """Return the name of the first law of a task that a function breaks."""
    for law in TASKS[name].laws:
        try:
            evidence = law(function, cases)
            assert evidence.law == law.sentence
            assert evidence.cases > 0 or function not in vars(REFERENCE).values()
        except LawViolated as accused:
            return accused.counterexample.law
    return None


def test_a_hundred_points() -> None:
    assert sum(task.points for task in ASSIGNMENT.tasks) == 100
    assert [task.title.split()[0] for task in ASSIGNMENT.tasks] == [f"A3.{i}" for i in range(1, 11)]


def test_the_examples_in_the_docstrings_and_the_hand_out() -> None:
    assert doctest.testmod(REFERENCE).attempted > 10 and not doctest.testmod(REFERENCE).failed
    names = {**vars(REFERENCE), "LayeredModel": LayeredModel}
    tried = doctest.testfile(
        str(FOLDER / "handout.md"), module_relative=False, globs=names, encoding="utf-8"
    )
    assert tried.attempted == 4 and not tried.failed


def test_the_hand_out_s_sums() -> None:
    model = LayeredModel(seed=0, depth=3)
    assert REFERENCE.decode_recomputing(model, [0], 2, Fraction(1, 4)) == ([2, 1], [1, 3])
    ran = [event[1:] for event in model.trace if event[0] == "run"]
    assert ran[:2] == [(1, 0, 1, 6), (2, 0, 6, 41)] and [event[-1] for event in ran[3:]] == [
        0,
        13,
        65,
    ]
    copied = LayeredModel(seed=0, depth=3)
    REFERENCE.decode(copied, [0], 2, Fraction(1, 4))
    stored = {event[1:3]: event[3] for event in copied.trace if event[0] == "store"}
    assert (stored[1, 0], stored[2, 0], stored[3, 0], stored[3, 1]) == (2, 18, 24, 53)
    assert [event[-1] for event in copied.trace if event[0] == "run"] == [
        6,
        0,
        13,
        32,
    ]  # four layers
    weights = {6: (1, 1, 4), 32: (1, 4, 8), 65: (1, 8, 7)}
    assert all(model.row(h) == [Fraction(w, sum(row)) for w in row] for h, row in weights.items())
    assert [REFERENCE.softmax_response(model.row(h)) for h in (6, 0, 13)] == [
        Fraction(1, 2),
        Fraction(2, 9),
        Fraction(2, 11),
    ]
    begun = {}
    for name, more in (("decode_recomputing", ()), ("decode_waiting", (1,))):
        model = LayeredModel(seed=0, depth=3)
        getattr(REFERENCE, name)(model, [0], 2, *more, Fraction(1, 4))
        begun[name] = [event[1:3] for event in model.trace if event[0] == "run"]
    assert begun["decode_recomputing"] == [(n, at) for at in (0, 1) for n in (1, 2, 3)]
    assert begun["decode_waiting"] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [REFERENCE.p_value(k, 5, Fraction(1, 2)) for k in (0, 1)] == [
        Fraction(1, 32),
        Fraction(6, 32),
    ]
    p_values = [Fraction(1, 32), Fraction(1, 32), Fraction(6, 32), Fraction(1, 32)]
    assert REFERENCE.calibrate([0.9, 0.8, 0.7, 0.6], p_values, SURE) == 0.8
    counting = CountedModel("counting", vocabulary=5)
    REFERENCE.jacobi(counting, [1], 3, 3)
    assert [said for _, _, said in counting.trace] == [[2, 1, 1], [2, 3, 2], [2, 3, 4]]
    lower, higher = (
        REFERENCE.decode(LayeredModel(8, 3), [2], 3, at)[1]
        for at in (Fraction(1, 4), Fraction(1, 3))
    )
    assert sum(lower) > sum(higher)  # question 2
    for seed, threshold in itertools.product(
        range(5), (Fraction(1, 10), Fraction(1, 4))
    ):  # question 1
        texts = [
            function(LayeredModel(seed, 2), [0, 1], 4, threshold)
            for function in (REFERENCE.decode, REFERENCE.decode_recomputing)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("cases", [Cases(), Cases(seed=5, times=2)], ids=["public", "other"])
def test_the_reference_holds_every_law(name: str, cases: Cases) -> None:
    assert find_broken_law(name, getattr(REFERENCE, name), cases) is None


@pytest.mark.parametrize("name", TASKS)
def test_what_is_not_written_holds_no_law(name: str) -> None:
    def starter(*args: Any) -> Any:
        raise NotImplementedError

    def nothing(*args: Any, **named: Any) -> Any:
        return None

    for law in TASKS[name].laws:
        with pytest.raises(NotImplementedError):
            law(lambda *args, **named: starter(), Cases())
        with pytest.raises(LawViolated):
            law(nothing, Cases())


# ---------------------------------------------------------------------- confidences


def distinct(row: Any) -> Any:
    top = sorted(set(row))
    return top[-1] - (top[-2] if len(top) > 1 else 0)


GAPS = {
    "the greatest alone": max,
    "the first two places": lambda row: abs(row[0] - row[1]),
    "the greatest less the least": lambda row: max(row) - min(row),
    "equals are taken for one": distinct,
    "their ratio": lambda row: 1 - sorted(row)[-2] / sorted(row)[-1],
}


@pytest.mark.parametrize("wrong", GAPS)
def test_wrong_gaps(wrong: str) -> None:
    assert find_broken_law("softmax_response", GAPS[wrong]) == a3_confidence.GAP


def cosine(state: Any, below: Any) -> float:
    dot = sum(x * y for x, y in zip(state, below, strict=True))
    return float(dot / (math.hypot(*state) * math.hypot(*below) or 1))


SATURATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "no division": (
        lambda a, b: max(0, sum(x * y for x, y in zip(a, b, strict=True))),
        a3_confidence.COSINE,
    ),
    "divided by one length": (
        lambda a, b: max(
            0.0, sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*b) or 1)
        ),
        a3_confidence.COSINE,
    ),
    "divided by the squares": (
        lambda a, b: max(0.0, cosine(a, b) / (math.hypot(*a) * math.hypot(*b) or 1)),
        a3_confidence.COSINE,
    ),
    "a distance": (lambda a, b: 1 / (1 + math.dist(a, b)), a3_confidence.COSINE),
    "its square": (lambda a, b: cosine(a, b) ** 2, a3_confidence.COSINE),
    "three entries alone": (lambda a, b: max(0.0, cosine(a[:3], b[:3])), a3_confidence.COSINE),
    "not cut at 0": (cosine, a3_confidence.RANGE),
    "without its sign": (lambda a, b: abs(cosine(a, b)), a3_confidence.RANGE),
    "all zeros are sure": (
        lambda a, b: max(0.0, cosine(a, b)) if any(a) and any(b) else 1.0,
        a3_confidence.RANGE,
    ),
}


@pytest.mark.parametrize("wrong", SATURATIONS)
def test_wrong_saturations(wrong: str) -> None:
    function, law = SATURATIONS[wrong]
    assert find_broken_law("saturation", function) == law


# ---------------------------------------------------------------------- the exit layer


def exits(
    due: Callable[..., float] | None = None,
    reaches: Callable[[Any, Any], bool] = lambda c, due: bool(c >= due),
    first: int = 1,
    never: bool = True,
    last: bool = False,
) -> Callable[..., int]:
    """Return the exit layer with one thing changed."""

    def paper(threshold: float, step: int, limit: int, tau: float) -> float:
        return min(1.0, 0.9 * threshold + 0.1 * math.exp(-tau * step / limit))

    def exit_layer(confidences: Any, threshold: float, step: int, limit: int, tau: float) -> int:
        if threshold == math.inf and never:
            return len(confidences) + 1
        bar = (due or paper)(threshold, step, limit, tau)
        sure = [layer for layer, c in enumerate(confidences, first) if reaches(c, bar)]
        return (sure[-1] if last else sure[0]) if sure else len(confidences) + first

    return exit_layer


EXITS: dict[str, tuple[Callable[..., Any], str]] = {
    "greater, not equal": (exits(reaches=lambda c, due: bool(c > due)), a3_confidence.FIRST),
    "the last that is sure": (exits(last=True), a3_confidence.FIRST),
    "layers from 0": (exits(first=0), a3_confidence.FIRST),
    "leaves where it is not sure": (
        exits(reaches=lambda c, due: bool(c < due)),
        a3_confidence.FIRST,
    ),
    "no decay": (exits(lambda threshold, *place: min(1.0, threshold)), a3_confidence.DECAY),
    "the form of the published code": (
        exits(
            lambda threshold, step, limit, tau: min(
                1.0, threshold * (0.9 + 0.1 * math.exp(-tau * step / limit))
            )
        ),
        a3_confidence.DECAY,
    ),
    "rises": (
        exits(
            lambda threshold, step, limit, tau: min(
                1.0, 0.9 * threshold + 0.1 * math.exp(-tau * (limit - step) / limit)
            )
        ),
        a3_confidence.DECAY,
    ),
    "does not know the limit": (
        exits(
            lambda threshold, step, limit, tau: min(
                1.0, 0.9 * threshold + 0.1 * math.exp(-tau * step)
            )
        ),
        a3_confidence.DECAY,
    ),
    "counts from 1": (
        exits(
            lambda threshold, step, limit, tau: min(
                1.0, 0.9 * threshold + 0.1 * math.exp(-tau * (step - 1) / limit)
            )
        ),
        a3_confidence.DECAY,
    ),
    "lambda is cut": (
        exits(
            lambda threshold, step, limit, tau: (
                0.9 * min(threshold, 1) + 0.1 * math.exp(-tau * step / limit)
            )
        ),
        a3_confidence.CUT,
    ),
    "1 for every lambda above 1": (
        exits(
            lambda threshold, step, limit, tau: (
                1.0 if threshold > 1 else 0.9 * threshold + 0.1 * math.exp(-tau * step / limit)
            )
        ),
        a3_confidence.CUT,
    ),
    "inf is cut to 1": (exits(never=False), a3_confidence.CUT),
    "not cut": (
        exits(
            lambda threshold, step, limit, tau: (
                0.9 * threshold + 0.1 * math.exp(-tau * step / limit)
            )
        ),
        a3_confidence.CUT,
    ),
}


@pytest.mark.parametrize("wrong", EXITS)
def test_wrong_exit_layers(wrong: str) -> None:
    function, law = EXITS[wrong]
    assert find_broken_law("exit_layer", function) == law


# ---------------------------------------------------------------------- missing keys and values


def gap(row: Any) -> Any:
    top = sorted(row)
    return top[-1] - top[-2]


class Decoding:
    """Decoding with early exits, a method for everything that can go wrong."""

    recompute = False
    prompt_leaves = False
    tops = False  # whether the last layer is asked, and left out of the count

    def __call__(
        self, model: Any, prompt: list[int], n: int, threshold: Any
    ) -> tuple[list[int], list[int]]:
        self.model, self.threshold = model, threshold
        tokens, layers = list[int](), list[int]()
        text = list(prompt)
        for position in range(len(prompt) - 1 + n):
            new = position >= len(prompt) - 1
            state, left = self.token(position, text[position], new or self.prompt_leaves)
            if not self.recompute or position < len(prompt) - 2 + n or self.runs_the_last():
                self.fill(position, state, left)
            if new:
                (
                    text.append(self.word(position, state)),
                    tokens.append(text[-1]),
                    layers.append(left),
                )
        return tokens, layers

    def runs_the_last(self) -> bool:
        return False

    def layer(self, layer: int, position: int, state: int) -> int:
        self.model.store(layer, position, self.model.project(layer, position, state))
        return int(self.model.run(layer, position, state))

    def token(self, position: int, token: int, may: bool) -> tuple[int, int]:
        state = self.model.embed(token)
        for layer in range(1, self.model.depth + 1):
            self.below = state
            state = self.layer(layer, position, state)
            if may and layer < self.model.depth and self.sure(self.model.row(state)):
                return state, layer
        return state, int(self.model.depth)

    def sure(self, row: Any) -> bool:
        return bool(gap(row) >= self.threshold)

    def fill(self, position: int, state: int, left: int) -> None:
        for layer in range(left + 1, self.model.depth + 1):
            if self.recompute:
                state = self.layer(layer, position, state)
            else:
                self.model.store(layer, position, self.model.project(layer, position, state))

    def word(self, position: int, state: int) -> int:
        row = self.model.row(state)
        return int(row.index(max(row)))


class NothingIsFilled(Decoding):
    def fill(self, position: int, state: int, left: int) -> None:
        pass


class OneLayerIsFilled(Decoding):
    def fill(self, position: int, state: int, left: int) -> None:
        if left < self.model.depth:
            self.model.store(left + 1, position, self.model.project(left + 1, position, state))


class TheNextPositionIsFilled(Decoding):
    def fill(self, position: int, state: int, left: int) -> None:
        super().fill(position + 1, state, left)


class HolesAreIgnored(NothingIsFilled):
    """Goes on with the state it has where a layer is rejected."""

    def layer(self, layer: int, position: int, state: int) -> int:
        try:
            return super().layer(layer, position, state)
        except ValueError:
            return state


class KeysOfTheExitAreCopied(Decoding):
    """Not projected by each layer: the field's favourite."""

    def fill(self, position: int, state: int, left: int) -> None:
        for layer in range(left + 1, self.model.depth + 1):
            self.model.store(layer, position, self.model.project(left, position, self.below))


class OneProjectionForAll(Decoding):
    def fill(self, position: int, state: int, left: int) -> None:
        for layer in range(left + 1, self.model.depth + 1):
            self.model.store(layer, position, self.model.project(left + 1, position, state))


class TheStateBelowTheExit(Decoding):
    def fill(self, position: int, state: int, left: int) -> None:
        super().fill(position, self.below, left)


class Zeros(Decoding):
    def fill(self, position: int, state: int, left: int) -> None:
        for layer in range(left + 1, self.model.depth + 1):
            self.model.store(layer, position, 0)


class ThePromptLeavesToo(Decoding):
    prompt_leaves = True


class Recomputes(Decoding):
    recompute = True


class CopiesInstead(Decoding):
    """For the task that asks for recomputation."""


class RecomputesTheLast(Recomputes):
    def runs_the_last(self) -> bool:
        return True


class RecomputesFromTheBottom(Recomputes):
    """Right, and layers run twice."""

    def fill(self, position: int, state: int, left: int) -> None:
        if left < self.model.depth:
            state = self.model.embed(self.fed)
            super().fill(position, state, 0)

    def token(self, position: int, token: int, may: bool) -> tuple[int, int]:
        self.fed = token
        return super().token(position, token, may)


class RecomputesFromTheStateBelow(Recomputes):
    def fill(self, position: int, state: int, left: int) -> None:
        super().fill(position, self.below, left)


class RunsTheTopAsWell(Decoding):
    """Reads the logits of the exit, and saves nothing: it runs one layer above for no reason."""

    def fill(self, position: int, state: int, left: int) -> None:
        if left < self.model.depth:
            self.layer(left + 1, position, state)
        super().fill(position, state, left)


class RunsThePrefixAgain(Decoding):
    def token(self, position: int, token: int, may: bool) -> tuple[int, int]:
        if position == 1:
            for layer in range(1, self.model.depth + 1):
                self.model.run(layer, 0, self.first[layer - 1])
        self.first = [] if position == 0 else self.first
        return super().token(position, token, may)

    def layer(self, layer: int, position: int, state: int) -> int:
        if position == 0:
            self.first.append(state)
        return super().layer(layer, position, state)

    def fill(self, position: int, state: int, left: int) -> None:
        for layer in range(left + 1, self.model.depth + 1):
            self.first += [state] if position == 0 else []
            self.model.store(layer, position, self.model.project(layer, position, state))


class TheRowBelow(Decoding):
    def word(self, position: int, state: int) -> int:
        return super().word(position, self.below)


class TheLastOfEquals(Decoding):
    def word(self, position: int, state: int) -> int:
        row = self.model.row(state)
        return max(range(len(row)), key=lambda token: (row[token], token))


class GreaterNotEqual(Decoding):
    def sure(self, row: Any) -> bool:
        return bool(gap(row) > self.threshold)


class TheGreatestAlone(Decoding):
    def sure(self, row: Any) -> bool:
        return bool(max(row) >= self.threshold)


class IgnoresInf(Decoding):
    def sure(self, row: Any) -> bool:
        return bool(gap(row) >= min(self.threshold, Fraction(1, 5)))


class TheFirstNeverLeaves(Decoding):
    """Counts the last token of the prompt among those that run through."""

    def token(self, position: int, token: int, may: bool) -> tuple[int, int]:
        may, self.seen = may and self.seen, may
        return super().token(position, token, may)

    def __call__(
        self, model: Any, prompt: list[int], n: int, threshold: Any
    ) -> tuple[list[int], list[int]]:
        self.seen = False
        return super().__call__(model, prompt, n, threshold)


class LayersFromZero(Decoding):
    def __call__(
        self, model: Any, prompt: list[int], n: int, threshold: Any
    ) -> tuple[list[int], list[int]]:
        tokens, layers = super().__call__(model, prompt, n, threshold)
        return tokens, [layer - 1 for layer in layers]


class OneTokenTooMany(Decoding):
    def __call__(
        self, model: Any, prompt: list[int], n: int, threshold: Any
    ) -> tuple[list[int], list[int]]:
        return super().__call__(model, prompt, n + 1, threshold)


COPY = {
    LayersFromZero: a3_exits.PAIR,
    OneTokenTooMany: a3_exits.PAIR,
    TheFirstNeverLeaves: a3_exits.SURE,
    IgnoresInf: a3_exits.NEVER,
    NothingIsFilled: a3_exits.HOLES,
    OneLayerIsFilled: a3_exits.HOLES,
    TheNextPositionIsFilled: a3_exits.HOLES,
    HolesAreIgnored: a3_exits.HOLES,
    KeysOfTheExitAreCopied: a3_exits.COPIED,
    OneProjectionForAll: a3_exits.COPIED,
    TheStateBelowTheExit: a3_exits.COPIED,
    Zeros: a3_exits.COPIED,
    ThePromptLeavesToo: a3_exits.PROMPT,
    Recomputes: a3_exits.COPIED,
    TheRowBelow: a3_exits.READ,
    TheLastOfEquals: a3_exits.READ,
    GreaterNotEqual: a3_exits.SURE,
    TheGreatestAlone: a3_exits.SURE,
    RunsTheTopAsWell: a3_exits.COUNTED,
    RunsThePrefixAgain: a3_exits.COUNTED,
}
RECOMPUTE = {
    NothingIsFilled: a3_exits.HOLES,
    CopiesInstead: a3_exits.RECOMPUTED,
    KeysOfTheExitAreCopied: a3_exits.RECOMPUTED,
    RecomputesFromTheStateBelow: a3_exits.RECOMPUTED,
    RecomputesTheLast: a3_exits.COUNTED,
    RecomputesFromTheBottom: a3_exits.COUNTED,
}


def test_without_a_mistake_the_test_doubles_are_right() -> None:
    assert find_broken_law("decode", Decoding()) is None
    assert find_broken_law("decode_recomputing", Recomputes()) is None


@pytest.mark.parametrize("wrong", COPY, ids=lambda wrong: wrong.__name__)
def test_wrong_copies(wrong: type[Decoding]) -> None:
    assert find_broken_law("decode", wrong()) == COPY[wrong]


@pytest.mark.parametrize("wrong", RECOMPUTE, ids=lambda wrong: wrong.__name__)
def test_wrong_recomputations(wrong: type[Decoding]) -> None:
    assert find_broken_law("decode_recomputing", wrong()) == RECOMPUTE[wrong]


class Waiting(Decoding):
    """FREE, a method for everything that can go wrong."""

    def __call__(  # type: ignore[override]
        self, model: Any, prompt: list[int], n: int, shallow: int, threshold: Any
    ) -> tuple[list[int], list[int]]:
        self.model, self.shallow, self.threshold = model, shallow, threshold
        self.waiting = list[tuple[int, int]]()
        text, layers, first = list(prompt), list[int](), len(prompt) - 1
        for position in range(first + n):
            state = model.embed(text[position])
            for layer in range(1, shallow + 1):
                self.below, state = state, self.layer(layer, position, state)
            left, exits = shallow, position >= first or self.prompt_leaves
            if exits and self.sure(model.row(state)):
                self.wait(position, state)
            else:
                self.waiting.append((position, state))
                state, left = self.complete(), model.depth
            if position >= first:
                text.append(self.word(position, state))
                layers.append(left)
        self.end()
        return text[first + 1 :], layers

    def sure(self, row: Any) -> bool:
        return bool(gap(row) > self.threshold)

    def wait(self, position: int, state: int) -> None:
        self.waiting.append((position, state))

    def complete(self) -> int:
        for layer in range(self.shallow + 1, self.model.depth + 1):
            self.waiting = [(at, self.layer(layer, at, below)) for at, below in self.waiting]
        state, self.waiting = self.waiting[-1][1], []
        return state

    def end(self) -> None:
        pass


class ForgetsWhoWaits(Waiting):
    def wait(self, position: int, state: int) -> None:
        pass


class CopiesWhoWaits(Waiting):
    """The states of the exit are copied up, under the name of FREE."""

    def wait(self, position: int, state: int) -> None:
        for layer in range(self.shallow + 1, self.model.depth + 1):
            self.model.store(layer, position, self.model.project(layer, position, state))


class WaitsBelowTheExit(Waiting):
    def wait(self, position: int, state: int) -> None:
        self.waiting.append((position, self.below))


class RunsNewestFirst(Waiting):
    def complete(self) -> int:
        newest, self.waiting = self.waiting[-1], self.waiting[-1:] + self.waiting[:-1]
        for layer in range(self.shallow + 1, self.model.depth + 1):
            self.waiting = [(at, self.layer(layer, at, below)) for at, below in self.waiting]
        state = dict(self.waiting)[newest[0]]
        self.waiting = []
        return state


class NoMaskInTheBlock(Waiting):
    """Stores the keys of the whole block, then runs it from the newest to the oldest state."""

    def complete(self) -> int:
        for layer in range(self.shallow + 1, self.model.depth + 1):
            last = self.waiting[-1][0]
            for at, below in self.waiting:
                self.model.store(layer, at, self.model.project(layer, at, below))
            self.waiting = [(at, self.model.run(layer, last, h)) for at, h in self.waiting]
        state, self.waiting = self.waiting[-1][1], []
        return state


class OneByOne(Waiting):
    """Right, and every token reads the weights again."""

    def complete(self) -> int:
        for at, state in self.waiting:
            for layer in range(self.shallow + 1, self.model.depth + 1):
                state = self.layer(layer, at, state)
        self.waiting = []
        return state


class RunsAtOnce(OneByOne):
    """Recomputes before the next token."""

    def wait(self, position: int, state: int) -> None:
        self.waiting.append((position, state))
        self.complete()


class RunsWhoWaitsAtTheEnd(Waiting):
    def end(self) -> None:
        if self.waiting:
            self.complete()


class ReachesTheThreshold(Waiting):
    def sure(self, row: Any) -> bool:
        return bool(gap(row) >= self.threshold)


class ThePromptWaits(Waiting):
    prompt_leaves = True


class TheShallowWord(Waiting):
    """A token that stays keeps the word that it had after the shallow layers."""

    def complete(self) -> int:
        shallow = self.waiting[-1][1]
        super().complete()
        return shallow


WAIT = {
    ForgetsWhoWaits: a3_exits.HOLES,
    RunsNewestFirst: a3_exits.HOLES,
    CopiesWhoWaits: a3_exits.SYNCHRONISED,
    WaitsBelowTheExit: a3_exits.SYNCHRONISED,
    NoMaskInTheBlock: a3_exits.SYNCHRONISED,
    ThePromptWaits: a3_exits.PROMPT,
    TheShallowWord: a3_exits.READ,
    ReachesTheThreshold: a3_exits.EXCEEDS,
    RunsWhoWaitsAtTheEnd: a3_exits.COUNTED,
    RunsAtOnce: a3_exits.COUNTED,
    OneByOne: a3_exits.BLOCKS_OF_WAITING,
}


def test_the_double_that_waits_is_right() -> None:
    assert find_broken_law("decode_waiting", Waiting()) is None


@pytest.mark.parametrize("wrong", WAIT, ids=lambda wrong: wrong.__name__)
def test_wrong_blocks(wrong: type[Waiting]) -> None:
    assert find_broken_law("decode_waiting", wrong()) == WAIT[wrong]


def test_a_prompt_may_be_run_as_one_block() -> None:
    class InOneBlock(Waiting):
        def complete(self) -> int:
            if self.waiting[-1][0] < self.prompt_ends:
                return 0
            return super().complete()

        def __call__(self, model: Any, prompt: list[int], *rest: Any) -> Any:
            self.prompt_ends = len(prompt) - 2
            return super().__call__(model, prompt, *rest)

    assert find_broken_law("decode_waiting", InOneBlock()) is None


# ---------------------------------------------------------------------- Viterbi


def search(
    transition: Callable[..., int] = lambda lattice, i, a, b: lattice.transition(i, a, b),
    keep: int = 99,
    pointers: Callable[[Any], Any] = reversed,
    emission: Callable[..., int] = lambda lattice, i, a: lattice.emission(i, a),
) -> Callable[[Any], list[int]]:
    """Return Viterbi's algorithm with one thing changed; `keep` candidates of a place go on."""

    def viterbi(lattice: Any) -> list[int]:
        words = range(lattice.candidates)
        scores, before = {a: emission(lattice, 0, a) for a in words}, list[dict[int, int]]()
        for place in range(1, lattice.places):
            live = sorted(scores, key=lambda a: -scores[a])[:keep]
            best = {
                b: max((scores[a] + transition(lattice, place - 1, a, b), a) for a in live)
                for b in words
            }
            scores = {b: score + emission(lattice, place, b) for b, (score, _) in best.items()}
            before.append({b: a for b, (_, a) in best.items()})
        path = [max(scores, key=lambda a: scores[a])]
        for came_from in pointers(before):
            path.append(came_from[path[-1]])
        return path[::-1]

    return viterbi


def try_all(lattice: Any) -> list[int]:
    def score(path: tuple[int, ...]) -> int:
        emissions = sum(lattice.emission(i, a) for i, a in enumerate(path))
        pairs = enumerate(itertools.pairwise(path))
        return int(emissions + sum(lattice.transition(i, a, b) for i, (a, b) in pairs))

    words = range(lattice.candidates)
    return list(max(itertools.product(words, repeat=lattice.places), key=score))


def ask_again(lattice: Any) -> list[int]:
    """Right, and the emission of a place is asked for with each transition."""
    return search(
        lambda lattice, i, a, b: lattice.transition(i, a, b) + 0 * lattice.emission(i + 1, b)
    )(lattice)


def ask_a_copy(lattice: Any) -> list[int]:
    """Right, but nobody sees how much it asks for."""
    return search()(CountedLattice(**lattice.made_of))


PATHS: dict[str, tuple[Callable[..., Any], str]] = {
    "the score comes back": (lambda lattice: 7, a3_viterbi.PATH),
    "a place is missing": (lambda lattice: search()(lattice)[:-1], a3_viterbi.PATH),
    "candidates from 1": (lambda lattice: [a + 1 for a in search()(lattice)], a3_viterbi.PATH),
    "from left to right": (search(keep=1), a3_viterbi.BEST),
    "a beam of two": (search(keep=2), a3_viterbi.BEST),
    "a beam of three": (search(keep=3), a3_viterbi.BEST),
    "emissions alone": (search(lambda *given: 0), a3_viterbi.BEST),
    "transitions alone": (search(emission=lambda *given: 0), a3_viterbi.BEST),
    "transitions the other way": (
        search(lambda lattice, i, a, b: lattice.transition(i, b, a)),
        a3_viterbi.BEST,
    ),
    "static transitions under the name of dynamic ones": (
        search(lambda lattice, i, a, b: lattice.transition(0, a, b)),
        a3_viterbi.BEST,
    ),
    "pointers from the front": (search(pointers=iter), a3_viterbi.BEST),
    "the sentence backwards": (lambda lattice: search()(lattice)[::-1], a3_viterbi.BEST),
    "the lowest score": (
        search(lambda lattice, i, a, b: -lattice.transition(i, a, b)),
        a3_viterbi.BEST,
    ),
    "asked for twice": (ask_again, a3_viterbi.WORK),
    "a copy is asked": (ask_a_copy, a3_viterbi.WORK),
}


@pytest.mark.parametrize("wrong", PATHS)
def test_wrong_sentences(wrong: str) -> None:
    function, law = PATHS[wrong]
    assert find_broken_law("viterbi", function) == law


def test_trying_every_sentence_is_right_and_too_much() -> None:
    laws = {law.sentence: law for law in TASKS["viterbi"].laws}
    assert laws[a3_viterbi.BEST](try_all, Cases()).cases
    with pytest.raises(LawViolated) as told:
        laws[a3_viterbi.WORK](try_all, Cases())
    assert told.value.counterexample.law == a3_viterbi.WORK


def test_the_sentence_of_the_hand_out() -> None:
    class ByHand(CountedLattice):
        def emission(self, place: int, a: int) -> int:
            return (3, 2)[a]

        def transition(self, place: int, a: int, b: int) -> int:
            return ((-4, 0), (1, 0))[a][b]

    assert REFERENCE.viterbi(ByHand("static", 0, 2, 2)) == [1, 0]


def test_a_lattice_refuses_what_it_lacks() -> None:
    lattice = CountedLattice("dynamic", 0, 2, 3)
    for misuse in (
        lambda: lattice.emission(2, 0),
        lambda: lattice.emission(0, 3),
        lambda: lattice.transition(1, 0, 0),
        lambda: lattice.transition(0, True, 0),
    ):
        with pytest.raises(ValueError, match="must be a whole number from 0 to"):
            misuse()


def test_a_hole_is_named_with_layer_and_position() -> None:
    with pytest.raises(LawViolated) as told:
        TASKS["decode"].laws[0](NothingIsFilled(), Cases())
    assert (
        told.value.counterexample.got
        == "layer 2, run at position 1, read position 0, where nothing was stored"
    )
    assert told.value.counterexample.case["prompt"] and told.value.counterexample.case["n"] == 2


# ---------------------------------------------------------------------- Learn then Test


def tail(n: int, delta: Fraction, counted: Any) -> Fraction:
    return sum((math.comb(n, k) * delta**k * (1 - delta) ** (n - k) for k in counted), Fraction(0))


P_VALUES: dict[str, tuple[Callable[..., Any], str]] = {
    "fewer losses, not as many": (lambda k, n, d: tail(n, d, range(k)), exit_laws.SUPER),
    "the other side": (lambda k, n, d: tail(n, d, range(k, n + 1)), exit_laws.SUPER),
    "just as many": (lambda k, n, d: tail(n, d, (k,)), exit_laws.SUPER),
    "the mean": (lambda k, n, d: Fraction(k, n), exit_laws.SUPER),
    "without the binomial coefficients": (
        lambda k, n, d: sum(d**i * (1 - d) ** (n - i) for i in range(k + 1)),
        exit_laws.SUPER,
    ),
    "Hoeffding's": (
        lambda k, n, d: Fraction(math.exp(-2 * n * max(0.0, float(d) - k / n) ** 2)),
        a3_calibration.TAIL,
    ),
    "rounded": (lambda k, n, d: float(tail(n, d, range(k + 1))), a3_calibration.TAIL),
    "one loss more": (lambda k, n, d: tail(n, d, range(min(k + 2, n + 1))), a3_calibration.TAIL),
    "always 1": (lambda k, n, d: 1, a3_calibration.TAIL),
}


@pytest.mark.parametrize("wrong", P_VALUES)
def test_wrong_p_values(wrong: str) -> None:
    function, law = P_VALUES[wrong]
    assert find_broken_law("p_value", function) == law


def test_a_p_value_that_comes_too_often_is_named() -> None:
    with pytest.raises(LawViolated) as told:
        TASKS["p_value"].laws[0](P_VALUES["fewer losses, not as many"][0], Cases())
    assert told.value.counterexample.expected == (
        "where the risk is 1/10, a p-value of 0 or less comes with probability 0 at most"
    )
    assert str(told.value.counterexample.got).endswith(
        "a p-value of 0 or less comes with probability 0.9000"
    )


def goes_on(thresholds: Any, p_values: Any, epsilon: Any) -> Any:
    passed = [threshold for threshold, p in zip(thresholds, p_values, strict=True) if p <= epsilon]
    return passed[-1] if passed else math.inf


def one_too_far(thresholds: Any, p_values: Any, epsilon: Any) -> Any:
    for threshold, p in zip(thresholds, p_values, strict=True):
        if p > epsilon:
            return threshold
    return thresholds[-1]


def divided(thresholds: Any, p_values: Any, epsilon: Any) -> Any:
    return goes_on(thresholds, p_values, epsilon / len(thresholds))  # Bonferroni: valid, and weaker


CALIBRATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "goes on after a failure": (goes_on, exit_laws.CALIBRATED),
    "returns the one that failed": (one_too_far, exit_laws.CALIBRATED),
    "the smallest p": (lambda ts, ps, e: ts[ps.index(min(ps))], exit_laws.CALIBRATED),
    "from the boldest up": (
        lambda ts, ps, e: next(
            (t for t, p in zip(ts[::-1], ps[::-1], strict=True) if p <= e), math.inf
        ),
        exit_laws.CALIBRATED,
    ),
    "keeps what it could not reject": (
        lambda ts, ps, e: next((t for t, p in zip(ts, ps, strict=True) if p > e), math.inf),
        exit_laws.CALIBRATED,
    ),
    "the safest where none passed": (
        lambda ts, ps, e: ts[0] if ps[0] > e else REFERENCE.calibrate(ts, ps, e),
        exit_laws.CALIBRATED,
    ),
    "never": (lambda ts, ps, e: math.inf, exit_laws.SEQUENCE),
    "the first that passed": (
        lambda ts, ps, e: ts[0] if ps[0] <= e else math.inf,
        exit_laws.SEQUENCE,
    ),
    "smaller, not equal": (
        lambda ts, ps, e: REFERENCE.calibrate(ts, ps, e - Fraction(1, 10**6)),
        exit_laws.SEQUENCE,
    ),
    "epsilon is always 1/20": (
        lambda ts, ps, e: REFERENCE.calibrate(ts, ps, SURE),
        exit_laws.SEQUENCE,
    ),
    "epsilon divided by their number": (divided, exit_laws.SEQUENCE),
}


@pytest.mark.parametrize("wrong", CALIBRATIONS)
def test_wrong_calibrations(wrong: str) -> None:
    function, law = CALIBRATIONS[wrong]
    assert find_broken_law("calibrate", function) == law


def test_a_wrong_choice_is_shown_with_its_probability_and_an_example() -> None:
    with pytest.raises(LawViolated) as told:
        TASKS["calibrate"].laws[0](goes_on, Cases())
    found = told.value.counterexample
    assert float(found.got.split()[-1]) > exit_laws.EPSILON
    assert (
        found.case["p-values, for example"].count(Fraction(3, 16)) == 1
    )  # one failure, and it went on
    assert found.case["you choose"] < found.case["testing in order chooses"]


# ---------------------------------------------------------------------- Jacobi iteration


class Iteration:
    """Jacobi iteration, a method for everything that can go wrong."""

    def __call__(self, model: Any, prompt: list[int], n: int, block: int) -> list[int]:
        made = list[int]()
        while len(made) < n:
            size = self.size(n, block, made)
            guess = self.solved(model, [*prompt, *made], [0] * size)
            made += guess
            if self.ended(model, made, guess):
                return self.cut(model, made)
        return made

    def size(self, n: int, block: int, made: list[int]) -> int:
        return min(block, n - len(made))

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in range(len(guess)):
            said = model.says(text, guess)
            if said == guess:
                break
            guess = said
        return guess

    def ended(self, model: Any, made: list[int], guess: list[int]) -> bool:
        return model.eos in guess

    def cut(self, model: Any, made: list[int]) -> list[int]:
        return made[: made.index(model.eos) + 1]


class SlicesWhatIsFinal(Iteration):
    """Right too: what is final goes into the text."""

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        done = list[int]()
        while guess:
            said = model.says([*text, *done], guess)
            agreed = next(
                (at for at, (a, b) in enumerate(zip(said, guess, strict=True)) if a != b),
                len(guess),
            )
            fixed = min(agreed + 1, len(guess))
            done, guess = done + said[:fixed], said[fixed:]
        return done


class OneSweep(Iteration):
    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        return list(model.says(text, guess))


class StopsWhenTheFirstStands(Iteration):
    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in range(len(guess)):
            said = model.says(text, guess)
            if said[0] == guess[0]:
                return list(said)
            guess = said
        return guess


class ConvergesByTheLastToken(Iteration):
    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in range(len(guess)):
            said = model.says(text, guess)
            if said[-1] == guess[-1]:
                return list(said)
            guess = said
        return guess


class BelievesAnEndThatIsGuessed(Iteration):
    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in range(len(guess)):
            said = model.says(text, guess)
            if said == guess or model.eos in said:
                return list(said)
            guess = said
        return guess


class IsNotCut(Iteration):
    def cut(self, model: Any, made: list[int]) -> list[int]:
        return made


class LooksForTheEndAtTheLastToken(Iteration):
    def ended(self, model: Any, made: list[int], guess: list[int]) -> bool:
        return bool(guess[-1] == model.eos)


class LeavesTheEndOut(Iteration):
    def cut(self, model: Any, made: list[int]) -> list[int]:
        return made[: made.index(model.eos)]


class TheLastBlockIsWhole(Iteration):
    def size(self, n: int, block: int, made: list[int]) -> int:
        return block


class ShiftedByOne(Iteration):
    """Takes the answer at a position for the token after that position's answer."""

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in range(len(guess)):
            guess = [guess[0], *model.says(text, guess)[:-1]]
        return guess


class AllAtOnce(Iteration):
    """Forgets the blocks."""

    def size(self, n: int, block: int, made: list[int]) -> int:
        return n - len(made)


class OneByOne(Iteration):
    """Plain decoding under another name."""

    def size(self, n: int, block: int, made: list[int]) -> int:
        return 1


class OneTokenASweep(Iteration):
    """It runs as many forward passes as plain decoding.

    It leaves the rest of the block as it was, even where it has become right.
    """

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for at in range(len(guess)):
            guess = [*guess[:at], model.says(text, guess)[at], *guess[at + 1 :]]
        return guess


class OneSweepToConfirm(Iteration):
    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        while True:
            said = model.says(text, guess)
            if said == guess:
                return guess
            guess = said


class EverySweepTwice(Iteration):
    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in range(len(guess)):
            model.says(text, guess)
            guess = model.says(text, guess)
        return guess


class StartsAnew(Iteration):
    """Finds out which tokens are final, and forgets the other tokens of the block."""

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        known = list[int]()
        while len(known) < len(guess):
            tried = [*known, *guess[len(known) :]]
            said = model.says(text, tried)
            agreed = next(
                (at for at, (a, b) in enumerate(zip(said, tried, strict=True)) if a != b),
                len(tried),
            )
            known = said[: agreed + 1]
        return known


def second(model: Any, text: list[int], count: int) -> list[int]:
    """Return the greedy tokens, by a second model whose forward passes are not counted."""
    unseen, made = type(model)(**model.made_of), list[int]()
    while len(made) < count:
        made += unseen.says([*text, *made], [0])
    return made


class AsksASecondModel(Iteration):
    """Return the greedy text, without a forward pass of the model that was given."""

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        return second(model, text, len(guess))


class GuessesWhatASecondModelSays(Iteration):
    """One forward pass a block, which only confirms what is known."""

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        return list(model.says(text, second(model, text, len(guess))))


class AsksBehindTheWrongText(Iteration):
    """Calls as many as are wanted, whose answers are not what is returned."""

    def solved(self, model: Any, text: list[int], guess: list[int]) -> list[int]:
        for _ in guess:
            model.says(text, guess)
        return second(model, text, len(guess))


JACOBI = {
    AsksASecondModel: a3_jacobi.SAID,
    AsksBehindTheWrongText: a3_jacobi.SAID,
    GuessesWhatASecondModelSays: a3_jacobi.BLIND,
    OneSweep: a3_jacobi.GREEDY,
    StopsWhenTheFirstStands: a3_jacobi.GREEDY,
    ConvergesByTheLastToken: a3_jacobi.GREEDY,
    BelievesAnEndThatIsGuessed: a3_jacobi.GREEDY,
    IsNotCut: a3_jacobi.GREEDY,
    LooksForTheEndAtTheLastToken: a3_jacobi.GREEDY,
    LeavesTheEndOut: a3_jacobi.GREEDY,
    TheLastBlockIsWhole: a3_jacobi.GREEDY,
    ShiftedByOne: a3_jacobi.GREEDY,
    AllAtOnce: a3_jacobi.BLOCKS,
    OneByOne: a3_jacobi.BLOCKS,
    EverySweepTwice: a3_jacobi.PROGRESS,
    OneTokenASweep: a3_jacobi.PROGRESS,
    OneSweepToConfirm: a3_jacobi.CALLS,
    StartsAnew: a3_jacobi.CALLS,
}


@pytest.mark.parametrize("right", [Iteration, SlicesWhatIsFinal], ids=lambda right: right.__name__)
def test_two_right_ways_to_iterate(right: type[Iteration]) -> None:
    assert find_broken_law("jacobi", right()) is None


@pytest.mark.parametrize("wrong", JACOBI, ids=lambda wrong: wrong.__name__)
def test_wrong_iterations(wrong: type[Iteration]) -> None:
    assert find_broken_law("jacobi", wrong()) == JACOBI[wrong]


# ---------------------------------------------------------------------- the models


def misuses() -> Iterator[tuple[Callable[[], Any], str]]:
    layered, counted = LayeredModel(1, 2), CountedModel("mixing", vocabulary=3)
    yield (
        lambda: layered.run(1, 0, 5),
        "a hole: layer 1, run at position 0, reads the keys and values of position 0",
    )
    yield lambda: layered.run(3, 0, 5), "the layer is 3: it must be a whole number from 1 to 2"
    yield lambda: layered.embed(7), "the token is 7"
    yield lambda: layered.store(1, 0, None), "the key and value is None"  # type: ignore[arg-type]
    yield lambda: layered.row(1.5), "the state is 1.5"  # type: ignore[arg-type]
    yield lambda: counted.says([0], []), "the guesses must be a list of tokens that is not empty"
    yield lambda: counted.says([0], [-1]), "a token of the guesses is -1"
    yield lambda: [counted.says([0], [0]) for _ in range(2000)], "ran 1000 forward passes"


@pytest.mark.parametrize("misuse", misuses(), ids=lambda misuse: misuse[1][:24])
def test_misuse_is_an_error_of_one_sentence(misuse: tuple[Callable[[], Any], str]) -> None:
    with pytest.raises(ValueError, match=misuse[1]):
        misuse[0]()


def test_models_keep_their_innards_to_themselves() -> None:
    base = {"trace", "note", "made_of"}
    layered = {"embed", "project", "store", "run", "row", "depth", "vocabulary"}
    shown = [
        {name for name in dir(model) if name[0] != "_"} - base
        for model in (LayeredModel(1, 2), CountedModel("mixing"))
    ]
    assert shown == [layered, {"says", "vocabulary", "eos"}]


def test_models_are_made_again_of_what_they_tell() -> None:
    layered, counted = LayeredModel(2, 3), CountedModel("places", 1, 4, 2)
    layered.store(1, 0, 5)
    assert (
        LayeredModel(**layered.made_of).made_of == layered.made_of
        and LayeredModel(**layered.made_of).trace == []
    )
    assert CountedModel(**counted.made_of).made_of == counted.made_of


# ---------------------------------------------------------------------- in a child process


def handed_in(folder: Path, text: str) -> dict[str, Any]:
    """Return the results of a submission by task."""
    (folder / "submission.py").write_text(text, encoding="utf-8")
    report = grade_folder(ASSIGNMENT, folder)
    assert not report.problem
    return {result.task.name: result for result in report.results}


@pytest.mark.slow
def test_the_reference_has_all_points_in_a_child_process(tmp_path: Path) -> None:
    results = handed_in(tmp_path, (FOLDER / "reference.py").read_text(encoding="utf-8"))
    assert sum(result.score for result in results.values()) == 100


def test_the_starter_has_no_points(tmp_path: Path) -> None:
    results = handed_in(tmp_path, make_starter(ASSIGNMENT))
    assert [result.score for result in results.values()] == [0] * len(TASKS)
    assert all("is not written yet" in result.sentence for result in results.values())
    assert "A3.4 decode: write me" in results["decode"].sentence


HALF_DONE = (
    (
        (
            "            model.store(layer, position, model.project(layer, position, state))\n "
            "       if position"
        ),
        "            pass\n        if position",
    ),
    ("        if position < first + n - 1:", "        if position < first + n:"),
    (
        "        if p > epsilon:\n            break\n        chosen = threshold\n",
        "        if p <= epsilon:\n            chosen = threshold\n",
    ),
    ("    if threshold < math.inf:\n", "    if True:\n"),
    ("        for _ in range(size):", "        while True:"),
)


@pytest.mark.slow
def test_half_done_work_is_shown_which_law_it_breaks_and_where(tmp_path: Path) -> None:
    text = (FOLDER / "reference.py").read_text(encoding="utf-8")
    for right, wrong in HALF_DONE:
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    results = handed_in(tmp_path, text)
    laws = {
        name: result.counterexample.law for name, result in results.items() if result.counterexample
    }
    assert laws == {
        "exit_layer": a3_confidence.CUT,
        "decode": a3_exits.HOLES,
        "decode_recomputing": a3_exits.COUNTED,
        "calibrate": exit_laws.CALIBRATED,
        "jacobi": a3_jacobi.CALLS,
    }
    hole = results["decode"].counterexample
    assert (
        hole and hole.got == "layer 2, run at position 1, read position 0, where nothing was stored"
    )
    scores = {name: result.score for name, result in results.items()}
    assert scores == {
        "softmax_response": 4,
        "saturation": 6,
        "exit_layer": 8,
        "decode": 2,
        "decode_recomputing": 7,
        "p_value": 6,
        "calibrate": 0,
        "jacobi": 13,
        "decode_waiting": 12,
        "viterbi": 10,
    }
