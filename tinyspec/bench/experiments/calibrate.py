"""`tinyspec calibrate`: the lowest of CALM's thresholds whose texts stay within delta, with
probability 1 - epsilon.

Passages are drawn independently, each place of the texts as likely as any other: what is shown
holds for passages drawn so, from texts like these. Thresholds 1, 0.95, ... are tested in this
order, by Hoeffding's p-values (early_exit/calibrate.py), until one fails. Textual consistency
compares with the full model's text, risk consistency with how the passage really goes on. In the
end the choice is looked at on fresh passages; that is no part of the guarantee.
"""

import math
from collections.abc import Sequence
from typing import Any

from tinyspec import models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.exits import (
    Passage,
    count_work,
    decode_with_exits,
    draw_passages,
    read_classics,
    relative_work,
)
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.settings import CalibrationSettings
from tinyspec.early_exit.calibrate import (
    calibrate,
    check_examples,
    hoeffding_p_value,
    risk_loss,
    textual_loss,
)
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model


def list_thresholds(step: float) -> list[float]:
    """From the safest down.

    >>> list_thresholds(0.25)
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if not 0 < step <= 1:
        raise TinyspecError(f"--step is {step}: it must be above 0 and at most 1")
    found = [round(1 - i * step, 10) for i in range(int(1 / step + 1e-9) + 1)]
    return found


def run_calibration(given: CalibrationSettings, quiet: bool = False) -> dict[str, Any]:
    """Return the threshold ("inf" where not even 1 passed: the full model), and everything that was
    tested.
    """
    delta, epsilon, consistency = given.delta, given.epsilon, given.consistency
    prompts, prompt_tokens, tokens = given.prompts, given.prompt_tokens, given.tokens
    seed, check = given.seed, given.check
    knobs = {name: getattr(given, name) for name in ("measure", "decay", "tau", "min_exit")}
    check_examples(prompts, delta, epsilon)  # before any text is read
    texts = given.texts or read_classics("valid")
    candidates = list_thresholds(given.step)
    model = models.load(given.model, dtype=given.dtype)
    found = draw_passages(model, texts, prompts + check, prompt_tokens, tokens, seed)
    examples, fresh = found[:prompts], found[prompts:]
    decode_with_exits(
        model, examples[0].prompt, 1, [], {**knobs, "threshold": 1.0}
    )  # what is wrong with the knobs is said first
    full = [
        decode_with_exits(model, p.prompt, tokens, [], {"threshold": math.inf}) for p in examples
    ]
    costs: dict[float, float] = {}
    with show_progress(f"{model.name}: {consistency} consistency", len(candidates), quiet) as tick:

        def losses(threshold: float) -> list[float]:
            forward_log: list[ForwardRecord] = []
            early = [
                decode_with_exits(
                    model, p.prompt, tokens, forward_log, {**knobs, "threshold": threshold}
                )
                for p in examples
            ]
            costs[threshold] = _work(model, forward_log, sum(map(len, early)))
            tick()
            return _losses(consistency, early, full, examples)

        outcome = calibrate(candidates, losses, delta, epsilon, hoeffding_p_value)
    choice = math.inf if outcome.choice is None else outcome.choice
    made: dict[str, Any] = {
        "model": model.name,
        "threshold": "inf" if choice == math.inf else choice,
        "delta": delta,
        "epsilon": epsilon,
        "consistency": consistency,
        "knobs": knobs,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "seed": seed,
        "work_over_full": costs.get(choice, 1.0),
        "tested": [
            {
                "threshold": t.candidate,
                "loss": t.loss,
                "p": t.p,
                "passed": t.rejected,
                "work": costs[t.candidate],
            }
            for t in outcome.tested
        ],
    }
    if check and fresh:
        early, full = (
            [
                decode_with_exits(model, p.prompt, tokens, [], {**knobs, "threshold": x})
                for p in fresh
            ]
            for x in (choice, math.inf)
        )
        made["checked"] = {
            "prompts": check,
            "loss": sum(_losses(consistency, early, full, fresh)) / check,
        }
    return stamp_result(made)


Texts = Sequence[list[int]]


def _losses(consistency: str, early: Texts, full: Texts, of: Sequence[Passage]) -> list[float]:
    if consistency == "textual":
        return [textual_loss(*pair) for pair in zip(early, full, strict=True)]
    return [
        risk_loss(one, other, passage.rest)
        for one, other, passage in zip(early, full, of, strict=True)
    ]


def _work(model: Model, forward_log: Sequence[ForwardRecord], tokens: int) -> float:
    """All work behind the prompts, over the full model's for as many tokens."""
    return relative_work(model.config, *count_work(forward_log)) / max(tokens, 1)


def describe_tests(result: dict[str, Any]) -> list[str]:
    """Return a line for each threshold that was tested, and one for the choice."""
    lines = [
        f"threshold {row['threshold']:.2f}  loss {row['loss']:.4f}  p {row['p']:.2g}  "
        f"work {row['work']:.2f}  {'passed' if row['passed'] else 'stop'}"
        for row in result["tested"]
    ]
    sure = f"risk at most {result['delta']} with probability {1 - result['epsilon']:g}"
    if "checked" in result:
        checked = result["checked"]
        sure += f"; on {checked['prompts']} fresh passages {checked['loss']:.4f}"
    return [*lines, f"threshold: {result['threshold']}  ({sure})"]


EXPERIMENT = Experiment(run_calibration, closing=describe_tests)
