"""A transformer by hand whose answer stands far back in its text: what an old key is worth can be
read off.

One layer, one head. A needle names one of four answers; a question attends to the needle, wherever
it stands, and answers; after an answer the question comes again. Whoever does not see the needle
does not know the answer.
"""

import torch

from tinyspec.lm.config import Config
from tinyspec.lm.transformer import Model

FILLER, QUESTION = 0, 1
NEEDLES = (2, 3, 4, 5)
ANSWERS = (6, 7, 8, 9)
WHICH, ATTENDED = 4, 8  # first of the four coordinates: which needle it was, what attention brought


def needle_model(name: str = "needle") -> Model:
    """V = 10, d = 16, positions do not matter; float64."""
    config = Config(
        vocab_size=10, d_model=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4, d_ff=2, max_positions=256,
        positions="learned", tied=False,
    )  # fmt: skip
    weights = {
        key: torch.zeros(shape, dtype=torch.float64) for key, shape in config.shapes().items()
    }
    for key, weight in weights.items():
        if "norm" in key:
            weight.fill_(1.0)
    embed, qkv, head = weights["embed"], weights["0.qkv.weight"], weights["head"]
    embed[FILLER, 0] = embed[QUESTION, 1] = 1.0
    qkv[0, 1] = 20.0  # a question asks ...
    qkv[4, 2] = 1.0  # ... for a needle ...
    for i, (needle, answer) in enumerate(zip(NEEDLES, ANSWERS, strict=True)):
        embed[needle, [2, WHICH + i]] = 1.0
        embed[answer, 3] = 1.0
        qkv[8 + i, WHICH + i] = 1.0  # ... and is told which
        weights["0.out.weight"][ATTENDED + i, i] = 4.0
        head[answer, ATTENDED + i] = 4.0
    head[FILLER, 0] = head[QUESTION, 3] = 40.0  # more than a little of everything that is seen
    return Model(config, weights, name=name)


def make_haystack(which: int, length: int, at: int) -> list[int]:
    """A prompt of so many tokens with a needle at a place, and the question at its end."""
    text = [FILLER] * (length - 1) + [QUESTION]
    text[at] = NEEDLES[which]
    return text
