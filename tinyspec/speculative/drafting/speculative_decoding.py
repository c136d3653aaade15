"""Speculative decoding: let a cheap model guess, and keep the expensive model's law.

Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318 (which swaps the letters: their q
is our p). The draft model samples gamma tokens; the target scores all of them in one call; each is kept with probability
min(1, p/q), the first refusal is replaced by a draw from the residual, and a draft that passes whole earns a bonus token.
Draft and target rows are warped alike (temperature, top-k, top-p) before the ratio. Nothing is trained.

Leviathan's paper adds the analysis, and so does this file: the acceptance rate alpha = E[sum_x min(p, q)] from paired rows
without decoding, the tokens, wall time and arithmetic it predicts, and the best gamma for a cost ratio c. It also adds
lenience l <= 1: accept min(1, p / (l q)), which is faster and keeps only P(x) <= p(x) / l.

Guarantee: EXACT at lenience 1, for any q that is positive where it proposes; below, LOSSY. Tested in
tests/speculative/test_speculative_decoding.py: the joint law, 1 - TV, the predicted tokens per round against brute force,
and the lenience cap on an enumerated law.
Left out: beam search, which the paper only sketches.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.verify import Verdict, residual, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, Probs, TokenTree


def lenient(lenience: float) -> Verifier:
    """Acceptance of Leviathan et al., appendix A.5: the draft's law is scaled by l before it is compared.

    At temperature 0 a draft token passes where p(x) >= l max p, p being the law before it is sharpened.
    """

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        path: tuple[int, ...] = ()
        at = ROOT
        for node, (token, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
            row = rest = p[at]
            if p.sampling.temperature == 0:
                soft = p.probs_under(at, replace(p.sampling, temperature=1.0))
                passed = soft[token] >= lenience * max(soft)
            elif q is None:
                raise TinyspecError(
                    "lenience scales the law a token was drawn from: this draft declares none"
                )
            elif not (passed := rng.accept(row[token] / (lenience * q[token]))):
                rest = residual(row, [lenience * x for x in q])
            if not passed:
                return Verdict(path, rng.draw(rest), (node,))
            path, at = (*path, node), node
        return Verdict(path, rng.draw(p[at]))

    return judge


@technique(
    title="Speculative decoding",
    summary="a small model drafts a chain",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    lossy=("lenience", 1.0),
    knobs=(
        Knob("gamma", 3, "tokens the draft model proposes in a round", low=1),
        Knob(
            "lenience",
            1.0,
            "scale on q before the comparison; below 1 it is lossy",
            low=1e-3,
            high=1.0,
        ),
    ),
)
def speculative_decoding(request: Request, *, gamma: int, lenience: float) -> Decoder:
    """A draft model guesses a chain of gamma tokens; the target walks it."""
    reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
    drafter = ModelDrafter(request.drafts[0], gamma, request.stop.eos, reach)
    return request.decoder(drafter, verify_tree if lenience == 1 else lenient(lenience))


# ---------------------------------------------------------------------- the analysis (sections 3.1 to 3.5)


def acceptance(pairs: Iterable[tuple[Probs, Probs]]) -> float:
    """alpha: the mean of sum_x min(p(x), q(x)) over paired rows, that is 1 - TV on average (section 3.2).

    >>> acceptance([([0.5, 0.5], [1.0, 0.0]), ([0.2, 0.8], [0.2, 0.8])])
    0.75
    """
    overlaps = [
        float(sum(np.minimum(np.asarray(p, dtype=float), np.asarray(q, dtype=float))))
        for p, q in pairs
    ]
    return sum(overlaps) / len(overlaps)


def expected_tokens(alpha: Any, gamma: int) -> Any:
    """Tokens committed per round if every draft token passes with probability alpha (equation 1).

    (1 - alpha^(gamma+1)) / (1 - alpha), written as the sum it is, so that alpha = 1 needs no special case.

    >>> round(expected_tokens(0.8, 4), 4)
    3.3616
    """
    return sum(alpha**i for i in range(gamma + 1))


def walltime_gain(alpha: float, gamma: int, c: float) -> float:
    """Expected speed-up where one draft step costs c target calls and a block costs one call (theorem 3.8)."""
    return float(expected_tokens(alpha, gamma)) / (gamma * c + 1)


def arithmetic_growth(alpha: float, gamma: int, c_ops: float) -> float:
    """Factor by which the number of operations grows; a draft token costs c_ops target tokens (theorem 3.11)."""
    return (gamma * c_ops + gamma + 1) / float(expected_tokens(alpha, gamma))


def best_gamma(alpha: float, c: float, longest: int = 64) -> int:
    """The draft length with the greatest expected speed-up; 0 where drafting does not pay (section 3.5)."""
    return max(range(longest + 1), key=lambda gamma: walltime_gain(alpha, gamma, c))
