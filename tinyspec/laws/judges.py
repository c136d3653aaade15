"""Every law that judges a `Parts`, by the name it accuses under.

A mutant names the law that is meant for it; the law is looked up here. Laws that judge one function
(a verifier, a kernel, the beginning of a session) are handed the part they judge.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from itertools import product
from operator import add
from typing import Any

import torch

from tinyspec.decoding.decode import BaseDrafter, Decoder, Drafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import (
    contracts,
    exit_laws,
    loop_laws,
    nonautoregressive_laws,
    padded_batch,
    request_laws,
    rewriting_laws,
    row_laws,
    schedule_laws,
    session_laws,
    suites,
    sweeps,
    theorems,
    verification_laws,
)
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.exact.rational import Exact
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.parts import KERNELS, Parts
from tinyspec.laws.session_laws import FAMILIES, PartlyRightDrafter, ThroughParts, family_model
from tinyspec.laws.traps import bild
from tinyspec.technique import Request
from tinyspec.tree import ROOT

PartsLaw = Callable[[Parts], Evidence]


def of_sessions(
    law: Callable[[Parts, session_laws.Begin], Evidence],
    families: Iterable[str] = FAMILIES,
    dtypes: Iterable[torch.dtype] = (torch.float64,),
) -> PartsLaw:
    """Return a law of sessions as a law of parts, on a model of each family and dtype."""

    def check(parts: Parts) -> Evidence:
        models = [
            ThroughParts(family_model(family).to(dtype=dtype), parts)
            for family, dtype in product(families, dtypes)
        ]
        return reduce(add, (law(parts, partial(parts.session, model)) for model in models))

    return check


def node_logits_of_parts(parts: Parts, begin: session_laws.Begin) -> Evidence:
    """Check that node logits are path logits."""
    return session_laws.node_logits(begin, cases=2, rounds=2, nodes=5)


def _row_identity_of_parts(parts: Parts, begin: session_laws.Begin) -> Evidence:
    return session_laws.row_identity(begin, cases=5)


def _slots_of_parts(parts: Parts, begin: session_laws.Begin) -> Evidence:
    def make(request: Request) -> Decoder:
        drafter = PartlyRightDrafter(family_model("rotations"), 1, wide=True)
        return parts.decoder(
            request.target, drafter, parts.walk, sampling=request.sampling, stop=request.stop
        )

    return session_laws.cache_after_every_round(make, begin, texts=2, tokens=8)


def _draw_order(parts: Parts) -> Evidence:
    def draft(q: Exact, k: int, rng: RandomSource) -> tuple[Any, Any]:
        drafter = parts.siblings(
            TableModel(vocabulary=len(q), rows=lambda text: q).session(), k, False
        )
        drafter.extend((0,), None)  # type: ignore[arg-type]
        tree = drafter.propose([0], k, SamplingParams(), rng)
        return tree.tokens, tree.draft_probs

    return theorems.draw_order(draft, parts.walk, largest=6, most=2)


def _contract(law: str) -> PartsLaw:
    """Return a contract as a law of the drafters: a chain, siblings without replacement, trees."""

    def check(parts: Parts) -> Evidence:
        drafters: tuple[Callable[[Any], Drafter], ...] = (
            lambda model: parts.drafter(model, 2, frozenset()),
            lambda model: parts.siblings(model, 2, False),
            lambda model: parts.trees(model, (ROOT, ROOT, 0), False),
            lambda model: parts.trees(model, (ROOT, ROOT), True),
        )

        def make(draft: Callable[[Any], Drafter], request: Request) -> Decoder:
            drafter = draft(request.drafts[0])
            return parts.decoder(request.target, drafter, parts.walk, sampling=request.sampling)

        checks = (
            contracts.check_contracts(partial(make, draft), laws=(law,)) for draft in drafters
        )
        return reduce(add, (found for (found,) in checks))

    return check


def _block(law: str) -> PartsLaw:
    """Return a law of block verification as a law of parts."""
    return lambda parts: verification_laws.block_keeps_its_promise(
        parts.block, gamma=2, laws=(law,)
    )


def _coupled(parts: Parts) -> Callable[..., Decoder]:
    """Return a builder of a decoder on shared noise."""

    def build(request: Request, gamma: int) -> Decoder:
        drafter = parts.racing(request.drafts[0], gamma) if request.drafts else BaseDrafter()
        return parts.decoder(
            request.target, drafter, parts.match, sampling=request.sampling, stop=request.stop
        )

    return build


def _twins(parts: Parts) -> Evidence:
    from tinyspec.laws.twins import equals_twin  # needs Hypothesis

    # What was replaced comes first.
    kernels = sorted(parts.kernels.items(), key=lambda entry: entry[1] is KERNELS[entry[0]])
    return reduce(
        add, (equals_twin(name, kernel, examples=60, large=0) for name, kernel in kernels)
    )


@cache
def all_judges() -> dict[str, PartsLaw]:
    """Return every law that judges a `Parts`, by the name it reports."""
    return {
        **loop_laws.LAWS,
        **loop_laws.STOP_LAWS,
        **request_laws.REPORT_LAWS,
        **row_laws.LAWS,
        **row_laws.FOREST_LAWS,
        **session_laws.SESSION_LAWS,
        **schedule_laws.SCHEDULE_LAWS,
        **padded_batch.PADDED_LAWS,
        **loop_laws.JOINT_ROW_LAWS,
        **loop_laws.CASCADE_LAWS,
        **exit_laws.PIPELINE_LAWS,
        **rewriting_laws.TRANSLATION_LAWS,
        **exit_laws.EXIT_LOSS_LAWS,
        **exit_laws.EXIT_RULE_LAWS,
        **nonautoregressive_laws.MASK_LAWS,
        **nonautoregressive_laws.FERTILITY_LAWS,
        **nonautoregressive_laws.ALIGNMENT_LAWS,
        **exit_laws.CALIBRATION_LAWS,
        bild.ALGORITHM: lambda parts: bild.follows_the_algorithm(
            bild.build_with_policy(parts.rollback)
        ),
        **{law: _contract(law) for law in contracts.CONTRACT_LAWS},
        theorems.ACCEPTANCE: lambda parts: theorems.acceptance_theorem(parts.walk),
        theorems.ROUND_TOKENS: lambda parts: theorems.tokens_of_a_round(parts.walk, gamma=2),
        theorems.REJECTION: lambda parts: theorems.recursive_rejection_law(
            parts.walk, largest=6, most=2
        ),
        theorems.TRANSPORT: lambda parts: theorems.several_drafts(parts.walk, largest=5, most=2),
        theorems.MATCHING: lambda parts: theorems.several_drafts(parts.walk, largest=5, most=2),
        theorems.KSEQ: lambda parts: theorems.kseq_reaches_share(parts.walk, largest=5, most=2),
        theorems.DRAW_ORDER: _draw_order,
        verification_laws.BLOCK_TOKENS: _block(verification_laws.BLOCK_TOKENS),
        verification_laws.BLOCK_EMITTED: _block(verification_laws.BLOCK_EMITTED),
        verification_laws.SELECTED: lambda parts: verification_laws.selection_keeps_target(
            parts.k_seq, largest=4
        ),
        verification_laws.FACTOR: lambda parts: verification_laws.least_factor(
            parts.k_seq, ks=(1, 2)
        ),
        verification_laws.TREES: lambda parts: verification_laws.trees_of_every_kind(parts.walk),
        verification_laws.GREEDY_VERDICT: lambda parts: verification_laws.greedy_verdict(
            parts.walk
        ),
        verification_laws.PLAIN_TEXT: lambda parts: verification_laws.plain_text_of_a_seed(
            parts.walk
        ),
        verification_laws.COUPLING_INVARIANT: lambda parts: (
            verification_laws.same_text_whoever_drafts(_coupled(parts), seeds=4)
        ),
        verification_laws.COUPLING_AGREES: lambda parts: (
            verification_laws.draft_kept_where_winners_agree(_coupled(parts), grid=8)
        ),
        sweeps.SWEEP_IS_JACOBI: lambda parts: sweeps.sweeps_by_hand(
            sweeps.build_jacobi(parts.jacobi)
        ),
        sweeps.SOLVE_PUBLISHED: lambda parts: sweeps.solve_ends_at_greedy(parts.solve),
        "twin": _twins,
        suites.RACE_LAW: lambda parts: suites.race_law(parts.replay, grid=10),
        session_laws.NODE_LOGITS: of_sessions(node_logits_of_parts),
        session_laws.SIBLING_ORDER: of_sessions(
            lambda parts, begin: session_laws.sibling_order(begin, parts.walk, cases=10)
        ),
        session_laws.ROW_IDENTITY: of_sessions(
            _row_identity_of_parts, dtypes=(torch.float32, torch.bfloat16)
        ),
        session_laws.COMMITTED_SLOTS: of_sessions(_slots_of_parts),
    }
