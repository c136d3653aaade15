"""Quantised drafts: a copy of the target in four bits drafts, the target verifies.

Paper: Georganas et al. 2025, arXiv 2503.13565 (ML-SpecQD). Nothing is trained.

Idea. A pass over one row takes as long as its weights need to arrive. The same weights in four bits
are less than a third of the bytes, and the model that they make is close to the target. So a copy
drafts: no other model has to be found or trained, and any checkpoint can do it. The weights are
rounded once, 32 of a row at a time (llama.cpp's Q4_0):

    d       = the weight of greatest size / -8               one float16 for 32 weights
    weight ~= d (q - 8),  q = round(weight / d) + 8          q in 0..15

How much it can gain follows from bytes: a round of gamma draft tokens reads the copy gamma times
and the target once. With four bits in place of sixteen and all drafts accepted that is
(gamma + 1) / (1 + 0.28 gamma), at most 3.5; from 32-bit weights more, from 8-bit ones hardly
anything. A target whose own weights are four bits gains nothing.

Guarantee: EXACT. The copy declares the distribution that it samples from.
Pitfall: draft tokens that are kept without verification, because the copy is nearly the target; one
scale for a whole row, which an outlier spoils.
Tests: tests/speculative/test_quantized_draft.py (the joint distribution; each weight is within a
step of its own group; the copy has a cache of its own; it is made once for a model).
Left out: ML-SpecQD rounds to MXFP4, whose 32 weights share a power of two; and a second, smaller
model drafts for the copy (`staged` and `cascade` have such levels). QuantSpec (Tiwari et al., ICML
2025, arXiv 2502.10424) quantises the cache of a long text, too: the copy reads the upper four of
eight bits. gamma is our choice; the abstract has none. The copy's embedding and output matrix are
quantised as well. Where the kernels do not multiply quantised weights the copy is expanded, and so
as slow as the target.
"""

import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from tinyspec import _core
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.host import trim_heap
from tinyspec.lm.model import Model
from tinyspec.lm.quantised import GROUP, QuantisedMatrix, QuantisedWeights, quantise_matrix
from tinyspec.technique import Guarantee, Knob, Request, technique

KIND = "Q4_0"

_lock = threading.Lock()
_copies: WeakKeyDictionary[Model, Model] = WeakKeyDictionary()


def quantise_weights(weights: dict[str, Tensor]) -> dict[str, QuantisedMatrix]:
    """Return the matrices in four bits, by name.

    weights  of a transformer; matrices [out, in]

    Left out are those with rows of no multiple of 32, and with numbers beyond float16.
    """
    found = {
        name: quantise_matrix(weight, KIND)
        for name, weight in weights.items()
        if weight.ndim == 2 and name != "positions" and weight.shape[1] % GROUP == 0
    }
    return {name: m for name, m in found.items() if np.isfinite(m.scales()).all()}


def copy_in_four_bits(target: Model) -> Model:
    """Return a copy of a model with its matrices in four bits. It is made once for each model."""
    with _lock:
        if target not in _copies:
            _copies[target] = _make_copy(target)
        return _copies[target]


def _make_copy(target: Model) -> Model:
    """Return the copy: quantised where the kernels multiply that, else expanded to its type."""
    weights = dict(target.weights)
    matrices = quantise_weights(weights)
    plain = {name: weight for name, weight in weights.items() if name not in matrices}
    quantised: Any = QuantisedWeights(matrices, plain)
    compute = _core.compute
    if target.engine is not None and compute is not None and compute.unpacks():
        quantised.plain = {name: weight.bfloat16() for name, weight in plain.items()}
    else:
        quantised = {name: quantised[name].to(weights[name]) for name in weights}
    tokenizer = target.tokenizer if target.has_tokenizer else None
    copied = Model(target.config, quantised, tokenizer, f"{target.name}-q4")
    trim_heap()
    return copied


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
