"""Verify a draft tree so that the output follows the target's distribution exactly.

One rule serves the chain of Leviathan et al. (arXiv 2211.17192), several drafts with and without
replacement (SpecInfer 2305.09781, MCSD 2401.06706), drafts without probabilities, and merged trees,
because each node carries the distribution it was drawn from given its earlier siblings, or None.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import kernels_of, sample_inverse_cdf
from tinyspec.tree import ROOT, Probs, TokenTree

__all__ = ["Verdict", "exclude_token", "residual", "sample_inverse_cdf", "verify_tree"]


class Verdict(NamedTuple):
    """What a verifier decided.

    accepted  accepted nodes, from the root down
    next      the recovered token after a rejection, or the bonus token after a leaf; None: the
              round ends on an accepted node whose distribution is known
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

    tree  draft_probs[i] is the distribution of tokens[i], given all the past and its earlier
          siblings
    p     p[ROOT] and p[node] are the target's distributions; only those of accepted nodes are read
    rng   one `accept` for each tested node, one `draw`; nothing if sampling is greedy and no node
          declares a distribution

    Raises TinyspecError if a token has probability 0 under its own declared distribution, or if the
    vocabularies differ.
    """
    greedy_token = getattr(p, "greedy_token", None)  # of `TargetProbs`: it needs no distribution
    if greedy_token is not None and all(q is None for q in tree.draft_probs):
        token = greedy_token(ROOT)
        if token is not None:
            return verify_tree_greedy(tree, greedy_token, token)
    kernels = getattr(p, "kernels", None) or kernels_of(p[ROOT])
    return Verdict(*kernels.verify_tree(tree, p, rng))


def verify_tree_greedy(tree: TokenTree, greedy_token: Callable[[int], int], token: int) -> Verdict:
    """Verify a tree at temperature 0: accept a node if its token is the target's.

    greedy_token(node) returns the target's token after an accepted node; `token` is the one after
    the root.
    """
    accepted, rejected, here = list[int](), list[int](), {ROOT}
    while True:
        siblings = [
            node
            for node, parent in enumerate(tree.parents)
            if parent in here and not tree.probe[node]
        ]
        # Equal siblings are one position: a child of either of them may follow.
        here = {node for node in siblings if tree.tokens[node] == token}
        first = min(here, default=None)
        rejected += [node for node in siblings if first is None or node < first]
        if first is None:
            return Verdict(tuple(accepted), token, tuple(rejected))
        accepted.append(first)
        token = greedy_token(first)
