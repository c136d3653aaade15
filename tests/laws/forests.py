"""The forest of counted tries in any order of operations, against counts of all windows.

The twin keeps a dictionary of windows; the judge here keeps nothing but the texts, and counts them
anew for every question.
"""

from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tinyspec._core import Forest

TOKENS = st.lists(
    st.sampled_from([0, 1, 2, 70_000]), min_size=1, max_size=8
)  # one that does not fit into 16 bits
TREES = st.sampled_from(["prompt", "outputs"])
WHICH = st.integers(0, 3)

Windows = Counter[tuple[int, ...]]


class Forests(RuleBasedStateMachine):
    """One forest with two trees and up to four texts."""

    begin: ClassVar[Any] = Forest

    @initialize(
        depth=st.integers(2, 5), first=st.lists(st.sampled_from([0, 1]), max_size=12), second=TOKENS
    )
    def start(self, depth: int, first: list[int], second: list[int]) -> None:
        self.depth, self.forest = depth, self.begin(depth, 10_000)
        self.old: dict[str, Windows] = {
            "prompt": Counter(),
            "outputs": Counter(),
        }  # of closed texts, and what was halved
        self.open: list[
            tuple[int, str, list[int]]
        ] = []  # number, tree, output since the last halving
        for which, (tree, tokens) in enumerate((("prompt", first), ("outputs", second))):
            self.begin_a_text(tree)
            self.append(which, tokens)
        self.old: dict[str, Windows] = {
            "prompt": Counter(),
            "outputs": Counter(),
        }  # of closed texts, and what was halved

    def windows(self, tree: str) -> Windows:
        """How often each window of up to `depth` tokens occurred."""
        found = Counter(self.old[tree])
        for _, where, tokens in self.open:
            if where == tree:
                found.update(self.of(tokens))
        return found

    def of(self, text: list[int]) -> Windows:
        ends = range(1, len(text) + 1)
        return Counter(
            tuple(text[end - n : end]) for end in ends for n in range(1, min(self.depth, end) + 1)
        )

    @rule(tree=TREES)
    def begin_a_text(self, tree: str) -> None:
        if len(self.open) < 4:
            self.open.append((self.forest.open(tree), tree, []))

    @rule(which=WHICH, new=TOKENS)
    def append(self, which: int, new: list[int]) -> None:
        if self.open:
            number, _, tokens = self.open[which % len(self.open)]
            self.forest.append(number, new)
            tokens.extend(new)

    @rule(which=WHICH, drop=st.integers(1, 6))
    def rewind(self, which: int, drop: int) -> None:
        if self.open:
            number, _, tokens = self.open[which % len(self.open)]
            self.forest.rewind(number, max(self.forest.length(number) - drop, 0))
            del tokens[max(len(tokens) - drop, 0) :]

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        if which < len(self.open):
            number, tree, tokens = self.open.pop(which)
            self.forest.close(number)
            self.old[tree].update(self.of(tokens))

    @rule(tree=TREES)
    def halve(self, tree: str) -> None:
        self.forest.halve(tree)
        self.old[tree] = Counter(
            {path: count // 2 for path, count in self.windows(tree).items() if count > 1}
        )
        for _, where, tokens in self.open:
            if where == tree:
                tokens.clear()

    @rule(tree=TREES)
    def forget(self, tree: str) -> None:
        self.forest.drop(tree)
        self.old[tree] = Counter()
        self.open = [text for text in self.open if text[1] != tree]

    @rule(tree=TREES, suffix=TOKENS, budget=st.integers(0, 6), deepest=st.integers(1, 5))
    def look(self, tree: str, suffix: list[int], budget: int, deepest: int) -> None:
        """The longest suffix that something follows; after it the most frequent windows, each with
        its share.
        """
        windows = self.windows(tree)
        follows = lambda n: any(path[:-1] == tuple(suffix[len(suffix) - n :]) for path in windows)  # noqa: E731
        known = [n for n in range(1, min(self.depth - 1, len(suffix)) + 1) if follows(n)]
        tokens, parents, shares, matches = self.forest.gather(
            [(tree, budget)], suffix, 9, 1, deepest
        )
        match = max(known) if known and budget else 0
        assert matches == [match] * len(tokens)
        assert bool(match) == bool(tokens)
        before = tuple(suffix[len(suffix) - match :])
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(tokens, parents, shares, strict=True):
            above = before if parent < 0 else paths[parent]
            paths.append((*above, token))
            siblings = sum(windows[path] for path in windows if path[:-1] == above)
            over = 1.0 if parent < 0 else shares[parent]
            assert abs(share - over * windows[paths[-1]] / siblings) < 1e-12
        reach = match + min(deepest, self.depth - match)
        below = (
            [path for path in windows if path[:match] == before and match < len(path) <= reach]
            if match
            else []
        )
        assert len(set(paths)) == len(paths) == min(budget, len(below))
        best = sorted((windows[path] for path in below), reverse=True)
        assert [windows[path] for path in paths] == best[: len(paths)]

    @rule(
        suffix=TOKENS,
        factor=st.sampled_from([0.5, 1.0, 2.5]),
        most=st.integers(1, 6),
        deepest=st.integers(1, 5),
    )
    def weigh(self, suffix: list[int], factor: float, most: int, deepest: int) -> None:
        """Of every tree and suffix, the draft with the greatest sum of shares."""
        highest = 0.0
        for tree in ("prompt", "outputs"):
            windows = self.windows(tree)
            for n in range(1, min(self.depth - 1, len(suffix)) + 1):
                before, worth = tuple(suffix[len(suffix) - n :]), {}
                reach = n + min(deepest, self.depth - n)
                for path in sorted(
                    (p for p in windows if p[:n] == before and n < len(p) <= reach), key=len
                ):
                    siblings = sum(
                        count for other, count in windows.items() if other[:-1] == path[:-1]
                    )
                    worth[path] = worth.get(path[:-1], 1.0) * windows[path] / siblings
                highest = max(
                    highest, sum(sorted(worth.values(), reverse=True)[: int(min(most, factor * n))])
                )
        draft = self.forest.best(("prompt", "outputs"), suffix, factor, most, deepest, 0.0)
        assert abs(sum(draft[2]) - highest) < 1e-9

    @invariant()
    def every_window_is_counted(self) -> None:
        for tree in ("prompt", "outputs"):
            windows = self.windows(tree)
            for first in (0, 1, 2, 70_000):
                tokens, parents, _, _ = self.forest.gather([(tree, 999)], [first], 1, 1, self.depth)
                paths: list[tuple[int, ...]] = []
                for token, parent in zip(tokens, parents, strict=True):
                    paths.append((*((first,) if parent < 0 else paths[parent]), token))
                assert sorted(paths) == sorted(
                    path for path in windows if path[0] == first and len(path) > 1
                )

    @invariant()
    def sizes_are_those_of_trees(self) -> None:
        for tree in ("prompt", "outputs"):
            assert self.forest.size(tree) <= len(self.windows(tree))
            assert (self.forest.size(tree) == 0) == (not self.windows(tree))
