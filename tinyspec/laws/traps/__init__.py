"""Traps: what makes a technique that technique.

For most papers there is a simpler thing that looks the same in a demonstration: prompt lookup under
the name of LLMA, an acceptance test without the residual, a formula without the analysis. A *trap*
is a check that asks for what the look-alike lacks; the technique passes it. The look-alikes are the
*toys* of the museum: each must fall into a trap.

One file here for each technique, under its registry name, with the list TRAPS. A new file is found
by itself; it may bring a list TOYS of its own. Here is also what several traps need: a decoder on
small models that has read a prompt, a run to its end, and the check of a joint distribution.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, collect_evidence
from tinyspec.laws.exact.joint import JOINT, Reference, exact_distribution
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import Table, enumerate_tokens, expect_distribution, table_model
from tinyspec.technique import Request, find_technique

Build = Callable[..., Decoder]
"""A technique: (request, knobs) -> a decoder."""

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams()


@dataclass(frozen=True)
class Trap:
    """A check of a technique.

    law    the name it accuses under
    check  what is judged -> Evidence; raises LawViolated
    real   what the technique itself hands to it
    """

    law: str
    check: Callable[[Any], Evidence]
    real: Callable[[], Any]


def card(name: str) -> Callable[[], Any]:
    """Return a function that looks up the builder of a registered technique."""
    return lambda: find_technique(name).make


def refine_card(name: str) -> Callable[[], Any]:
    """Return a function that looks up the builder of a registered technique that rewrites."""
    return lambda: find_technique(name).refiner


def trap_files() -> dict[str, Any]:
    """Return the module of every technique that has traps."""
    return {
        file.name: importlib.import_module(f"{__name__}.{file.name}")
        for file in pkgutil.iter_modules(__path__)
    }


def traps() -> list[tuple[str, Trap]]:
    """Return (technique, trap), by technique."""
    return [(name, trap) for name, file in trap_files().items() for trap in file.TRAPS]


def find_trap(technique: str, law: str) -> Trap:
    """Return the trap of a technique that accuses under this name."""
    of_technique: list[Trap] = importlib.import_module(f"{__name__}.{technique}").TRAPS
    return next(trap for trap in of_technique if trap.law == law)


def begin_decoder(
    build: Build,
    models: Sequence[Any],
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    max_new_tokens: int | None = None,
    eos: frozenset[int] = frozenset(),
    **knobs: Any,
) -> Decoder:
    """Return a technique's decoder that has read a prompt.

    models  the target, and the drafts; one forward log is kept for all of them
    """
    forward_log: list[Any] = []
    target, *drafts = [model.session(forward_log) for model in models]
    stop = StoppingCriteria(eos=eos, max_new_tokens=max_new_tokens)
    request = Request(target, drafts, sampling, stop, forward_log=forward_log)
    decoder = build(request, **knobs)
    decoder.extend(prompt)
    return decoder


def run_all_rounds(decoder: Decoder) -> list[Round]:
    """Return all rounds of a request."""
    rounds = []
    while not decoder.finished:
        rounds.append(decoder.step(Seeded(decoder.rounds)))
    return rounds


def check_joint_distribution(
    build: Build,
    models: Sequence[Any],
    case: dict[str, Any],
    sampling: SamplingParams = SAMPLED,
    prompt: Sequence[int] = (0,),
    references: Sequence[Sequence[int]] = (),
    **knobs: Any,
) -> int:
    """Check that the first two tokens are distributed as those of plain decoding.

    models  tables: the target, and the drafts
    case    what a counterexample shows

    Returns how many outcomes were walked.
    """

    def make() -> Decoder:
        target, *drafts = [model.session() for model in models]
        return build(Request(target, drafts, sampling, references=references), **knobs)

    got = exact_distribution(make, 2, prompt, outside=lambda decoder: models)
    expected = Reference(models[0].row, sampling).distribution(2, prompt)
    expect_distribution(JOINT, expected, got, **case)
    return got.branches


def check_table_law(
    build: Build,
    tables: Sequence[Table],
    expected: Reference,
    case: dict[str, Any],
    law: str = JOINT,
    **knobs: Any,
) -> int:
    """Check that the first two tokens are distributed as expected, over all their rounds.

    tables  of the target, and of the drafts
    case    what a counterexample shows

    Returns how many outcomes were walked.
    """

    def make() -> Decoder:
        target, *drafts = [table_model(table).session() for table in tables]
        return build(Request(target, drafts, expected.sampling), **knobs)

    got, outcomes = enumerate_tokens(make, 2)
    expect_distribution(law, expected.distribution(2), got, **case)
    return outcomes


@collect_evidence(JOINT)
def joint_distribution_of_self_drafting(
    build: Build, samplings: Sequence[SamplingParams] = (SAMPLED, GREEDY), **knobs: Any
) -> Iterator[int]:
    """Check the first two tokens of a technique that drafts with the target itself."""
    for seed, sampling in product((1, 2, 3), samplings):
        model = TableModel(seed, zeros=False)
        case = {"model": model, "temperature": sampling.temperature, **knobs}
        yield check_joint_distribution(build, [model], case, sampling, **knobs)
