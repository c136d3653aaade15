"""A tree in one pass equals its paths one by one, and its cache that of a fresh pass.

On broken sessions both laws fail.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import tinyspec
from tests.laws.test_theorems import killed
from tests.lm.small import GPT2, LLAMA, model
from tinyspec._core import compute
from tinyspec.decoding.decode import BaseDrafter
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import session_laws
from tinyspec.laws.exact.models import run_dense
from tinyspec.lm.forward import ForwardBatch, Plan, Scores, VisibleSet
from tinyspec.lm.model import Model
from tinyspec.lm.session import Session
from tinyspec.technique import find_technique
from tinyspec.tree import ROOT, TokenTree

MODELS = {"llama": model(LLAMA), "gpt2": model(replace(GPT2, n_kv_heads=2))}
M = MODELS["llama"]
models = pytest.mark.parametrize("m", MODELS.values(), ids=MODELS.keys())
REFERENCES = [[token for _ in range(3) for token in range(LLAMA.vocab_size)], [1, 1, 2, 1, 1, 2]]


@pytest.fixture(scope="module", params=["float64", "float32"])
def zoo(request) -> tuple[Model, Model, float]:
    """The bundled pair, and how far a logit may be off: float32 sums some hundred terms a layer, in
    twelve layers.
    """
    pair = [tinyspec.load(name, dtype=request.param) for name in ("storyteller", "apprentice")]
    return *pair, 1e-10 if request.param == "float64" else 3e-5


def held_by(
    card, target: session_laws.Begin, draft: session_laws.Begin, **options
) -> session_laws.Evidence:
    references = REFERENCES if card.copies else ()
    return session_laws.cache_after_every_round(
        card.make, target, [draft] * card.drafts, references=references, **options
    )


# --------------------------------------------------------------------------------- the judge itself


@models
def test_the_plain_pass_is_the_model_trained(m: Model) -> None:
    """Its logits equal those of the pass that training differentiates; the two share no line."""
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    with torch.no_grad():
        expected = m.training_logits(torch.tensor([text]))[0].numpy()
    np.testing.assert_allclose(run_dense(m, text).logits, expected, atol=1e-11)


@models
def test_the_plain_pass_follows_a_plan(m: Model) -> None:
    session = Session(m, plan=Plan(last=2, skip=frozenset({0, 3})))
    session.extend([3, 1, 4, 1, 5])
    assert session_laws.committed_slots(session) == 4 * 1
    found = run_dense(m, [3, 1, 4, 1, 5], session.plan)
    np.testing.assert_allclose(
        session.score(TokenTree()).logits[0].numpy(), found.logits[-1], atol=1e-11
    )
    assert [keys is None for keys in found.keys] == [True, False, True]
    with pytest.raises(ValueError, match="sees everything"):
        run_dense(m, [1], Plan(visible=VisibleSet.for_all_layers((0,), 1, LLAMA.n_layers, 2)))


# ------------------------------------------------------------------------------- the code is lawful


@pytest.mark.skipif(
    compute is None, reason="NO COMPILED TRANSFORMER: rows of torch's products are not identical"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_bits_whatever_is_computed_beside_it(dtype: torch.dtype) -> None:
    for m in (M.to(dtype=dtype), tinyspec.load("storyteller", dtype=dtype)):
        assert session_laws.row_identity(m.session, cases=6).cases == 27


def test_the_bundled_storyteller_keeps_the_laws_of_passes(zoo: tuple[Model, Model, float]) -> None:
    target, draft, tolerance = zoo
    session_laws.node_logits(target.session, cases=1, rounds=2, nodes=4, tolerance=tolerance)
    session_laws.sibling_order(target.session, verify_tree, cases=4, tolerance=tolerance)
    held_by(
        find_technique("speculative_decoding"),
        target.session,
        draft.session,
        texts=2,
        tokens=8,
        tolerance=tolerance,
    )


def test_a_token_that_left_early_is_judged_as_far_as_it_ran() -> None:
    session = M.session()
    session.extend([3, 1, 4, 1, 5])
    session.run_to_layer(TokenTree.chain([9]), 2)
    session.commit([0], 2)
    assert session_laws.committed_slots(session) == 4 * 3 + 2 * 2
    session.fill_cache("copy")
    session.score(TokenTree.chain([6]))
    session.commit([0], 5)  # token 2 was run in full, but looked at what was copied up
    assert not session.cache_exact
    assert session_laws.committed_slots(session) == 4 * 3 + 2 * 2
    session.cache.keys[1][:, 5] += 1e-6
    killed(session_laws.COMMITTED_SLOTS, lambda: session_laws.committed_slots(session))


# ----------------------------------------------------------------------------------- what they kill


def gated(change: Callable[[ForwardBatch], None]) -> session_laws.Begin:
    """Sessions whose feeds are changed on their way to the model."""

    def gate(feeds: Sequence[ForwardBatch]) -> list[Scores]:
        for feed in feeds:
            change(feed)
        return M.forward(feeds)

    return lambda: Session(M, forward=gate)


def flat_positions(feed: ForwardBatch) -> None:
    feed.positions = list(feed.slots)


def siblings_visible(feed: ForwardBatch) -> None:
    feed.seen = [(slot + 1, ()) for slot in feed.slots]


def parent_hidden(feed: ForwardBatch) -> None:
    feed.seen = [(prefix, (*own[:-2], *own[-1:])) for prefix, own in feed.seen]


def late_positions(feed: ForwardBatch) -> None:
    if not feed.prefill:
        feed.positions = [at + 1 for at in feed.positions]


class NotGathered(Session):
    """Commits a path and leaves its keys and values where they were."""

    def _assign_slots(self, nodes, first):
        self.cache.move_slots = lambda old, to: None
        super()._assign_slots(nodes, first)


class KeepsGuesses(Session):
    """Takes what is computed in the newest token's slot, a rejected draft token's keys, for its
    own.
    """

    def commit(self, path, next):
        n_drafted = len(self.scored)
        super().commit(path, next)
        self.trust(n_drafted)

    def append(self, tokens):
        n_drafted = len(self.scored)
        super().append(tokens)
        self.trust(n_drafted)

    def trust(self, n_drafted: int) -> None:
        newest = self.committed[-1] if self.committed else None
        if n_drafted and newest and not newest.sublayers_done:
            newest.sublayers_done = newest.logits_at = 2 * self.model.config.n_layers
            newest.logits = torch.zeros(self.model.config.vocab_size, dtype=torch.float64)
            self.cache.present[newest.slot] = True


class Forgets(Session):
    """Takes the whole text back and forth instead of a few draft tokens: the cache is empty after
    every round.
    """

    def commit(self, path, next):
        super().commit(path, next)
        text = self.text
        self.rewind(0)
        self.append(text)


@pytest.mark.parametrize(
    "change", [flat_positions, siblings_visible, parent_hidden, late_positions]
)
def test_node_logits_kill_a_wrong_mask_or_position(change) -> None:
    killed(session_laws.NODE_LOGITS, lambda: session_laws.node_logits(gated(change)))


def test_row_identity_kills_a_product_that_sums_otherwise_for_many_rows() -> None:
    """What libraries do: the last bit of a row depends on how many are computed with it."""
    m = M.to(dtype=torch.float32)

    def gate(feeds: Sequence[ForwardBatch]) -> list[Scores]:
        scores = m.forward(feeds)
        return [
            s._replace(logits=s.logits * (1 + 2**-23)) if len(s.logits) > 2 else s for s in scores
        ]

    killed(
        session_laws.ROW_IDENTITY,
        lambda: session_laws.row_identity(lambda: Session(m, forward=gate)),
    )


@pytest.mark.parametrize("change", [flat_positions, siblings_visible])
def test_permuting_siblings_kills_what_knows_their_order(change) -> None:
    killed(
        session_laws.SIBLING_ORDER, lambda: session_laws.sibling_order(gated(change), verify_tree)
    )


@pytest.mark.parametrize(
    "begin", [NotGathered, KeepsGuesses], ids=["path not gathered", "rejected keys kept"]
)
def test_node_logits_kill_a_wrong_commit(begin) -> None:
    killed(session_laws.NODE_LOGITS, lambda: session_laws.node_logits(lambda: begin(M)))


def test_permuting_siblings_kills_a_greedy_walk_of_the_first_child() -> None:
    def first_child(tree: TokenTree, p, source) -> Verdict:
        path, at = (), ROOT
        while at + 1 < len(tree.tokens):
            node = next((i for i, parent in enumerate(tree.parents) if parent == at), None)
            if node is None or not p[at][tree.tokens[node]]:
                break
            path, at = (*path, node), node
        return Verdict(path, int(np.argmax(p[at])))

    killed(session_laws.SIBLING_ORDER, lambda: session_laws.sibling_order(M.session, first_child))


@pytest.mark.parametrize(
    "begin",
    [lambda: KeepsGuesses(M), lambda: Forgets(M), gated(late_positions)],
    ids=["rejected keys kept", "cache reset", "positions off by one"],
)
def test_committed_slots_kill_a_wrong_target(begin) -> None:
    draft = model(LLAMA, seed=5)
    killed(
        session_laws.COMMITTED_SLOTS,
        lambda: held_by(find_technique("speculative_decoding"), begin, draft.session),
    )


def test_committed_slots_kill_a_path_that_is_not_gathered() -> None:
    """A chain needs no gathering: a second child is accepted here."""

    class Two(BaseDrafter):
        def propose(self, context, max_draft_depth, sampling, source):
            best = int(run_dense(M, context).logits[-1].argmax())
            tokens = ((best + 1) % LLAMA.vocab_size, best)
            return (
                TokenTree(tokens, (ROOT, ROOT), (None, None), (False, False))
                if max_draft_depth
                else TokenTree()
            )

    def bush(request):
        return request.decoder(Two(), verify_tree)

    session_laws.cache_after_every_round(bush, M.session)
    killed(
        session_laws.COMMITTED_SLOTS,
        lambda: session_laws.cache_after_every_round(bush, lambda: NotGathered(M)),
    )


def test_committed_slots_kill_a_stale_draft() -> None:
    """The draft model keeps what it computed for tokens that the target rejected."""
    draft = model(LLAMA, seed=5)
    killed(
        session_laws.COMMITTED_SLOTS,
        lambda: held_by(
            find_technique("speculative_decoding"), M.session, lambda: KeepsGuesses(draft)
        ),
    )


def test_trees_are_reordered_only_among_siblings() -> None:
    rng = random.Random(0)
    for _ in range(50):
        tree = session_laws.random_tree(rng, 7, [1, 2])
        other, old = session_laws.reorder_siblings(rng, tree)
        assert sorted(old) == list(range(7))
        for node, was in enumerate(old):
            assert [old[i] for i in other.path(node)] == list(tree.path(was))
