"""`tinyspec bench equality`: lossless means lossless, in bfloat16 too. Greedy speculation against
plain greedy decoding.

Everywhere else a block is verified with other rounding than one-token steps have, so the two texts
part sooner or later where two logits all but tie. Our kernels sum a row in an order that depends on
the row alone, so not one token may differ, on any prompt. Beside the methods asked for, `rehearsed`
copies from the plain answer itself with every seventh token changed: then most of the text is
verified in long blocks, which a method that finds little to copy would not do.

Nothing is timed, so the machine may be busy.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyspec import data, models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import read_unfinished, save_result, show_progress, stamp_result
from tinyspec.bench.settings import EqualitySettings
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics, decode
from tinyspec.errors import TinyspecError
from tinyspec.generation import prompt_ids
from tinyspec.lm.model import Model
from tinyspec.technique import Request, find_technique

REHEARSED, CHANGED = "rehearsed", 7
COLUMNS = ("question", "category", "prompt", "check", "arm", "same", "calls", "drafted", "accepted")


def decode_greedily(
    model: Model,
    ids: Sequence[int],
    tokens: int,
    method: str,
    references: Sequence[Sequence[int]] = (),
    **knobs: Any,
) -> tuple[list[int], Statistics]:
    """Greedy ids that end after `tokens` tokens and nowhere else, and what was counted."""
    forward_log: list[Any] = []
    stop = StoppingCriteria(max_new_tokens=tokens)
    limit = model.config.max_positions
    request = Request(
        model.session(forward_log),
        (),
        SamplingParams(temperature=0.0),
        stop,
        references,
        positions=limit,
        forward_log=forward_log,
    )
    return decode(find_technique(method).make(request, **knobs), ids, Seeded(0))


def noisy_reference(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The end of the prompt and the answer with every seventh token changed.

    >>> noisy_reference([5], [1, 2, 3, 4, 5, 6, 7, 8])
    [5, 1, 2, 3, 4, 5, 6, 0, 8]
    """
    return [
        *prompt[-8:],
        *(0 if i % CHANGED == CHANGED - 1 else token for i, token in enumerate(answer)),
    ]


def compare_on_question(
    model: Model, question: Any, tokens: int, methods: Sequence[str]
) -> list[list[Any]]:
    """One line an arm: how many ids at the front are plain decoding's, and how many calls and
    guesses it took.
    """
    ids = prompt_ids(model, question.turns[0], chat=model.tokenizer.has_chat)[
        -(model.config.max_positions - tokens) :
    ]
    plain, _ = decode_greedily(model, ids, tokens, "autoregressive")
    check, lines = zlib.crc32(json.dumps(plain).encode()), list[list[Any]]()
    for arm in (*methods, REHEARSED):
        copied = arm == REHEARSED
        if copied:
            got, counted = decode_greedily(
                model, ids, tokens, "llma", [noisy_reference(ids, plain)], price=0.0
            )
        else:
            got, counted = decode_greedily(model, ids, tokens, arm)
        same = next((i for i, (a, b) in enumerate(zip(got, plain, strict=True)) if a != b), tokens)
        figures = (counted.target_calls, counted.drafted, counted.accepted)
        lines.append([question.id, question.category, len(ids), check, arm, same, *figures])
    return lines


def measure_equality(
    given: EqualitySettings, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Compare every question of Spec-Bench (its first turn), or some spread over it.

    With `out`, the result is saved after every question.
    """
    name, questions, tokens = given.model, given.questions, given.tokens
    methods, dtype = given.methods, given.dtype
    for method in methods:
        if find_technique(method).drafts:
            raise TinyspecError(
                f"{method} needs a draft model; this comparison takes methods without one"
            )
    model, bank = models.load(name, dtype=dtype), data.read_spec_bench()
    chosen = (
        bank
        if questions is None
        else [bank[i * len(bank) // questions] for i in range(min(questions, len(bank)))]
    )
    head = {"model": name, "dtype": dtype, "tokens_each": tokens, "methods": list(methods)}
    done: list[list[Any]] = []
    if resume and out is not None:
        done = read_unfinished(out, "equality", head, lambda found: list(found["rows"])) or []
    seen = {line[0] for line in done}
    result = _summarize(head, done)
    with show_progress(f"{name} {dtype} against itself", len(chosen), quiet) as tick:
        for question in chosen:
            if question.id not in seen:
                done += compare_on_question(model, question, tokens, methods)
                result = _summarize(head, done)
                if out is not None:
                    save_result(out, result)
            tick()
    return result


def _summarize(head: dict[str, Any], lines: list[list[Any]]) -> dict[str, Any]:
    tokens = head["tokens_each"]
    figures = {
        "questions": len({line[0] for line in lines}),
        "tokens": tokens * len(lines),
        "mismatches": sum(line[5] < tokens for line in lines),
        "passed": bool(lines) and all(line[5] == tokens for line in lines),
        "tokens_per_call": {
            arm: round(
                sum(tokens for line in lines if line[4] == arm)
                / sum(r[6] for r in lines if r[4] == arm),
                3,
            )
            for arm in dict.fromkeys(line[4] for line in lines)
        },
    }
    return stamp_result({**head, **figures, "columns": list(COLUMNS), "rows": lines})


EXPERIMENT = Experiment(measure_equality)
