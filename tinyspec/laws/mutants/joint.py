"""Joint targets with one defect each: a member that was not told, a row of the wrong place, a text
that is not the whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinyspec.laws.joint_laws import ROWS, STORIES, played
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.laws.tables import TableModel
from tinyspec.lm.feed import Scores
from tinyspec.speculative.integrated.speculative_contrastive import Joint
from tinyspec.tree import TokenTree


class FirstIsRewound(Joint):
    def rewind(self, length: int) -> None:
        self.members[0].rewind(length)  # right: every member
        del self.text[length:]


class DraftMissesTheNext(Joint):
    def commit(self, path: Sequence[int], next: int | None) -> None:
        super().commit(path, next)
        if next is not None:
            self.members[1].rewind(
                len(self.text) - 1
            )  # right: the recovered token is the small model's text too


class FirstIsTold(Joint):
    def append(self, tokens: Sequence[int]) -> None:
        self.members[0].append(tokens)  # right: every member
        self.text.extend(tokens)


class RowBehind(Joint):
    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        first, second = (member.score(tree, hidden_layers) for member in self.members)
        self._tree = tree
        ups = (-1, *tree.parents)
        return first._replace(
            logits=[  # type: ignore[arg-type]
                self.make(
                    [row, second.logits[up + 1]], self.text, tree.tokens_on(tree.path(node - 1))
                )  # right: node
                for node, (row, up) in enumerate(zip(first.logits, ups, strict=True))
            ]
        )


class Swapped(Joint):
    def __init__(self, members: Sequence[Any], make: Any):
        super().__init__(
            members, lambda rows, text, path: make(rows[::-1], text, path)
        )  # right: in their order


class PathForgotten(Joint):
    def __init__(self, members: Sequence[Any], make: Any):
        super().__init__(
            members, lambda rows, text, path: make(rows, text, ())
        )  # right: the node's own path


class TextKept(Joint):
    def rewind(self, length: int) -> None:
        for member in self.members:
            member.rewind(length)  # right: and what the function is shown


class GuessesForgotten(Joint):
    def commit(self, path: Sequence[int], next: int | None) -> None:
        for member in self.members:
            member.commit(path, next)
        self.text += () if next is None else (next,)  # right: the accepted guesses before it


def seen(parts: Parts) -> Any:
    """Every joint row of every story."""
    models = [TableModel(seed, zeros=False) for seed in (3, 4)]
    return [list(played(parts.joint, story, models)) for story in STORIES]


def _joint(name: str, joint: type[Joint], bug: str = "slip") -> Mutant:
    return Mutant(name, bug, ROWS, replace(PARTS, joint=joint), seen)


MUTANTS = [
    _joint("one member is rewound", FirstIsRewound),
    _joint("the small member misses the recovered token", DraftMissesTheNext),
    _joint("one member is told", FirstIsTold),
    _joint("the small member's row is a position behind", RowBehind),
    _joint("members swapped", Swapped),
    _joint("a mask that does not see the path", PathForgotten),
    _joint("a mask that sees what was taken back", TextKept),
    _joint("a mask that does not see the accepted guesses", GuessesForgotten),
]
