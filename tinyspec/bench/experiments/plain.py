"""`tinyspec bench plain`: plain decoding against transformers' `generate`, same weights, same
tokens, batch 1.

Both decode greedily from the same prompt for the same number of tokens, ending at nothing else, in
turn in one process. Peak memory is that of a fresh process which loads the model and decodes once.
"""

import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tinyspec import models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import ratio_of_medians, show_progress, stamp_result, time_interleaved
from tinyspec.bench.settings import PlainSettings
from tinyspec.decoding import trace
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.technique import Request, find_technique

PROMPT = (
    "Tell me, in a few paragraphs, how a lighthouse works and who looked after it in former times."
)


def decode(
    model: Model, ids: list[int], tokens: int, method: str = "autoregressive", **knobs: Any
) -> list[int]:
    """New ids of a greedy decoding that ends after `tokens` tokens and nowhere else."""
    forward_log: list[Any] = []
    request = Request(
        model.session(forward_log),
        sampling=SamplingParams(temperature=0.0),
        stop=StoppingCriteria(max_new_tokens=tokens),
        positions=model.config.max_positions,
        forward_log=forward_log,
    )
    return trace.decode(find_technique(method).make(request, **knobs), ids, Seeded(0))[0]


def load_transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """transformers' model of the same folder."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise TinyspecError(
            "this benchmark compares with transformers: pip install 'tinyspec[bench]'"
        ) from None
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    theirs.generation_config.eos_token_id = (
        None  # no end: a minimum length would forbid the token and change the text
    )
    return theirs.eval()


def peer_decode(theirs: Any, ids: list[int], tokens: int) -> list[int]:
    """The same decoding by transformers. The mask is passed: without one it hides the prompt's own
    end-of-turn token.
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


def find_model_folder(name: str) -> Path:
    """The checkpoint folder of a model, or an error that says how to get it."""
    path = models.find_model(name)
    if path is None:
        models.load(name)  # says what to do
        raise TinyspecError(f"{name}: no such model")
    return path


def measure_peak_memory(name: str, dtype: str, tokens: int) -> dict[str, int] | None:
    """Return bytes: the most a fresh process held, the weights, and the cache.

    None, and a warning, where that process fails: the speeds beside it are worth keeping.
    """
    code = (
        "import sys; from tinyspec.bench.experiments import plain; "
        "plain.print_memory(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, name, dtype, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(
            f"warning: the memory was not measured: its process ended with {last}", file=sys.stderr
        )
        return None
    most, weights, cache = (int(n) for n in done.stdout.split()[-3:])
    return {"peak": most, "weights": weights, "cache": cache}


def print_memory(name: str, dtype: str, tokens: int) -> None:
    """In a process of its own: load, decode, print the three figures."""
    model = models.load(name, dtype=dtype)
    ids = model.tokenizer.encode(PROMPT)
    decode(model, ids, tokens)
    c = model.config
    weights = c.parameters() * model.dtype.itemsize
    cache = 2 * c.n_layers * c.kv_dim * (len(ids) + tokens) * model.dtype.itemsize
    print(peak_resident_bytes(), weights, cache)


def peak_resident_bytes() -> int:
    """The most memory this process has held, in bytes. getrusage would also count what its parent
    held before it.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure_plain_decoding(given: PlainSettings, quiet: bool = False) -> dict[str, Any]:
    """Return, for each dtype: tokens per second of both, their ratio, whether the texts agree, and
    peak memory.
    """
    name, tokens, rounds = given.model, given.tokens, given.rounds
    path = find_model_folder(name)
    figures: dict[str, Any] = {"model": name, "tokens": tokens, "prompt": PROMPT}
    for dtype in given.dtypes:
        model = models.load(name, dtype=dtype)
        theirs = load_transformers_model(path, model.dtype)
        ids = model.tokenizer.chat([{"role": "user", "content": PROMPT}]) if model.tokenizer.has_chat else (
            model.tokenizer.encode(PROMPT)
        )  # fmt: skip
        arms = {
            "tinyspec": lambda model=model, ids=ids: decode(model, ids, tokens),
            "transformers": lambda theirs=theirs, ids=ids: peer_decode(theirs, ids, tokens),
        }
        with show_progress(f"{name} {dtype}", 2 * rounds, quiet) as tick:
            samples = time_interleaved(arms, rounds, tick=tick)
        figures[dtype] = {
            "samples": samples,
            "tokens_per_second": {
                arm: round(tokens / median(taken), 2) for arm, taken in samples.items()
            },
            "ratio": ratio_of_medians(samples, "transformers", "tinyspec"),
            "same_tokens": decode(model, ids, tokens) == peer_decode(theirs, ids, tokens),
            "memory": measure_peak_memory(name, dtype, tokens),
        }
        del model, theirs, arms
    return stamp_result(figures)


EXPERIMENT = Experiment(measure_plain_decoding)
