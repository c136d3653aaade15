"""EAGLE-2 (Li et al. 2024): the tree follows the head's confidence on this very text."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.laws.traps.eagle import random_target
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.eagle2 import Eagle2Drafter
from tinyspec.technique import find_technique

BEST = "no tree of its size has a greater sum of path products"
EXPANDED = "the nodes that run are the best of their depth, whoever their parents are"

Path = tuple[int, ...]

PROMPTS = ((0, 1), (2, 0, 3), (1, 3, 0, 2))


def value_paths(model: Model, text: Path, depth: int) -> dict[Path, float]:
    """Return the product of probabilities of every path, by the training forward."""
    values: dict[Path, float] = {(): 1.0}
    waiting: list[Path] = [()]
    while waiting:
        path = waiting.pop()
        row: Any = feature_laws.trained_forward(find_technique("eagle2"), model, text, path)
        for token, chance in enumerate(row.softmax(-1).tolist()):
            values[(*path, token)] = values[path] * chance
            if len(path) + 1 < depth:
                waiting.append((*path, token))
    del values[()]
    return values


def draft_paths(build: Build, model: Model, text: Path, depth: int, **knobs: Any) -> list[Path]:
    """Return the paths of a draft's nodes."""
    decoder = begin_decoder(build, [model], text, depth=depth, **knobs)
    tree = decoder.drafter.propose(decoder.context, depth, decoder.sampling, Seeded(0))
    return [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]


@collect_evidence(BEST)
def draft_is_worth_most(build: Build) -> Iterator[int]:
    """Check the sum of a draft's path products, where every node is expanded.

    The paths of greatest product are the best tree, since no path is worth more than its parent.
    """
    for seed, text in enumerate(PROMPTS):
        model = random_target(seed, 4)
        values = value_paths(model, text, 2)
        for nodes in (1, 3, 6, 11):
            got = draft_paths(build, model, text, 2, nodes=nodes, width=4)
            best = sum(sorted(values.values(), reverse=True)[:nodes])
            worth = sum(values[path] for path in got)
            if len(set(got)) != nodes or abs(worth - best) > 1e-9:
                case = {"text": text, "nodes": nodes, "paths": got}
                accuse(BEST, f"worth {best:.6f}", f"worth {worth:.6f}", **case)
            yield nodes


@collect_evidence(EXPANDED)
def best_nodes_are_expanded(build: Build) -> Iterator[int]:
    """Check which nodes have children, in a draft that keeps every node."""
    for seed, text in enumerate(PROMPTS):
        model = random_target(seed, 4)
        values = value_paths(model, text, 3)
        got = draft_paths(build, model, text, 4, nodes=1024, width=2)
        levels: dict[int, list[Path]] = defaultdict(list)
        for path in got:
            levels[len(path)].append(path)
        for depth in (1, 2, 3):
            ran = sorted({path[:depth] for path in levels[depth + 1]})
            ordered = sorted(levels[depth], key=lambda path: -values[path])
            if ran != sorted(ordered[:2]):
                case = {"text": text, "depth": depth, "nodes of the depth": ordered}
                accuse(EXPANDED, sorted(ordered[:2]), ran, **case)
            yield len(ran)


TRAPS = [
    Trap(BEST, draft_is_worth_most, card("eagle2")),
    Trap(EXPANDED, best_nodes_are_expanded, card("eagle2")),
]

_eagle2 = partial(Toy, technique="eagle2", function=Eagle2Drafter.grow_tree)

TOYS = [
    _eagle2(
        "no reranking",
        "rank_nodes(values, range(len(values)), self.nodes)",
        "range(min(self.nodes, len(values)))",
        law=BEST,
    ),
    _eagle2(
        "a static tree",
        "chance := float(q[token])",
        "chance := 0.5 ** (1 + top_k_tokens(q, self.width).index(token))",
        law=BEST,
    ),
    _eagle2(
        "the best child of each parent",
        "level = rank_nodes(values, going_on, self.width)",
        """best = {}
for node in rank_nodes(values, going_on, len(going_on)):
    best.setdefault(tree.parents[node] if level != [ROOT] else node, node)
level = rank_nodes(values, [*best.values()], self.width)""",
        law=EXPANDED,
    ),
    _eagle2(
        "the last probability for the path's",
        "values[node] * chance",
        "chance",
        law=EXPANDED,
    ),
]
