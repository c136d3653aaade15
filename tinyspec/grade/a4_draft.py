"""Laws of assignment A4 on a round: the draft after a text, and its verification."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from tinyspec.grade.a2_walk import (
    JOINT,
    KEPT,
    PATH,
    TreeCase,
    WalkForm,
    draw_tree_cases,
    walk_law,
)
from tinyspec.grade.a4_heads import (
    Weights,
    compute_logits,
    draw_heads,
    make_generator,
    show_tensor,
)
from tinyspec.grade.task import (
    Cases,
    Function,
    GradedLaw,
    Task,
    describe_result,
    expect_close,
    graded_law,
)
from tinyspec.laws.evidence import accuse
from tinyspec.laws.exact.models import small_network
from tinyspec.lm.heads import freeze_target
from tinyspec.lm.model import Model
from tinyspec.tree import ROOT

PLACED = "a draft token is the candidate that the training forward gives on the whole text"
ENDS = "nothing hangs below an end token, and no node is deeper than there is room"
EMPTY = "after a text of one token there is no draft"

VOCABULARY, HEADS = 5, 3

Nodes = tuple[tuple[int, int], ...]

TREES: tuple[Nodes, ...] = (
    ((-1, 0),),
    ((-1, 1),),
    ((-1, 0), (0, 0)),
    ((-1, 0), (-1, 1), (0, 0)),
    ((-1, 0), (0, 0), (1, 0)),
    ((-1, 0), (-1, 2), (0, 1), (1, 0), (2, 0), (0, 0)),
)
"""Trees of ranks: for each node its parent and its rank."""


# ---------------------------------------------------------------------- the draft


def draw_drafts_of_heads(cases: Cases) -> Iterator[tuple[Model, Weights, list[int], Nodes]]:
    """Yield a small target, heads, a text, and a tree: the shortest texts first."""
    for number in range(24 * cases.times):
        random = Random(f"{cases.seed} drafts {number}")
        model = small_network(random.randrange(1000), VOCABULARY)
        generator = make_generator(cases.seed, "drafts", number)
        weights = draw_heads(HEADS, model.config.d_model, VOCABULARY, generator)
        weights["rows"] = freeze_target(model, layers=False).head
        text = random.choices(range(VOCABULARY), k=2 + number // 6 % 4)
        yield model, weights, text, TREES[number % len(TREES)]


def dense_states(model: Model, text: list[int]) -> Tensor:
    """Return the states [T, d] of all tokens of a text, of one pass over it."""
    layers = (model.config.n_layers,)
    return model.torch_blocks().hidden_states(torch.tensor([text]), layers)[0, 0].detach()


def fill_tree(
    weights: Weights, state: Tensor, nodes: Nodes, room: int, ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the tokens and parents that a tree of ranks gets by the rows of one state."""
    tokens, parents, place, depths = list[int](), list[int](), {ROOT: ROOT}, {ROOT: -1}
    for number, (above, rank) in enumerate(nodes):
        if above not in place or (above != ROOT and tokens[place[above]] in ends):
            continue
        depth = depths[above] + 1
        if depth < room:
            order = compute_logits(weights, state, depth).argsort(descending=True)
            place[number], depths[number] = len(tokens), depth
            tokens.append(int(order[rank]))
            parents.append(place[above])
    return tokens, parents


def judge_draft(
    law: str,
    propose: Function,
    target: tuple[Model, Weights, list[int], Nodes],
    room: int = 9,
    ends: tuple[int, ...] = (),
) -> None:
    """Accuse unless a draft is the one that the dense states give."""
    model, weights, text, nodes = target
    states = dense_states(model, text)
    got = propose(weights, states[:-1], list(nodes), room, list(ends))
    case = {"text": text, "tree": list(nodes), "room": room, "ends": list(ends)}
    is_pair = isinstance(got, (list, tuple)) and len(got) == 2
    if not is_pair or not all(isinstance(part, (list, tuple)) for part in got):
        accuse(law, "two lists: tokens and parents", describe_result(got), **case)
    if not all(type(x) is int for part in got for x in part):
        accuse(law, "whole numbers, of type int", {"tokens": got[0], "parents": got[1]}, **case)
    tokens, parents = list[int](), list[int]()
    if len(text) > 1:
        tokens, parents = fill_tree(weights, states[-2], nodes, room, ends)
        for depth in range(HEADS):
            rows = compute_logits(weights, states, depth)
            case[f"head {depth}, on the state of each token"] = show_tensor(rows)
    expected = {"tokens": tokens, "parents": parents}
    expect_close(law, expected, {"tokens": list(got[0]), "parents": list(got[1])}, **case)


@graded_law(8, PLACED)
def draft_is_the_training_forward(propose: Function, cases: Cases) -> Iterator[bool]:
    """Check law F2 of the library: the state of the last token but one, and the head of a depth."""
    for target in draw_drafts_of_heads(cases):
        judge_draft(PLACED, propose, target)
        yield True


@graded_law(3, ENDS)
def draft_ends_in_time(propose: Function, cases: Cases) -> Iterator[bool]:
    """Check trees that reach the end of the room, or an end token."""
    for number, target in enumerate(draw_drafts_of_heads(cases)):
        model, weights, text, nodes = target
        tokens, _ = fill_tree(weights, dense_states(model, text)[-2], nodes, 9, ())
        limits = (0, ()), (1, ()), (2, ()), (9, (tokens[0],)), (9, (tokens[-1],))
        judge_draft(ENDS, propose, target, *limits[number % 5])
        yield True


@graded_law(3, EMPTY)
def first_token_has_no_draft(propose: Function, cases: Cases) -> Iterator[bool]:
    """Check the shortest text: no state is known yet."""
    for model, weights, text, nodes in draw_drafts_of_heads(cases):
        judge_draft(EMPTY, propose, (model, weights, text[:1], nodes))
        yield True


# ---------------------------------------------------------------------- verification


def draw_point_trees(cases: Cases) -> Iterator[TreeCase]:
    """Yield the trees of A2.5 with every node a point mass."""
    for case in draw_tree_cases(cases):
        yield replace(case, points=(ROOT, *range(len(case.parents))))


class PointForm(WalkForm):
    """A verification that is given no draft distributions."""

    def __init__(self, verify: Function, tolerance: float):
        def walk(tokens: Any, parents: Any, p_rows: Any, q_rows: Any, rng: Any) -> Any:
            return verify(tokens, parents, p_rows, rng)

        super().__init__(walk, tolerance)

    def shown(self, case: TreeCase) -> dict[str, Any]:
        tree = f"parents {list(case.parents)}, each node a point mass"
        return {"tree": tree, "target rows": case.p.shown(case.gamma)}


def point_law(points: int, sentence: str, check: Callable[..., Any], *needs: str) -> GradedLaw:
    """Return the law that a check of A2.5 holds, for trees of point masses."""
    return walk_law(points, sentence, check, *needs, draw=draw_point_trees, form_of=PointForm)


path_goes_down_the_tree = point_law(2, PATH, PointForm.check_path)
text_has_the_joint_distribution = point_law(6, JOINT, PointForm.check_joint)
nodes_are_accepted_with_probability_p = point_law(4, KEPT, PointForm.check_acceptance, JOINT)


PROPOSE_TASK = Task(
    "propose",
    "A4.6 The draft",
    (draft_is_the_training_forward, draft_ends_in_time, first_token_has_no_draft),
    uses=("head_logits",),
)
VERIFY_TASK = Task(
    "verify",
    "A4.7 Verification",
    (
        path_goes_down_the_tree,
        text_has_the_joint_distribution,
        nodes_are_accepted_with_probability_p,
    ),
)
