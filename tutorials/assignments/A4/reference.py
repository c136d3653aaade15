"""A4: heads.

Eight functions. The hand-out (handout.md) says what each is for, with an example by hand; here stand their exact terms. Use
Python's standard library and torch alone. torch.optim does not work in the grader: write the step of the optimizer yourself.
Tensors are float64 when you are graded, and float32 when `train.py` trains: make new ones with `torch.zeros_like` or
`.new_zeros`. No randomness; keep nothing between calls.

Shapes: d is the width of a state, V the size of the vocabulary, T the tokens of a text, B the texts of a batch.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ROOT = -1

Weights = dict[str, Tensor]
"""The target's output matrix "rows" [V, d], and of head i, from 0, "blocks.i.layers.0.weight" [d, d] and
"blocks.i.layers.0.bias" [d]."""

Batch = tuple[Tensor, Tensor]
"""Token ids [B, T], and the target's states [B, T, d]: the state of token t is the one that token t + 1 is read from."""

RankTree = list[tuple[int, int]]
"""For each node the index of its parent, or ROOT, and its rank among the candidates of its head. Parents come first."""


class Chance(Protocol):
    """Where randomness comes from, and the only place."""

    def accept(self, ratio: Any) -> bool:
        """True with probability min(1, ratio)."""
        ...

    def draw(self, row: Sequence[Any]) -> int:
        """A token, drawn from the row."""
        ...


class Submission(Protocol):
    """What `submission.py` offers. Write the functions here, or anywhere else and import them here."""

    def head_logits(self, weights: Weights, h: Tensor, depth: int) -> Tensor: ...
    def medusa_loss(self, weights: Weights, ids: Tensor, states: Tensor) -> Tensor: ...
    def fit_heads(
        self, weights: Weights, batches: list[Batch], steps: int, rate: float
    ) -> Weights: ...
    def rank_table(
        self, weights: Weights, texts: list[tuple[Tensor, Tensor]], ranks: int
    ) -> list[list[Any]]: ...
    def best_tree(self, table: list[list[Any]], n: int) -> RankTree: ...
    def propose(
        self, weights: Weights, states: Tensor, tree: RankTree, room: int, ends: Collection[int]
    ) -> tuple[list[int], list[int]]: ...
    def verify(
        self, tokens: list[int], parents: list[int], p_rows: list[Any], chance: Any
    ) -> tuple[list[int], int]: ...
    def trained_heads(self) -> Weights: ...


def count_heads(weights: Weights) -> int:
    """How many heads the weights have. It is written for you."""
    return sum(name.endswith(".bias") for name in weights)


def head_logits(weights: Weights, h: Tensor, depth: int) -> Tensor:
    """What a head says on a state: a block that is added to the state, then the target's output matrix.

    Args:
        h: [..., d] one state, or as many as you like.
        depth: which head, from 0.
    Returns:
        [..., V] logits.

    >>> block, shift = torch.zeros(2, 2), torch.zeros(2)
    >>> weights = {"rows": torch.eye(2), "blocks.0.layers.0.weight": block, "blocks.0.layers.0.bias": shift}
    >>> head_logits(weights, torch.tensor([3.0, 4.0]), 0)  # a block of zeros: the target's own logits
    tensor([3., 4.])
    """
    # solution
    block = f"blocks.{depth}.layers.0"
    inner = torch.nn.functional.linear(h, weights[f"{block}.weight"], weights[f"{block}.bias"])
    return (h + torch.nn.functional.silu(inner)) @ weights["rows"].T
    # end of solution


def medusa_loss(weights: Weights, ids: Tensor, states: Tensor) -> Tensor:
    """How wrong the heads are on texts: the sum of their mean cross-entropies, weighted by 0.8 ** (depth + 1).

    The target's own head reads token t + 1 from the state of token t. Head `depth` guesses the token that comes `depth` + 1
    places after that one. A position whose token is not in the text any more does not count, and a head without any position
    adds 0.

    Args:
        ids, states: a batch.
    Returns:
        A tensor without dimensions. A training needs gradients that flow through it to the blocks.
    """
    # solution
    loss = states.new_zeros(())
    for depth in range(count_heads(weights)):
        labels = ids[:, depth + 2 :]
        if labels.numel():
            logits = head_logits(weights, states[:, : -depth - 2], depth)
            entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss + 0.8 ** (depth + 1) * entropy
    return loss
    # end of solution


def fit_heads(weights: Weights, batches: list[Batch], steps: int, rate: float) -> Weights:
    """Train the blocks of the heads. The target's matrix "rows" stays as it is.

    Step s, from 0, computes `medusa_loss` on batch s modulo len(batches). Then it moves each number of each block by Adam's
    rule, where g is its gradient, and m and v begin as 0:

        m = 0.9 m + 0.1 g        v = 0.99 v + 0.01 g^2        w = w - rate * m / (sqrt(v) + 1e-8)

    `torch.autograd.grad(loss, tensors)` gives the gradients.

    Returns:
        New weights under the same names.
    """
    # solution
    fitted = {name: w.detach().clone() for name, w in weights.items()}
    blocks = [w.requires_grad_() for name, w in fitted.items() if name != "rows"]
    means, squares = ([torch.zeros_like(w) for w in blocks] for _ in range(2))
    for step in range(steps):
        loss = medusa_loss(fitted, *batches[step % len(batches)])
        gradients = torch.autograd.grad(loss, blocks)
        with torch.no_grad():
            for w, g, m, v in zip(blocks, gradients, means, squares, strict=True):
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.01)
                w -= rate * m / (v.sqrt() + 1e-8)
    return {name: w.detach() for name, w in fitted.items()}
    # end of solution


def rank_table(
    weights: Weights, texts: list[tuple[Tensor, Tensor]], ranks: int
) -> list[list[float]]:
    """How often each candidate of each head is right, measured on texts that the heads were not trained on.

    Args:
        texts: ids [T] and states [T, d] of each; texts may differ in length, and one may be too short for a head.
        ranks: how many candidates; the candidate of rank 0 is the token with the greatest logit.
    Returns:
        [heads][ranks] of all positions of all texts whose token is in the text, the share at which that candidate is right.
    """
    # solution
    table = []
    for depth in range(count_heads(weights)):
        right, count = [0] * ranks, 0
        for ids, states in texts:
            labels = ids[depth + 2 :]
            logits = head_logits(weights, states[: len(labels)], depth)
            above = logits > logits.gather(1, labels[:, None])
            for rank in above.sum(1).tolist():
                if rank < ranks:
                    right[rank] += 1
            count += len(labels)
        table.append([hits / max(count, 1) for hits in right])
    return table
    # end of solution


def best_tree(table: list[list[Any]], n: int) -> RankTree:
    """The tree of n nodes that is expected to have the most tokens accepted.

    A node at depth i, from 0, is a candidate of head i. Its path is right with the product of the chances along it, as if heads
    were right independently of each other. The expected number of accepted tokens is the sum of these products over all nodes.

    Args:
        table: [heads][ranks] numbers from 0 to 1; they need not fall with the rank.
        n: nodes, 0 or more. If there are not so many paths, take all.
    Returns:
        The nodes, parents first. Nodes with one parent differ in their ranks.

    >>> best_tree([[0.5, 0.25], [0.75, 0.125]], 3)  # worth 0.5, 0.375 and 0.25
    [(-1, 0), (0, 0), (-1, 1)]
    """
    # solution
    tree: RankTree = []
    first = table[0] if table else []
    waiting = [(chance, 0, ROOT, rank) for rank, chance in enumerate(first)]
    while waiting and len(tree) < n:
        best = max(waiting, key=lambda path: path[0])
        waiting.remove(best)
        worth, depth, parent, rank = best
        if depth + 1 < len(table):
            below = enumerate(table[depth + 1])
            waiting += [(worth * chance, depth + 1, len(tree), at) for at, chance in below]
        tree.append((parent, rank))
    return tree
    # end of solution


def propose(
    weights: Weights, states: Tensor, tree: RankTree, room: int, ends: Collection[int]
) -> tuple[list[int], list[int]]:
    """Fill a tree of ranks with tokens, after a text whose newest token the target has not run yet.

    Args:
        states: [n, d] of all tokens of the text but the newest. After a text of one token there are none, and no draft.
        tree: as `best_tree` gives it; it is no deeper than there are heads.
        room: how many more tokens the text may get: no node is deeper than that. It may be 0.
        ends: tokens that end a text. Nothing hangs below one; the token itself may be proposed.
    Returns:
        tokens [m] and parents [m] of the nodes that are left, in the order of the tree; a parent is a node's place in these
        lists, or ROOT.
    """
    # solution
    tokens, parents = list[int](), list[int]()
    below = {ROOT: (ROOT, 0)}  # node of the tree -> its place in the draft, and the depth below it
    for place, (above, rank) in enumerate(tree if len(states) else ()):
        parent, depth = below.get(above, (ROOT, room))
        if depth >= room:
            continue
        token = int(head_logits(weights, states[-1], depth).argsort(descending=True)[rank])
        if token not in ends:
            below[place] = (len(tokens), depth + 1)
        tokens.append(token)
        parents.append(parent)
    return tokens, parents
    # end of solution


def verify(
    tokens: list[int], parents: list[int], p_rows: list[Sequence[Any]], chance: Chance
) -> tuple[list[int], int]:
    """Follow the tree as far as the target goes along, then return one token more. The text has the target's distribution.

    Args:
        tokens, parents: [n] the tree. Each node is a point mass, siblings differ, and n may be 0.
        p_rows: [n + 1][V] the target's rows: entry i + 1 is the distribution of the token after node i, entry 0 after the root.
    Returns:
        The accepted nodes from the top down, and the token after them.
    """
    # solution
    path: list[int] = []
    while True:
        here = path[-1] if path else ROOT
        token = chance.draw(p_rows[here + 1])
        pairs = list(zip(parents, tokens, strict=True))
        if (here, token) not in pairs:
            return path, token
        path.append(pairs.index((here, token)))
    # end of solution


def trained_heads() -> Weights:
    """The heads that `train.py` saved beside this file as heads.pt: `torch.load` reads them. Hand in that file, too.

    Returns:
        The tensors of the blocks, and "target": the checksum of the target that they were trained for.
    """
    # solution
    saved: Weights = torch.load(Path(__file__).with_name("heads.pt"))
    return saved
    # end of solution
