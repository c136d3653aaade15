"""Multi-candidate speculative decoding (MCSD): test several draft tokens at every position.

Paper: Yang, Huang, Dai, Chen 2024, arXiv 2401.06706. Nothing is trained.

Idea. Where speculative decoding draws one draft token, the draft model draws k candidates, and k
more after each of them: a tree, whose widths by depth are the k-configuration. The target scores
all paths in one forward pass under a tree mask. At a node the candidates are tested in the order
in which they were drawn. Each rejection replaces the target's distribution by the residual, and
the next candidate is tested against that.

    P(accept x_i) = min(1, p_i(x_i) / q_i(x_i))            p_1 = p, q_1 = q
    p_(i+1)       = max(0, p_i - q_i), divided by its sum  after a rejection of x_i
    q_(i+1)       = q                                      with replacement
    q_(i+1)       = norm(q_i with q_i(x_i) = 0)            without replacement

With replacement, candidates may be equal, and a second copy of a rejected token never passes.
Without replacement all candidates differ. If all are rejected, the token is sampled from the last
residual.

Guarantee: EXACT in both modes. At temperature 0, where all draws would be the same token, the
candidates are the draft's k most likely tokens, as point masses.
Pitfall: taking the k most likely tokens and testing them against q; sorting the draws by
probability; forgetting that a rejection changes p (and, without replacement, q). Each of these
gives another distribution.
Tests: tests/speculative/test_multi_candidate.py (`verify_siblings` against the code that runs,
outcome by outcome; k = V without replacement always accepts; naive sampling <= with <= without
replacement; the formula of `sequential_acceptance`).
Left out: a temperature of the draft's own, and training the draft on the target's texts (`tinyspec
train lm --distill` does that). The default configuration is ours: the authors' example, 4x2x2, with
one more depth.
"""

from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.verify import residual, verify_tree
from tinyspec.speculative.treedraft import TreeDrafter, branching_parents, parse_branching
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import Probs


def verify_siblings(p: Any, dists: Any, candidates: list[int], rng: Any) -> tuple[int, bool]:
    """Test the candidates of one position in draw order.

    p           [V] target probabilities
    dists       [k, V] the distribution that each candidate was drawn from: q for all of them with
                replacement, q without the earlier ones without
    candidates  [k] tokens in draw order
    rng         a numpy.random.Generator

    Returns the next token and whether it is one of the candidates. The decoder runs `verify_tree`,
    the same rule at every node of a tree. A test compares the two on every outcome.
    """
    p = np.asarray(p)
    for token, q in zip(candidates, dists, strict=True):
        if rng.random() < min(1, p[token] / q[token]):
            return token, True
        p = np.maximum(0, p - np.asarray(q))  # rejected: what the target has beyond this draft
        p = p / p.sum()
    return rng.choice(len(p), p=p), False


def sequential_acceptance(p: Probs, q: Probs, k: int) -> Any:
    """Return the probability that one of k candidates drawn with replacement is accepted.

        1 - (1 - beta_1) ... (1 - beta_k)        beta_i = sum over x of min(p_i(x), q(x))

    p_1 is p, and p_(i+1) is the residual of p_i. Which token was rejected does not matter.

    >>> from fractions import Fraction as F
    >>> [str(sequential_acceptance([F(1), F(0)], [F(1, 3), F(2, 3)], k)) for k in (1, 2)]
    ['1/3', '5/9']
    """
    all_rejected = 1
    for _ in range(k):
        all_rejected *= 1 - sum(min(a, b) for a, b in zip(p, q, strict=True))
        p = residual(p, q)
    return 1 - all_rejected


@technique(
    title="Multi-candidate speculative decoding (MCSD)",
    summary="several candidates at each position",
    paper="Yang et al. 2024, arXiv 2401.06706",
    family="verification",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(
        Knob(
            "configuration",
            "4x2x2x1",
            "candidates below every node, by depth",
            small=(2, "2x1", "1x2"),
        ),
        Knob(
            "replacement",
            False,
            "whether candidates may be equal: drawn independently of each other",
        ),
    ),
)
def multi_candidate(request: Request, *, configuration: str, replacement: bool) -> Decoder:
    """Return a decoder whose draft model draws a tree of candidates."""
    tree = branching_parents(parse_branching(configuration))
    drafter = TreeDrafter(
        request.drafts[0], tree, request.stop.eos, request.draft_max_length, replace=replacement
    )
    return request.decoder(drafter, verify_tree)
