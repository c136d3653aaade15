"""Gumbel coupling: sample draft and target from shared noise, so that only the target decides.

Paper: Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant speculative
decoding", arXiv 2408.07978. Nothing is trained.

Idea. Every position of a text has its own noise: an independent exponential E_x for each token x,
made from the seed and the position alone. The target's token is the one with the least E_x / p(x),
which is a sample from p (the Gumbel-max trick). The draft model uses the same noise and proposes
the token with the least E_x / q(x), which is often the same one. A draft token is accepted if it is
the target's own. No ratio is computed, and no residual is sampled from.

    target's token = argmin over x of E_x / p(x)
    draft token    = argmin over x of E_x / q(x)                    the same E
    P(equal)       = sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i))
                    >= (1 - TV) / (1 + TV)

So the text is a function of the seed and the target. Which draft model there is, if any, changes
only the speed; that makes texts reproducible and is a good instrument for finding bugs. The price:
the ratio test, which knows q, accepts with probability 1 - TV. Of the couplings that do not know
the other distribution, none guarantees more than this one.

Guarantee: EXACT, and more: for every seed, the tokens are those of the target's races alone.
Pitfall: noise that depends on the round instead of the position, or that draft and target draw
separately.
Tests: tests/speculative/test_gumbel_coupling.py (`couple_round` against the code that runs; one
seed, any drafter, one text; P(equal), its bounds and its integral). Shared noise cannot be
enumerated, so laws/suites.py proves two halves: the same tokens with any drafter, and what a race
samples.
Left out: the paper's other coupling, by weighted min-wise hashing, and its variant for parties that
exchange a few bits. The default gamma is that of `speculative_decoding`.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder, Drafter, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, match_tree
from tinyspec.speculative.verification.vectors import as_vectors
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import Probs, TokenTree


def run_race(p: Any, noise: Any) -> int:
    """Return the token with the least noise / probability.

    >>> run_race([0.5, 0.5], [0.3, 0.2]), run_race([0.8, 0.2], [0.3, 0.2])
    (1, 0)
    """
    return min(range(len(p)), key=lambda x: noise[x] / p[x] if p[x] > 0 else inf)


def couple_round(
    p: Callable[..., Any], q: Callable[..., Any], text: Sequence[int], gamma: int, noise: Any
) -> list[int]:
    """Return the tokens of one round of drafter-invariant speculative decoding.

    p, q   functions from a text to the next token's distribution [V], of target and draft model
    noise  [positions, V] independent exponentials; noise[i] belongs to position i of the text

    The decoder runs `GumbelCouplingDrafter` and `verify_tree_by_race`. A test compares them.
    """
    draft = list(text)
    for _ in range(gamma):
        draft.append(run_race(q(draft), noise[len(draft)]))
    output = list(text)
    while True:
        output.append(run_race(p(output), noise[len(output)]))
        n = len(output)
        if output != draft[:n] or n > len(text) + gamma:  # not the draft token, or the bonus token
            return output[len(text) :]


class _Races:
    """A random source for a drafter: each draw is the race of the next position of the text."""

    def __init__(self, rng: RandomSource, position: int):
        self.rng, self.position = rng, position

    def draw(self, row: Probs) -> int:
        self.position += 1
        return self.rng.exponential_race(row, self.position - 1)


class GumbelCouplingDrafter(ModelDrafter):
    """Propose the winners of the draft model's races.

    The verifier uses the same noise, so no distribution is declared.
    """

    def propose(
        self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        races: Any = _Races(rng, len(context))
        return TokenTree.chain(super().propose(context, max_draft_depth, sampling, races).tokens)


def verify_tree_by_race(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    """Output the winners of the target's races, and accept draft tokens while they are the same.

    The draft may be any tree, whoever made it.
    """
    start = len(p.context)
    return match_tree(tree, lambda node, depth: rng.exponential_race(p[node], start + depth))


# ------------------------------ the analysis


def match_probability(p: Probs, q: Probs) -> Any:
    """Return the probability that two races on the same noise have the same winner. O(V log V).

    Token i wins both races if E_j >= E_i max(p_j / p_i, q_j / q_i) for every j. That is one
    exponential clock being the first of several, so its probability is

        1 / (sum over j of max(p_j / p_i, q_j / q_i))

    Sorted by p / q, the greater of the two ratios is p's for the tokens from i on, and q's before.

    >>> from fractions import Fraction as F
    >>> str(match_probability([F(1, 2), F(1, 2)], [F(1, 4), F(3, 4)]))
    '3/4'
    """
    a, b = as_vectors(p, q, 0)
    both = (a > 0) & (b > 0)
    # Tokens that only one of the two can produce: their p / q is above all others, or below.
    p_alone, q_alone = a[~both].sum(), b[~both].sum()
    order = (a[both] / b[both]).argsort()
    a, b = a[both][order], b[both][order]
    at_least, less = p_alone + a.sum() - (a.cumsum(0) - a), q_alone + b.cumsum(0) - b
    return (1 / (at_least / a + less / b)).sum()


# ------------------------------ the card


@technique(
    title="Gumbel coupling (drafter-invariant)",
    summary="draft and target share their noise",
    paper="Daliri et al. 2024, arXiv 2408.07978",
    family="verification",
    guarantee=Guarantee.EXACT,
    coupled=True,
    optional_draft=True,
    knobs=(
        Knob(
            "gamma", 3, "tokens the draft model proposes in a round", low=1, high=64, advised=True
        ),
    ),
)
def gumbel_coupling(request: Request, *, gamma: int) -> Decoder:
    """Return a decoder whose draft model and target race on the same noise.

    Without a draft model the text is the same, one token per forward pass.
    """
    drafter: Drafter = BaseDrafter()
    if request.drafts:
        drafter = GumbelCouplingDrafter(
            request.drafts[0], gamma, request.stop.eos, request.draft_max_length
        )
    return request.decoder(drafter, verify_tree_by_race)
