"""Quantised drafts: a copy of the target in four bits drafts, the target verifies.

Paper: Georganas et al. 2025, arXiv 2503.13565 (ML-SpecQD). Nothing is trained.

Idea. A pass over one token takes as long as reading all weights from memory. The same weights in
four bits are less than a third of the bytes, and the model that they make is close to the target.
So a copy drafts: no other model has to be found or trained, and any checkpoint can do it. The
weights are rounded once, 32 of a row at a time (llama.cpp's Q4_0):

    d       = the weight of greatest size / -8               one float16 for 32 weights
    weight ~= d (q - 8),  q = round(weight / d) + 8          q in 0..15

How much it can gain follows from bytes. A round reads the copy gamma times and the target once. So
if all draft tokens are accepted, and nothing but reading weights takes time, the speed-up is

    (gamma + 1) / (1 + c gamma)       c = bits of the copy / bits of the target

With 4.5 bits in place of 16, c is 0.28 and the speed-up below 3.6. From weights of 8.5 bits it is
below 1.9, and from weights of 4.5 bits nothing is gained.

Other methods draft with the copy where `draft` is "quantized_draft". So `auto` may choose it.

Guarantee: EXACT. The copy declares the distribution that it samples from.
Pitfall: draft tokens that are kept without verification, because the copy is nearly the target; one
scale for a whole row, which an outlier spoils.
Tests: tests/speculative/test_quantized_draft.py (the joint distribution; each weight is within a
step of its own group; it is made once for a model; greedy text is plain decoding's).
Left out: ML-SpecQD rounds to MXFP4, whose 32 weights share a power of two; and a second, smaller
model drafts for the copy (`staged` and `cascade` have such levels). QuantSpec (Tiwari et al., ICML
2025, arXiv 2502.10424) quantises the cache of a long text as well. gamma is our choice. The copy's
embedding and output matrix are quantised too. Where it is not faster to multiply these as they
are, the copy is expanded, and so as slow as the target.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.engine import prefers_quantised
from tinyspec.lm.host import trim_heap
from tinyspec.lm.model import Model
from tinyspec.lm.quantised import GROUP, QuantisedMatrix, QuantisedWeights, quantise_matrix
from tinyspec.technique import Guarantee, Knob, Request, technique

KIND = "Q4_0"


def quantise_weights(weights: dict[str, Tensor]) -> dict[str, QuantisedMatrix]:
    """Return the matrices in four bits, by name.

    weights  of a transformer; matrices [out, in]

    Left out are `positions`, matrices whose rows are not a multiple of 32 long, and matrices with
    numbers beyond float16.
    """
    found = {
        name: quantise_matrix(weight, KIND)
        for name, weight in weights.items()
        if weight.ndim == 2 and name != "positions" and weight.shape[1] % GROUP == 0
    }
    return {name: m for name, m in found.items() if np.isfinite(m.scales()).all()}


def copy_in_four_bits(target: Model) -> Model:
    """Return a copy of a model with its matrices in four bits.

    They stay quantised if that is faster. Otherwise they are expanded to the model's type.
    """
    weights = dict(target.weights)
    matrices = quantise_weights(weights)
    plain = {name: weight for name, weight in weights.items() if name not in matrices}
    copied: Mapping[str, Tensor]
    if target.engine is not None and prefers_quantised(target.config):
        copied = QuantisedWeights(matrices, {name: w.bfloat16() for name, w in plain.items()})
    else:
        expanded = {name: one.expand().to(weights[name]) for name, one in matrices.items()}
        copied = {**plain, **expanded}
    tokenizer = target.tokenizer if target.has_tokenizer else None
    model = Model(target.config, copied, tokenizer, f"{target.name}-q4")
    trim_heap()
    return model


@technique(
    title="Drafts by a quantised copy",
    summary="a copy in four bits drafts",
    paper="Georganas et al. 2025, arXiv 2503.13565",
    reported="up to 2x over bfloat16, MXFP4 drafts on a CPU (arXiv 2503.13565)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    make_draft=copy_in_four_bits,
    knobs=(Knob("gamma", 4, "draft tokens of a round", low=1, high=64, small=(1, 2)),),
)
def quantized_draft(request: Request, *, gamma: int) -> Decoder:
    """Return a decoder whose draft model is the target in four bits."""
    drafter = ModelDrafter(request.drafts[0], gamma, request.stop.eos, request.draft_max_length)
    return request.decoder(drafter, verify_tree)
