"""A2, trees: its tasks, the laws that judge them, and the points of each law."""

from tinyspec.grade import a2_siblings, a2_trees, a2_trie, a2_walk
from tinyspec.grade.task import Assignment, GradedLaw, Task

ASSIGNMENT = Assignment(
    "A2",
    "Trees",
    (
        Task("positions", "A2.1 Positions", (GradedLaw(10, a2_trees.STANDS, a2_trees.stands),)),
        Task("mask", "A2.2 The mask", (GradedLaw(15, a2_trees.SEES, a2_trees.sees),)),
        Task(
            "score",
            "A2.3 One forward pass for a tree",
            (
                GradedLaw(10, a2_trees.ROWS, a2_trees.rows),
                GradedLaw(5, a2_trees.BILL, a2_trees.bill, needs=(a2_trees.ROWS,)),
            ),
            uses=("positions", "mask"),
        ),
        Task(
            "siblings",
            "A2.4 Siblings",
            (
                GradedLaw(3, a2_siblings.KEPT_IS, a2_siblings.kept_is_a_candidate),
                GradedLaw(8, a2_siblings.LAW, a2_siblings.has_the_law),
                GradedLaw(5, a2_siblings.KEPT, a2_siblings.keeps, needs=(a2_siblings.LAW,)),
                GradedLaw(9, a2_siblings.POINT, a2_siblings.keeps_points),
            ),
        ),
        Task(
            "walk",
            "A2.5 The walk",
            (
                GradedLaw(3, a2_walk.PATH, a2_walk.is_a_path),
                GradedLaw(11, a2_walk.JOINT, a2_walk.has_the_joint_law),
                GradedLaw(6, a2_walk.KEPT, a2_walk.keeps, needs=(a2_walk.JOINT,)),
            ),
            uses=("siblings",),
        ),
        Task(
            "answers",
            "A2.6 A trie",
            (
                GradedLaw(3, a2_trie.TREE, a2_trie.is_a_tree),
                GradedLaw(12, a2_trie.ANSWER, a2_trie.is_the_answer),
            ),
        ),
    ),
)
