"""EAGLE-2: grow EAGLE's tree where its head is confident, and keep the best nodes.

Paper: Li et al., EMNLP 2024, arXiv 2406.16858. The head is EAGLE's; nothing more is trained.

Idea. The head's probability of a token is close to the chance that the target accepts it. So the
tree can depend on the text. The value of a node is the estimated chance that its whole path is
accepted:

    V(node) = product of q(token) over the path to it      q: the head's distribution

Expand: of the nodes of one depth, whoever their parents are, the `width` of greatest value run
together, and each proposes its `width` most likely tokens. This goes on for `depth` levels.
Rerank: of all nodes proposed, the `nodes` of greatest value are the draft.

    sum of V over the draft = expected number of accepted tokens, if q is the chance of acceptance

No tree of this size among the proposed nodes has a greater sum. V falls along a path, and of equals
the node proposed first is kept, so the parents of a kept node are kept.

Guarantee: EXACT, at any temperature. Which tokens are kept depends on the tokens themselves, so no
node may declare the distribution of the head: all of them are point masses.
Pitfall: the order of equal values. Libraries do not promise that top-k keeps a parent before a
child of equal value; a node without its parent would be left.
Tests: tests/speculative/test_eagle2.py (the draft is worth as much as the best tree found by trying
all; the nodes that run are the best of their depth; one pass for each depth; what does not run
could not be kept).
Additions of ours: nothing follows the end of a text; a repetition penalty changes q; a node does
not run if none of its children could be kept. The authors' code runs all levels, for the same tree.
Left out: the authors' search for the fastest `nodes` at the start (total_token -1).
"""

from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.drafting.eagle import (
    TRAINED,
    EagleDrafter,
    find_eagle_head,
    node_history,
)
from tinyspec.speculative.treedraft import append_node
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


def rank_nodes(values: Sequence[float], nodes: Sequence[int], k: int) -> list[int]:
    """Return the k nodes of greatest value, the greatest first; of equals the one proposed first.

    >>> rank_nodes([0.5, 0.2, 0.5, 0.3], [0, 1, 2, 3], 3)
    [0, 2, 3]
    """
    return sorted(nodes, key=lambda node: (-values[node], node))[:k]


def keep_nodes(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """Return the part of a tree that has these nodes, in their old order, as point masses."""
    chosen = sorted(nodes)
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(chosen)}
    tokens = [tree.tokens[node] for node in chosen]
    parents = [number[tree.parents[node]] for node in chosen]
    return TokenTree.point_masses(tokens, parents)


class Eagle2Drafter(EagleDrafter):
    """Expand the nodes of greatest value, depth by depth, and keep the best of all."""

    def __init__(self, *head: Any, nodes: int, depth: int, width: int):
        super().__init__(*head)
        self.nodes, self.depth, self.width = nodes, depth, width

    def grow_tree(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        # The draft sees the head's own probabilities, without temperature and without cuts.
        unwarped = SamplingParams(repetition_penalty=sampling.repetition_penalty)
        tree, values = TokenTree([], [], [], []), list[float]()
        level, kept = [ROOT], list[int]()
        for _ in range(min(self.depth, max_draft_depth)):
            rows, proposed = self.run_nodes(tree, level), list[int]()
            for node, row in zip(level, rows, strict=True):
                q = unwarped.probs(row, node_history(context, tree, node, sampling))
                for token in top_k_tokens(q, self.width):
                    if (chance := float(q[token])) > 0:
                        proposed.append(append_node(tree, token, node))
                        values.append(chance if node == ROOT else values[node] * chance)
            kept = rank_nodes(values, range(len(values)), self.nodes)
            # No child is worth more than its parent, so of these nodes none would be kept.
            least = values[kept[-1]] if len(kept) == self.nodes else 0.0
            going_on = [
                node
                for node in proposed
                if values[node] > least and tree.tokens[node] not in self.ends
            ]
            level = rank_nodes(values, going_on, self.width)
            if not level:
                break
        return keep_nodes(tree, kept)


def tree_knobs(levels: int) -> tuple[Knob, ...]:
    """Return the knobs of a tree that has so many levels by default."""
    return (
        # Today's code of the authors counts the newest token too (total_token 60).
        Knob("nodes", 59, "draft tokens", low=1, high=1024, small=(3, 1), ours=4),
        Knob("depth", levels, "levels of the tree", low=1, high=64, small=(2, 1)),
        Knob(
            "width",
            10,
            "nodes that are expanded at each depth, and tokens that each of them proposes",
            low=1,
            high=64,
            small=(2, 1),
        ),
    )


@technique(
    title="EAGLE-2",
    summary="EAGLE with a tree that follows confidence",
    paper="Li et al. 2024, arXiv 2406.16858",
    reported="3.05x to 4.26x (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=TRAINED,
    head_of="eagle",
    knobs=tree_knobs(6),  # the code of the paper's time (bfeb532): 5, after the first pass
)
def eagle2(request: Request, *, nodes: int, depth: int, width: int) -> Decoder:
    """Return a decoder that drafts with the target's EAGLE head, along a dynamic tree."""
    drafter = Eagle2Drafter(
        request.target.model,  # type: ignore[attr-defined]
        find_eagle_head(request),
        request.stop.eos,
        request.forward_log,
        nodes=nodes,
        depth=depth,
        width=width,
    )
    return request.decoder(drafter, verify_tree)
