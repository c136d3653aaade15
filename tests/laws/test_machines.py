"""State machines: sessions, forks and views against lists and fresh forward passes.

The n-gram index is compared with a search through the texts.

Every defect here must be seen by the machine that is meant for it.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.laws.family import Family
from tests.laws.indices import Indices
from tinyspec._core import NgramIndex, fallback
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Cache, Plan
from tinyspec.lm.session import Session
from tinyspec.lm.view import View
from tinyspec.tree import TokenTree


def checked(examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=30,
        phases=phases or tuple(Phase),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


Family.TestCase.settings = checked(45)
TestFamilies = Family.TestCase


class Twins(Indices):
    begin = fallback.NgramIndex


Indices.TestCase.settings = Twins.TestCase.settings = checked(60)
TestIndices = Indices.TestCase
TestTwinsOfIndices = Twins.TestCase


# --- what the machine kills -----------------------------------------------------------------------


class SharedCache(Session):
    """A fork that writes into the cache it was forked from."""

    def fork(self) -> Session:
        twin = super().fork()
        twin.cache = self.cache
        return twin


class ShortRewind(Session):
    """A rewind by one that takes back nothing, as a slice to -0 does."""

    def rewind(self, length: int) -> None:
        super().rewind(length if length != len(self) - 1 else len(self))


class Restless(Session):
    """A score that runs its draft tokens again."""

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Any:
        for node in self.committed[-1].descendants() if self.committed else ():
            node.reset()
        return super().score(tree, hidden_layers)


class Blind(View):
    """A view that does not notice that its session has gone on."""

    def _sync_trunk(self) -> None:
        return None


class Trusting(View):
    """A view that asks a token who its parent is, and not the parent whose children are."""

    def _sync_trunk(self) -> None:
        committed = self.session.committed
        kept = [node for node in self._trunk if node.position >= len(committed)]
        self._trunk = kept if kept and committed and kept[0].parent is committed[-1] else []
        if self._position is not None and self._position >= len(committed):
            self._position = None


class Forgetful(View):
    """A view that is computed by the whole model where it has a trunk."""

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Any:
        self._sync_trunk()
        scores, self._nodes = self.session.score_tree(
            tree, hidden_layers, Plan() if self._trunk else self.plan, trunk=self._trunk
        )
        return scores


def showing(kind: type[View]) -> type[Session]:
    """Sessions with such views."""

    class Showing(Session):
        def view(self, plan: Plan) -> View:
            return kind(self, plan)

    return Showing


class KeysAlone(Cache):
    """Moves keys and leaves the values where they were."""

    def move_slots(self, old: Sequence[int], first: int) -> None:
        values = self.store[:, 1].clone()
        super().move_slots(old, first)
        self.store[:, 1] = values


class Unsorted(Cache):
    """Moves slots one after the other, so that a later one reads what an earlier one has
    overwritten.
    """

    def move_slots(self, old: Sequence[int], first: int) -> None:
        for at, slot in reversed(list(enumerate(old))):
            super().move_slots([slot], first + at)


def keeping(kind: type[Cache]) -> type[Session]:
    """Sessions with such a cache."""

    class Keeping(Session):
        def __init__(self, *given: Any, **options: Any):
            super().__init__(*given, **options)
            self.cache.__class__ = kind

    return Keeping


DEFECTS: dict[str, type[Session]] = {
    "a fork shares the cache": SharedCache,
    "a rewind by one takes nothing back": ShortRewind,
    "draft tokens are run again": Restless,
    "a view does not follow": showing(Blind),
    "a trunk outlives what it hung from": showing(Trusting),
    "a trunk is run by the whole model": showing(Forgetful),
    "values stay behind": keeping(KeysAlone),
    "slots are overwritten while they move": keeping(Unsorted),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_machine_sees(defect: str) -> None:
    class Broken(Family):
        begin = DEFECTS[defect]

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=checked(60, Phase.generate))


@pytest.mark.parametrize("kind", [NgramIndex, fallback.NgramIndex])
def test_a_length_that_an_index_does_not_know_is_an_error(kind: Any) -> None:
    with pytest.raises(TinyspecError, match="max_n >= 1"):
        kind(0)
    for longest, shortest in ((3, 1), (1, 2), (2, 0)):
        with pytest.raises(TinyspecError, match="min_n <= max_n"):
            kind(2).lookup([1], 1, longest, shortest)


class Blockwise(fallback.NgramIndex):
    """Overlooks n-grams that straddle two appends."""

    def append(self, text: int, tokens: Any) -> None:
        self.borders = {*getattr(self, "borders", ()), (text, self.length(text))}
        super().append(text, tokens)

    def lookup(
        self, suffix: Any, k: int, max_n: Any = None, min_n: int = 1, which: str = "last"
    ) -> list[int]:
        known = self._places
        whole = lambda gram, text, end: (  # noqa: E731
            not any((text, at) in self.borders for at in range(end - len(gram) + 1, end))
        )
        self._places = {
            gram: [at for at in places if whole(gram, *at)] for gram, places in known.items()
        }
        found = super().lookup(suffix, k, max_n, min_n, which)
        self._places = known
        return found


class LastIsFirst(fallback.NgramIndex):
    """Takes the place that stands last in a text for the one that was appended last."""

    def lookup(
        self, suffix: Any, k: int, max_n: Any = None, min_n: int = 1, which: str = "last"
    ) -> list[int]:
        order = {gram: list(places) for gram, places in self._places.items()}
        self._places = {gram: sorted(places) for gram, places in order.items()}
        found = super().lookup(suffix, k, max_n, min_n, which)
        self._places = order
        return found


class Greedy(fallback.NgramIndex):
    """Takes the shortest match."""

    def lookup(
        self, suffix: Any, k: int, max_n: Any = None, min_n: int = 1, which: str = "last"
    ) -> list[int]:
        return super().lookup(suffix, k, min_n, min_n, which)


class Endless(fallback.NgramIndex):
    """A continuation runs on into the next text."""

    def lookup(
        self, suffix: Any, k: int, max_n: Any = None, min_n: int = 1, which: str = "last"
    ) -> list[int]:
        found = super().lookup(suffix, k, max_n, min_n, which)
        more = [token for line in self._texts.values() for token in line]
        return (found + more)[:k] if found else found


INDEX_DEFECTS = {
    "n-grams across two appends are lost": Blockwise,
    "the shortest match wins": Greedy,
    "the last text counts for the last appended": LastIsFirst,
    "a continuation crosses the end of its text": Endless,
}


@pytest.mark.parametrize("defect", INDEX_DEFECTS)
def test_the_machine_of_indices_sees(defect: str) -> None:
    class Broken(Indices):
        begin = INDEX_DEFECTS[defect]

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=checked(60, Phase.generate))
