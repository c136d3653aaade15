"""`tinyspec bench core`: the compiled kernels against what others use, from the same logits.

Sampling: temperature 0.8 and top-p 0.9 over a vocabulary of 49,152, against transformers'
processors and against torch with the 1,024 best taken first (which is not exact: it truncates).
Verification: five drafted tokens walked, against transformers' `_speculative_sampling` from the
same rows. Linearity: the same warp at V, 2 V, 4 V.
"""

from statistics import median
from typing import Any

import numpy as np
import torch

from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import ratio_of_medians, show_progress, stamp_result, time_interleaved
from tinyspec.bench.settings import CoreSettings
from tinyspec.decoding.rng import Replay
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.tree import TokenTree

VOCABULARY = 49_152
TIMES = 20  # calls in a timed sample


def make_peaked_logits(vocabulary: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Rows as peaked as a language model's: a few likely tokens over a wide floor, [rows, V]
    float32.
    """
    generator = torch.Generator().manual_seed(seed)
    floor = torch.randn(rows, vocabulary, generator=generator) * 2
    peaks = torch.randint(vocabulary, (rows, 40), generator=generator)
    return floor.scatter_add(1, peaks, torch.rand(rows, 40, generator=generator) * 12)


def repeat_call(call: Any) -> Any:
    def run() -> None:
        for _ in range(TIMES):
            call()

    return run


def make_draw(sampling: SamplingParams, line: torch.Tensor) -> Any:
    return lambda: sampling.draw(line, (), 0.5)


def measure_kernels(given: CoreSettings, quiet: bool = False) -> dict[str, Any]:
    """Return the seconds of one call of each kernel, and ratios of medians."""
    try:
        from transformers.generation import logits_process
        from transformers.generation.utils import _speculative_sampling
    except ImportError:
        raise TinyspecError(
            "bench core compares with transformers: pip install 'tinyspec[bench]'"
        ) from None
    row = make_peaked_logits(VOCABULARY, 1)
    ids = torch.tensor([[1, 2, 3]])
    heat, nucleus = (
        logits_process.TemperatureLogitsWarper(0.8),
        logits_process.TopPLogitsWarper(0.9),
    )
    sampling = SamplingParams(temperature=0.8, top_p=0.9)

    def theirs() -> None:
        torch.multinomial(nucleus(ids, heat(ids, row.clone())).softmax(-1), 1)

    def top_first() -> None:
        values, index = torch.topk(row[0] / 0.8, 1024)
        law = values.softmax(-1)
        law[law.cumsum(0) - law >= 0.9] = 0
        index[torch.multinomial(law, 1)]

    p, q = make_peaked_logits(VOCABULARY, 6, seed=1), make_peaked_logits(VOCABULARY, 5, seed=1)
    p_rows, q_rows = p.double().softmax(-1), q.double().softmax(-1)
    rows = {node: p_rows[node + 1].numpy() for node in range(-1, 5)}
    laws = [q_rows[i].numpy() for i in range(5)]
    drafted = [int(np.argmax(law)) for law in laws]
    tree = TokenTree.chain(drafted, laws)
    candidates = torch.tensor([[7, *drafted]])
    generator = np.random.default_rng(0)

    arms = {
        "warp_draw": repeat_call(lambda: sampling.draw(row[0], (), 0.5)),
        "transformers_processors": repeat_call(theirs),
        "torch_top_k_first": repeat_call(top_first),
        "walk": repeat_call(lambda: verify_tree(tree, rows, Replay(generator.random(6)))),  # type: ignore[arg-type]
        "transformers_verify": repeat_call(
            lambda: _speculative_sampling(
                candidates, q_rows.log()[None].float(), 5, p_rows.log()[None].float(), False
            )
        ),
        **{
            f"warp_draw_v{scale}": repeat_call(
                make_draw(sampling, make_peaked_logits(VOCABULARY * scale, 1)[0])
            )
            for scale in (2, 4)
        },
    }
    with show_progress("kernels", given.rounds * len(arms), quiet) as tick:
        samples = time_interleaved(arms, given.rounds, tick=tick)
    each = {name: [s / TIMES for s in taken] for name, taken in samples.items()}
    return stamp_result(
        {
            "vocabulary": VOCABULARY,
            "samples": each,
            "microseconds": {name: round(1e6 * median(taken), 1) for name, taken in each.items()},
            "warp_against_transformers": ratio_of_medians(
                each, "warp_draw", "transformers_processors"
            ),
            "warp_against_top_k_first": ratio_of_medians(each, "warp_draw", "torch_top_k_first"),
            "verify_speedup": ratio_of_medians(each, "transformers_verify", "walk"),
            "growth_v_to_4v": ratio_of_medians(each, "warp_draw_v4", "warp_draw"),
        }
    )


EXPERIMENT = Experiment(measure_kernels)
