"""The n-gram index in any order of operations, against a dictionary and a full search.

tests/core/test_tree_and_trie.py compares the kernel with its twin after a history; here both are
compared with what they claim: the twin keeps a dictionary of n-grams, the judge keeps nothing but
the texts and when each token was appended.
"""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tinyspec._core import NgramIndex

TOKENS = st.lists(
    st.sampled_from([0, 1, 2, 70_000]), max_size=6
)  # one that does not fit into 16 bits
TEXTS = st.integers(0, 2)


class Indices(RuleBasedStateMachine):
    """One index over up to three texts."""

    begin: ClassVar[Any] = NgramIndex

    @initialize(max_n=st.integers(1, 4))
    def start(self, max_n: int) -> None:
        self.max_n, self.index, self.clock = max_n, self.begin(max_n), 0
        self.texts: dict[int, list[tuple[int, int]]] = {}  # text -> (token, when it was appended)

    def spelled(self, text: int) -> list[int]:
        return [token for token, _ in self.texts.get(text, [])]

    def found(self, suffix: list[int], k: int, longest: int, shortest: int, kind: str) -> list[int]:
        """By the definition: every place in every text that follows the suffix's last n tokens, the
        longest n first.
        """
        for n in range(min(longest, len(suffix)), shortest - 1, -1):
            places = []
            for text, entries in self.texts.items():
                line = self.spelled(text)
                places += [
                    (entries[at][1], text, at)
                    for at in range(n, len(line))
                    if line[at - n : at] == suffix[len(suffix) - n :]
                ]
            if places:
                following = [self.spelled(text)[at] for _, text, at in sorted(places)]
                best = min(set(following), key=lambda token: (-following.count(token), token))
                right = [
                    place
                    for place in places
                    if kind != "frequent" or self.spelled(place[1])[place[2]] == best
                ]
                _, text, at = min(right) if kind == "first" else max(right)
                return self.spelled(text)[at : at + k]
        return []

    @rule(text=TEXTS, new=TOKENS)
    def append(self, text: int, new: list[int]) -> None:
        self.index.append(text, new)
        for token in new:
            self.clock += 1
            self.texts.setdefault(text, []).append((token, self.clock))

    @rule(text=TEXTS, drop=st.integers(0, 5))
    def rewind(self, text: int, drop: int) -> None:
        length = max(len(self.texts.get(text, [])) - drop, 0)
        self.index.rewind(text, length)
        del self.texts.setdefault(text, [])[length:]

    @rule(text=TEXTS, more=TOKENS, k=st.integers(0, 5), data=st.data())
    def look(self, text: int, more: list[int], k: int, data: st.DataObject) -> None:
        """The end of a text, or any other suffix, under every rule and every range of n."""
        longest = data.draw(st.integers(1, self.max_n))
        suffix = data.draw(st.sampled_from([self.spelled(text), more, self.spelled(text) + more]))
        for kind in ("first", "last", "frequent"):
            for shortest in range(1, longest + 1):
                got = self.index.lookup(suffix, k, longest, shortest, kind)
                assert got == self.found(suffix, k, longest, shortest, kind), (
                    suffix,
                    k,
                    longest,
                    shortest,
                    kind,
                )

    @invariant()
    def lengths_are_the_texts(self) -> None:
        for text in range(3):
            assert self.index.length(text) == len(self.texts.get(text, []))
