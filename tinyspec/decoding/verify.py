"""Verify a draft tree so that the output follows the target's distribution exactly.

One rule serves the chain of Leviathan et al. (arXiv 2211.17192), several drafts with and without
replacement (SpecInfer 2305.09781, MCSD 2401.06706), drafts without probabilities, and merged trees,
because each node carries the distribution it was drawn from given its earlier siblings, or None.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tinyspec import _core
from tinyspec._core import reference
from tinyspec.decoding import device
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import is_exact, on_device, on_host, sample_inverse_cdf
from tinyspec.errors import TinyspecError
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
    if is_exact(p) or is_exact(q):
        return reference.residual(p, q)
    return device.residual(p, q) if on_device(p) else _core.residual(on_host(p), on_host(q))


def exclude_token(p: Probs, token: int) -> Probs:
    """Return p without this token: the residual of a point mass. If nothing is left: p."""
    if is_exact(p):
        return reference.without(p, token)
    return device.without(p, token) if on_device(p) else _core.without(on_host(p), token)


def _reject(p: Probs, q: Probs | None, token: int, last: bool) -> Probs:
    return exclude_token(p, token) if q is None else residual(p, q)


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
    if (on_its_device := getattr(p, "on_device", None)) is not None:
        return _verify_on_device(tree, on_its_device, rng)
    greedy_token = getattr(p, "greedy_token", None)
    if greedy_token is not None and all(q is None for q in tree.draft_probs):
        token = greedy_token(ROOT)
        if token is not None:
            return verify_tree_greedy(tree, greedy_token, token)
    root = p[ROOT]
    uniforms = None if is_exact(root) or on_device(root) else rng.uniforms(len(tree.tokens) + 1)
    if uniforms is None:
        return Verdict(*reference.walk(*_columns(tree), p, rng.accept, rng.draw, _reject))
    tokens, parents, draft_probs, probe = _columns(tree)
    draft_probs = [q if q is None else on_host(q) for q in draft_probs]
    accepted, token, rejected, used = _core.walk(tokens, parents, draft_probs, probe, p, uniforms)
    rng.push_back(len(uniforms) - used)
    return Verdict(accepted, token, rejected)


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


def _verify_on_device(tree: TokenTree, block: tuple[Any, Any], rng: RandomSource) -> Verdict:
    """Verify a tree whose distributions live on a device, with one synchronisation."""
    uniforms = rng.uniforms(len(tree.tokens) + 1)
    if uniforms is None:
        raise TinyspecError(
            "every outcome of a verification is enumerated on the host: use a model on the CPU"
        )
    accepted, token, rejected, used = device.walk(*_columns(tree), *block, uniforms.tolist())
    rng.push_back(len(uniforms) - used)
    return Verdict(accepted, token, rejected)


def _columns(tree: TokenTree) -> tuple[Any, Any, Any, Any]:
    return tree.tokens, tree.parents, tree.draft_probs, tree.probe
