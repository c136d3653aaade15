"""Speculative decoding: a small model drafts, the large model verifies in one forward pass.

Paper: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318
(which swaps the letters: its q is our p). Nothing is trained.

Idea. The draft model samples gamma tokens, one after the other. The target computes its
distributions at all gamma + 1 positions in a single forward pass. Draft tokens are accepted from
left to right; the first rejected one is replaced by a sample from what the target has beyond the
draft. If all are accepted, one bonus token is free.

    P(accept x)  = min(1, p(x) / q(x))              p: target, q: draft
    residual(x)  = max(0, p(x) - q(x)) / sum over y of max(0, p(y) - q(y))
    alpha        = E[sum over x of min(p(x), q(x))]                     acceptance rate
    E[tokens]    = (1 - alpha^(gamma + 1)) / (1 - alpha)                tokens of a round

Draft and target use the same sampling settings (temperature, top-k, top-p) before the ratio is
formed.

Guarantee: EXACT at lenience 1, for any q that is positive where it proposes. Lenience l < 1 accepts
with min(1, p(x) / (l q(x))): it is faster, and the output is only bounded, P(x) <= p(x) / l.
Pitfall: sampling the recovered token from p instead of the residual; settings applied to one of the
two models only.
Tests: tests/speculative/test_speculative_decoding.py (the joint distribution; `verify_chain`
against the code that runs, outcome by outcome; 1 - total variation; the predicted tokens against
brute force; the bound of lenience).
Left out: beam search, which the paper only sketches. The paper computes gamma from alpha and c for
each pair; `planner` and `tinyspec bench plan-draft` do. The default, 3, is the smallest of its 3, 5
and 7, because a small target gains little from a longer draft.
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


def verify_chain(p: Any, q: Any, draft: list[int], rng: Any) -> list[int]:
    """Accept a prefix of the draft, then sample one more token (Leviathan et al., algorithm 1).

    p      [gamma + 1, V] target probabilities, one row for each draft token and one more
    q      [gamma, V] draft probabilities
    draft  [gamma] tokens, each sampled from its row of q
    rng    a numpy.random.Generator

    The decoder runs `verify_tree`, the same rule on trees. A test compares the two on every
    outcome.
    """
    for i, token in enumerate(draft):
        accept_prob = min(1, p[i][token] / q[i][token])
        if rng.random() >= accept_prob:
            # Rejected: sample from what the target has beyond the draft.
            residual = np.maximum(0, np.asarray(p[i]) - np.asarray(q[i]))
            recovered = rng.choice(len(residual), p=residual / residual.sum())
            return [*draft[:i], recovered]
    bonus = rng.choice(len(p[-1]), p=p[-1])  # everything was accepted: one token for free
    return [*draft, bonus]


def lenient_verifier(lenience: float) -> Verifier:
    """Return a verifier of chains that accepts with min(1, p(x) / (l q(x))) (appendix A.5).

    At temperature 0 a draft token is accepted if p(x) >= l max p, where p is the target's
    distribution at temperature 1 and otherwise the same settings. The verifier raises TinyspecError
    if the draft branches, and above temperature 0 if a token declares no distribution.
    """

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        path: tuple[int, ...] = ()
        at = ROOT
        for node in tree.chain_nodes("the lenient rule"):
            token, q = tree.tokens[node], tree.draft_probs[node]
            row = rest = p[at]
            if p.sampling.temperature == 0:
                soft = p.probs_under(at, replace(p.sampling, temperature=1.0))
                passed = soft[token] >= lenience * max(soft)
            elif q is None:
                raise TinyspecError(
                    "lenience needs the distribution that a token was drawn from, and this draft "
                    "declares none: set lenience to 1"
                )
            elif not (passed := rng.accept(row[token] / (lenience * q[token]))):
                rest = residual(row, [lenience * x for x in q])
            if not passed:
                return Verdict(path, rng.draw(rest), (node,))
            path, at = (*path, node), node
        return Verdict(path, rng.draw(p[at]))

    return judge


# ------------------------------ the analysis (sections 3.1 to 3.5)


def acceptance_rate(pairs: Iterable[tuple[Probs, Probs]]) -> float:
    """Return alpha, the mean of sum_x min(p(x), q(x)) over pairs (p, q): 1 - TV (section 3.2).

    >>> acceptance_rate([([0.5, 0.5], [1.0, 0.0]), ([0.2, 0.8], [0.2, 0.8])])
    0.75
    """
    overlaps = [
        float(sum(np.minimum(np.asarray(p, dtype=float), np.asarray(q, dtype=float))))
        for p, q in pairs
    ]
    return sum(overlaps) / len(overlaps)


def expected_tokens(alpha: Any, gamma: int) -> Any:
    """Return the expected number of tokens of a round, at acceptance rate alpha.

        (1 - alpha^(gamma+1)) / (1 - alpha)                                            equation 1

    It is computed as the geometric sum, so that alpha = 1 needs no special case.

    >>> round(expected_tokens(0.8, 4), 4)
    3.3616
    """
    return sum(alpha**i for i in range(gamma + 1))


def walltime_speedup(alpha: float, gamma: int, c: float) -> float:
    """Return the expected speed-up if a draft step costs c target passes (theorem 3.8).

    A pass over the whole draft is assumed to cost as much as a pass over one token.
    """
    return float(expected_tokens(alpha, gamma)) / (gamma * c + 1)


def arithmetic_growth(alpha: float, gamma: int, c_ops: float) -> float:
    """Return the factor by which the number of operations grows (theorem 3.11).

    c_ops  operations for a draft token, over those for a target token
    """
    return (gamma * c_ops + gamma + 1) / float(expected_tokens(alpha, gamma))


def best_gamma(alpha: float, c: float, longest: int = 64) -> int:
    """Return the draft length with the greatest expected speed-up (section 3.5).

    0: drafting does not pay.
    """
    return max(range(longest + 1), key=lambda gamma: walltime_speedup(alpha, gamma, c))


# ------------------------------ the card


@technique(
    title="Speculative decoding",
    summary="a small model drafts a chain",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
    reported="2x to 3x, T5-XXL (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    lossy=("lenience", 1.0),
    knobs=(
        Knob(
            "gamma", 3, "tokens the draft model proposes in a round", low=1, high=64, advised=True
        ),
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
    """Return a decoder whose draft model samples a chain of gamma tokens."""
    drafter = ModelDrafter(request.drafts[0], gamma, request.stop.eos, request.draft_max_length)
    return request.decoder(drafter, verify_tree if lenience == 1 else lenient_verifier(lenience))
