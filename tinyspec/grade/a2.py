"""A2, trees: its tasks, their points, and the laws that judge them."""

from tinyspec.grade import a2_siblings, a2_trees, a2_trie, a2_walk
from tinyspec.grade.task import Assignment, Task

ASSIGNMENT = Assignment(
    "A2",
    "Trees",
    (
        Task("positions", "A2.1 Positions", 10, (a2_trees.stands,)),
        Task("mask", "A2.2 The mask", 15, (a2_trees.sees,)),
        Task("score", "A2.3 One call for a tree", 15, (a2_trees.rows, a2_trees.bill)),
        Task(
            "siblings",
            "A2.4 Siblings",
            25,
            (a2_siblings.kept_is_a_candidate, a2_siblings.has_the_law, a2_siblings.keeps, a2_siblings.keeps_points),
        ),
        Task("walk", "A2.5 The walk", 20, (a2_walk.is_a_path, a2_walk.has_the_joint_law, a2_walk.keeps)),
        Task("answers", "A2.6 A trie", 15, (a2_trie.is_a_tree, a2_trie.is_the_answer)),
    ),
)
