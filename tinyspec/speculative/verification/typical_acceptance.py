"""Typical acceptance: accept a draft token that the target finds typical, whatever it would sample.

Paper: Cai et al., ICML 2024, arXiv 2401.10774 (Medusa). The heads are Medusa's; nothing more is
trained.

Idea. Above temperature 0 the exact test rejects many tokens that would do as well. So a draft token
x is accepted if the target's probability of it is not too small for its distribution:

    p(x) > min(epsilon, delta exp(-H(p)))          H(p) = -sum over y of p(y) log p(y)

Where the target is sure, H is small and epsilon decides. Where n tokens are equally likely, exp(-H)
is 1 / n, and the threshold falls. Of all paths of the tree whose tokens are accepted one after
another, the longest is kept; of equals, the one with the greatest sum of log p. Then one more token
is added. `bonus` says which:

    argmax    the target's likeliest token, as the authors' code does by default (`fast`)
    typical   a sample of p without the tokens below the threshold, as it does without `fast`

delta is sqrt(epsilon), as the authors advise. p is the distribution under the user's settings.

Guarantee: LOSSY in `epsilon`. At inf nothing is accepted, and the next token is a sample of p:
EXACT, at the price of the drafts. At any other value the text is not distributed as p. An accepted
token is not sampled at all: it need only be drafted and pass. With `argmax` nothing is sampled, so
temperature only moves the threshold, and every seed gives the same text. At temperature 0 the text
is plain decoding's at any epsilon. The paper claims the quality of the text, not its distribution.
The authors' README says that giving up the distribution makes sampled text faster than greedy text.
At temperature 0.8, tutorials/results/heads-typical.md counts its tokens per pass, and those of the
exact test with the same head.
Pitfall: a threshold without the entropy. Such a threshold rejects even the likeliest token where
the target is unsure. With the entropy the likeliest token always passes, if delta < 1: exp(-H(p))
is at most the greatest p(x).
Tests: tests/speculative/test_typical_acceptance.py (the threshold by hand; the likeliest token
passes; `extend_by_typical_path` against the code that runs; greedy text; a smaller epsilon accepts
more).
Left out: the acceptance of the authors' code without `fast`, in which a sampled token decides at
each place; top-p in place of the threshold; the 1e-5 that their code adds to p in the logarithm.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import top_k_tokens
from tinyspec.decoding.verify import Verdict
from tinyspec.lm.host import to_numpy
from tinyspec.speculative.drafting.medusa import TRAINED, medusa
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, Probs, TokenTree


def typical_threshold(p: Any, epsilon: float, delta: float) -> float:
    """Return what the probability of an accepted token exceeds: min(epsilon, delta exp(-H(p))).

    >>> round(typical_threshold(np.array([0.5, 0.5]), 0.3, 0.4), 6)
    0.2
    """
    possible = p[p > 0]
    entropy = -float((possible * np.log(possible)).sum())
    return min(epsilon, delta * math.exp(-entropy))


def extend_by_typical_path(
    p: Callable[[list[int]], Any],
    text: list[int],
    paths: Sequence[Sequence[int]],
    epsilon: float,
    delta: float,
) -> list[int]:
    """Return the text after one round, with the likeliest token at its end.

    p      text -> the target's distribution [V] of the next token
    paths  candidate continuations of the text

    The decoder runs `typical_verifier`, which reads the distributions of a whole tree from one
    forward pass. A test compares the two.
    """
    best, best_score = list[int](), (0, 0.0)
    for path in paths:
        accepted, likelihood = list[int](), 0.0
        for token in path:
            row = p([*text, *accepted])
            if row[token] <= typical_threshold(row, epsilon, delta):
                break
            accepted.append(token)
            likelihood += math.log(row[token])
        if (len(accepted), likelihood) > best_score:
            best, best_score = accepted, (len(accepted), likelihood)
    text = [*text, *best]
    return [*text, int(np.argmax(p(text)))]


def typical_verifier(epsilon: float, delta: float, bonus: str) -> Verifier:
    """Return a verifier that accepts the longest path of typical tokens.

    bonus  argmax or typical: the token after the path
    """

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        rows = dict[int, tuple[Any, float]]()  # an accepted node or ROOT -> p after it, threshold
        score = {ROOT: (0, 0.0)}  # the same -> how many tokens lead to it, and their sum of log p
        for node, parent in enumerate(tree.parents):
            if tree.probe[node] or parent not in score or epsilon == math.inf:
                continue
            if parent not in rows:
                row = read_on_host(p[parent])
                rows[parent] = row, typical_threshold(row, epsilon, delta)
            row, threshold = rows[parent]
            probability = float(row[tree.tokens[node]])
            if probability > threshold:
                n, likelihood = score[parent]
                score[node] = n + 1, likelihood + math.log(probability)
        end = max(score, key=lambda node: score[node])
        siblings = [child for child, parent in enumerate(tree.parents) if parent == end]
        rejected = tuple(child for child in siblings if not tree.probe[child])
        return Verdict(tree.path(end), choose_bonus(p[end], rng), rejected)

    def choose_bonus(row: Probs, rng: RandomSource) -> int:
        if epsilon == math.inf:  # no token is typical
            return rng.draw(row)
        row = read_on_host(row)
        if bonus == "argmax":
            return top_k_tokens(row, 1)[0]
        typical = np.where(row >= typical_threshold(row, epsilon, delta), row, 0.0)
        return rng.draw(typical if typical.any() else row)  # rounding may leave none

    return judge


def read_on_host(row: Probs) -> NDArray[np.float64]:
    """Return a distribution as an array of float64 on the host."""
    row = to_numpy(row) if isinstance(row, torch.Tensor) else row
    return np.asarray(row, dtype=np.float64)


@technique(
    title="Typical acceptance",
    summary="accepts what the target finds typical",
    paper="Cai et al. 2024, arXiv 2401.10774",
    reported="1.1x over greedy decoding (authors' page)",
    family="verification",
    guarantee=Guarantee.LOSSY,
    hidden=True,
    lossy=("epsilon", math.inf),
    trained=TRAINED,
    head_of="medusa",
    knobs=(
        Knob(
            "epsilon",
            0.09,
            "a token is accepted if its probability exceeds this, or less where the target is "
            "unsure; inf is exact",
            low=0.0,
            high=1.0,
            beyond=math.inf,
        ),
        Knob(
            "delta",
            0.0,
            "share of exp(-entropy) that is enough; 0: the square root of epsilon",
            low=0.0,
            high=1.0,
        ),
        Knob(
            "bonus",
            "argmax",
            "the token after the accepted path: the likeliest one, or a sample of the typical ones",
            choices=("argmax", "typical"),
        ),
        Knob("nodes", 63, "nodes of the tree", low=1, high=1024, small=(3, 1), ours=5),
        Knob("heads", 16, "heads that are used, at most", low=1, high=16, small=(2, 1)),
    ),
)
def typical_acceptance(
    request: Request, *, epsilon: float, delta: float, bonus: str, nodes: int, heads: int
) -> Decoder:
    """Return a decoder that drafts with the target's Medusa heads and accepts typical tokens."""
    decoder = medusa(request, nodes=nodes, heads=heads)
    # At temperature 0 the exact rule is the same: p is a point mass, and the threshold below 1.
    if not request.sampling.greedy:
        decoder.verifier = typical_verifier(epsilon, delta or math.sqrt(epsilon), bonus)
    return decoder
