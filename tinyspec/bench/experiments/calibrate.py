"""`tinyspec calibrate`: find CALM's lowest threshold with a risk of at most delta.

The risk is below delta with probability 1 - epsilon. Passages are drawn independently, and each
place of the texts is as likely as any other. The guarantee holds for passages drawn so, from texts
like these. Thresholds 1, 0.95, ... are tested in this order, by Hoeffding's p-values
(early_exit/calibrate.py), until one fails. Textual consistency compares with the full model's text,
risk consistency with how the passage really goes on. In the end the choice is checked on fresh
passages, which is no part of the guarantee.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tinyspec import models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.exit_arms import (
    Passage,
    count_work,
    draw_passages,
    price_weights,
    read_classics,
)
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.settings import CalibrationSettings
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import decode
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
from tinyspec.technique import Request, find_technique

Texts = Sequence[list[int]]


def list_thresholds(step: float) -> list[float]:
    """Return thresholds from 1, the safest, down to 0.

    >>> list_thresholds(0.25)
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if not 0 < step <= 1:
        raise TinyspecError(f"--step is {step}: it must be above 0 and at most 1")
    return [round(1 - i * step, 10) for i in range(int(1 / step + 1e-9) + 1)]


def decode_with_exits(
    model: Model,
    prompt: Sequence[int],
    tokens: int,
    forward_log: list[ForwardRecord],
    knobs: Mapping[str, Any],
) -> list[int]:
    """Return the text that CALM writes at temperature 0."""
    request = Request(
        model.session(forward_log),
        sampling=SamplingParams(0.0),
        stop=StoppingCriteria(frozenset(model.config.eos), max_new_tokens=tokens),
        forward_log=forward_log,
    )
    return decode(find_technique("calm").make(request, **knobs), prompt, Seeded(0))[0]


def run_calibration(given: CalibrationSettings, quiet: bool = False) -> dict[str, Any]:
    """Return the threshold, and everything that was tested.

    The threshold is "inf", the full model, if not even 1 passed.
    """
    delta, epsilon, consistency = given.delta, given.epsilon, given.consistency
    prompts, check = given.prompts, given.check
    knobs = {name: getattr(given, name) for name in ("measure", "decay", "tau", "min_exit")}
    check_examples(prompts, delta, epsilon)  # before any text is read
    texts = given.texts or read_classics()
    candidates = list_thresholds(given.step)
    model = models.load(given.model, dtype=given.dtype)
    found = draw_passages(
        model, texts, prompts + check, given.prompt_tokens, given.tokens, given.seed
    )
    examples, fresh = found[:prompts], found[prompts:]

    def decode_all(
        passages: Sequence[Passage], threshold: float, forward_log: list[ForwardRecord]
    ) -> Texts:
        now = {**knobs, "threshold": threshold}
        return [
            decode_with_exits(model, p.prompt, given.tokens, forward_log, now) for p in passages
        ]

    # A wrong knob is reported before anything else is run.
    decode_with_exits(model, examples[0].prompt, 1, [], {**knobs, "threshold": 1.0})
    full = decode_all(examples, math.inf, [])
    costs: dict[float, float] = {}
    title = f"{model.name}: {consistency} consistency"
    with show_progress_bar(title, len(candidates), quiet) as tick:

        def measure_losses(threshold: float) -> list[float]:
            forward_log: list[ForwardRecord] = []
            early = decode_all(examples, threshold, forward_log)
            done = count_work(forward_log)
            work = price_weights(model.config).relative_work(done.layers, done.fills, done.heads)
            costs[threshold] = work / max(sum(map(len, early)), 1)
            tick()
            return _compute_losses(consistency, early, full, examples)

        outcome = calibrate(candidates, measure_losses, delta, epsilon, hoeffding_p_value)
    choice = math.inf if outcome.choice is None else outcome.choice
    made: dict[str, Any] = {
        "model": model.name,
        "threshold": "inf" if choice == math.inf else choice,
        "delta": delta,
        "epsilon": epsilon,
        "consistency": consistency,
        "knobs": knobs,
        "prompts": prompts,
        "prompt_tokens": given.prompt_tokens,
        "tokens": given.tokens,
        "seed": given.seed,
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
        early, full = (decode_all(fresh, threshold, []) for threshold in (choice, math.inf))
        losses = _compute_losses(consistency, early, full, fresh)
        made["checked"] = {"prompts": check, "loss": sum(losses) / check}
    return stamp_result(made)


def _compute_losses(
    consistency: str, early: Texts, full: Texts, of: Sequence[Passage]
) -> list[float]:
    if consistency == "textual":
        return [textual_loss(*pair) for pair in zip(early, full, strict=True)]
    return [
        risk_loss(one, other, passage.rest)
        for one, other, passage in zip(early, full, of, strict=True)
    ]


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
