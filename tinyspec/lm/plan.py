"""How much of the model a row runs: the last layer, the sublayers skipped, the slots each attention
sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Heads = tuple[frozenset[int] | None, ...]


@dataclass(frozen=True)
class Visible:
    """Which old positions attention may read: eviction is a set that is not looked at, never a
    physical drop.

    layers  one entry a layer: None (sees everything) or, per key/value head, a set of positions
            (None: everything)
    since   positions >= since are always visible (what came after the set was chosen)
    """

    layers: tuple[Heads | None, ...]
    since: int

    @classmethod
    def everywhere(
        cls, positions: Sequence[int], since: int, n_layers: int, n_kv_heads: int
    ) -> "Visible":
        """The same positions in every layer and head (a StreamingLLM window with its sinks,
        say).
        """
        return cls((((frozenset(positions),) * n_kv_heads),) * n_layers, since)


@dataclass(frozen=True, eq=False)
class Plan:
    """A way through the layers. Sublayer 2l is the attention of layer l, 2l + 1 its feed-forward
    part.

    last     number of layers run (None: all)
    skip     sublayers that are the identity
    visible  what attention sees (None: everything)
    """

    last: int | None = None
    skip: frozenset[int] = frozenset()
    visible: Visible | None = None

    def __eq__(self, other: object) -> bool:
        """Most comparisons are of a plan with itself."""
        if self is other:
            return True
        same = isinstance(other, Plan) and (self.last, self.skip, self.visible) == (
            other.last,
            other.skip,
            other.visible,
        )
        return same

    def __hash__(self) -> int:
        return hash((self.last, self.skip, self.visible))

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.last is None and not self.skip and self.visible is None

    def sublayers(self, n_layers: int) -> int:
        """Where this plan stops, in sublayers."""
        return 2 * (n_layers if self.last is None else self.last)

    def differs(self, other: "Plan", n_layers: int) -> int:
        """The first sublayer where the two part; 2 * n_layers if they never do.

        This is the one reuse rule: what was computed under one plan up to here holds under the
        other.

        >>> Plan(last=3).differs(Plan(), 12), Plan(skip=frozenset({4, 9})).differs(Plan(), 12)
        (6, 4)
        """
        if self is other:
            return 2 * n_layers
        ends = {self.sublayers(n_layers), other.sublayers(n_layers)}
        firsts = [
            2 * n_layers,
            *(min(ends) for _ in range(len(ends) - 1)),
            *(self.skip ^ other.skip),
        ]
        if self.visible != other.visible:
            firsts.extend(
                2 * layer for layer in range(n_layers) if self._sees(layer) != other._sees(layer)
            )
        return min(firsts)

    def _sees(self, layer: int) -> tuple[Heads, int] | None:
        heads = self.visible.layers[layer] if self.visible else None
        return None if self.visible is None or heads is None else (heads, self.visible.since)
