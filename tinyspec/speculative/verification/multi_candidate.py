"""Multi-candidate speculative decoding (MCSD): several guesses for every position, tested one after
the other.

Yang, Huang, Dai, Chen 2024, arXiv 2401.06706. The draft model draws k candidates where speculative
decoding draws one, and below each of them again: a tree, whose widths by depth are the
k-configuration. The target scores all paths in one pass under a tree mask. At a node the candidates
are tested in the order they were drawn: x passes with probability min(1, p(x) / q(x)), and a
refusal replaces p by the residual norm(max(0, p - q)) before the next is tested; where all fail the
token is drawn from what is left. Candidates drawn with replacement may be equal, and a second copy
of a refused token never passes; so the paper also draws them without replacement, and then a
refusal takes the token out of q as well. Nothing is trained.

What makes it this technique: the candidates are draws and each is judged by the law it was drawn
from given its earlier siblings, in the order of the draws. The best k of q judged by q, sorted
draws, or a p that forgets the refusals before it give another law. The naive scheme, which draws y
from p and keeps it where it is among the candidates, is exact too and accepts less.

Guarantee: EXACT in both modes. At temperature 0, where all draws are one token, the candidates are
the draft's likeliest tokens, as point masses. Tested in tests/speculative/test_multi_candidate.py:
all V tokens without replacement are accepted surely; with replacement accepts no less than naive
sampling and no more than without; and with replacement the chance that one of k passes is 1 - (1 -
beta_1) ... (1 - beta_k), the beta_i being the overlaps of q with what is left of p.
Left out: a temperature of the draft's own, and training the draft on the target's texts (`tinyspec
train lm --distill`).
"""

from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.verify import residual, verify_tree
from tinyspec.speculative.treedraft import TreeDrafter, parse_branching, shape
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import Probs


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
    """A draft model draws a tree of candidates; the target walks it."""
    reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
    tree = shape(parse_branching(configuration))
    return request.decoder(
        TreeDrafter(request.drafts[0], tree, request.stop.eos, reach, replace=replacement),
        verify_tree,
    )


def sequential_acceptance(p: Probs, q: Probs, k: int) -> Any:
    """The chance that one of k candidates drawn with replacement passes: 1 - (1 - beta_1) ... (1 -
    beta_k).

    beta_i = sum_x min(p_i, q) with p_1 = p and p_i+1 the residual; which token was refused does not
    matter.

    >>> from fractions import Fraction as F
    >>> [str(sequential_acceptance([F(1), F(0)], [F(1, 3), F(2, 3)], k)) for k in (1, 2)]
    ['1/3', '5/9']
    """
    refused = 1
    for _ in range(k):
        refused *= 1 - sum(min(a, b) for a, b in zip(p, q, strict=True))
        p = residual(p, q)
    return 1 - refused
