"""Quantised drafts (Georganas et al. 2025): the target verifies, and 32 weights share a scale."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap, card
from tinyspec.laws.traps.speculative_decoding import joint_distribution_of_a_chain
from tinyspec.lm.quantised import GROUP, QuantisedMatrix
from tinyspec.speculative.drafting.quantized_draft import quantise_weights, quantized_draft

OWN_SCALE = "a weight is within a step of its own 32"

Quantise = Callable[[dict[str, torch.Tensor]], dict[str, QuantisedMatrix]]


@collect_evidence(OWN_SCALE)
def weights_are_within_a_step(quantise: Quantise) -> Iterator[int]:
    """Check matrices in which one weight is much larger than the others.

    A step is an eighth of the greatest weight of the 32. At the other end of the range a weight may
    be off by a whole one; bfloat16 and float16 round by another 1/64 of it at most.
    """
    for seed in range(8):
        weight = torch.randn(4, 3 * GROUP, generator=torch.Generator().manual_seed(seed))
        weight[seed % 4, 7 * seed] *= 100
        copied = quantise({"a.weight": weight})["a.weight"].expand().float()
        groups, copies = (w.reshape(4, 3, GROUP) for w in (weight, copied))
        step = groups.abs().amax(2, keepdim=True) / 8
        is_near = ((copies - groups).abs() <= step * (1 + 1 / 8)).all()
        expect_equal(OWN_SCALE, True, bool(is_near), seed=seed)
        yield 0


TRAPS = [
    Trap(JOINT, joint_distribution_of_a_chain, card("quantized_draft")),
    Trap(OWN_SCALE, weights_are_within_a_step, lambda: quantise_weights),
]

_copy = partial(Toy, technique="quantized_draft")

TOYS = [
    _copy(
        "the copy is as good as the target",
        "return request.decoder(drafter, verify_tree)",
        """from tinyspec.decoding.verify import Verdict

def keep_all(tree, p, rng):
    path = tuple(tree.chain_nodes("a draft"))
    return Verdict(path, rng.draw(p[path[-1] if path else -1]))

return request.decoder(drafter, keep_all)""",
        quantized_draft,
        law=JOINT,
    ),
    _copy(
        "one scale for a row",
        "quantise_matrix(weight, KIND)",
        "quantise_matrix((weight / (s := weight.abs().amax(1, True) / 7)).round() * s, KIND)",
        quantise_weights,
        law=OWN_SCALE,
    ),
]
