"""Sessions, forks and views in any order of operations, against lists and fresh forward passes.

tests/lm/test_session_machine.py drives one session with one view: probes, early exits, fills,
hidden states. What it cannot see is here: several texts that were forked from each other and all go
on, several views on one session that are looked at late or not at all, views that are extended,
rewound and ended, tokens appended but not run, requests that end; values as well as keys; that
nothing is run twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from tests.lm.oracle import Oracle, Token
from tests.lm.small import LLAMA, model
from tinyspec.lm.forward import Plan, VisibleSet
from tinyspec.lm.session import Session
from tinyspec.lm.view import View
from tinyspec.tree import ROOT, TokenTree

L = LLAMA.n_layers
MODEL = model(LLAMA)
ORACLE = Oracle(MODEL)
BASE = Plan()
PLANS = [
    Plan(last=1),
    Plan(skip=frozenset({2})),
    Plan(last=2, skip=frozenset({1})),
    Plan(visible=VisibleSet((None, (frozenset({0}), None), (frozenset(), frozenset({1, 3}))), 5)),
]
LONGEST = 24
tokens = st.integers(0, 2)  # few, so that texts, trunks and trees collide
texts = st.lists(tokens, min_size=1, max_size=3)
which = st.integers(0, 5)

Path = tuple[tuple[int, Plan], ...]


@cache
def ran(path: Path) -> Token:
    """A token and how it was run, after those before it: the naive oracle, remembered."""
    return ORACLE.run(path[-1][0], [ran(path[:at]) for at in range(1, len(path))], path[-1][1])


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Up to four draft tokens, equal siblings included."""
    parents = [draw(st.integers(ROOT, at - 1)) for at in range(draw(st.integers(0, 4)))]
    names = [draw(tokens) for _ in parents]
    return TokenTree(names, parents, (None,) * len(names), (False,) * len(names))


def expected(text: Sequence[int], trunk: Sequence[int], tree: TokenTree, plan: Plan) -> np.ndarray:
    """Rows of the newest token and the tree: all before the newest by the whole model, the rest
    under the plan.
    """
    tip: Path = tuple((t, BASE) for t in text[:-1]) + tuple((t, plan) for t in (text[-1], *trunk))
    paths = [tip]
    for token, up in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[up + 1], (token, plan)))
    return np.array([ran(path).logits for path in paths])


@dataclass
class Glance:
    """A view and what it must be: its plan, its trunk, where it stands in its session's text (None:
    at the end).
    """

    view: View
    plan: Plan
    trunk: list[int] = field(default_factory=list)
    at: int | None = None
    tree: TokenTree | None = None


@dataclass
class Line:
    """A session and what it must be: its text, the last tree, its views."""

    session: Session
    forward_log: list[Any]
    text: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    glances: list[Glance] = field(default_factory=list)

    def follow(self, new: Sequence[int]) -> None:
        """The text grew: what a view had ahead leaves its trunk, or all of it goes."""
        for glance in self.glances:
            for token in new:
                glance.trunk = glance.trunk[1:] if glance.trunk[:1] == [token] else []
            glance.tree = None
        self.text += new
        self.tree = None


class Family(RuleBasedStateMachine):
    """Up to three texts with a common past, each with up to three views."""

    begin: ClassVar[Any] = Session

    def __init__(self) -> None:
        super().__init__()
        forward_log: list[Any] = []
        self.lines = [Line(self.begin(MODEL, forward_log=forward_log), forward_log)]

    @initialize(text=texts, plan=st.sampled_from(PLANS))
    def start(self, text: list[int], plan: Plan) -> None:
        self.grow(0, text, run=True)
        self.open(0, plan)

    def line(self, number: int) -> Line:
        return self.lines[number % len(self.lines)]

    def glance(self, number: int) -> tuple[Line, Glance]:
        every = [(line, glance) for line in self.lines for glance in line.glances]
        return every[number % len(every)]

    def agree(self, got: torch.Tensor, want: np.ndarray) -> None:
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-9)

    # ---- sessions

    @rule(n=which, new=texts, run=st.booleans())
    def grow(self, n: int, new: list[int], run: bool) -> None:
        """`extend` runs all but the newest, `append` runs nothing; the text is the same."""
        line = self.line(n)
        if len(line.text) < LONGEST:
            (line.session.extend if run else line.session.append)(new)
            line.follow(new)

    @rule(n=which, tree=trees())
    def score(self, n: int, tree: TokenTree) -> None:
        line = self.line(n)
        first = line.session.score(tree).logits
        self.agree(first, expected(line.text, [], tree, BASE))
        calls = len(line.forward_log)
        assert torch.equal(line.session.score(tree).logits, first)
        assert len(line.forward_log) == calls, "what had been run was run again"
        line.tree = tree

    @rule(n=which, tree=trees(), data=st.data())
    def commit(self, n: int, tree: TokenTree, data: st.DataObject) -> None:
        """A path of the last tree, which may have been scored some time ago."""
        line = self.line(n)
        if len(line.text) < LONGEST:
            if line.tree is None:
                self.score(n, tree)
            assert line.tree is not None
            path = line.tree.path(data.draw(st.integers(ROOT, len(line.tree.tokens) - 1)))
            after = data.draw(st.none() | tokens)
            new = [*line.tree.tokens_on(path), *(() if after is None else (after,))]
            line.session.commit(path, after)
            line.follow(new)

    @rule(n=which, drop=st.integers(1, 3))
    def rewind(self, n: int, drop: int) -> None:
        line = self.line(n)
        length = max(len(line.text) - drop, 1)
        line.session.rewind(length)
        if length < len(line.text):
            self.shorten(line, length)

    @rule(m=which)
    def change_of_mind(self, m: int) -> None:
        """What a view had ahead is committed, and taken back before anybody looks."""
        line, glance = self.glance(m)
        if glance.trunk:
            length = len(line.text)
            line.session.extend(glance.trunk[:1])
            line.session.rewind(length)
            self.shorten(line, length)
            assert glance.view.text == line.text

    @rule(n=which, new=texts)
    def end(self, n: int, new: list[int]) -> None:
        """A request is over, and the next one begins."""
        line = self.line(n)
        line.session.end()
        self.shorten(line, 0)
        self.grow(n, new, run=True)

    def shorten(self, line: Line, length: int) -> None:
        line.text, line.tree = line.text[:length], None
        for glance in line.glances:
            glance.trunk, glance.tree = [], None
            if glance.at is not None and glance.at >= length:
                glance.at = None
                assert glance.view.text == line.text

    @rule(n=which)
    def fork(self, n: int) -> None:
        """Both go on, and neither changes the other. Of three, the oldest is dropped."""
        line = self.line(n)
        self.lines = [
            *self.lines[-2:],
            Line(line.session.fork(), line.forward_log, list(line.text)),
        ]
        if not any(line.glances for line in self.lines):
            self.open(0, PLANS[0])

    # ---- views

    @rule(n=which, plan=st.sampled_from(PLANS))
    def open(self, n: int, plan: Plan) -> None:
        line = self.line(n)
        line.glances = [*line.glances[-1:], Glance(line.session.view(plan), plan)]

    @rule(m=which, tree=trees())
    def view_score(self, m: int, tree: TokenTree) -> None:
        line, glance = self.glance(m)
        if glance.at is None:
            first = glance.view.score(tree).logits
            self.agree(first, expected(line.text, glance.trunk, tree, glance.plan))
            calls = len(line.forward_log)
            assert torch.equal(glance.view.score(tree).logits, first)
            assert len(line.forward_log) == calls, "what had been run was run again"
            glance.tree = tree

    @rule(m=which, tree=trees(), data=st.data())
    def view_commit(self, m: int, tree: TokenTree, data: st.DataObject) -> None:
        _, glance = self.glance(m)
        if glance.at is None and len(glance.trunk) < 6:
            if glance.tree is None:
                self.view_score(m, tree)
            assert glance.tree is not None
            path = glance.tree.path(data.draw(st.integers(ROOT, len(glance.tree.tokens) - 1)))
            after = data.draw(st.none() | tokens)
            glance.view.commit(path, after)
            glance.trunk += [*glance.tree.tokens_on(path), *(() if after is None else (after,))]
            glance.tree = None

    @rule(m=which, new=texts, on=st.booleans())
    def view_grow(self, m: int, new: list[int], on: bool) -> None:
        """Inside its session's text a view can only read on; after it, it goes its own way."""
        line, glance = self.glance(m)
        glance.tree = None
        if glance.at is None and len(glance.trunk) < 6:
            glance.view.extend(new)
            glance.trunk += new
            line.tree = (
                None  # it runs what its session has not run, which closes the session's last tree
            )
        elif glance.at is not None and on:
            glance.view.append([*line.text[glance.at :], *new])
            glance.trunk, glance.at = list(new), None
        elif glance.at is not None:
            glance.view.append(line.text[glance.at : glance.at + 1])
            glance.at = glance.at + 1 if glance.at + 1 < len(line.text) else None

    @rule(m=which, drop=st.integers(1, 4))
    def view_rewind(self, m: int, drop: int) -> None:
        line, glance = self.glance(m)
        whole = len(line.text) + len(glance.trunk) if glance.at is None else glance.at
        length = max(whole - drop, 0)
        glance.view.rewind(length)
        glance.trunk = glance.trunk[: max(length - len(line.text), 0)]
        glance.at, glance.tree = (length if length < len(line.text) else None), None

    @rule(m=which)
    def view_end(self, m: int) -> None:
        _, glance = self.glance(m)
        glance.view.end()
        glance.trunk, glance.at, glance.tree = [], None, None

    @rule(m=which)
    def view_text(self, m: int) -> None:
        """A view may be looked at seldom: what was done in between must not depend on it."""
        line, glance = self.glance(m)
        assert glance.view.text == [*line.text, *glance.trunk][: glance.at]
        assert len(glance.view) == len(glance.view.text)

    # ---- what always holds

    @invariant()
    def texts_are_the_lists(self) -> None:
        for line in self.lines:
            assert (line.session.text, len(line.session)) == (line.text, len(line.text))

    @invariant()
    def slots_hold_what_the_oracle_computed(self) -> None:
        for line in self.lines:
            path: Path = ()
            for at, node in enumerate(line.session.committed[:-1]):
                path = (*path, (node.token, BASE))
                assert node.slot == node.position == at
                for layer in range(min(L, node.sublayers_valid(BASE, L) // 2)):
                    assert line.session.cache.present[at, layer]
                    for store, kept in (
                        (line.session.cache.keys, ran(path).keys),
                        (line.session.cache.values, ran(path).values),
                    ):
                        np.testing.assert_allclose(
                            store[layer][:, at].numpy(), kept[layer], rtol=0, atol=1e-9
                        )

    def teardown(self) -> None:
        """Every text, taken on from where it is, is a fresh forward over the whole of it."""
        for line in self.lines:
            if line.text:
                self.agree(
                    line.session.score(TokenTree()).logits[0], MODEL.logits(line.text)[-1].numpy()
                )
                fresh = Session(MODEL)
                fresh.extend(line.text)
                n = len(line.text) - 1
                ours, theirs = (s.cache.store[:, :, :, :n].numpy() for s in (line.session, fresh))
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
                assert line.session.cache_exact
