"""`tinyspec bench equality`: compare greedy speculation with plain greedy decoding, in bfloat16.

Lossless means that not one token differs. Elsewhere the rounding of a verified block is not that of
one-token steps, so the texts part sooner or later where two logits are nearly equal. Our kernels
sum a row in an order that depends on the row alone, so no token may differ on any prompt. Beside
the methods asked for, `rehearsed` copies from the plain answer itself with every seventh token
changed. Then most of the text is verified in long blocks; a method that finds little to copy would
not do that.

Nothing is timed, so the machine may be busy.
"""

import json
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec import data, models
from tinyspec.bench.arms import decode_to_length
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import (
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.measure import count_agreeing
from tinyspec.bench.settings import EqualitySettings
from tinyspec.bench.tasks import spread_evenly, tokenize_question
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.processes import run_pieces
from tinyspec.technique import find_technique

REHEARSED = "rehearsed"  # the arm that copies from the plain answer
CHANGED = 7  # in that answer, every seventh token is changed


class EqualitySample(NamedTuple):
    """One question, answered by one arm.

    prompt  tokens of the prompt
    check   check sum of plain decoding's answer
    same    how many ids at the front equal plain decoding's
    """

    question: int
    category: str
    prompt: int
    check: int
    arm: str
    same: int
    calls: int
    drafted: int
    accepted: int


def noisy_reference(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the end of the prompt and the answer with every seventh token changed.

    >>> noisy_reference([5], [1, 2, 3, 4, 5, 6, 7, 8])
    [5, 1, 2, 3, 4, 5, 6, 0, 8]
    """
    changed = (0 if i % CHANGED == CHANGED - 1 else token for i, token in enumerate(answer))
    return [*prompt[-8:], *changed]


def compare_on_question(
    model: Model, question: data.Question, tokens: int, methods: Sequence[str]
) -> list[EqualitySample]:
    """Answer a question by every arm, and compare with plain decoding's answer."""
    ids = tokenize_question(model, question, tokens)
    plain, _ = decode_to_length(model, ids, tokens, "autoregressive")
    check, samples = zlib.crc32(json.dumps(plain).encode()), list[EqualitySample]()
    for arm in (*methods, REHEARSED):
        if arm == REHEARSED:
            reference = noisy_reference(ids, plain)
            got, counted = decode_to_length(model, ids, tokens, "llma", [reference])
        else:
            got, counted = decode_to_length(model, ids, tokens, arm)
        samples.append(
            EqualitySample(
                question=question.id,
                category=question.category,
                prompt=len(ids),
                check=check,
                arm=arm,
                same=count_agreeing(got, plain),
                calls=counted.target_calls,
                drafted=counted.drafted,
                accepted=counted.accepted,
            )
        )
    return samples


def measure_equality(
    given: EqualitySettings, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Compare every question of Spec-Bench (its first turn), or some spread over it.

    With `out`, the result is saved after every question.
    """
    for method in given.methods:
        if find_technique(method).drafts:
            raise TinyspecError(
                f"{method} needs a draft model; this comparison takes methods without one"
            )
        if find_technique(method).persistent and given.jobs > 1:
            raise TinyspecError(
                f"{method} drafts from earlier answers, so all questions must be asked by one "
                "process: leave out --jobs"
            )
    bank = data.read_spec_bench()
    models.load_once(given.model, dtype=given.dtype)  # says now what is wrong with it
    chosen = spread_evenly(bank, len(bank) if given.questions is None else given.questions)
    settings = {
        "model": given.model,
        "dtype": given.dtype,
        "tokens_each": given.tokens,
        "methods": list(given.methods),
        "knobs": {
            **{arm: record_knobs(find_technique(arm).settings({})) for arm in given.methods},
            REHEARSED: record_knobs(find_technique("llma").settings({})),
        },
    }
    done: list[EqualitySample] = read_unfinished(
        out, resume, "equality", settings, _read_samples, [], is_timed=False
    )
    seen = {sample.question for sample in done}
    result = _make_result(settings, done)
    title = f"{given.model} {given.dtype} against itself"
    left = [question for question in chosen if question.id not in seen]
    compare = partial(_compare_on_question, given)
    with show_progress_bar(title, len(left), quiet) as tick:
        for samples in run_pieces(compare, left, given.jobs, given.ray):
            done += samples
            result = _make_result(settings, done)
            save_result(out, result)
            tick()
    return result


def _compare_on_question(given: EqualitySettings, question: data.Question) -> list[EqualitySample]:
    model = models.load_once(given.model, dtype=given.dtype)
    return compare_on_question(model, question, given.tokens, given.methods)


def _read_samples(found: dict[str, Any]) -> list[EqualitySample]:
    return [EqualitySample(*row) for row in found["rows"]]


def _make_result(settings: dict[str, Any], samples: Sequence[EqualitySample]) -> dict[str, Any]:
    tokens = settings["tokens_each"]
    by_arm: dict[str, list[EqualitySample]] = {}
    for sample in samples:
        by_arm.setdefault(sample.arm, []).append(sample)
    return stamp_result(
        {
            **settings,
            "questions": len({sample.question for sample in samples}),
            "tokens": tokens * len(samples),
            "mismatches": sum(sample.same < tokens for sample in samples),
            "passed": bool(samples) and all(sample.same == tokens for sample in samples),
            "tokens_per_call": {
                arm: round(tokens * len(own) / sum(sample.calls for sample in own), 3)
                for arm, own in by_arm.items()
            },
            "columns": list(EqualitySample._fields),
            "rows": [list(sample) for sample in samples],
        }
    )


EXPERIMENT = Experiment(measure_equality)
