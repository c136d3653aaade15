"""`tinyspec bench plain`: compare plain decoding with transformers' `generate`.

Both decode greedily from the same prompt, on the same weights, for the same number of tokens, at
batch 1. They take turns in one process. Peak memory is that of a fresh process which loads the
model and decodes once.
"""

import sys
from statistics import median
from typing import Any

import torch

from tinyspec import models
from tinyspec.bench.arms import decode_to_length
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import (
    ratio_of_medians,
    show_progress_bar,
    stamp_result,
    time_interleaved,
)
from tinyspec.bench.memory import measure_arm_memory
from tinyspec.bench.peers import load_transformers
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.settings import PlainSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError
from tinyspec.generation import prompt_ids
from tinyspec.lm.model import Model

PROMPT = (
    "Tell me, in a few paragraphs, how a lighthouse works and who looked after it in former times."
)


def decode_by_transformers(theirs: Any, ids: list[int], tokens: int) -> list[int]:
    """Decode greedily by transformers. Returns the new ids.

    Without a mask it would hide the prompt's own end-of-turn token.
    """
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(ids) :]]


def measure_peak_memory(
    model: Model, settings: BenchSettings, ids: list[int], tokens: int
) -> dict[str, int] | None:
    """Return bytes: the most that a fresh process held, the weights, and the cache.

    Returns None after a warning if that process fails: the speeds beside it are worth keeping.
    """
    job = Job("plain", "0", 0, tuple(ids), tokens)
    try:
        peak = measure_arm_memory(ArmSpec(PLAIN), settings, model, job)["peak"]
    except TinyspecError as error:
        print(f"warning: {error}", file=sys.stderr)
        return None
    c, size = model.config, model.dtype.itemsize
    cache = 2 * c.n_layers * c.kv_dim * (len(ids) + tokens) * size
    return {"peak": peak, "weights": c.parameters() * size, "cache": cache}


def measure_plain_decoding(given: PlainSettings, quiet: bool = False) -> dict[str, Any]:
    """Return for each dtype both speeds, their ratio, whether the texts agree, and the memory."""
    name, tokens, rounds = given.model, given.tokens, given.rounds
    figures: dict[str, Any] = {"model": name, "tokens": tokens, "prompt": PROMPT}
    for dtype in given.dtypes:
        model, settings = models.load(name, dtype=dtype), BenchSettings(name, dtype=dtype)
        theirs = load_transformers(name, settings, model)
        ids = prompt_ids(model, PROMPT, chat=model.tokenizer.has_chat)
        arms = {
            "tinyspec": lambda model=model, ids=ids: decode_to_length(model, ids, tokens)[0],
            "transformers": lambda theirs=theirs, ids=ids: decode_by_transformers(
                theirs, ids, tokens
            ),
        }
        with show_progress_bar(f"{name} {dtype}", 2 * rounds, quiet) as tick:
            samples = time_interleaved(arms, rounds, tick=tick)
        figures[dtype] = {
            "samples": samples,
            "tokens_per_second": {
                arm: round(tokens / median(taken), 2) for arm, taken in samples.items()
            },
            "ratio": ratio_of_medians(samples, "transformers", "tinyspec"),
            "same_tokens": decode_to_length(model, ids, tokens)[0]
            == decode_by_transformers(theirs, ids, tokens),
            "memory": measure_peak_memory(model, settings, ids, tokens),
        }
        del model, theirs, arms
    return stamp_result(figures)


EXPERIMENT = Experiment(measure_plain_decoding)
