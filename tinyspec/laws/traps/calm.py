"""CALM (Schuster et al. 2022): the gap of the top two, three measures, states copied up, a
threshold that was calibrated.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.calibrate import Calibration, PValue, TestedThreshold, calibrate
from tinyspec.early_exit.calm import ConfidenceMeasure, ConfidenceRule, decay_threshold
from tinyspec.early_exit.exits import ExitPoint, ExitTarget
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    EXIT_MEASURES,
    EXIT_RULE,
    controls_its_risk,
    each_measure,
    follows_exit_rule,
)
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.technique import Request, find_technique


def on_target(
    request: Request, of: Callable[[ExitPoint], Any], make: Any = ExitTarget, **knobs: Any
) -> Decoder:
    """CALM with a confidence that reads the row, or with another target."""
    layers = range(knobs["min_exit"], request.target.model.config.n_layers, knobs["interval"])  # type: ignore[attr-defined]

    def due(step: int) -> float:
        return decay_threshold(
            knobs["decay"], knobs["threshold"], knobs["tau"], step, request.stop.max_new_tokens or 1
        )

    target = make(request.target, ConfidenceRule(ConfidenceMeasure(of, row=True), due, layers))
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)


# ------------------------------------------------------------------ toys


def greatest_probability(request: Request, **knobs: Any) -> Decoder:
    """The softmax response as many know it: the probability of the likeliest word."""
    return on_target(request, lambda at: max(SamplingParams().probs(at.logits)), **knobs)


def same_keys_above(request: Request, **knobs: Any) -> Decoder:
    """What is copied up are the keys and values of the exit's layer, not the state."""

    class Lazy(ExitTarget):
        def _fill_pending(self) -> None:
            for node in self.session.committed[:-1]:
                done = node.sublayers_done // 2
                if 0 < done < len(node.keys) and not node.filled:
                    node.keys[done:] = [node.keys[done - 1]] * (len(node.keys) - done)
                    node.filled = True

    return on_target(request, lambda at: _gap(at.logits), Lazy, **knobs)


def _gap(row: Sequence[Any]) -> Any:
    least, most = sorted(row)[-2:]
    return most - least


def nothing_copied(request: Request, **knobs: Any) -> Decoder:
    """The layers that were left out are run after all, in silence."""
    return on_target(
        request,
        lambda at: _gap(at.logits),
        lambda session, rule: ExitTarget(session, rule, "recompute"),
        **knobs,
    )


def one_measure(request: Request, **knobs: Any) -> Decoder:
    """Whatever is asked for, it is the softmax."""
    return find_technique("calm").make(request, **{**knobs, "measure": "softmax"})


def best_on_the_examples(
    candidates: Sequence[Any],
    losses: Callable[[Any], Sequence[Any]],
    delta: Any,
    epsilon: Any,
    p_value: PValue,
) -> Calibration:
    """The last candidate whose mean loss on the examples is no more than delta."""
    choice, tested = None, list[TestedThreshold]()
    for candidate in candidates:
        sample = losses(candidate)
        fine = sum(sample) <= delta * len(sample)
        tested.append(TestedThreshold(candidate, sum(sample) / len(sample), 0, fine))
        choice = candidate if fine else choice
    return Calibration(choice, tuple(tested))


TRAPS = [
    Trap(EXIT_RULE, follows_exit_rule, card("calm")),
    Trap(EXIT_MEASURES, each_measure, card("calm")),
    Trap(CALIBRATED, controls_its_risk, lambda: calibrate),
]
TOYS = [
    Toy("the likeliest word's probability", EXIT_RULE, greatest_probability),
    Toy("the exit's keys and values in every layer above", EXIT_RULE, same_keys_above),
    Toy("the layers left out run in silence", EXIT_RULE, nothing_copied),
    Toy("one measure", EXIT_MEASURES, one_measure),
    Toy("the threshold that looked best on the examples", CALIBRATED, best_on_the_examples),
]
