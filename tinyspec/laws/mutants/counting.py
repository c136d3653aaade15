"""Mutants of the forest of counted tries: what is counted, whose it is, and what a halving
leaves.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

from tinyspec._core.reference_forest import Forest, Tree, Window
from tinyspec.laws.counting import COUNT, told
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts


class Lasting(Forest):
    """A rewind cuts the text and leaves what it counted."""

    def rewind(self, text: int, length: int) -> None:
        del self._known(text).tokens[
            length:
        ]  # right: and every window that ended there counts one less


class Mixing(Forest):
    """All owners share a tree."""

    def open(self, tree: Hashable) -> int:
        return super().open(0)  # right: tree


class Generous(Forest):
    """A halving rounds up, so that nothing ever goes."""

    def halve(self, tree: Hashable) -> None:
        for window in self._trees[tree].values():
            window.count += window.count % 2  # right: round down
        super().halve(tree)


class Crossing(Forest):
    """Windows go on across a halving: they come to count more than what they continue."""

    def halve(self, tree: Hashable) -> None:
        before = {number: text.since for number, text in self._texts.items()}
        super().halve(tree)
        for number, text in self._texts.items():
            text.since = before[number]  # right: its length

    def _recount(self, tree: Tree, before: tuple[int, ...], token: int, by: int) -> None:
        tree.setdefault(before, Window(1))  # else it would fall over what the halving dropped
        super()._recount(tree, before, token, by)


class Unordered(Forest):
    """Siblings stand in the order in which they came."""

    def _recount(self, tree: Tree, before: tuple[int, ...], token: int, by: int) -> None:
        known = list(tree[before].after)
        super()._recount(tree, before, token, by)
        order = {sibling: at for at, sibling in enumerate(known)}
        tree[before].after.sort(
            key=lambda sibling: order.get(sibling, len(known))
        )  # right: by their counts


class Stitching(Forest):
    """A text that was closed goes on in the next one of its tree."""

    def open(self, tree: Hashable) -> int:
        text = super().open(tree)
        self._texts[text].tokens = list(getattr(self, "last", {}).get(tree, ()))  # right: no tokens
        return text

    def close(self, text: int) -> None:
        known = self._known(text)
        self.last: dict[Hashable, list[int]] = {
            **getattr(self, "last", {}),
            known.tree: known.tokens,
        }
        super().close(text)


class SixteenBits(Forest):
    """Ids are kept in 16 bits."""

    def append(self, text: int, tokens: Iterable[int]) -> int:
        return super().append(text, [token & 0xFFFF for token in tokens])  # right: token


def trees(parts: Parts) -> Any:
    """What a forest tells of a text that is halved, goes on and is taken back, and of another
    owner's.
    """
    forest, made = parts.forest(3, 99), list[Any]()
    one, other = forest.open(0), forest.open(1)
    forest.append(one, [1, 2, 1, 3, 1, 3, 70_000])
    forest.append(other, [2, 4, 1])
    for step, given in (("rewind", (one, 5)), ("halve", (0,)), ("append", (one, [1, 3, 1, 2]))):
        made += [list(told(forest, tree, [1, 2, 3, 4, 70_000]).items()) for tree in (0, 1)]
        getattr(forest, step)(*given)
    forest.close(one)
    forest.append(forest.open(0), [4, 2])
    return [*made, list(told(forest, 0, [1, 2, 3, 4, 70_000]).items())]


def _mutant(name: str, bug: str, forest: Any) -> Mutant:
    return Mutant(name, bug, COUNT, replace(PARTS, forest=forest), trees)


MUTANTS = [
    _mutant("a rewind leaves what was counted", "slip", Lasting),
    _mutant("owners share a tree", "slip", Mixing),
    _mutant("a halving rounds up", "slip", Generous),
    _mutant("windows cross a halving", "slip", Crossing),
    _mutant("siblings in the order they came", "slip", Unordered),
    _mutant("a closed text goes on in the next", "slip", Stitching),
    _mutant("a forest stores 16 bits", "B35", SixteenBits),
]
