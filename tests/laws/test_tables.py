"""Table models: every row is that of a fresh pass.

Their sessions and views behave as those of a transformer.
"""

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.lm.small import GPT2, model
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.lm.forward import Plan, VisibleSet
from tinyspec.tree import ROOT, TokenTree

L, V = 3, 4
PLANS = [
    Plan(last=1), Plan(last=2), Plan(skip=frozenset({2})), Plan(skip=frozenset({3, 4})),
    Plan(last=2, skip=frozenset({1})),
    Plan(visible=VisibleSet.for_all_layers((0, 2), 4, L, 1)),
    Plan(visible=VisibleSet((None, (frozenset({0}),), (frozenset(),)), 3)),
]  # fmt: skip
# positions are learned: with rotated ones alone, a text of equal tokens has equal rows
CONFIG = replace(
    GPT2, vocab_size=V, n_layers=L, n_kv_heads=1, n_heads=2, head_dim=8, max_positions=24
)
TRANSFORMER = model(CONFIG)
PROBES = torch.randn(
    2, CONFIG.d_model, generator=torch.Generator().manual_seed(7), dtype=torch.float64
)
PREFIX = tuple(
    torch.randn(2, L, 1, 2, 8, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
)


def test_rows_are_distributions_with_small_denominators() -> None:
    m = TableModel(3)
    for a in range(3):
        row = m.row((0, a))
        assert sum(row) == 1
        assert all(isinstance(x, Fraction) and x >= 0 and x.denominator <= 12 for x in row)
    assert any(0 in m.row((a, b)) for a in range(3) for b in range(3))
    full = TableModel(3, zeros=False)
    assert all(0 not in full.row((a, b)) for a in range(3) for b in range(3))


def test_the_network_is_the_same_in_every_process() -> None:
    assert [str(x) for x in TableModel(1).row((0, 1, 2))] == ["0", "0", "1"]


def test_everything_that_could_be_wrong_changes_the_state() -> None:
    m = TableModel(5)
    base = m.run((0, 1, 2))[-1]
    changed = [
        m.run(text)[-1] for text in ((1, 1, 2), (0, 0, 2), (1, 0, 2), (0, 2), (2,), (0, 1, 1, 2))
    ]
    changed += [
        m.run((0, 1, 2), plan)[-1]
        for plan in PLANS
        if plan.visible is None or plan.visible.since < 3
    ]
    changed.append(TableModel(6).run((0, 1, 2))[-1])
    assert len({base, *changed}) == len(changed) + 1


def test_rows_by_hand() -> None:
    m = TableModel(rows=lambda context: [1, 2] if context[-1] else [3, len(context)])
    session = m.session()
    session.extend((0, 1, 0))
    scores: Any = session.score(TokenTree.chain([1]))
    assert scores.logits == [[Fraction(1, 2)] * 2, [Fraction(1, 3), Fraction(2, 3)]]
    assert m.row((0, 1, 0)) == scores.logits[0]


def test_rows_in_floats_are_the_logarithms_of_the_exact_ones() -> None:
    exact, floats = TableModel(2), TableModel(2, floats=True)
    for context in ((0,), (1, 2), (2, 1, 0)):
        row = floats.row(context)
        assert row.dtype == np.float64
        assert np.exp(row) / np.exp(row).sum() == pytest.approx(
            [float(x) for x in exact.row(context)]
        )


def test_a_table_session_rejects_what_a_session_rejects() -> None:
    session = TableModel(1, positions=4).session()
    with pytest.raises(TinyspecError, match="no text"):
        session.score(TokenTree())
    session.extend((0, 1))
    with pytest.raises(TinyspecError, match="vocabulary"):
        session.append((3,))
    with pytest.raises(TinyspecError, match="context"):
        session.append((0, 0, 0))
    with pytest.raises(TinyspecError, match="beyond the context"):
        session.score(TokenTree.chain([0, 0, 0]))
    session.score(TokenTree((0, 1), (ROOT, 0), (None, None), (False, False)))
    with pytest.raises(ValueError, match="path"):
        session.commit((1,), None)
    with pytest.raises(ValueError, match="rewind"):
        session.rewind(3)
    with pytest.raises(ValueError, match="probe"):
        session.score(TokenTree((0, 1), (ROOT, 0), (None, None), (True, False)))
    with pytest.raises(ValueError, match="hidden layer"):
        session.score(TokenTree(), hidden_layers=(7,))


class Pair:
    """One session on a transformer and one on a table, driven alike.

    A state of the table is a hash of all that made it, so two rows have equal states exactly where
    they were computed alike: then, and only then, must the transformer's two rows be equal.
    """

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.calls: tuple[list[Any], list[Any]] = ([], [])
        self.real, self.table = (
            TRANSFORMER.session(self.calls[0]),
            TableModel(0, V, L, positions=24).session(self.calls[1]),
        )
        self.real.set_probe_embeddings(PROBES, PREFIX)
        self.table.set_probe_embeddings(PROBES, PREFIX)
        self.views = (self.real.view(PLANS[0]), self.table.view(PLANS[0]))
        self.tree: TokenTree | None = None
        self.rows: dict[Any, torch.Tensor] = {}

    def both(self, name: str, *args: Any, on_view: bool = False, **options: Any) -> Any:
        """The same operation on both: the same result or the same kind of error."""
        pair = self.views if on_view else (self.real, self.table)
        results: list[Any] = []
        for target in pair:
            try:
                results.append(getattr(target, name)(*args, **options))
            except (ValueError, TinyspecError) as error:
                results.append(type(error))
        real, table = results
        assert isinstance(real, type) == isinstance(table, type), (name, args, real, table)
        assert not isinstance(real, type) or real is table
        return None if isinstance(real, type) else (real, table)

    def compare(self, scores: Any, tap: int) -> None:
        if scores is None:
            return
        real, table = scores
        assert list(real.layers) == list(table.layers)
        assert len(real.logits) == len(table.logits)
        for logits, state in zip(real.hidden[0], table.hidden[0], strict=True):
            known = self.rows.setdefault((tap, state), logits)
            assert torch.allclose(known, logits, atol=1e-9, rtol=0)
        kept = [row for (at, _), row in self.rows.items() if at == tap]
        for i, row in enumerate(kept):
            assert all(not torch.allclose(row, other, atol=1e-7, rtol=0) for other in kept[:i])

    def draw_tree(self, probes: bool) -> TokenTree:
        tokens, parents, probe = list[int](), list[int](), list[bool]()
        for i in range(self.rng.randint(0, 4)):
            up = self.rng.randint(ROOT, i - 1)
            odd = (up != ROOT and probe[up]) or (probes and self.rng.random() < 0.2)
            tokens.append(self.rng.randrange(V + 2 if odd else V))
            parents.append(up)
            probe.append(odd)
        return TokenTree(tokens, parents, (None,) * len(tokens), probe)

    def follow(self, token: int) -> None:
        """The view drafts after its trunk, the session verifies some of it, and the view looks at
        the rest again.
        """
        drafted = (
            [*self.views[0].text[len(self.real) :], token]
            if len(self.views[0]) >= len(self.real)
            else [token]
        )
        self.compare(self.both("score", TokenTree.chain([token]), (L,), on_view=True), L)
        kept = self.rng.randint(0, len(drafted))
        if self.both("score", TokenTree.chain(drafted[:kept])) is not None:
            self.both("commit", tuple(range(kept)), None)
            left = drafted[kept:] if len(self.views[0]) == len(self.real) else []
            self.compare(self.both("score", TokenTree.chain(left), (L,), on_view=True), L)
        self.tree = None

    def copy_up(self) -> None:
        """Keys of tokens that left early are made from their exit; a transformer may have let go of
        the states there.
        """
        try:
            self.real.fill_cache("copy")
        except ValueError:
            return
        self.table.fill_cache("copy")

    def score_with_late_rows(self) -> None:
        """Both read the rows of the same tokens; a row of the table stands for one of the other."""
        found = self.both("score_with_late_rows", TokenTree(), (L,))
        self.compare([scores for scores, _ in found], L)
        real, table = [rows for _, rows in found]
        assert sorted(real) == sorted(table)
        for at, row in real.items():
            known = self.rows.setdefault(("late", repr(table[at])), row)
            assert torch.allclose(known, row, atol=1e-9, rtol=0)
        self.tree = TokenTree()

    def step(self) -> None:
        rng, text = self.rng, [self.rng.randrange(V) for _ in range(self.rng.randint(1, 2))]
        act = rng.choice(["extend", "append", "score", "score", "commit", "advance", "rewind",
                          "fill", "fork", "watch",
                          "view", "view", "view commit", "view rewind", "view append", "follow",
                          "copy", "late", "restart", "run committed"])  # fmt: skip
        tap = rng.choice((L, L, 1))
        if act == "extend":
            self.compare(self.both("extend", text, (tap,)), tap)
            self.tree = None
        elif act == "append":
            self.both("append", text)
            self.tree = None
        elif act == "score":
            tree = self.draw_tree(True)
            scores = self.both("score", tree, (tap,))
            self.compare(scores, tap)
            self.tree = tree if scores else None
        elif act == "commit" and self.tree is not None:
            node = rng.randint(ROOT, len(self.tree.tokens) - 1)
            self.both("commit", self.tree.path(node), rng.choice((None, *range(V))))
            self.tree = None
        elif act == "advance":
            tree = self.draw_tree(True)
            scores = self.both(
                "run_to_layer", tree, rng.randint(1, L), (L,), head=rng.random() < 0.5
            )
            self.compare(scores, L)
            self.tree = tree if scores else None
        elif act == "rewind":
            self.both("rewind", rng.randint(0, len(self.real)))
            self.tree = None
        elif act == "fill" and len(self.real):
            self.both("fill_cache", "recompute")
        elif act == "fork" and len(self.real):
            twins = (self.real.fork(), self.table.fork())
            self.real, self.table = twins
            self.views = (self.real.view(PLANS[1]), self.table.view(PLANS[1]))
            self.tree = None
        elif act == "watch":
            plan = rng.choice(PLANS)
            self.views = (self.real.view(plan), self.table.view(plan))
        elif act == "view":
            self.compare(self.both("score", self.draw_tree(True), (L,), on_view=True), L)
        elif act == "view commit":
            tree = self.draw_tree(False)
            if self.both("score", tree, on_view=True) is not None:
                node = rng.randint(ROOT, len(tree.tokens) - 1)
                self.both("commit", tree.path(node), rng.choice((None, *range(V))), on_view=True)
        elif act == "view rewind":
            self.both("rewind", rng.randint(0, len(self.views[0])), on_view=True)
        elif act == "view append":
            self.both("append", text, on_view=True)
        elif act == "follow" and len(self.real):
            self.follow(rng.randrange(V))
        elif act == "copy" and len(self.real):
            self.copy_up()
        elif act == "late" and len(self.real):
            self.score_with_late_rows()
        elif act == "restart" and len(self.real) > 1:
            self.both("restart", rng.sample(range(len(self.real) - 1), 1))
        elif act == "run committed" and len(self.real):
            self.both("run_committed", range(len(self.real) - 1), rng.randint(1, L))
        assert self.real.text == self.table.text
        assert self.views[0].text == self.views[1].text
        assert len(self.views[0]) == len(self.views[1])
        assert self.real.cache_exact == self.table.cache_exact


@pytest.mark.parametrize("seed", range(60))
def test_a_table_is_computed_as_a_transformer_is(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(40):
        pair.step()


def test_filling_by_copying_leaves_what_a_transformer_would_leave() -> None:
    pair = Pair(0)
    pair.both("extend", (0, 1, 2))
    pair.both("run_to_layer", TokenTree.chain((1, 0)), 1, head=True)
    pair.both("commit", (0, 1), 3)
    pair.both("fill_cache", "copy")
    assert pair.real.cache_exact == pair.table.cache_exact is False
    copied = pair.both("score", TokenTree.chain((2,)), (L,))
    pair.compare(copied, L)
    assert copied[1].hidden[0][0] != pair.table.model.run((0, 1, 2, 1, 0, 3))[-1]
    pair.both("fill_cache", "recompute")
    pair.both("rewind", 5)
    pair.compare(pair.both("score", TokenTree.chain((3, 2)), (L,)), L)
    assert (
        pair.both("score", TokenTree.chain((3, 2)), (L,))[1].hidden[0][1]
        == pair.table.model.run((0, 1, 2, 1, 0, 3))[-1]
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_counts_what_a_transformers_counts(seed: int) -> None:
    pair, rng = Pair(seed), random.Random(seed)
    pair.both("extend", (0, 1))
    for _ in range(15):
        tree = pair.draw_tree(False)
        act = rng.randrange(4)
        if act == 0 and len(pair.real) > 2:
            pair.both("rewind", len(pair.real) - 1)
        elif act == 1 and len(pair.real) < 15:
            pair.both("append", (1,))
        elif act == 2:
            pair.both("run_to_layer", tree, 1)
        elif len(pair.real) < 15:
            pair.both("score", tree)
            pair.both(
                "commit", tree.path(rng.randint(ROOT, len(tree.tokens) - 1)), rng.randrange(V)
            )
    real, table = ([call[1:] for call in calls] for calls in pair.calls)
    assert real == table


def test_scoring_is_fast_enough_to_enumerate() -> None:
    """What is counted, not timed: nothing that was run is run again."""
    session = TableModel(0).session(forward_log := [])
    session.extend((0, 1, 2))
    session.score(TokenTree.chain((0, 1)))
    session.score(TokenTree.chain((0, 1, 2)))
    session.commit((0, 1, 2), 2)
    session.score(TokenTree())
    assert [call.row_layers for call in forward_log] == [6, 9, 3, 3]


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_that_shrinks_is_the_same_on_both(seed: int) -> None:
    """Each token runs under a plan of its own, and once; old tokens stay as they are."""
    pair, rng = Pair(seed), random.Random(seed)
    pair.both("extend", (0, 1, 2))
    skips = sorted(rng.sample(range(2 * L - 1), 3))
    for used in range(4):
        pair.both("set_plan", Plan(skip=frozenset(skips[:used])))
        pair.compare(pair.both("score", TokenTree(), (L,)), L)
        pair.both("commit", (), rng.randrange(V))
        assert pair.real.cache_exact == pair.table.cache_exact is True
    logs = [
        [(call.rows, call.row_layers, call.head_rows) for call in session.forward_log]
        for session in (pair.real, pair.table)
    ]
    assert logs[0] == logs[1]
    assert logs[0][1:] == [(1, L - used / 2, 1) for used in range(4)]
