"""SpecTr (Sun et al., NeurIPS 2023): one division factor for all drafts, the least that keeps the
law, and its residual.
"""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder, Verifier
from tinyspec.decoding.verify import Verdict, residual, verify_tree
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.laws.verification_laws import FACTOR, SELECTED, least_factor, selection_keeps_law
from tinyspec.speculative.treedraft import TreeDrafter, shape
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

Build = Callable[..., Decoder]


def _verifier(build: Build) -> Verifier:
    """What the technique puts into its decoder."""
    one = table_model(((1, 1),))
    return build(Request(one.session(), [one.session()]), k=2, gamma=2).verifier


def keeps_the_law(build: Build) -> Evidence:
    """Of one position and of two, whichever draft is taken."""
    return selection_keeps_law(_verifier(build), largest=4)


def divides_by_the_least(build: Build) -> Evidence:
    """As much is accepted as with the least lawful rho."""
    return least_factor(_verifier(build), ks=(1, 2))


# ------------------------------------------------------------------ toys


def _with(verifier: Verifier, request: Request, k: int, gamma: int) -> Decoder:
    return request.decoder(TreeDrafter(request.drafts[0], shape((k, *[1] * (gamma - 1)))), verifier)


def _divided(factor: Callable[[int], Any], left: Callable[..., Any]) -> Verifier:
    """Test after test against p / (rho q); where all fail, draw from `left`."""

    def verify(tree: TokenTree, p: Any, rng: Any) -> Verdict:
        path, here = list[int](), {ROOT}
        while True:
            row, drafts = (
                p[path[-1] if path else ROOT],
                [i for i, up in enumerate(tree.parents) if up in here],
            )
            q: Any = tree.draft_probs[drafts[0]] if drafts else None
            rho = factor(len(drafts))
            took = next(
                (i for i in drafts if rng.accept(row[tree.tokens[i]] / (rho * q[tree.tokens[i]]))),
                None,
            )
            if took is None:
                return Verdict(
                    tuple(path),
                    rng.draw(left(row, q, rho, len(drafts)) if drafts else row),
                    tuple(drafts),
                )
            path.append(took)
            here = {i for i in drafts if tree.tokens[i] == tree.tokens[took]}

    return verify


def _owed(row: Any, q: Any, rho: Any, k: int) -> Any:
    said = [min(b, a / rho) for a, b in zip(row, q, strict=True)]
    share = (1 - (1 - sum(said)) ** k) / sum(said) if sum(said) else 0
    left = [max(0, a - b * share) for a, b in zip(row, said, strict=True)]
    return left if sum(left) else row


def recursive_rejection(request: Request, k: int, gamma: int) -> Decoder:
    """Several drafts, each tested against what the one before it left: exact, and another
    method.
    """
    return _with(verify_tree, request, k, gamma)


def divided_by_k(request: Request, k: int, gamma: int) -> Decoder:
    """The factor that always keeps the law."""
    return _with(_divided(lambda drafts: drafts, _owed), request, k, gamma)


def not_divided(request: Request, k: int, gamma: int) -> Decoder:
    """Every draft has the chance that a single one would have."""
    return _with(_divided(lambda drafts: 1, _owed), request, k, gamma)


def residual_of_one(request: Request, k: int, gamma: int) -> Decoder:
    """Divided, and behind the refusals the residual of a single draft."""
    return _with(
        _divided(lambda drafts: drafts, lambda row, q, rho, k: residual(row, q)), request, k, gamma
    )


def one_text_after_the_other(request: Request, k: int, gamma: int) -> Decoder:
    """The first text that passes whole is taken; behind the last, what it was refused for is
    mended.
    """

    def verify(tree: TokenTree, p: Any, rng: Any) -> Verdict:
        verdict = Verdict((), None)
        for root in (i for i, up in enumerate(tree.parents) if up == ROOT):
            nodes = [i for i in range(len(tree.tokens)) if root in tree.path(i)]
            chain = TokenTree.chain(tree.tokens_on(nodes), [tree.draft_probs[i] for i in nodes])
            verdict = verify_tree(
                chain, {-1: p[ROOT], **{n: p[i] for n, i in enumerate(nodes)}}, rng
            )
            verdict = Verdict(tuple(nodes[n] for n in verdict.accepted), verdict.next)
            if len(verdict.accepted) == len(nodes):
                break
        return verdict

    return _with(verify, request, k, gamma)


TRAPS = [
    Trap(SELECTED, keeps_the_law, card("spectr")),
    Trap(FACTOR, divides_by_the_least, card("spectr")),
]
TOYS = [
    Toy("recursive rejection", FACTOR, recursive_rejection),
    Toy("a factor of k", FACTOR, divided_by_k),
    Toy("no factor", SELECTED, not_divided),
    Toy("the residual of a single draft", SELECTED, residual_of_one),
    Toy("one text after the other", SELECTED, one_text_after_the_other),
]
