"""Early exits and their calibration with one defect each: when a token leaves, what it leaves
behind, what is shown of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.calibrate import Calibrated, PValue, Tested
from tinyspec.early_exit.exits import Exit, ExitTarget, Rule
from tinyspec.laws.calibration_laws import CALIBRATED, EXAMPLES, HALF, SEQUENCE, SUPER, chosen, tail
from tinyspec.laws.exit_laws import ON_TABLES, PROMPT, RULE, of_parts, tables
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.lm.feed import Scores
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

# ---------------------------------------------------------------------- targets


class NextLayersRow(ExitTarget):
    """The word is read one layer above the exit."""

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        scores = super().score(tree, hidden_layers)
        layer = scores.layers[0] + 1
        if layer >= self.model.config.n_layers:
            return scores
        return self.session.advance(tree, layer, head=True)  # type: ignore[no-any-return]


class WholeModelsRow(ExitTarget):
    """It leaves early, and the word is the top layer's all the same."""

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        super().score(tree, hidden_layers)
        return self.session.score(tree, hidden_layers)  # type: ignore[no-any-return]


class PromptsToo(ExitTarget):
    """Where the new tokens begin is forgotten: the threshold falls with the place in the whole
    text.
    """

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        scores = super().extend(tokens, hidden_layers)
        self.start = 0
        return scores


class Other(Rule):
    """The technique's rule, asked another question."""

    def __init__(self, rule: Any, **defect: Any):
        self.rule, self.layers, self.row, self.states = rule, rule.layers, rule.row, rule.states
        for name, value in defect.items():
            setattr(self, name, value(self))

    def stops(self, at: Exit) -> bool:
        return self.rule.stops(at)  # type: ignore[no-any-return]


def ruled(**defect: Callable[[Any], Any]) -> Callable[..., ExitTarget]:
    return lambda session, rule, fill: ExitTarget(session, Other(rule, **defect), fill)


def filled(other: str) -> Callable[..., ExitTarget]:
    return lambda session, rule, fill: ExitTarget(session, rule, other)


def strictly(self: Any) -> Any:
    """Above the threshold, not at it."""
    return lambda at: bool(self.rule.measure.of(at) > self.rule.threshold(at.step))


def sharpened(self: Any) -> Any:
    """Under a law that is not the model's own."""
    return lambda at: self.rule.stops(at._replace(logits=SamplingParams(0.5).probs(at.logits)))


def one_step_late(self: Any) -> Any:
    """The threshold of the token before."""
    return lambda at: self.rule.stops(at._replace(step=max(at.step - 1, 0)))


def never_the_first(self: Any) -> Any:
    """The first new token always runs the whole model."""
    return lambda at: at.step > 0 and self.rule.stops(at)


def from_the_top(self: Any) -> Any:
    return tuple(self.rule.layers)[::-1]  # right: the lowest first


def decoded(parts: Parts) -> Any:
    """Texts, laws and layers on some tables, for every setting."""
    told = []
    for model, setting, seed in product(tables(), ON_TABLES, range(4)):
        decoder = of_parts(parts)(
            Request(model.session(), stop=StoppingCriteria(max_new_tokens=3)), **setting.knobs
        )
        decoder.extend(PROMPT)
        rng = Seeded(seed)
        while not decoder.finished:
            round = decoder.step(rng)
            told.append((round.tokens, round.output_probs, tuple(round.scores.layers)))
    return told


# ---------------------------------------------------------------------- calibrations


def procedure(
    order: Callable[[list[Tested]], list[Tested]] = list,
    patience: int = 1,
    failed: bool = False,
    size: int | None = None,
) -> Callable[..., Calibrated]:
    """Fixed-sequence testing that goes wrong so.

    order     the order of the tests, chosen when all p-values are known
    patience  failures until it stops
    failed    the first that failed is chosen
    size      how many examples the p-value believes in
    """

    def calibrate(
        candidates: Any,
        losses: Callable[[Any], Sequence[Any]],
        delta: Any,
        epsilon: Any,
        p_value: PValue,
    ) -> Calibrated:
        every = list[Tested]()
        for candidate in candidates:
            sample = losses(candidate)
            p = p_value(sum(sample), size or len(sample), delta)
            every.append(Tested(candidate, sum(sample) / len(sample), p, p <= epsilon))
        choice, left = None, patience
        for test in order(every):
            left -= not test.rejected
            if test.rejected or (failed and not left):
                choice = test.candidate
            if not left:
                break
        return Calibrated(choice, tuple(every))

    return calibrate


def by_p(tests: list[Tested]) -> list[Tested]:
    return sorted(tests, key=lambda test: test.p)  # right: the order was fixed before


def backwards(tests: list[Tested]) -> list[Tested]:
    return tests[::-1]  # right: the safest first


def both_sides(total: Any, n: int, delta: Any) -> float:
    return math.exp(
        -2 * n * (float(delta) - total / n) ** 2
    )  # right: 1 where the mean is above delta


def squared(total: Any, n: int, delta: Any) -> float:
    return math.exp(-2 * (n * max(0.0, float(delta) - total / n)) ** 2)  # right: n once


def strictly_fewer(total: Any, n: int, delta: Any) -> Any:
    return tail(total - 1, n, delta) if total else 0  # right: as few, or fewer


def choices(parts: Parts) -> Any:
    """What is chosen for some losses; and the p-values."""
    counts = [(0, 0, 0), (0, 1, 0), (3, 0, 0), (0, 3, 0), (1, 1, 1), (0, 0, 5)]
    picked = [chosen(parts.calibrate, count, EXAMPLES, HALF, tail) for count in counts]
    return picked, [float(parts.p_value(k, 5, HALF)) for k in range(6)]


def _exit(name: str, exits: Any, bug: str = "slip") -> Mutant:
    return Mutant(name, bug, RULE, replace(PARTS, exits=exits), decoded)


def _testing(name: str, law: str, **defect: Any) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, calibrate=procedure(**defect)), choices)


def _p_value(name: str, wrong: PValue) -> Mutant:
    return Mutant(name, "slip", SUPER, replace(PARTS, p_value=wrong), choices)


MUTANTS = [
    _exit("the word is read one layer above the exit", NextLayersRow, "B40"),
    _exit("the word is the top layer's", WholeModelsRow, "B40"),
    _exit("what was left out is run at once", filled("recompute")),
    _exit("what was left out is run when somebody needs it", filled("postpone")),
    _exit("the threshold falls with the prompt", PromptsToo),
    _exit("the threshold of the token before", ruled(stops=one_step_late)),
    _exit("at the threshold it stays", ruled(stops=strictly)),
    _exit("confidence under the user's temperature", ruled(stops=sharpened)),
    _exit("the first new token never leaves", ruled(stops=never_the_first)),
    _exit("asked from the top down", ruled(layers=from_the_top)),
    _testing("the testing goes on behind a failure", CALIBRATED, patience=99),
    _testing("a second failure stops it", CALIBRATED, patience=2),
    _testing("tested in the order of the p-values", CALIBRATED, order=by_p),
    _testing("the first that failed is chosen", CALIBRATED, failed=True),
    _testing("from the boldest up", SEQUENCE, order=backwards),
    _testing("one example too few is counted", SEQUENCE, size=EXAMPLES - 1),
    _p_value("a mean above delta is evidence too", both_sides),
    _p_value("the examples count twice", squared),
    _p_value("fewer losses, not as few", strictly_fewer),
]
