"""`tinyspec bench acceptance`: measure Sequoia's acceptance vector before anything is decoded.

P[k] is how often the k-th sampled child is the accepted one. The paper measures it on calibration
texts and computes its tree from it. Here the texts are openings of the valid books, each with the
target's own continuation under the same sampling. The knob `accepts` of `sequoia` takes the file.
Nothing is timed, so the machine may be busy.
"""

from typing import Any

from tinyspec.bench.arms import load_arm_models
from tinyspec.bench.experiment import Experiment, Result
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.plan import BenchSettings
from tinyspec.bench.settings import AcceptanceSettings
from tinyspec.bench.stores import continue_text
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.speculative.drafting.sequoia import estimate_acceptance


def measure_rank_acceptance(given: AcceptanceSettings, quiet: bool = False) -> dict[str, Any]:
    """Return P of a target and a draft model, over every position of some texts."""
    settings = BenchSettings(
        model=given.model, draft=given.draft, dtype=given.dtype, methods=("sequoia",)
    )
    model, drafts = load_arm_models(settings)
    if drafts is None:
        raise TinyspecError(f"{model.name} names no draft model: give one with --draft NAME")
    draft = drafts[0]
    openings = tokenize_openings(model, find_room(model, given.tokens, draft))[: given.prompts]
    sampling, texts = SamplingParams(temperature=given.temperature), list[list[int]]()
    with show_progress_bar(f"{model.name} and {draft.name}", len(openings) + 1, quiet) as tick:
        for number, opening in enumerate(openings):
            texts.append(continue_text(model, opening, given.tokens, sampling, given.seed + number))
            tick()
        shares = estimate_acceptance(model, draft, texts, sampling, given.ranks, Seeded(given.seed))
        tick()
    return stamp_result(
        {
            "model": model.name,
            "draft": draft.name,
            "dtype": given.dtype,
            "prompts": len(texts),
            "positions": sum(map(len, texts)),
            "temperature": given.temperature,
            "seed": given.seed,
            "accepts": shares,
        }
    )


def write_knob(result: Result) -> list[str]:
    """Return the vector as the knob takes it."""
    vector = ",".join(f"{share:g}" for share in result["accepts"])
    return [
        f"P over {result['positions']:,} positions of {result['model']} and {result['draft']}",
        f"--method sequoia --accepts {vector}",
    ]


EXPERIMENT = Experiment(measure_rank_acceptance, closing=write_knob)
