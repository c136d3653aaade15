"""Multi-candidate speculative decoding (Yang et al. 2024): a tree of draws, each judged as it was
drawn.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import top_k_tokens
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.loop_laws import (
    OWN_CHILDREN,
    TREE_DRAFTS,
    TREE_TARGET,
    Build,
    Table,
    format_table,
    table_model,
)
from tinyspec.laws.theorems import play_siblings, with_replacement
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.speculative.treedraft import TreeDrafter, parse_branching, shape
from tinyspec.speculative.verification import multi_candidate as mcsd
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

SURE = "all tokens without replacement: one is accepted surely"
CHANCE = "one of k passes with 1 - prod (1 - overlap with what is left of p)"


def joint_law(build: Build) -> Evidence:
    """The joint law of two tokens, in both modes."""
    wide, deep = (
        [{"configuration": c, "replacement": again} for again in (False, True)]
        for c in ("2", "1x2")
    )
    return loop_laws.tree_joint_law(build, wide, deep)


def accepts_surely(build: Build) -> Evidence:
    """V candidates of V different tokens hold every token that the target may say."""
    for q in TREE_DRAFTS:

        def refused(rng: Exhaustive, q: Table = q) -> bool:
            decoder = build(
                Request(table_model(TREE_TARGET).session(), [table_model(q).session()]),
                configuration="3",
                replacement=False,
            )
            decoder.extend((0,))
            return not decoder.step(rng).verdict.accepted

        mass = sum((x for nothing, x in Exhaustive.walk(refused) if nothing), Fraction(0))
        if mass:
            accuse(
                SURE,
                "refused with probability 0",
                mass,
                p=format_table(TREE_TARGET),
                q=format_table(q),
                configuration="3",
            )
    return Evidence(SURE, len(TREE_DRAFTS))


def has_its_own_candidates(build: Build) -> Evidence:
    """2x2 is two nodes with two each below them: six, from two calls of the draft model."""
    return loop_laws.own_children(build, lambda c: {"configuration": c, "replacement": False})


def chance_of_one(formula: Callable[[Any, Any, int], Any]) -> Evidence:
    """Against every outcome of drawing and walking."""
    seen = 0
    for p, q in distribution_pairs(largest=6):
        for k in (1, 2, 3):
            expected, _, _ = play_siblings(verify_tree, with_replacement, p, q, k)
            got, seen = formula(list(p), list(q), k), seen + 1
            if got != expected:
                accuse(CHANCE, expected, got, p=p, q=q, k=k)
    return Evidence(CHANCE, seen)


# ------------------------------------------------------------------ toys


def best_of_q(request: Request, configuration: str, replacement: bool) -> Decoder:
    """The k likeliest candidates, judged by their probability under q."""

    class Draft(TreeDrafter):
        def children(self, laws: TargetProbs, node: int, k: int, rng: RandomSource) -> Any:
            return [
                (token, laws[node])
                for token in top_k_tokens(laws[node], k)
                if laws[node][token] > 0
            ]

    return request.decoder(
        Draft(request.drafts[0], shape(parse_branching(configuration))), verify_tree
    )


def sorted_draws(request: Request, configuration: str, replacement: bool) -> Decoder:
    """The candidates stand in the order of their probability."""

    class Draft(TreeDrafter):
        def children(self, laws: TargetProbs, node: int, k: int, rng: RandomSource) -> Any:
            drawn = super().children(laws, node, k, rng)
            best = sorted((token for token, _ in drawn), key=lambda token: -laws[node][token])
            return [
                (x, law)
                for x, (_, law) in zip(best, drawn, strict=True)
                if law is not None and law[x] > 0
            ]

    return request.decoder(
        Draft(request.drafts[0], shape(parse_branching(configuration)), replace=replacement),
        verify_tree,
    )


def whole_q(request: Request, configuration: str, replacement: bool) -> Decoder:
    """Drawn without replacement, judged as if each had been the first."""

    class Draft(TreeDrafter):
        def children(self, laws: TargetProbs, node: int, k: int, rng: RandomSource) -> Any:
            return [(token, laws[node]) for token, _ in super().children(laws, node, k, rng)]

    return request.decoder(
        Draft(request.drafts[0], shape(parse_branching(configuration)), replace=replacement),
        verify_tree,
    )


def forgetful(request: Request, configuration: str, replacement: bool) -> Decoder:
    """Every candidate is tested against p itself; what is left is that of the last one."""

    def verify(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
        at, path = ROOT, tuple[int, ...]()
        while below := [node for node, up in enumerate(tree.parents) if up == at]:
            for node in below:
                one = TokenTree((tree.tokens[node],), (ROOT,), (tree.draft_probs[node],), (False,))
                verdict = verify_tree(one, {ROOT: p[at], 0: p[node]}, rng)
                if verdict.accepted:
                    at, path = node, (*path, node)
                    break
            else:
                return verdict._replace(accepted=path)
        return Verdict(path, rng.draw(p[at]))

    return request.decoder(
        TreeDrafter(request.drafts[0], shape(parse_branching(configuration)), replace=replacement),
        verify,
    )


def collisions(request: Request, configuration: str, replacement: bool) -> Decoder:
    """Always with replacement."""
    return request.decoder(
        TreeDrafter(request.drafts[0], shape(parse_branching(configuration))), verify_tree
    )


def batch_of_chains(request: Request, configuration: str, replacement: bool) -> Decoder:
    """As many chains as the tree has leaves, one after the other, side by side in one batch."""

    class Draft(ModelDrafter):
        def propose(
            self, context: Any, max_draft_depth: int, sampling: Any, rng: RandomSource
        ) -> TokenTree:
            tree = TokenTree([], [], [], [])
            for _ in range(leaves):
                chain = super().propose(context, max_draft_depth, sampling, rng)
                n = len(tree.tokens)
                tree.parents.extend(up + n if up != ROOT else ROOT for up in chain.parents)  # type: ignore[attr-defined]
                for column, more in zip(
                    (tree.tokens, tree.draft_probs, tree.probe), chain[:1] + chain[2:], strict=True
                ):
                    column.extend(more)  # type: ignore[attr-defined]
            return tree

    children = parse_branching(configuration)
    leaves = len(shape(children)) - len(shape(children[:-1]))
    return request.decoder(Draft(request.drafts[0], len(children)), verify_tree)


def independent_tests(p: Any, q: Any, k: int) -> Any:
    """As if each candidate met p itself."""
    return 1 - (1 - sum(min(a, b) for a, b in zip(p, q, strict=True))) ** k


TRAPS = [
    Trap(JOINT, joint_law, card("multi_candidate")),
    Trap(SURE, accepts_surely, card("multi_candidate")),
    Trap(OWN_CHILDREN, has_its_own_candidates, card("multi_candidate")),
    Trap(CHANCE, chance_of_one, lambda: mcsd.sequential_acceptance),
]
TOYS = [
    Toy("the best k, judged by q", JOINT, best_of_q),
    Toy("draws sorted by probability", JOINT, sorted_draws),
    Toy("q not renormalised without replacement", JOINT, whole_q),
    Toy("p forgets the refusals", JOINT, forgetful),
    Toy("candidates may collide", SURE, collisions),
    Toy("a batch of chains", OWN_CHILDREN, batch_of_chains),
    Toy("k independent tests", CHANCE, independent_tests),
]
