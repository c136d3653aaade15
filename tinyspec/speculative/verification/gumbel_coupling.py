"""Gumbel coupling: draft and target race on one noise, so the text does not know who drafted it.

Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant speculative
decoding", arXiv 2408.07978. Every position of a text has its noise, an exponential E_x for each
token, made from the seed and the position alone. The target says the token with the least E_x /
p(x), which is a draw from p (the Gumbel-max trick); the draft model proposes the token with the
least E_x / q(x) on the same noise, which is very often the same. Guesses are kept while they are
what the target itself says; no ratio is computed, no law of the draft is asked for, no residual is
drawn from. Nothing is trained.

What makes it this technique: draft and target agree without seeing each other's law. So the text is
a function of seed and target; whichever drafter there is, also none, changes only the speed. That
makes it reproducible over drafters and a good instrument for finding faults. The price: P(same) =
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), at least (1 - TV) / (1 + TV), where the ratio test, which
knows q, has 1 - TV. Of couplings that do without that knowledge none guarantees more.

Guarantee: EXACT, and stronger: path by path the tokens of racing alone. Shared noise cannot be
enumerated, so laws/suites.py proves it by two halves, the same tokens with any drafter and the
law of the race. Tested in tests/speculative/test_gumbel_coupling.py: one seed, any drafter, one
text; P(same), its bounds, and its integral.
Left out: the paper's other coupling, by weighted min-wise hashing, and its variant for parties that
exchange few bits.
"""

from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder, Drafter, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict
from tinyspec.speculative.verification.vectors import vectors
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, Probs, TokenTree


class _Races:
    """A chance for a drafter: each draw is the race of the next position of the text."""

    def __init__(self, rng: RandomSource, position: int):
        self.rng, self.position = rng, position

    def draw(self, row: Probs) -> int:
        self.position += 1
        return self.rng.exponential_race(row, self.position - 1)


class GumbelCouplingDrafter(ModelDrafter):
    """Proposes what wins the draft model's races. The verifier runs on the same noise, so no law is
    declared.
    """

    def propose(
        self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        races: Any = _Races(rng, len(context))
        return TokenTree.chain(super().propose(context, max_draft_depth, sampling, races).tokens)


def verify_tree_by_race(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    """What wins the target's race is said; the draft is followed while it says so too. Any tree,
    whoever made it.
    """
    path: tuple[int, ...] = ()
    row, here = p[ROOT], {ROOT}
    while True:
        token = rng.exponential_race(row, len(p.context) + len(path))
        below = [
            node for node, up in enumerate(tree.parents) if up in here and not tree.probe[node]
        ]
        here = {node for node in below if tree.tokens[node] == token}
        if not here:
            return Verdict(path, token, tuple(below))
        path = (*path, min(here))
        row = p[path[-1]]


@technique(
    title="Gumbel coupling (drafter-invariant)",
    summary="draft and target share their noise",
    paper="Daliri et al. 2024, arXiv 2408.07978",
    family="verification",
    guarantee=Guarantee.EXACT,
    coupled=True,
    optional_draft=True,
    knobs=(Knob("gamma", 3, "tokens the draft model proposes in a round", low=1),),
)
def gumbel_coupling(request: Request, *, gamma: int) -> Decoder:
    """A draft model races ahead; the target races on the same noise. Without a draft model: the
    same text, token by token.
    """
    drafter: Drafter = BaseDrafter()
    if request.drafts:
        reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
        drafter = GumbelCouplingDrafter(request.drafts[0], gamma, request.stop.eos, reach)
    return request.decoder(drafter, verify_tree_by_race)


# ---------------------------------------------------------------------- the analysis


def match_probability(p: Probs, q: Probs) -> Any:
    """P(same): the probability that two races on the same noise have one winner. O(V log V).

    i wins both where E_j >= E_i max(p_j / p_i, q_j / q_i) for every j: an exponential clock that is
    the first of several, hence 1 / sum_j max(p_j / p_i, q_j / q_i). The greater of the two is p's
    for the tokens whose p / q is at least i's.

    >>> from fractions import Fraction as F
    >>> str(match_probability([F(1, 2), F(1, 2)], [F(1, 4), F(3, 4)]))
    '3/4'
    """
    a, b = vectors(p, q, 0)
    both = (a > 0) & (b > 0)
    p_alone, q_alone = a[~both].sum(), b[~both].sum()  # their p / q is above all others, and below
    order = (a[both] / b[both]).argsort()
    a, b = a[both][order], b[both][order]
    at_least, less = p_alone + a.sum() - (a.cumsum(0) - a), q_alone + b.cumsum(0) - b
    return (1 / (at_least / a + less / b)).sum()
