"""List the four assignments: their tasks, in order. The laws of a task stand in its file."""

from tinyspec.errors import TinyspecError
from tinyspec.grade import (
    a1_loop,
    a1_position,
    a1_round,
    a2_siblings,
    a2_trees,
    a2_trie,
    a2_walk,
    a3_calibration,
    a3_confidence,
    a3_exits,
    a3_jacobi,
    a3_viterbi,
    a4_draft,
    a4_heads,
    a4_ranks,
    a4_trained,
)
from tinyspec.grade.task import Assignment

A1 = Assignment(
    "A1",
    "Speculative sampling",
    (
        a1_position.WARP_TASK,
        a1_position.ACCEPTANCE_TASK,
        a1_position.RESIDUAL_TASK,
        a1_round.VERIFY_TASK,
        a1_loop.GENERATE_TASK,
    ),
)

A2 = Assignment(
    "A2",
    "Trees",
    (
        a2_trees.POSITIONS_TASK,
        a2_trees.MASK_TASK,
        a2_trees.SCORE_TASK,
        a2_siblings.SIBLINGS_TASK,
        a2_walk.WALK_TASK,
        a2_trie.ANSWERS_TASK,
    ),
)

A3 = Assignment(
    "A3",
    "Exits and fixed points",
    (
        a3_confidence.SOFTMAX_RESPONSE_TASK,
        a3_confidence.SATURATION_TASK,
        a3_confidence.EXIT_LAYER_TASK,
        a3_exits.DECODE_TASK,
        a3_exits.DECODE_RECOMPUTING_TASK,
        a3_calibration.P_VALUE_TASK,
        a3_calibration.CALIBRATE_TASK,
        a3_jacobi.JACOBI_TASK,
        a3_exits.DECODE_WAITING_TASK,
        a3_viterbi.VITERBI_TASK,
    ),
)

A4 = Assignment(
    "A4",
    "Heads",
    (
        a4_heads.HEAD_LOGITS_TASK,
        a4_heads.MEDUSA_LOSS_TASK,
        a4_heads.FIT_HEADS_TASK,
        a4_ranks.RANK_TABLE_TASK,
        a4_ranks.BEST_TREE_TASK,
        a4_draft.PROPOSE_TASK,
        a4_draft.VERIFY_TASK,
        a4_trained.TRAINED_HEADS_TASK,
    ),
    has_tensors=True,
    model=a4_trained.TARGET,
)

ASSIGNMENTS = {assignment.name: assignment for assignment in (A1, A2, A3, A4)}


def find_assignment(name: str) -> Assignment:
    """Return an assignment by its name. Raises TinyspecError if there is none."""
    if name.upper() not in ASSIGNMENTS:
        raise TinyspecError(f"no assignment {name!r}: there are {', '.join(ASSIGNMENTS)}")
    return ASSIGNMENTS[name.upper()]
