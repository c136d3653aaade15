"""Every theorem holds for the library.

What each of them kills is in test_theorems.py and test_passes.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import session_laws, theorems, verification_laws
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.exact.models import add_random_head
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.speculative_decoding import (
    best_gamma,
    expected_tokens,
    lenient_verifier,
)
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.gumbel_coupling import match_probability
from tinyspec.speculative.verification.spectr import verify_tree_k_seq
from tinyspec.technique import load_techniques

LLAMA = Config(
    vocab_size=11,
    d_model=16,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    d_ff=24,
    max_positions=64,
    tied=True,
)
GPT2 = replace(
    LLAMA, norm="layer", positions="learned", activation="gelu_new", gated=False, n_kv_heads=4,
    qkv_bias=True,
    out_bias=True, mlp_bias=True, family="gpt2",
)  # fmt: skip


def all_theorems() -> dict[str, Callable[[], Evidence]]:
    """Return every theorem by name; calling one returns its Evidence or raises `LawViolated`."""
    laws: dict[str, Callable[[], Evidence]] = {
        "acceptance": lambda: theorems.acceptance_theorem(verify_tree),
        "tokens of a round": lambda: theorems.tokens_of_a_round(verify_tree),
        "predicted tokens": lambda: theorems.predicted_tokens(expected_tokens),
        "planner": lambda: theorems.planner_is_optimal(best_gamma),
        "lenience": lambda: theorems.lenience_cap(lenient_verifier),
        "recursive rejection": lambda: theorems.recursive_rejection_law(verify_tree),
        "several drafts": lambda: theorems.several_drafts(verify_tree),
        "block verification": lambda: verification_laws.block_keeps_its_promise(
            verify_tree_by_block, gamma=2
        ),
        "K-SEQ's share": lambda: theorems.kseq_reaches_share(verify_tree_k_seq, largest=4),
        "K-SEQ's factor": lambda: verification_laws.least_factor(verify_tree_k_seq, largest=4),
        "Gumbel coupling": lambda: verification_laws.agreement_formula(match_probability),
        "draw order": lambda: theorems.draw_order(theorems.without_replacement, verify_tree),
    }
    for config in (
        LLAMA,
        GPT2,
    ):  # weights so large that every layer, position and token changes the logits
        target, draft = (Model.random(config, seed, torch.float64, scale=0.4) for seed in (0, 1))
        on = f"on a random {config.family}"
        laws[f"node logits {on}"] = partial(session_laws.node_logits, target.session)
        laws[f"siblings {on}"] = partial(session_laws.sibling_order, target.session, verify_tree)
        for card in (card for card in load_techniques().values() if card.kind == "decoder"):
            texts = (
                [[token for _ in range(2) for token in range(config.vocab_size)]]
                if card.copies
                else []
            )
            laws[f"committed slots of {card.name} {on}"] = partial(
                session_laws.cache_after_every_round,
                card.make,
                add_random_head(target, card, 0).session,
                [draft.session] * card.drafts,
                references=texts,
                texts=12,  # the better the drafts, the fewer the rounds of a text
            )
    return laws


THEORY = all_theorems()


@pytest.mark.parametrize("law", THEORY.values(), ids=THEORY)
def test_every_theorem_holds(law: Callable[[], Evidence]) -> None:
    evidence = law()
    assert evidence.cases >= 20
    assert evidence.seconds > 0
    if evidence.law in (theorems.ACCEPTANCE, theorems.TRANSPORT, session_laws.COMMITTED_SLOTS):
        assert evidence.branches > evidence.cases  # outcomes walked, or slots compared


def test_no_technique_is_left_out() -> None:
    for name in (name for name, card in load_techniques().items() if card.kind == "decoder"):
        assert sum(f"committed slots of {name} on" in law for law in THEORY) == 2
