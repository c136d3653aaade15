"""Any order of session operations, against a list of tokens and the naive oracle."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.lm.oracle import Oracle, Token
from tests.lm.small import GPT2, LLAMA, model
from tinyspec.lm.forward import Plan, VisibleSet
from tinyspec.tree import ROOT, TokenTree

L, V, D = LLAMA.n_layers, LLAMA.vocab_size, LLAMA.d_model
MODELS = [model(LLAMA), model(replace(GPT2, n_kv_heads=2))]
ORACLES = [Oracle(m) for m in MODELS]
PROBES = torch.randn(2, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
PREFIX = tuple(
    torch.randn(2, L, 2, 3, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
)
PLANS = [
    Plan(last=1),
    Plan(last=2),
    Plan(skip=frozenset({2})),
    Plan(skip=frozenset({3, 4})),
    Plan(last=2, skip=frozenset({1})),
    Plan(visible=VisibleSet.for_all_layers((0, 2), 4, L, 2)),
    Plan(visible=VisibleSet((None, (frozenset({0}), None), (frozenset(), frozenset({1, 3}))), 5)),
]
BASE = Plan()
tokens = st.integers(0, 4)  # few, so that siblings and texts collide
texts = st.lists(tokens, min_size=1, max_size=4)
layers = st.integers(1, L)
taps_of = st.sampled_from([(), (), (0,), (1, L), (L,)])


@st.composite
def trees(draw: st.DrawFn, probes: bool = True) -> TokenTree:
    """Up to five nodes, equal siblings and probes included."""
    names: list[int] = []
    parents: list[int] = []
    probe: list[bool] = []
    for i in range(draw(st.integers(0, 5))):
        up = draw(st.integers(ROOT, i - 1))
        odd = up != ROOT and probe[up]  # below a probe stand only probes
        odd = odd or (probes and draw(st.integers(0, 4)) == 0)
        names.append(draw(st.integers(0, V + 1)) if odd else draw(tokens))
        parents.append(up)
        probe.append(odd)
    return TokenTree(names, parents, (None,) * len(names), probe)


class Machine(RuleBasedStateMachine):
    """`text` and `done` say what the session must be: its tokens, and how each but the newest was
    run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start(0)

    def start(self, which: int) -> None:
        self.oracle = ORACLES[which]
        self.session = MODELS[which].session()
        self.session.set_probe_embeddings(PROBES, PREFIX)
        self.text: list[int] = []
        self.done: list[Token] = []
        self.copied: set[int] = set()  # positions whose upper keys and values were copied up
        self.waiting: dict[int, int] = {}  # position that left early -> the layers it has run
        self.tree: TokenTree | None = None
        self.watch(Plan(last=1))

    def watch(self, plan: Plan) -> None:
        self.plan, self.view = plan, self.session.view(plan)
        self.trunk: list[int] = []
        self.view_tree: TokenTree | None = None

    # ---- what must come out

    def settle(self) -> None:
        """All but the newest token has been run, exactly, after what stood before it."""
        for token in self.text[len(self.done) : -1]:
            self.done.append(self.oracle.run(token, self.done))

    def expect(
        self, scores, tree: TokenTree, past: list[Token], tip: int, plan: Plan, hidden_layers=()
    ) -> None:
        root = self.oracle.run(tip, past, plan)
        nodes: list[Token] = []
        paths: list[list[Token]] = []
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            path = [*past, root] if up == ROOT else paths[up]
            name = PROBES[token - V].numpy() if token >= V else token
            prefix = (PREFIX[0].numpy(), PREFIX[1].numpy()) if probe else None
            nodes.append(self.oracle.run(name, path, plan, prefix))
            paths.append([*path, nodes[-1]])
        rows = [root, *nodes]
        np.testing.assert_allclose(scores.logits.numpy(), [r.logits for r in rows], atol=1e-9)
        for tap, shown in zip(hidden_layers, scores.hidden, strict=True):
            np.testing.assert_allclose(
                shown.numpy(), [r.top if tap == L else r.states[tap] for r in rows], atol=1e-9
            )

    def deepen(self, layer: int) -> None:
        """Tokens that left early are run along when a later one goes deeper."""
        self.waiting = {
            at: max(ran, layer) for at, ran in self.waiting.items() if max(ran, layer) < L
        }

    def follow(self, new: list[int]) -> None:
        """Committed tokens leave the trunk of the view, or it breaks."""
        for token in new:
            self.trunk = self.trunk[1:] if self.trunk[:1] == [token] else []
        self.text += new
        self.tree = None
        self.settle()

    # ---- what may be done

    @precondition(lambda self: not self.text)
    @rule(which=st.integers(0, 1), text=texts, hidden_layers=taps_of)
    def begin(self, which: int, text: list[int], hidden_layers) -> None:
        self.start(which)
        self.extend(text, hidden_layers)

    @precondition(lambda self: len(self.text) < 40)
    @rule(text=texts, hidden_layers=taps_of)
    def extend(self, text: list[int], hidden_layers) -> None:
        first = max(len(self.text) - 1, 0)
        shown = self.session.extend(text, hidden_layers)
        self.follow(text)
        if (
            hidden_layers and first in self.copied
        ):  # to show what was not stored, it was run after all
            self.copied.discard(first)
        self.waiting = {}
        assert shown.hidden.shape == (len(hidden_layers), len(self.text) - 1 - first, D)
        for tap, states in zip(hidden_layers, shown.hidden, strict=True):
            for state, row in zip(states.numpy(), self.done[first:], strict=True):
                np.testing.assert_allclose(
                    state, row.top if tap == L else row.states[tap], atol=1e-9
                )

    @precondition(lambda self: self.text)
    @rule(tree=trees(), hidden_layers=taps_of)
    def score(self, tree: TokenTree, hidden_layers) -> None:
        scores = self.session.score(tree, hidden_layers)
        self.deepen(L)
        self.expect(scores, tree, self.done, self.text[-1], BASE, hidden_layers)
        self.tree = tree

    @precondition(lambda self: self.text)
    @rule(
        tree=trees(),
        layer=layers,
        head=st.booleans(),
        hidden_layers=st.sampled_from([(), (1,), (L,)]),
    )
    def advance(self, tree: TokenTree, layer: int, head: bool, hidden_layers) -> None:
        scores = self.session.run_to_layer(tree, layer, hidden_layers, head=head)
        self.deepen(layer)
        if head:
            self.expect(scores, tree, self.done, self.text[-1], Plan(last=layer), hidden_layers)
        self.tree = tree

    @precondition(lambda self: self.tree is not None and len(self.text) < 40)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Nodes that were only advanced may be committed: they wait, like tokens that leave
        early.
        """
        assert self.tree is not None
        drafted = [i for i, probe in enumerate(self.tree.probe) if not probe]
        node = data.draw(st.sampled_from([ROOT, *drafted]))
        path = self.tree.path(node)
        after = data.draw(st.none() | tokens)
        new = [*self.tree.tokens_on(path), *(() if after is None else (after,))]
        first = max(len(self.text) - 1, 0)
        self.session.commit(path, after)
        self.follow(new)
        for at in range(first, len(self.text) - 1):
            ran = self.session.committed[at].sublayers_valid(BASE, L) // 2
            if ran < L:
                self.waiting[at] = ran

    @precondition(lambda self: self.text)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.text)))
        if length < len(self.text):
            self.tree, self.trunk = None, []
        self.session.rewind(length)
        self.text, self.done = self.text[:length], self.done[: max(length - 1, 0)]
        self.copied = {at for at in self.copied if at < len(self.done)}
        self.waiting = {at: ran for at, ran in self.waiting.items() if at < len(self.done)}

    @precondition(lambda self: self.text)
    @rule(keep=st.booleans())
    def fork(self, keep: bool) -> None:
        twin = self.session.fork()
        other = twin
        if keep:
            other, self.session, self.tree = self.session, twin, None
            self.watch(self.plan)
        other.extend([1, 2])
        other.score(TokenTree.chain([3]))

    @precondition(lambda self: len(self.text) > 1)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """A token that starts again runs along with the next pass, and its keys are true."""
        at = data.draw(st.integers(0, len(self.text) - 2))
        self.session.restart([at])
        self.copied.discard(at)
        self.waiting[at] = 0
        self.done[at] = self.oracle.run(self.text[at], self.done[:at])

    @precondition(lambda self: self.text)
    @rule(hidden_layers=taps_of)
    def score_with_late_rows(self, hidden_layers) -> None:
        scores, rows = self.session.score_with_late_rows(TokenTree(), hidden_layers)
        for at, row in rows.items():
            np.testing.assert_allclose(row.numpy(), self.done[at].logits, atol=1e-9)
        assert rows.keys() >= self.waiting.keys()
        self.deepen(L)
        self.tree = TokenTree()
        self.expect(scores, self.tree, self.done, self.text[-1], BASE, hidden_layers)

    @precondition(lambda self: self.waiting and 0 not in self.waiting.values())
    @rule(how=st.sampled_from(["copy", "recompute"]))
    def fill(self, how) -> None:
        if how == "copy" and any(self.session.committed[at].plan != BASE for at in self.waiting):
            return  # a view came after the exit: its state there is no longer the newest
        self.session.fill_cache(how, list(self.waiting))
        if how == "copy":
            for at, ran in sorted(self.waiting.items()):
                self.done[at] = self.oracle.run(self.text[at], self.done[:at], copy_from=ran)
                self.copied.add(at)
        self.waiting = {}

    @rule(plan=st.sampled_from(PLANS))
    def look_again(self, plan: Plan) -> None:
        self.watch(plan)

    @precondition(lambda self: self.text)
    @rule(tree=trees(), hidden_layers=st.sampled_from([(), (1,), (L,)]))
    def view_score(self, tree: TokenTree, hidden_layers) -> None:
        last = L if self.plan.last is None else self.plan.last
        scores = self.view.score(tree, hidden_layers)
        self.deepen(last)
        past = self.done
        for token in [self.text[-1], *self.trunk][:-1]:
            past = [*past, self.oracle.run(token, past, self.plan)]
        self.expect(scores, tree, past, [self.text[-1], *self.trunk][-1], self.plan, hidden_layers)
        self.view_tree = tree

    @precondition(lambda self: self.text and len(self.trunk) < 12)
    @rule(tree=trees(probes=False), data=st.data())
    def view_commit(self, tree: TokenTree, data: st.DataObject) -> None:
        self.view.score(tree)
        self.deepen(L if self.plan.last is None else self.plan.last)
        path = tree.path(data.draw(st.integers(ROOT, len(tree.tokens) - 1)))
        after = data.draw(st.none() | tokens)
        self.view.commit(path, after)
        self.trunk += [*tree.tokens_on(path), *(() if after is None else (after,))]

    @precondition(lambda self: self.trunk)
    @rule(drop=st.integers(0, 3))
    def view_rewind(self, drop: int) -> None:
        keep = max(len(self.trunk) - drop, 0)
        self.view.rewind(len(self.text) + keep)
        self.trunk = self.trunk[:keep]

    # ---- what always holds

    @invariant()
    def texts_agree(self) -> None:
        assert self.session.text == self.text
        assert self.view.text == self.text + self.trunk

    @invariant()
    def committed_slots_hold_what_a_fresh_pass_would(self) -> None:
        for at, (node, token) in enumerate(zip(self.session.committed, self.done, strict=False)):
            assert node.slot == node.position == at
            for layer in range(L):
                if (
                    self.session.cache.present[at, layer]
                    and layer < node.sublayers_valid(BASE, L) // 2
                ) or at in self.copied:
                    np.testing.assert_allclose(
                        self.session.cache.keys[layer][:, at].numpy(), token.keys[layer], atol=1e-9
                    )
        assert self.copied or self.session.cache_exact


Machine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = Machine.TestCase
