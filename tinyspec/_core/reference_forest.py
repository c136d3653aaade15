"""The twin of forest.pyx: counted tries of token windows, one tree per owner, in dictionaries.

A tree counts every window of up to `depth` tokens of its texts, and keeps for each the tokens that
continue it: the most frequent first; of equals, the one that reached its count last. The kernel
knows the same in fewer nodes.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tinyspec._core.limits import MAX_DEPTH, MAX_DRAFT_NODES, check_range, read_ids, read_int
from tinyspec.errors import TinyspecError

Draft = tuple[list[int], list[int], list[float], list[int]]
"""Columns of a draft: tokens, parents (-1: the newest token of the text), shares, match lengths.

A share is the product of the relative frequencies along the path. The match length is that of the
suffix that the token was found after."""


@dataclass
class Window:
    """How often a window occurred, and the tokens that continued it."""

    count: int = 0
    after: list[int] = field(default_factory=list)


Tree = dict[tuple[int, ...], Window]


@dataclass
class Text:
    """A growing text. since: no window crosses this position, where the counts were halved."""

    tree: Hashable
    tokens: list[int] = field(default_factory=list)
    since: int = 0


class Forest:
    """Count windows, find the longest known suffix of a text, and draft what continued it.

    >>> forest = Forest(depth=4, bound=100)
    >>> text = forest.open("outputs")
    >>> _ = forest.append(text, [1, 2, 3, 1, 2, 5, 1, 2, 5])
    >>> tokens, parents, shares, _ = forest.gather([("outputs", 3)], [9, 1, 2], 3, 1, 2)
    >>> tokens, parents, [round(share, 2) for share in shares]
    ([5, 3, 1], [-1, -1, 0], [0.67, 0.33, 0.67])
    """

    def __init__(self, depth: int, bound: int) -> None:
        if depth < 2 or bound < 1:
            raise TinyspecError(
                f"a forest needs depth >= 2 and bound >= 1, got {depth} and {bound}"
            )
        check_range("the depth of a forest", depth, 2, MAX_DEPTH)
        self.depth, self.bound = read_int(depth), read_int(bound)
        self._trees: dict[Hashable, Tree] = {}
        self._texts: dict[int, Text] = {}

    # --- texts

    def _known(self, text: int) -> Text:
        if text not in self._texts:
            raise TinyspecError(
                f"text {text} is not open in this forest: open(tree) gives a number"
            )
        return self._texts[text]

    def open(self, tree: Hashable) -> int:
        """Begin a text in a tree; return its number."""
        self._trees.setdefault(tree, {(): Window()})
        text = next(n for n in range(len(self._texts) + 1) if n not in self._texts)
        self._texts[text] = Text(tree)
        return text

    def close(self, text: int) -> None:
        """End a text. What it counted stays."""
        self._known(text)
        del self._texts[text]

    def length(self, text: int) -> int:
        """Return the number of tokens of a text."""
        return len(self._known(text).tokens)

    def append(self, text: int, tokens: Iterable[int]) -> int:
        """Append all tokens or none; return the nodes of the text's tree. O(depth) for each."""
        tokens = read_ids(tokens)
        t = self._known(text)
        tree = self._trees[t.tree]
        for token in tokens:
            end = len(t.tokens)
            for start in range(max(t.since, end - self.depth + 1), end + 1):
                before = tuple(t.tokens[start:end])
                self._recount(tree, before, token, 1)
            t.tokens.append(token)
        return self.size(t.tree)

    def _recount(self, tree: Tree, before: tuple[int, ...], token: int, by: int) -> None:
        """Count a window once more or less; put it before the siblings of equal count."""
        window = tree.setdefault((*before, token), Window())
        window.count += by
        siblings = tree[before].after
        if token in siblings:
            siblings.remove(token)
        if window.count == 0:
            del tree[(*before, token)]
            return
        as_much = (
            at for at, other in enumerate(siblings) if tree[(*before, other)].count <= window.count
        )
        siblings.insert(next(as_much, len(siblings)), token)

    def rewind(self, text: int, length: int) -> None:
        """Forget a text after its first `length` tokens. What was halved since stays counted."""
        t = self._known(text)
        if not 0 <= length <= len(t.tokens):
            raise TinyspecError(f"cannot rewind a text of {len(t.tokens)} tokens to {length}")
        while len(t.tokens) > max(length, t.since):
            end = len(t.tokens)
            for start in range(max(t.since, end - self.depth), end):
                *before, token = t.tokens[start:end]
                self._recount(self._trees[t.tree], tuple(before), token, -1)
            t.tokens.pop()
        del t.tokens[length:]
        t.since = min(t.since, length)

    def drop(self, tree: Hashable) -> None:
        """Forget a tree and its texts."""
        self._trees.pop(tree, None)
        self._texts = {text: t for text, t in self._texts.items() if t.tree != tree}

    def halve(self, tree: Hashable) -> None:
        """Halve every count of a tree, rounding down, and drop what falls to 0."""
        known = self._trees.get(tree)
        if known is None:
            return
        for window in known.values():
            window.count //= 2
        for path, window in list(known.items()):
            window.after = [token for token in window.after if known[(*path, token)].count]
        self._trees[tree] = {
            path: window for path, window in known.items() if window.count or not path
        }
        for t in (t for t in self._texts.values() if t.tree == tree):
            t.since = len(t.tokens)  # a window across it would count more than its prefix

    def prune(self, tree: Hashable) -> int:
        """Halve until the tree has at most `bound` nodes; return how often."""
        times = 0
        while self.size(tree) > self.bound:
            self.halve(tree)
            times += 1
        return times

    def size(self, tree: Hashable) -> int:
        """Return the nodes of a tree: here one for each window, in the kernel fewer."""
        return max(len(self._trees.get(tree, ())) - 1, 0)

    @property
    def bytes(self) -> int:
        """The memory of all trees and texts, about that of their numbers."""
        windows = sum(8 * (2 + len(path)) for tree in self._trees.values() for path in tree)
        return windows + sum(8 * len(t.tokens) for t in self._texts.values())

    # --- drafts

    def _newest(self, suffix: Sequence[int], most: int) -> list[int]:
        """Return at most so many of the newest tokens of a text."""
        most = min(most, self.depth - 1)
        return read_ids(suffix[-most:]).tolist() if most > 0 else []

    def _longest(self, tree: Tree, suffix: Sequence[int], most: int) -> int:
        """Return the length of the longest suffix that is continued."""
        for n in range(min(most, self.depth - 1, len(suffix)), 0, -1):
            window = tree.get(tuple(suffix[len(suffix) - n :]))
            if window is not None and window.after:
                return n
        return 0

    def _expand(
        self,
        draft: Draft,
        tree: Tree,
        path: tuple[int, ...],
        budget: int,
        deepest: int,
        by_share: bool,
        floor: float,
    ) -> None:
        """Add what follows a window, best first, until the draft has `budget` nodes."""
        tokens, parents, shares, matches = draft
        heap: list[tuple[float, int, tuple[int, ...], int, float, int]] = []
        arrivals, longest = 0, len(path) + min(deepest, self.depth - len(path))

        def offer(path: tuple[int, ...], rank: int, share: float, parent: int) -> None:
            nonlocal arrivals
            siblings = tree[path].after
            if rank == len(siblings):
                return
            count = tree[(*path, siblings[rank])].count
            own = share * count / sum(tree[(*path, token)].count for token in siblings)
            arrivals += 1
            heappush(heap, (-own if by_share else -count, arrivals, path, rank, share, parent))

        offer(path, 0, 1.0, -1)
        while heap and len(tokens) < budget:
            _, _, before, rank, above, parent = heappop(heap)
            siblings = tree[before].after
            here = (*before, siblings[rank])
            share = (
                above * tree[here].count / sum(tree[(*before, token)].count for token in siblings)
            )
            if share < floor:
                continue
            same = (
                at
                for at in range(len(tokens))
                if (tokens[at], parents[at]) == (siblings[rank], parent)
            )
            at = next(same, len(tokens))
            if at == len(tokens):
                tokens.append(siblings[rank])
                parents.append(parent)
                shares.append(share)
                matches.append(len(path))
            offer(before, rank + 1, above, parent)
            if len(here) < longest:
                offer(here, 0, share, at)

    def gather(
        self,
        plan: Sequence[tuple[Hashable, int]],
        suffix: Sequence[int],
        longest: int,
        enough: int,
        deepest: int,
    ) -> Draft:
        """Return a draft from several trees, by frequency.

        The longest suffix comes first, then shorter ones, until the draft has enough nodes.

        plan     (tree, nodes that the draft may have after it), in turn for each suffix
        suffix   the newest tokens of the text
        longest  the longest suffix to look for
        enough   nodes after which no shorter suffix is tried
        deepest  most tokens in a branch
        """
        asked = [(tree, read_int(budget)) for tree, budget in plan]
        known = [(self._trees[tree], budget) for tree, budget in asked if tree in self._trees]
        most = max((budget for _, budget in known), default=0)
        check_range("the number of draft tokens", most, 0, MAX_DRAFT_NODES)
        suffix = self._newest(suffix, longest)
        matches = [self._longest(tree, suffix, longest) for tree, _ in known]
        draft: Draft = ([], [], [], [])
        for n in range(max(matches, default=0), 0, -1):
            for (tree, budget), most in zip(known, matches, strict=True):
                if n <= most:
                    self._expand(
                        draft, tree, tuple(suffix[len(suffix) - n :]), budget, deepest, False, 0.0
                    )
            if len(draft[0]) >= enough:
                break
        return draft

    def best(
        self,
        trees: Iterable[Hashable],
        suffix: Sequence[int],
        factor: float,
        most: int,
        deepest: int,
        floor: float,
    ) -> Draft:
        """Return the draft with the greatest sum of shares; the first of equals.

        It comes from one tree and one suffix of n tokens.

        factor   at most factor * n draft tokens, and at most `most`
        deepest  most tokens in a branch
        floor    the least share of a token
        """
        if not (factor >= 0 and floor == floor):
            raise TinyspecError(
                f"a draft needs a factor of at least 0 and a floor, got {factor} and {floor}"
            )
        check_range("the number of draft tokens", most, 0, MAX_DRAFT_NODES)
        suffix = self._newest(suffix, self.depth)
        highest = 0.0
        found: Draft = ([], [], [], [])
        for tree in (self._trees[tree] for tree in trees if tree in self._trees):
            for n in range(self._longest(tree, suffix, self.depth), 0, -1):
                budget = int(min(float(most), factor * n))
                if budget <= highest:
                    break  # it could not win even if all its tokens were certain
                draft: Draft = ([], [], [], [])
                self._expand(
                    draft, tree, tuple(suffix[len(suffix) - n :]), budget, deepest, True, floor
                )
                score = 0.0
                for share in draft[2]:
                    score += share
                if score > highest:
                    highest, found = score, draft
        return found
