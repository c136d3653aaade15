"""SpecInfer (Miao et al. 2024): proposals of several models, each tested against its own law;
models made for each other.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

from tinyspec.decoding.decode import Decoder, Verifier
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, exclude_token, residual
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass, positive_part
from tinyspec.laws.loop_laws import OWN_CHILDREN, TREE_DRAFTS, TREE_TARGET, Build, table_model
from tinyspec.laws.theorems import play_siblings, with_replacement
from tinyspec.laws.traps import Toy, Trap, card, multi_candidate
from tinyspec.speculative.treedraft import TreeDrafter, parse_branching, shape
from tinyspec.speculative.verification import specinfer as sif
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

TESTS = "k drafts are refused with the product of the distances: one test each"
MERGED = "a prefix that several models say is run once"
LEFT = "each draft is tuned on the prompts that no draft before it covers"


def joint_law(build: Build) -> Evidence:
    """Two models whose laws differ and whose tokens collide."""
    return loop_laws.tree_joint_law(build, [{"expansion": "1"}], [{"expansion": "2+1"}], drafts=2)


def expands_every_leaf(build: Build) -> Evidence:
    """k tokens below every leaf, one call a depth."""
    return loop_laws.own_children(build, lambda shape: {"expansion": shape})


def tests_each(verifier: Verifier) -> Evidence:
    """Of k i.i.d. drafts one passes as often as one test a draft allows; sampling once and looking
    passes less.
    """
    seen = 0
    for p, q in distribution_pairs(largest=5):
        left: Any = p
        refused: Any = 1
        for k in (1, 2):
            refused *= 1 - overlap_mass(left, q)
            left = positive_part(left, q) or left
            got, _, _ = play_siblings(verifier, with_replacement, p, q, k)
            seen += 1
            if got != 1 - refused:
                accuse(TESTS, 1 - refused, got, p=p, q=q, k=k)
    return Evidence(TESTS, seen)


def runs_a_prefix_once(build: Build) -> Evidence:
    """Two models that are the same, at temperature 0: the target runs the newest token and one
    path.
    """
    for depth in (1, 2, 4):
        forward_log: list[Any] = []
        drafts = [table_model(TREE_DRAFTS[0]).session() for _ in range(2)]
        request = Request(
            table_model(TREE_TARGET).session(forward_log),
            drafts,
            SamplingParams(temperature=0.0),
            forward_log=forward_log,
        )
        decoder = build(request, expansion="x".join("1" * depth))
        decoder.extend((0,))
        tree = decoder.drafter.propose([0], 9, request.sampling, Seeded(0))
        del forward_log[:]
        decoder.target.score(tree)
        rows = sum(call.rows for call in forward_log)
        if rows != depth + 1:
            accuse(MERGED, depth + 1, rows, depth=depth, models=2)
    return Evidence(MERGED, 3)


def tunes_on_what_is_left(collectively: Callable[..., Any]) -> Evidence:
    """Drafts that can learn two prompts each cover what those before them do not."""
    for order in permutations(range(5)):
        known: list[set[int]] = []

        def tune(draft: int, prompts: Sequence[int], known: list[set[int]] = known) -> int:
            known.append(set(prompts[:2]))
            return draft

        collectively(
            range(3), list(order), tune, lambda draft, prompt, known=known: prompt in known[draft]
        )
        if set().union(*known) != set(range(5)):
            expected = [set(order[at : at + 2]) for at in (0, 2, 4)]
            accuse(LEFT, expected, known, prompts=order, drafts=3, each_learns=2)
    return Evidence(LEFT, 120)


# ------------------------------------------------------------------ toys


def tested_once(request: Request, expansion: str) -> Decoder:
    """Of equal siblings only the first stays, with the law of the model that drew it."""

    class Once(sif.SpecInferDrafter):
        def propose(
            self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: RandomSource
        ) -> TokenTree:
            tree = super().propose(context, max_draft_depth, sampling, rng)
            first: dict[Any, int] = {}
            spelled = [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]
            kept = [
                node for node, text in enumerate(spelled) if first.setdefault(text, node) == node
            ]
            at = {text: kept.index(node) for text, node in first.items()}
            parents = [at[spelled[node][:-1]] if len(spelled[node]) > 1 else ROOT for node in kept]
            return TokenTree(
                tree.tokens_on(kept),
                parents,
                [tree.draft_probs[n] for n in kept],
                (False,) * len(kept),
            )

    trees = [
        TreeDrafter(draft, shape(parse_branching(expansion.split("+")[0])))
        for draft in request.drafts
    ]
    return request.decoder(Once(trees), sif.verify_tree_multi_step)


def one_law_for_all(request: Request, expansion: str) -> Decoder:
    """Every proposal is tested against the first model's law."""

    def verify(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
        firsts = {
            up: law for law, up in zip(tree.draft_probs[::-1], tree.parents[::-1], strict=True)
        }
        laws = [
            firsts[up] if firsts[up][token] > 0 else law  # type: ignore[index]
            for token, up, law in zip(tree.tokens, tree.parents, tree.draft_probs, strict=True)
        ]
        return sif.verify_tree_multi_step(tree._replace(draft_probs=laws), p, rng)

    trees = [
        TreeDrafter(draft, shape(parse_branching(expansion.split("+")[0])))
        for draft in request.drafts
    ]
    return request.decoder(sif.SpecInferDrafter(trees), verify)


def naive_sampling(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """The target draws a token at each node and follows it while it is in the tree."""
    path, here = tuple[int, ...](), {ROOT}
    while True:
        token = rng.draw(p[path[-1] if path else ROOT])
        here = {
            node
            for node, up in enumerate(tree.parents)
            if up in here and tree.tokens[node] == token
        }
        if not here:
            return Verdict(path, token)
        path = (*path, min(here))


def batch_of_chains(request: Request, expansion: str) -> Decoder:
    """As many chains as the tree has leaves."""
    return multi_candidate.batch_of_chains(request, expansion, True)


def each_for_itself(request: Request, expansion: str) -> Decoder:
    """The target runs every model's tree as a row of a batch: nothing is shared but the text."""

    class Apart:
        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Any:
            scores = target.score(tree, hidden_layers)
            request.forward_log[-1] = request.forward_log[-1]._replace(rows=len(tree.tokens) + 1)
            return scores

    target = request.target
    request.target = Apart()
    return request.decoder(
        sif.SpecInferDrafter(
            [TreeDrafter(draft, shape(parse_branching(expansion))) for draft in request.drafts]
        ),
        sif.verify_tree_multi_step,
    )


def tuned_alike(drafts: Any, prompts: Any, tune: Any, covers: Any) -> Any:
    """Every draft is tuned on all prompts: several random seeds of one model."""
    return [tune(draft, prompts) for draft in drafts]


def forgetful(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """Only the first proposal of a node is tested."""
    row = p[ROOT]
    token, q = tree.tokens[0], tree.draft_probs[0]
    if rng.accept(row[token] / q[token]):  # type: ignore[index]
        return Verdict((0,), rng.draw(p[0]))
    return Verdict((), rng.draw(exclude_token(row, token) if q is None else residual(row, q)), (0,))


TRAPS = [
    Trap(JOINT, joint_law, card("specinfer")),
    Trap(OWN_CHILDREN, expands_every_leaf, card("specinfer")),
    Trap(MERGED, runs_a_prefix_once, card("specinfer")),
    Trap(TESTS, tests_each, lambda: sif.verify_tree_multi_step),
    Trap(LEFT, tunes_on_what_is_left, lambda: sif.tune_collectively),
]
TOYS = [
    Toy("equal proposals merged into one test", JOINT, tested_once),
    Toy("one model's law for all proposals", JOINT, one_law_for_all),
    Toy("a batch of chains", OWN_CHILDREN, batch_of_chains),
    Toy("nothing shared between models", MERGED, each_for_itself),
    Toy("naive sampling", TESTS, naive_sampling),
    Toy("one proposal tested", TESTS, forgetful),
    Toy("every draft tuned on everything", LEFT, tuned_alike),
]
