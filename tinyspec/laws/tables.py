"""Table models: rational conditionals that depend on everything a technique could get wrong.

A table stands where a transformer stands: it has layers, keys and values, views, exits. Its states
are hashes. The state of a token above a sublayer is a hash of its state below, of its position, and
of the keys and values it may look at, *as they were written when those tokens were run*; the head
turns the last state into small integer weights. So a missing ancestor, a sibling that is seen, a
wrong position, keys that are stale or from another exit, and a skipped or repeated layer all change
the law of the next token, and an exact law sees them. Texts and views are in tablesession.py and
tableview.py; they are written apart from lm.session, whose meaning they share, and compared with it
in tests/laws/test_tables.py.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tinyspec.laws.hashes import HashNetwork, RowsByHand, is_visible
from tinyspec.laws.tablesession import TableSession
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord, Plan

__all__ = ["TableModel", "TableSession"]

FULL_PLAN = Plan()


class TableModel:
    """A model over a few tokens whose rows are exact.

    seed        which table
    vocabulary  V
    layers      depth: exits and skips have somewhere to go
    zeros       whether a token may be impossible (a support smaller than V)
    rows        context -> [V] weights, in place of the hashes: p and q by hand
    floats      rows are float64 logits (-inf where the weight is 0) instead of Fractions, for
                warpers that are irrational
    eos         ids that end a text
    """

    def __init__(
        self,
        seed: int = 0,
        vocabulary: int = 3,
        layers: int = 3,
        zeros: bool = True,
        rows: Callable[[tuple[int, ...]], Sequence[Any]] | None = None,
        name: str = "table",
        *,
        floats: bool = False,
        eos: Sequence[int] = (),
        positions: int = 64,
    ):
        self.seed, self.vocabulary, self.zeros, self.rows, self.floats = (
            seed,
            vocabulary,
            zeros,
            rows,
            floats,
        )
        self.name = name
        self.network = HashNetwork(seed, vocabulary, zeros) if rows is None else RowsByHand(rows)
        self.config = Config(
            vocab_size=vocabulary, d_model=1, n_layers=layers, n_heads=1, n_kv_heads=1, head_dim=1, d_ff=1,
            max_positions=positions, eos=tuple(eos),
        )  # fmt: skip
        self._heads: dict[Any, Any] = {}  # state -> row: pure, remembered

    has_tokenizer = False

    def __repr__(self) -> str:
        what = "by hand" if self.rows is not None else f"seed={self.seed}"
        return f"TableModel({what}, V={self.vocabulary}, {self.config.n_layers} layers)"

    def session(
        self, forward_log: list[ForwardRecord] | None = None, gate: Any = None
    ) -> TableSession:
        """A new text. There is nothing to batch, so a gate is let stand."""
        return TableSession(self, forward_log=forward_log)

    def head(self, state: Any) -> Any:
        """The row of a state: [V] Fractions that sum to one, or float64 logits."""
        if state not in self._heads:
            weights = self.network.weights(state)
            if self.floats:
                row: Any = np.array([math.log(x) if x > 0 else -math.inf for x in weights])
            else:
                whole = sum(Fraction(x) for x in weights)
                row = [Fraction(x) / whole for x in weights]
            self._heads[state] = row
        return self._heads[state]

    def row(self, context: Sequence[int], plan: Plan = FULL_PLAN) -> Any:
        """The row after `context` by one fresh pass, every token under `plan`: the judge of
        sessions.
        """
        return self.head(self.run(context, plan)[-1])

    def run(self, context: Sequence[int], plan: Plan = FULL_PLAN) -> list[Any]:
        """The last state of every token of `context`, by one fresh pass: layer by layer, as a
        transformer does it.
        """
        network, n_layers = self.network, self.config.n_layers
        states = [network.embed(token) for token in context]
        for sublayer in range(plan.sublayers(n_layers)):
            layer = sublayer // 2
            if sublayer in plan.skip:
                continue
            if sublayer % 2:
                states = [network.feed_forward(layer, state) for state in states]
                continue
            keys = [network.keys(layer, state, position) for position, state in enumerate(states)]
            states = [
                network.attend(
                    layer,
                    state,
                    [keys[at] for at in range(row + 1) if is_visible(plan, layer, row, at)],
                )
                for row, state in enumerate(states)
            ]
        return states
