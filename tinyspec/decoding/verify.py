"""Follow a draft tree from its root while the target's law lets it, without changing that law.

The chain of Leviathan et al. (arXiv 2211.17192), several drafts with and without replacement (SpecInfer 2305.09781,
MCSD 2401.06706), deterministic proposals and merged trees are one walk, because each node carries the law it was drawn
from given its earlier siblings, or None. `residual` and `without` are its two moves, for verifiers that need another walk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tinyspec import _core
from tinyspec._core import reference
from tinyspec.decoding import device
from tinyspec.decoding.chance import Chance
from tinyspec.decoding.sampling import is_exact, on_device, on_host, pick
from tinyspec.errors import TinyspecError
from tinyspec.tree import ROOT, Row, TokenTree

__all__ = ["Verdict", "pick", "residual", "walk", "without"]


class Verdict(NamedTuple):
    """What a verifier decided.

    path     accepted nodes, from the root down
    next     the recovered token after a refusal, the bonus token after a leaf; None: stop on a node whose row is known
    refused  nodes tested and refused, in order
    """

    path: tuple[int, ...]
    next: int | None
    refused: tuple[int, ...] = ()


def residual(row: Row, q: Row) -> Row:
    """normalise(max(0, row - q)): the target's law after it refused a token drawn from q.

    Where nothing is left, row and q agree up to rounding, and the answer is the row. Raises TinyspecError where the two
    vocabularies differ.
    """
    if is_exact(row) or is_exact(q):
        return reference.residual(row, q)
    return device.residual(row, q) if on_device(row) else _core.residual(on_host(row), on_host(q))


def without(row: Row, token: int) -> Row:
    """The row given that it is not `token`: the residual of a point mass. Where nothing is left: the row."""
    if is_exact(row):
        return reference.without(row, token)
    return device.without(row, token) if on_device(row) else _core.without(on_host(row), token)


def _refuse(row: Row, q: Row | None, token: int, last: bool) -> Row:
    return without(row, token) if q is None else residual(row, q)


def walk(tree: TokenTree, p: Any, chance: Chance) -> Verdict:
    """Accept the draft as far as the target's law allows, then draw one more token. The output has exactly the law p.

    tree   laws[i] is the law tokens[i] was drawn from, given all the past and its earlier siblings; None: a point mass
    p      p[ROOT] and p[node] are the target's rows there; only those of accepted nodes are read (the root's twice)
    chance one `accept` a tested node, one `draw`; nothing of it where the law is greedy and all guesses are point masses

    Raises TinyspecError where a token has probability 0 under its own declared law, or the vocabularies differ.
    """
    if (rows := getattr(p, "on_device", None)) is not None:
        return _walk_on_device(tree, rows, chance)
    certain = getattr(p, "certain", None)
    if (
        certain is not None
        and (said := certain(ROOT)) is not None
        and not any(law is not None for law in tree.laws)
    ):
        return follow(tree, certain, said)
    root = p[ROOT]
    block = None if is_exact(root) or on_device(root) else chance.uniforms(len(tree.tokens) + 1)
    if block is None:
        return Verdict(*reference.walk(*_columns(tree), p, chance.accept, chance.draw, _refuse))
    tokens, parents, laws, probe = _columns(tree)
    laws = [law if law is None else on_host(law) for law in laws]
    path, token, refused, used = _core.walk(tokens, parents, laws, probe, p, block)
    chance.unread(len(block) - used)
    return Verdict(path, token, refused)


def follow(tree: TokenTree, certain: Callable[[int], int], said: int) -> Verdict:
    """The walk where every law is one token and every guess a point mass: the text decides, and no row is made.

    certain(node) is the token that comes after an accepted node, `said` the first of them.
    """
    path, refused, here = list[int](), list[int](), {ROOT}
    while True:
        siblings = [
            node
            for node, parent in enumerate(tree.parents)
            if parent in here and not tree.probe[node]
        ]
        here = {node for node in siblings if tree.tokens[node] == said}
        first = min(here, default=None)
        refused += [node for node in siblings if first is None or node < first]
        if first is None:
            return Verdict(tuple(path), said, tuple(refused))
        path.append(first)
        said = certain(first)


def _walk_on_device(tree: TokenTree, rows: tuple[Any, Any], chance: Chance) -> Verdict:
    """The walk over rows that live on a device, with one synchronisation."""
    uniforms = chance.uniforms(len(tree.tokens) + 1)
    if uniforms is None:
        raise TinyspecError(
            "every outcome of a walk is enumerated on the host: use a model on the CPU"
        )
    path, token, refused, used = device.walk(*_columns(tree), *rows, uniforms.tolist())
    chance.unread(len(uniforms) - used)
    return Verdict(path, token, refused)


def _columns(tree: TokenTree) -> tuple[Any, Any, Any, Any]:
    return tree.tokens, tree.parents, tree.laws, tree.probe
