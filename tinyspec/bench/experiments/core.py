"""`tinyspec bench core`: compare the compiled kernels with what others use, from the same logits.

Sampling: temperature 0.8 and top-p 0.9 over a vocabulary of 49,152, against transformers'
processors, and against torch with the 1,024 best taken first (which is not exact: it truncates).
Verification: five draft tokens, against transformers' `_speculative_sampling` on the same
distributions. Linearity: the same sampling at V, 2 V, 4 V. Products: one row by a matrix, in
bfloat16 and quantised, with each kernel that this processor has.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from tinyspec._core import compute
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import (
    ratio_of_medians,
    show_progress_bar,
    stamp_result,
    time_interleaved,
)
from tinyspec.bench.settings import CoreSettings
from tinyspec.decoding.rng import Replay
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.engine import time_products
from tinyspec.lm.quantised import SCALE_BYTES
from tinyspec.tree import TokenTree

VOCABULARY = 49_152
TIMES = 20  # calls in a timed sample


def make_peaked_logits(vocabulary: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Return logits as peaked as a language model's: [rows, V] float32.

    A few tokens are likely, and all others are possible.
    """
    generator = torch.Generator().manual_seed(seed)
    floor = torch.randn(rows, vocabulary, generator=generator) * 2
    peaks = torch.randint(vocabulary, (rows, 40), generator=generator)
    return floor.scatter_add(1, peaks, torch.rand(rows, 40, generator=generator) * 12)


def measure_kernels(given: CoreSettings, quiet: bool = False) -> dict[str, Any]:
    """Return the seconds of one call of each kernel, and ratios of medians."""
    try:
        from transformers.generation import logits_process
        from transformers.generation.utils import _speculative_sampling
    except ImportError:
        raise TinyspecError(
            "bench core compares with transformers: pip install 'tinyspec[bench]'"
        ) from None
    logits = make_peaked_logits(VOCABULARY, 1)
    ids = torch.tensor([[1, 2, 3]])
    temperature = logits_process.TemperatureLogitsWarper(0.8)
    top_p = logits_process.TopPLogitsWarper(0.9)
    sampling = SamplingParams(temperature=0.8, top_p=0.9)

    def sample_by_transformers() -> None:
        torch.multinomial(top_p(ids, temperature(ids, logits.clone())).softmax(-1), 1)

    def sample_from_best() -> None:
        values, index = torch.topk(logits[0] / 0.8, 1024)
        probs = values.softmax(-1)
        probs[probs.cumsum(0) - probs >= 0.9] = 0
        index[torch.multinomial(probs, 1)]

    p, q = make_peaked_logits(VOCABULARY, 6, seed=1), make_peaked_logits(VOCABULARY, 5, seed=1)
    p_probs, q_probs = p.double().softmax(-1), q.double().softmax(-1)
    target_probs: Any = {node: p_probs[node + 1].numpy() for node in range(-1, 5)}
    draft_probs = [row.numpy() for row in q_probs]
    draft = [int(np.argmax(row)) for row in draft_probs]
    tree = TokenTree.chain(draft, draft_probs)
    candidates = torch.tensor([[7, *draft]])
    uniforms: Any = np.random.default_rng(0)
    wide = {scale: make_peaked_logits(VOCABULARY * scale, 1)[0] for scale in (2, 4)}
    kernels: dict[str, Callable[[], object]] = {
        "warp_draw": lambda: sampling.draw(logits[0], (), 0.5),
        "transformers_processors": sample_by_transformers,
        "torch_top_k_first": sample_from_best,
        "walk": lambda: verify_tree(tree, target_probs, Replay(uniforms.random(6))),
        "transformers_verify": lambda: _speculative_sampling(
            candidates, q_probs.log()[None].float(), 5, p_probs.log()[None].float(), False
        ),
        "warp_draw_v2": lambda: sampling.draw(wide[2], (), 0.5),
        "warp_draw_v4": lambda: sampling.draw(wide[4], (), 0.5),
    }
    arms = {name: _repeat_call(kernel) for name, kernel in kernels.items()}
    with show_progress_bar("kernels", given.rounds * len(arms), quiet) as tick:
        samples = time_interleaved(arms, given.rounds, tick=tick)
    kinds, threads = tuple(SCALE_BYTES), torch.get_num_threads()
    products = {
        kernel: time_products(kernel, threads, kinds, given.rounds)
        for kernel in (compute.kernels() if compute is not None else ())
    }
    each = {name: [s / TIMES for s in taken] for name, taken in samples.items()}
    ratios = {
        "warp_against_transformers": ("warp_draw", "transformers_processors"),
        "warp_against_top_k_first": ("warp_draw", "torch_top_k_first"),
        "verify_speedup": ("transformers_verify", "walk"),
        "growth_v_to_4v": ("warp_draw_v4", "warp_draw"),
    }
    return stamp_result(
        {
            "vocabulary": VOCABULARY,
            "samples": each,
            "products": products,
            "microseconds": {name: round(1e6 * median(taken), 1) for name, taken in each.items()},
            **{name: ratio_of_medians(each, *pair) for name, pair in ratios.items()},
        }
    )


def _repeat_call(call: Callable[[], object]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(TIMES):
            call()

    return repeat


EXPERIMENT = Experiment(measure_kernels)
