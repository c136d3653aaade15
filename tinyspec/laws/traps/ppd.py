"""PPD (Yang et al. 2023): the whole model decides every token, and a guess that holds has been
begun in good time.
"""

from collections.abc import Callable

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import exit_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, exact_law
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import PIPELINE_CLOCK, PIPELINE_WORK
from tinyspec.laws.traps import Trap, card
from tinyspec.technique import Request

Build = Callable[..., Decoder]


def joint_law_of_two_tokens(build: Build) -> Evidence:
    """Against plain decoding, sampled and greedy."""
    branches, cases = 0, 0
    for seed in (1, 2, 3):
        for sampling in (SamplingParams(), SamplingParams(0.0)):
            model = TableModel(seed, zeros=False)
            expected = exact_law(
                lambda model=model, sampling=sampling: Decoder(
                    model.session(), BaseDrafter(), verify_tree, sampling=sampling
                ),  # type: ignore[misc]
                2,
            )
            got = exact_law(
                lambda model=model, sampling=sampling: build(  # type: ignore[misc]
                    Request(model.session(), sampling=sampling), layer=2, k=2
                ),
                2,
            )
            branches, cases = branches + got.branches, cases + 1
            if dict(got) != dict(expected):
                told = {"model": model, "temperature": sampling.temperature, "layer": 2, "k": 2}
                accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **told)
    return Evidence(JOINT, cases, branches)


TRAPS = [
    Trap(JOINT, joint_law_of_two_tokens, card("ppd")),
    Trap(PIPELINE_CLOCK, exit_laws.pipeline_clock, card("ppd")),
    Trap(PIPELINE_WORK, exit_laws.pipeline_work, card("ppd")),
]
