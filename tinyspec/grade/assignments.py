"""List the three assignments: their tasks, the laws that judge them, and the points of each law."""

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
    a3_jacobi,
)
from tinyspec.grade.a3_exits import exit_laws
from tinyspec.grade.task import Assignment, Task

A1 = Assignment(
    "A1",
    "Speculative sampling",
    (
        Task(
            "warp",
            "A1.1 The warper",
            (
                a1_position.warper_is_a_distribution.worth(3),
                a1_position.temperature_is_right.worth(4),
                a1_position.top_k_is_right.worth(4),
                a1_position.top_p_is_right.worth(5),
                a1_position.order_is_right.worth(4),
            ),
        ),
        Task(
            "acceptance",
            "A1.2 The acceptance",
            (
                a1_position.acceptance_is_a_probability.worth(2),
                a1_position.acceptance_is_p_over_q.worth(5),
                a1_position.acceptance_is_one.worth(3, a1_position.acceptance_is_p_over_q),
            ),
        ),
        Task(
            "residual",
            "A1.3 The residual",
            (
                a1_position.residual_is_a_distribution.worth(2),
                a1_position.residual_is_beyond_the_draft.worth(5),
                a1_position.residual_completes_the_target.worth(
                    6, a1_position.residual_is_a_distribution
                ),
                a1_position.residual_of_equals_is_the_target.worth(2),
            ),
        ),
        Task(
            "verify",
            "A1.4 One round",
            (
                a1_round.returns_a_part_and_one_token.worth(3),
                a1_round.draws_the_bonus.worth(5),
                a1_round.accepts_from_left_to_right.worth(7),
                a1_round.round_has_the_joint_distribution.worth(
                    10, a1_round.accepts_from_left_to_right
                ),
            ),
            uses=("acceptance", "residual"),
        ),
        Task(
            "generate",
            "A1.5 The loop",
            (
                a1_loop.text_ends_where_it_should.worth(6),
                a1_loop.loop_has_the_joint_distribution.worth(9),
                a1_loop.caches_are_clean.worth(6),
                a1_loop.tokens_come_from_forward_passes.worth(3),
                a1_loop.target_runs_as_often_as_needed.worth(6),
            ),
            uses=("warp", "acceptance", "residual", "verify"),
        ),
    ),
)

A2 = Assignment(
    "A2",
    "Trees",
    (
        Task("positions", "A2.1 Positions", (a2_trees.positions_are_right.worth(10),)),
        Task("mask", "A2.2 The mask", (a2_trees.mask_is_right.worth(15),)),
        Task(
            "score",
            "A2.3 One forward pass for a tree",
            (
                a2_trees.rows_are_those_of_paths.worth(10),
                a2_trees.each_path_is_fed_once.worth(5, a2_trees.rows_are_those_of_paths),
            ),
            uses=("positions", "mask"),
        ),
        Task(
            "siblings",
            "A2.4 Siblings",
            (
                a2_siblings.accepted_is_a_candidate.worth(3),
                a2_siblings.token_has_the_targets_distribution.worth(8),
                a2_siblings.accepts_as_often_as_the_rule.worth(
                    5, a2_siblings.token_has_the_targets_distribution
                ),
                a2_siblings.accepts_points_with_probability_p.worth(9),
            ),
        ),
        Task(
            "walk",
            "A2.5 The walk",
            (
                a2_walk.path_goes_down.worth(3),
                a2_walk.walk_has_the_joint_distribution.worth(11),
                a2_walk.walk_accepts_as_often_as_the_rule.worth(
                    6, a2_walk.walk_has_the_joint_distribution
                ),
            ),
            uses=("siblings",),
        ),
        Task(
            "answers",
            "A2.6 A trie",
            (a2_trie.drafts_are_trees.worth(3), a2_trie.answers_are_right.worth(12)),
        ),
    ),
)

A3 = Assignment(
    "A3",
    "Exits and fixed points",
    (
        Task(
            "softmax_response",
            "A3.1 Confidence: the softmax response",
            (a3_confidence.softmax_response_is_the_gap.worth(6),),
        ),
        Task(
            "saturation",
            "A3.2 Confidence: saturation",
            (
                a3_confidence.saturation_is_the_cosine.worth(5),
                a3_confidence.saturation_is_in_range.worth(
                    3, a3_confidence.saturation_is_the_cosine
                ),
            ),
        ),
        Task(
            "exit_layer",
            "A3.3 The exit layer",
            (
                a3_confidence.leaves_at_the_first.worth(4),
                a3_confidence.threshold_decays.worth(6),
                a3_confidence.threshold_is_cut.worth(4),
            ),
        ),
        Task(
            "decode",
            "A3.4 Missing keys and values: copy",
            exit_laws(recompute=False, points=(3, 2, 6, 2, 3, 4, 2)),
            uses=("softmax_response",),
        ),
        Task(
            "decode_recomputing",
            "A3.5 Missing keys and values: recompute",
            exit_laws(recompute=True, points=(1, 1, 3, 1, 1, 1, 2)),
            uses=("softmax_response",),
        ),
        Task(
            "p_value",
            "A3.6 A p-value",
            (a3_calibration.p_value_is_valid.worth(3), a3_calibration.p_value_is_the_tail.worth(5)),
        ),
        Task(
            "calibrate",
            "A3.7 Learn then Test",
            (
                a3_calibration.calibration_controls_its_risk.worth(5),
                a3_calibration.calibration_accepts_what_passed.worth(7),
            ),
        ),
        Task(
            "jacobi",
            "A3.8 Jacobi iteration",
            (
                a3_jacobi.ends_at_the_greedy_text.worth(6),
                a3_jacobi.returns_answers_of_the_model.worth(3),
                a3_jacobi.sweeps_over_one_block.worth(3),
                a3_jacobi.makes_progress.worth(3),
                a3_jacobi.takes_few_forward_passes.worth(3, a3_jacobi.ends_at_the_greedy_text),
                a3_jacobi.guesses_blindly.worth(2),
            ),
        ),
    ),
)

ASSIGNMENTS = {assignment.name: assignment for assignment in (A1, A2, A3)}


def find_assignment(name: str) -> Assignment:
    """Return an assignment by its name. Raises TinyspecError if there is none."""
    if name.upper() not in ASSIGNMENTS:
        raise TinyspecError(f"no assignment {name!r}: there are {', '.join(ASSIGNMENTS)}")
    return ASSIGNMENTS[name.upper()]
