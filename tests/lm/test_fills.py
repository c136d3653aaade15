"""What an early exit leaves out: each fill does what it says, and the forward log counts it.

Judges are the naive transformer of tests/lm/oracle.py and plain arithmetic over the layers where
tokens left.
"""

import ast
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyspec
from tests.lm.oracle import Oracle, Token
from tests.lm.small import GPT2, LLAMA, PROMPT, begun, model, same_cache, tree
from tinyspec.early_exit.exits import FILLS, ExitPoint, ExitRule, ExitTarget
from tinyspec.laws.exact.tables import TableModel
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.lm.scheduler import run_together
from tinyspec.tree import ROOT, TokenTree

L = 4
M, G = model(replace(LLAMA, n_layers=L)), model(replace(GPT2, n_layers=L))
F = model(replace(LLAMA, n_layers=L), dtype=torch.float32)  # the compiled path, where it was built
TABLE = TableModel(3, LLAMA.vocab_size, L)
EMPTY = TokenTree()
N = len(PROMPT)
SCHEDULES = [(1,), (2, 1), (1, 3, 2), (3, 1, 4, 1), (1, 1, 1, 4), (4, 4), (2, 3, 1, 1, 2)]
"""After how many layers each token leaves, the prompt's last one first."""


# --------------------------------------------------------------- no key is missing where it is read


@pytest.mark.parametrize(("slot", "layer"), product(range(N - 1), range(L)))
@pytest.mark.parametrize("m", [M, G, F], ids=["llama", "gpt2", "compiled"])
def test_a_key_that_is_missing_in_one_layer_stops_every_read_of_that_layer_and_no_other(
    m, slot, layer
) -> None:
    missing = f"slot {slot} has no keys in layer {layer}"
    drafted = tree([1, 2, 2], [ROOT, 0, ROOT])
    reads: list[Any] = [
        lambda s: s.score(EMPTY),
        lambda s: s.score(drafted),
        lambda s: s.view(Plan(skip=frozenset({2 * layer + 1}))).score(drafted),
        lambda s: s.run_to_layer(drafted, layer + 1),
        lambda s: s.run_nodes([s.committed[-1]], 2 * L, prefill=True),
    ]
    others: list[Any] = [
        lambda s: s.run_to_layer(drafted, layer, head=True),  # leaves below
        lambda s: s.view(Plan(last=layer)).score(drafted),
        lambda s: s.view(Plan(skip=frozenset({2 * layer}))).score(
            drafted
        ),  # passes its attention by
    ]
    for read in reads:
        session = begun(m)
        session.cache.present[slot, layer] = False
        with pytest.raises(RuntimeError, match=missing):
            read(session)
    for read in others:
        session = begun(m)
        session.cache.present[slot, layer] = False
        read(session)


@pytest.mark.parametrize("layer", range(1, L))
def test_a_draft_token_that_was_run_part_of_the_way_is_run_on_before_it_is_read(layer: int) -> None:
    """A half-run parent is not read above its reach: whoever hangs below it takes it along, or it
    is an error.
    """
    session = begun(M)
    session.run_to_layer(tree([1], [ROOT]), layer)
    deeper = tree([1, 2], [ROOT, 0])
    np.testing.assert_allclose(
        session.score(deeper).logits.numpy(), begun(M).score(deeper).logits.numpy(), atol=1e-10
    )
    session = begun(M)
    session.run_to_layer(tree([1], [ROOT]), layer)
    parent = session.committed[-1].children[1]
    session.score(EMPTY)  # the root goes on, its child does not
    child = tree([1, 2], [ROOT, 0])
    session.run_to_layer(child, 0)
    with pytest.raises(RuntimeError, match=f"slot {parent.slot} has no keys in layer {layer}"):
        session.run_nodes([parent.children[2]], 2 * L)


def test_tokens_that_are_read_before_they_were_run_or_filled_are_an_error() -> None:
    for leaves in range(1, L):
        session = begun(M)
        session.run_to_layer(EMPTY, leaves, head=True)
        session.commit((), 7)
        with pytest.raises(RuntimeError, match=f"slot {N - 1} has no keys in layer {leaves}"):
            session.run_nodes([session.committed[-1]], 2 * L)


def test_a_table_refuses_it_too() -> None:
    for layer in range(L):
        session = TABLE.session()
        session.extend(PROMPT)
        session.committed[2].keys[layer] = None
        with pytest.raises(RuntimeError, match=f"has no keys in layer {layer}"):
            session.score(EMPTY)


def test_in_a_batch_the_request_that_lacks_a_key_is_an_error() -> None:
    def job(hole: bool) -> Any:
        def run(scheduler: Any) -> None:
            session = M.session(scheduler=scheduler)
            session.extend(PROMPT)
            session.cache.present[2, 1] &= not hole
            session.score(EMPTY)

        return run

    with pytest.raises(RuntimeError, match="slot 2 has no keys in layer 1"):
        run_together([job(False), job(True)])


def test_all_that_is_computed_for_a_session_was_looked_at() -> None:
    """`ForwardBatch` is made in two functions, which look at every slot that is read; so does what
    drafts chains.
    """
    made = set()
    package = Path(tinyspec.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.is_relative_to(package / "laws"):  # hosts of mistakes
            continue
        text = path.read_text(encoding="utf-8")
        if "ForwardBatch(" not in text and ".run_chain(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            source = (
                (ast.get_source_segment(text, node) or "")
                if isinstance(node, ast.FunctionDef)
                else ""
            )
            if " ForwardBatch(" in source:
                made.add((path.stem, node.name))  # type: ignore[attr-defined]
                assert ".check_keys(" in source
            if ".run_chain(" in source and node.name != "run_chain":  # those only pass it on
                made.add((path.stem, node.name))  # type: ignore[attr-defined]
                assert "not self.cache.present[:first].all()" in source
    assert made == {
        ("session", "run_nodes"),
        ("session", "draft_chain"),
        ("cyclic", "run_repetition"),
    }


# ---------------------------------------------------------------------- the named fills


class Scheduled(ExitRule):
    """Tokens leave after as many layers as the list says; the rule may read the logits of each
    layer.
    """

    layers = tuple(range(1, L))

    def __init__(self, leaves: Sequence[int], row: bool = False):
        self.leaves, self.reads_logits = leaves, row

    def should_exit(self, at: ExitPoint) -> bool:
        return at.layer == self.leaves[at.step]


def decode_with_exits(
    session: Any, leaves: Sequence[int], fill: str, row: bool = False
) -> list[Any]:
    """Let one token after the other leave where the list says, and return the logits. The tokens
    are 7, 8, 9, ...
    """
    target = ExitTarget(session, Scheduled(leaves, row), fill)
    target.extend(PROMPT)
    rows = []
    for at, layers in enumerate(leaves):
        scores = target.score(EMPTY)
        assert list(scores.layers) == [layers]
        rows.append(scores.logits[0])
        target.commit((), 7 + at)
    return rows


def run_with_copies(m: Any, leaves: Sequence[int]) -> list[Token]:
    """Return the tokens by the oracle: each leaves early, and its state at the exit makes the keys
    and values above.
    """
    oracle = Oracle(m)
    done = oracle.text(PROMPT[:-1])
    for token, layers in zip([PROMPT[-1], *range(7, 99)], leaves, strict=False):
        done.append(oracle.run(token, done, copy_from=layers))
    return done


def exact(m: Any, leaves: Sequence[int]) -> list[Any]:
    """Return the logits of exits, by the oracle, over a text that was run whole."""
    oracle = Oracle(m)
    done, rows = oracle.text(PROMPT[:-1]), []
    for token, layers in zip([PROMPT[-1], *range(7, 99)], leaves, strict=False):
        rows.append(oracle.run(token, done, Plan(last=layers)).logits)
        done.append(oracle.run(token, done))
    return rows


@pytest.mark.parametrize("leaves", SCHEDULES, ids=str)
@pytest.mark.parametrize("m", [M, G], ids=["llama", "gpt2"])
def test_copy_is_the_exit_state_through_the_matrices_above(m, leaves) -> None:
    session, done = m.session(), run_with_copies(m, leaves)
    rows = decode_with_exits(session, leaves, "copy")
    for row, token in zip(rows, done[N - 1 :], strict=True):
        np.testing.assert_allclose(row.numpy(), token.logits, atol=1e-10)
    session.fill_cache(
        "copy", [N - 2 + len(leaves)]
    )  # the last one waits for a reader, who is here
    for at, layer in product(range(len(done)), range(L)):
        np.testing.assert_allclose(
            session.cache.keys[layer][:, at].numpy(), done[at].keys[layer], atol=1e-10
        )
        np.testing.assert_allclose(
            session.cache.values[layer][:, at].numpy(), done[at].values[layer], atol=1e-10
        )
    assert session.cache_exact == (set(leaves) == {L})


@pytest.mark.parametrize("leaves", SCHEDULES, ids=str)
@pytest.mark.parametrize("fill", ["recompute", "postpone", "restart"])
@pytest.mark.parametrize("m", [M, G], ids=["llama", "gpt2"])
def test_recompute_and_postpone_leave_what_a_plain_forward_leaves(m, fill, leaves) -> None:
    session = m.session()
    for row, expected in zip(
        decode_with_exits(session, leaves, fill), exact(m, leaves), strict=True
    ):
        np.testing.assert_allclose(row.numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(
        session.score(EMPTY).logits[0].numpy(), m.logits(session.text)[-1].numpy(), atol=1e-10
    )
    session.commit((), 1)
    same_cache(session)
    assert session.cache_exact


@pytest.mark.parametrize("fill", FILLS)
def test_where_nobody_leaves_early_every_fill_is_plain_decoding_to_the_bit(fill: str) -> None:
    for m in (M, F):
        session, plain = m.session(), m.session()
        plain.extend(PROMPT)
        for at, row in enumerate(decode_with_exits(session, (L,) * 3, fill)):
            assert torch.equal(row, plain.score(EMPTY).logits[0])
            plain.commit((), 7 + at)
        assert torch.equal(
            session.cache.store[:, :, :, : N + 2], plain.cache.store[:, :, :, : N + 2]
        )


# ---------------------------------------------------------------------- the ledger


def count_work(forward_log: Sequence[ForwardRecord]) -> tuple[float, int, int]:
    """Layer evaluations, head products, fills, the prompt's own left out."""
    own = [call for call in forward_log if not call.prefill]
    return sum(c.row_layers for c in own), sum(c.head_rows for c in own), sum(c.fills for c in own)


def due(leaves: Sequence[int], fill: str, row: bool) -> tuple[float, int, int]:
    """The same by arithmetic; the newest token is filled by nobody."""
    filled = leaves[:-1]
    heads = sum(min(layers, L - 1) + (layers == L) if row else 1 for layers in leaves)
    if fill == "copy":
        return sum(leaves), heads, sum(L - layers for layers in filled)
    if fill == "recompute":
        return L * len(filled) + leaves[-1], heads, 0
    if fill == "restart":
        work = waiting = 0
        for layers in leaves:  # those that wait run again, as deep as this one
            work += (waiting + 1) * layers
            waiting = 0 if layers == L else waiting + 1
        return work, heads, 0
    return (
        sum(max(leaves[at:]) for at in range(len(leaves))),
        heads,
        0,
    )  # as deep as whoever comes after


@pytest.mark.parametrize("leaves", SCHEDULES, ids=str)
@pytest.mark.parametrize(("fill", "row"), product(FILLS, [False, True]))
@pytest.mark.parametrize("m", [M, G, F, TABLE], ids=["llama", "gpt2", "compiled", "table"])
def test_layers_heads_and_fills_are_counted_to_the_last_one(m, fill, row, leaves) -> None:
    forward_log: list[ForwardRecord] = []
    decode_with_exits(m.session(forward_log), leaves, fill, row)
    assert count_work(forward_log) == due(leaves, fill, row)
    assert sum(call.row_layers for call in forward_log if call.prefill) == (N - 1) * L


@pytest.mark.parametrize("fill", FILLS)
def test_each_fill_is_a_forward_pass_of_its_own_kind(fill: str) -> None:
    forward_log: list[ForwardRecord] = []
    decode_with_exits(M.session(forward_log), (1, 3, L), fill)
    late = {
        "copy": [ForwardRecord(M.name, 1, 0.0, 0, L - 1), ForwardRecord(M.name, 1, 0.0, 0, L - 3)],
        "recompute": [ForwardRecord(M.name, 1, L - 1.0, 0), ForwardRecord(M.name, 1, L - 3.0, 0)],
        "postpone": [
            ForwardRecord(M.name, 2, 2.0, 0),
            ForwardRecord(M.name, 3, 1.0 + 1 + 1, 1),
        ],  # along with the second, then the third
        "restart": [ForwardRecord(M.name, 2, 2.0, 0), ForwardRecord(M.name, 3, 3.0, 1)],
    }
    for call in late[fill]:
        assert call in forward_log
    assert sum(call.fills for call in forward_log) == sum(call.fills for call in late[fill])


@pytest.mark.parametrize("fill", FILLS)
def test_requests_of_a_batch_are_counted_each_for_itself(fill: str) -> None:
    forward_logs: list[list[ForwardRecord]] = [[], []]

    def job(number: int) -> Any:
        return lambda scheduler: decode_with_exits(
            M.session(forward_logs[number], scheduler), SCHEDULES[2 + number], fill
        )

    together = run_together([job(0), job(1)])
    for number, rows in enumerate(together):
        alone: list[ForwardRecord] = []
        for row, own in zip(
            rows, decode_with_exits(M.session(alone), SCHEDULES[2 + number], fill), strict=True
        ):
            np.testing.assert_allclose(row.numpy(), own.numpy(), atol=1e-10)
        assert forward_logs[number] == alone
