"""A table model's text as a target, for the tests of single techniques.

The laws are in tinyspec.laws.
"""

from collections.abc import Sequence
from typing import Any

from tinyspec.laws.exact.joint import JointDistribution, exact_distribution
from tinyspec.laws.exact.tables import TableModel, TableSession

__all__ = ["JointDistribution", "Table", "exact_distribution"]


class Table(TableSession):
    """Conditional distributions over V tokens that depend on the whole context. A subclass may
    write its own `row` of weights.
    """

    def __init__(self, seed: int, vocabulary: int = 3, zeros: bool = True):
        self.seed, self.vocabulary = seed, vocabulary
        written = type(self).row is not Table.row
        super().__init__(
            TableModel(seed, vocabulary, zeros=zeros, rows=self.row if written else None)
        )

    @property
    def calls(self) -> int:
        """Passes, the prompt's not counted."""
        return sum(not call.prefill for call in self.forward_log)

    def row(self, context: Sequence[int]) -> Any:
        """Return the distribution after a context."""
        return self.model.row(context)
