"""Verify a draft tree so that the output follows the target's distribution exactly.

One rule serves the chain of Leviathan et al. (arXiv 2211.17192), several drafts with and without
replacement (SpecInfer 2305.09781, MCSD 2401.06706), drafts without probabilities, and merged trees,
because each node carries the distribution it was drawn from given its earlier siblings, or None.

A draft without any distribution, as a look-up makes it, is verified by sampling and matching: the
target's token is sampled first, and a draft token is accepted if it is the same. This accepts as
often, and the text does not depend on the draft.
"""

from typing import Any, NamedTuple

from tinyspec.decoding.kernels import TokenSampler
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import kernels_of, sample_inverse_cdf
from tinyspec.tree import ROOT, Probs, TokenTree

__all__ = [
    "Verdict",
    "exclude_token",
    "match_tree",
    "residual",
    "sample_inverse_cdf",
    "verify_tree",
]


class Verdict(NamedTuple):
    """What a verifier decided.

    accepted  accepted nodes, from the root down
    next      the recovered token after a rejection, or the bonus token after a leaf; None: no
              further token, because the round was cut at an accepted one
    rejected  nodes that were tested and rejected, in order
    """

    accepted: tuple[int, ...]
    next: int | None
    rejected: tuple[int, ...] = ()

    def output_tokens(self, tree: TokenTree) -> tuple[int, ...]:
        """Return the accepted tokens, then the recovered or bonus token.

        >>> Verdict((0, 1), 9).output_tokens(TokenTree.chain([5, 7, 8]))
        (5, 7, 9)
        """
        last = () if self.next is None else (self.next,)
        return (*tree.tokens_on(self.accepted), *last)

    def cut(self, n: int) -> "Verdict":
        """Return the verdict on the first n tokens of the round alone.

        >>> Verdict((0, 1), 9).cut(2)
        Verdict(accepted=(0, 1), next=None, rejected=())
        """
        return self._replace(
            accepted=self.accepted[:n], next=self.next if n > len(self.accepted) else None
        )


def residual(p: Probs, q: Probs) -> Probs:
    """Return the target's distribution after it rejected a token that was drawn from q.

        residual(x) = max(0, p(x) - q(x)) / sum over y of max(0, p(y) - q(y))

    If nothing is left, p and q agree up to rounding, and the result is p. Raises TinyspecError if
    the two vocabularies differ.
    """
    return kernels_of(p).residual(p, q)


def exclude_token(p: Probs, token: int) -> Probs:
    """Return p without this token: the residual of a point mass. If nothing is left: p."""
    return kernels_of(p).exclude_token(p, token)


def verify_tree(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """Accept a path of the draft, then sample one more token. The output follows p exactly.

    At each accepted node the children are tested in draw order. A child with token x is accepted
    with probability

        min(1, p(x) / q(x))        q: the distribution it was drawn from; a point mass if it is None

    After a rejection p becomes the residual. If no child is accepted, the next token is sampled
    from what p has become; after a leaf, from the leaf's own distribution.

    If no node declares a distribution, `match_tree` decides the same with one uniform for each
    position of the text: so one seed gives the text of plain decoding, whatever is drafted.

    tree  draft_probs[i] is the distribution of tokens[i], given all the past and its earlier
          siblings
    p     p[ROOT] and p[node] are the target's distributions; only those of accepted nodes are read.
          The first token is at position len(p.context), or 0 if p has no context
    rng   one `accept` for each tested node, one `draw`; one `draw_at` for each output token if
          no node declares a distribution, and nothing if sampling is greedy too

    Raises TinyspecError if a token has probability 0 under its own declared distribution, or if the
    vocabularies differ.
    """
    kernels = getattr(p, "kernels", None) or kernels_of(p[ROOT])
    if all(q is None for q in tree.draft_probs):
        return match_tree(tree, kernels.token_sampler(tree, p, rng))
    return Verdict(*kernels.verify_tree(tree, p, rng))


def match_tree(tree: TokenTree, token_after: TokenSampler) -> Verdict:
    """Output the target's tokens, and accept draft tokens while they are the same.

    A child with token x is accepted with probability p(x), if the target's token is sampled from p:
    the same as by the rule of `verify_tree` for point masses.

    token_after  (an accepted node or ROOT, its depth with ROOT at 0) -> the target's next token
    """
    accepted, rejected, here, node = list[int](), list[int](), {ROOT}, ROOT
    while True:
        token = token_after(node, len(accepted))
        siblings = [
            child
            for child, parent in enumerate(tree.parents)
            if parent in here and not tree.probe[child]
        ]
        # Equal siblings are one position: a child of either of them may follow.
        here = {child for child in siblings if tree.tokens[child] == token}
        rejected += [child for child in siblings if not here or child < min(here)]
        if not here:
            return Verdict(tuple(accepted), token, tuple(rejected))
        node = min(here)
        accepted.append(node)
