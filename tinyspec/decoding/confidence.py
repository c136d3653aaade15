"""How sure a token is of its next word at a layer: the three measures of CALM, each a number from 0
to 1.

Schuster et al., NeurIPS 2022, arXiv 2207.07061, section 3.5. They differ in price: the first is a
product with the vocabulary matrix at every layer, the second is free, the third is a product with
one vector, which must be trained.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from tinyspec.decoding.sampling import SamplingParams, is_exact, on_device
from tinyspec.errors import TinyspecError
from tinyspec.tree import Probs

WEIGHT, BIAS = "exits.weight", "exits.bias"  # of the exit classifier, among a model's extras


def gap(row: Probs) -> Any:
    """The greatest probability of a law less the second greatest. Not the greatest alone: two
    likely words are a doubt.

    >>> float(gap(np.array([0.5, 0.125, 0.375])))
    0.125
    """
    if on_device(row):
        top = row.topk(min(2, len(row))).values.tolist()
    elif is_exact(row):
        top = sorted(row, reverse=True)[:2]
    else:
        first = int(np.argmax(row))
        top = [
            row[first],
            max(np.max(row[:first], initial=0.0), np.max(row[first + 1 :], initial=0.0)),
        ]
    return top[0] - top[1] if len(top) > 1 else top[0]


def softmax_response(logits: Any) -> Any:
    """The gap under the model's own law, before the user's settings sharpen or cut it."""
    return gap(SamplingParams().probs(logits))


def saturation(state: Any, below: Any) -> float:
    """The cosine between what came out of a layer and out of the layer below; 0 where it is
    negative.
    """
    a, b = _doubles(state), _doubles(below)
    return max(0.0, float(a @ b) / (math.sqrt(float(a @ a) * float(b @ b)) or 1.0))


def classified(state: Any, weight: Any, bias: float) -> float:
    """What a linear classifier of the state says: the probability that the top layer would choose
    the same word.
    """
    x = float(_doubles(state) @ weight) + bias
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def classifier(extras: Mapping[str, Tensor], name: str) -> tuple[Any, float]:
    """A model's trained exit classifier as numbers: weight [d] and bias. TinyspecError where it has
    none.
    """
    if WEIGHT not in extras or BIAS not in extras:
        raise TinyspecError(
            f"{name} has no exit classifier: `tinyspec train exits --model {name}` trains one, or choose the measure "
            "softmax or saturation"
        )
    return _doubles(extras[WEIGHT]), float(extras[BIAS])


def _doubles(vector: Any) -> Any:
    return vector.detach().double().cpu().numpy()
