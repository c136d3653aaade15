"""State machines over the forest of counted tries, kernel and twin.

A machine must see every defect that is listed here.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.laws.forests import Forests
from tinyspec._core import fallback


def checked(examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=30,
        phases=phases or tuple(Phase),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Twins(Forests):
    begin = fallback.Forest


Forests.TestCase.settings = checked(30)
Twins.TestCase.settings = checked(15)
TestForests = Forests.TestCase
TestTwinsOfForests = Twins.TestCase


class Lasting(fallback.Forest):
    """A rewind that leaves what was counted."""

    def rewind(self, text: int, length: int) -> None:
        del self._texts[text].tokens[length:]


class Alphabetical(fallback.Forest):
    """Siblings by their ids."""

    def _recount(self, tree: Any, before: tuple[int, ...], token: int, by: int) -> None:
        super()._recount(tree, before, token, by)
        tree[before].after.sort()


class Mixing(fallback.Forest):
    """One tree for all owners."""

    def open(self, tree: Any) -> int:
        return super().open("outputs")


class Shy(fallback.Forest):
    """Looks for the shortest suffix alone."""

    def _longest(self, tree: Any, suffix: Any, most: int) -> int:
        return min(super()._longest(tree, suffix, most), 1)


class Keeping(fallback.Forest):
    """Halving drops nothing."""

    def halve(self, tree: Any) -> None:
        known = self._trees.get(tree, {})
        counts = {path: max(window.count // 2, 1) for path, window in known.items()}
        after = {path: list(window.after) for path, window in known.items()}
        for path, window in known.items():
            window.count, window.after = counts[path], after[path]
        for text in (text for text in self._texts.values() if text.tree == tree):
            text.since = len(text.tokens)


DEFECTS = {
    "a rewind keeps what was counted": Lasting,
    "siblings stand in another order": Alphabetical,
    "owners are mixed": Mixing,
    "the shortest suffix wins": Shy,
    "a halving drops nothing": Keeping,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_machine_of_forests_sees(defect: str) -> None:
    class Broken(Forests):
        begin = DEFECTS[defect]

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Broken, settings=checked(80, Phase.generate))
