"""Tokens that leave early: what the target shows, what is missing in the cache, and three fills."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.lm.oracle import Oracle
from tests.lm.small import GPT2, LLAMA, PROMPT, model, same_cache
from tinyspec.early_exit.exits import FILLS, ExitPoint, ExitRule, ExitTarget
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import run_dense
from tinyspec.laws.exact.tables import TableModel
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.tree import TokenTree

M = model(LLAMA)
L = LLAMA.n_layers
EMPTY = TokenTree()


class At(ExitRule):
    """Tokens leave after these layers, one after the other; tokens beyond the list run the whole
    model.
    """

    def __init__(self, *layers: int, reads_logits: bool = False, states: int = 0):
        self.wanted, self.layers = layers, range(1, L)
        self.reads_logits, self.states, self.seen = reads_logits, states, list[ExitPoint]()

    def should_exit(self, at: ExitPoint) -> bool:
        self.seen.append(at)
        return at.step < len(self.wanted) and self.wanted[at.step] == at.layer


def run(target: ExitTarget, tokens: list[int]) -> list[Any]:
    """Score and commit, token by token; the scores."""
    target.extend(PROMPT)
    scores = []
    for token in tokens:
        scores.append(target.score(EMPTY))
        target.commit((), token)
    return scores


def begun(rule: ExitRule, fill: str = "copy", m: Any = M) -> tuple[ExitTarget, list[ForwardRecord]]:
    forward_log: list[ForwardRecord] = []
    return ExitTarget(m.session(forward_log), rule, fill), forward_log


@pytest.mark.parametrize("m", [M, model(GPT2)], ids=["llama", "gpt2"])
def test_a_copied_tokens_keys_are_each_layers_own_projection_of_its_exit_state(m: Any) -> None:
    """Trap: the exit layer's keys in the layers above. Against a transformer written a second time,
    layer by layer.
    """
    target, _ = begun(At(1, 2, 1), m=m)
    oracle = Oracle(m)
    done = oracle.text(PROMPT[:-1])
    scores = run(target, [7, 8, 9, 2])
    for token, layer, score in zip((PROMPT[-1], 7, 8), (1, 2, 1), scores, strict=False):
        done.append(oracle.run(token, done, copy_from=layer))
        np.testing.assert_allclose(score.logits[0].numpy(), done[-1].logits, atol=1e-10)
        assert list(score.layers) == [layer]
    np.testing.assert_allclose(scores[3].logits[0].numpy(), oracle.run(9, done).logits, atol=1e-10)
    for at, token in enumerate(done):
        for layer in range(L):
            np.testing.assert_allclose(
                target.session.cache.keys[layer][:, at].numpy(), token.keys[layer], atol=1e-10
            )
    assert not target.cache_exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("row", [False, True])
def test_a_token_that_never_leaves_early_runs_the_full_model_bit_for_bit(
    dtype: Any, row: bool
) -> None:
    m = model(LLAMA, dtype=dtype)
    whole = m.session()
    whole.extend(PROMPT)
    for score, token in zip(
        run(begun(At(reads_logits=row, states=2), m=m)[0], [7, 8, 9]), [7, 8, 9], strict=True
    ):
        assert torch.equal(score.logits, whole.score(EMPTY).logits) and list(score.layers) == [L]
        whole.commit((), token)


@pytest.mark.parametrize("fill", ["recompute", "postpone", "restart"])
def test_the_other_fills_are_cache_exact_and_the_logits_stay_the_exits(fill: str) -> None:
    target, _ = begun(At(1, 2, 1), fill)
    scores = run(target, [7, 8, 9, 2])
    text = [*PROMPT, 7, 8, 9]
    for at, (layer, score) in enumerate(zip((1, 2, 1, L), scores, strict=True)):
        session = M.session()
        session.extend(text[: len(PROMPT) + at])
        torch.testing.assert_close(
            score.logits, session.view(Plan(last=layer)).score(EMPTY).logits, atol=1e-10, rtol=0
        )
    target.session.score(EMPTY)  # whoever goes deep brings along what waits
    same_cache(target.session)
    assert target.cache_exact


def test_what_each_fill_costs_is_in_the_ledger() -> None:
    """Exits after layers 1 and 1, then the whole model of three layers: fills, layers, and which
    tokens run together.
    """
    passes = {}
    for fill in FILLS:
        target, forward_log = begun(At(1, 1), fill)
        run(target, [7, 8, 9])
        passes[fill] = [
            (call.rows, call.row_layers, call.fills) for call in forward_log if not call.prefill
        ]
    one, head = (1, 1.0, 0), (1, 0.0, 0)  # a layer; the exit's logits, where the rule reads none
    whole = [one, one, one]
    assert passes["copy"] == [one, head, (1, 0.0, 2), one, head, (1, 0.0, 2), *whole]
    assert passes["recompute"] == [one, head, (1, 2.0, 0), one, head, (1, 2.0, 0), *whole]
    assert passes["postpone"] == [one, head, one, head, one, (3, 3.0, 0), (3, 3.0, 0)]
    two, three = (2, 2.0, 0), (3, 3.0, 0)  # again from layer 1
    assert passes["restart"] == [one, head, two, head, three, three, three]


def test_a_rule_that_reads_logits_pays_a_head_product_a_layer_and_any_other_pays_one() -> None:
    for row, products in ((True, 2 + 1), (False, 1 + 1)):
        target, forward_log = begun(At(2, reads_logits=row))
        run(target, [7])
        target.session.score(EMPTY)
        assert sum(call.head_rows for call in forward_log) == products


def test_a_rule_sees_the_states_it_reads_the_step_and_the_logits() -> None:
    rule = At(1, reads_logits=True, states=2)
    target, _ = begun(rule)
    run(target, [7, 8])
    done = Oracle(M).text(PROMPT)
    assert [(at.layer, at.step) for at in rule.seen] == [(1, 0), (1, 1), (2, 1)]
    first = rule.seen[0]
    for state, layer in zip(first.states, (1, 0), strict=True):
        np.testing.assert_allclose(state.numpy(), done[-1].states[layer], atol=1e-10)
    cut = Oracle(M).text([PROMPT[-1]], Plan(last=1), done[:-1])
    np.testing.assert_allclose(first.logits.numpy(), cut[-1].logits, atol=1e-10)


def test_the_last_token_of_a_text_is_never_filled_and_the_prompt_always_runs_whole() -> None:
    target, forward_log = begun(At(1, 1, 1))
    run(target, [7])
    assert [call.fills for call in forward_log] == [0, 0, 0] and forward_log[0].prefill
    assert forward_log[0].row_layers == L * (len(PROMPT) - 1)
    target.score(EMPTY)
    assert sum(call.fills for call in forward_log) == L - 1


@pytest.mark.parametrize("m", [M, TableModel(3)], ids=["transformer", "table"])
@pytest.mark.parametrize("fill", FILLS)
def test_rewound_text_leaves_no_trace(m: Any, fill: str) -> None:
    prompt, tokens = [0, 1, 2], [2, 0, 1, 1]
    straight = ExitTarget(m.session(), At(1, 2, 1, 1), fill)
    straight.extend(prompt)
    for token in tokens:
        expected = straight.score(EMPTY).logits
        straight.commit((), token)
    for back in (1, 2, 3):
        target = ExitTarget(m.session(), At(1, 2, 1, 1), fill)
        target.extend(prompt)
        for token in tokens[:3]:
            target.score(EMPTY)
            target.commit((), token)
        target.rewind(len(prompt) + 3 - back)
        for token in tokens[3 - back :]:
            got = target.score(EMPTY).logits  # the new newest token is run again, as far as it went
            target.commit((), token)
        assert np.allclose(np.array(got, dtype=float), np.array(expected, dtype=float), atol=1e-10)


def test_text_given_from_outside_fills_what_left_early_first() -> None:
    target, forward_log = begun(At(1))
    run(target, [7])
    target.extend([8, 9])
    assert sum(call.fills for call in forward_log) == L - 1
    assert target.start == len(target) == len(PROMPT) + 3
    target.end()
    assert (len(target), target.start, target.unfilled) == (0, 0, [])


class Reading(At):
    """It notes of which positions it reads states, and those states."""

    text_layers = (L,)

    def read_text(self, states: Any, first: int) -> None:
        self.read = {**getattr(self, "read", {}), **dict(enumerate(states[0], first))}


def test_states_of_generated_tokens_are_not_read_as_given_text() -> None:
    """Places 6 and 7 are generated. The newest token has no state yet: it has not been run."""
    rule = Reading()
    target, _ = begun(rule)
    run(target, [7, 8])
    assert list(rule.read) == [0, 1, 2, 3, 4]
    target.extend([9, 2])
    assert list(rule.read) == [0, 1, 2, 3, 4, 8]
    target.extend([6])
    assert list(rule.read) == [0, 1, 2, 3, 4, 8, 9]
    whole = M.session().extend([*PROMPT, 7, 8, 9, 2, 6], (L,)).hidden[0]
    for at, state in rule.read.items():
        torch.testing.assert_close(state, whole[at], atol=1e-10, rtol=0)


def test_a_hole_in_the_cache_is_an_error_and_never_silence() -> None:
    target, _ = begun(At(1))
    run(target, [7])
    target.fill = lambda session, positions: setattr(
        session.committed[positions[0]], "filled", True
    )
    with pytest.raises(RuntimeError, match="has no keys in layer 1"):
        target.score(EMPTY)


def test_a_rule_that_may_stop_takes_no_drafts_and_one_that_never_does_is_the_session() -> None:
    target, _ = begun(At(1))
    target.extend(PROMPT)
    with pytest.raises(ValueError, match="no drafts"):
        target.score(TokenTree.chain([1]))
    target, _ = begun(ExitRule())
    target.extend(PROMPT)
    assert len(target.score(TokenTree.chain([1, 2])).logits) == 3
    assert target.text == PROMPT and target.model is M


@pytest.mark.parametrize("layer", [0, L + 1])
def test_exit_that_is_no_layer_raises_an_error(layer: int) -> None:
    rule = ExitRule()
    rule.layers = (layer,)
    with pytest.raises(
        TinyspecError, match=rf"exit layer {layer} is out of range: .* layers 1 to {L}"
    ):
        ExitTarget(M.session(), rule)


class Known(ExitRule):
    """The layer of a token follows from its id, also in the prompt."""

    prompt = True

    def __init__(self, *, prompt: bool = True):
        self.layers, self.prompt = range(1, L), prompt

    def layers_of(self, token: int, position: int) -> tuple[int, ...]:
        layer = 1 + token % L
        return (layer,) if layer < L else ()

    def should_exit(self, at: ExitPoint) -> bool:
        return True


def test_a_rule_that_knows_its_layer_is_asked_once() -> None:
    """Token 1 leaves after two layers, token 3 after one, token 2 never."""
    forward_log: list[ForwardRecord] = []
    target = ExitTarget(M.session(forward_log), Known(prompt=False), "recompute")
    target.extend([5, 1])
    for token in (3, 2, 1):
        target.score(EMPTY)
        target.commit((), token)
    head = 0.0  # the logits of the exit, which the rule does not read
    assert [call.row_layers for call in forward_log] == [L, 2, head, 1, 1, head, 2, L]


@pytest.mark.parametrize(
    "m",
    [M, model(GPT2), model(LLAMA, dtype=torch.float32)],
    ids=["llama", "gpt2", "compiled"],
)
def test_a_prompt_that_leaves_early_is_the_masked_stream(m: Any) -> None:
    """Three oracles agree: the session, the dense pass in numpy, and the stream that is trained."""
    text = [*PROMPT, 7, 8, 9, 2, 6]
    within = 1e-10 if m.dtype == torch.float64 else 1e-4
    depths = np.array([1 + token % L for token in text])
    target = ExitTarget(m.session(), Known(), "copy")
    target.extend(text[:4])
    target.score(EMPTY)
    target.commit((), text[4])
    target.append(text[5:7])
    target.extend(text[7:])
    row = target.score(EMPTY).logits[0].numpy()

    def leaves(layer: int, states: Any, below: Any) -> Any:
        return depths == layer

    expected = run_dense(m, text, leaves=leaves)
    np.testing.assert_allclose(row, expected.logits[-1], atol=within)
    *_, stream = m.torch_blocks().layer_states(
        torch.tensor([text]), depths=torch.tensor([depths.tolist()])
    )
    trained = m.torch_blocks().compute_logits(stream)[0].detach().numpy()
    np.testing.assert_allclose(trained, expected.logits, atol=within)
    for layer, keys in enumerate(expected.keys):
        assert keys is not None
        cached = target.session.cache.keys[layer][:, : len(text) - 1].transpose(0, 1)
        np.testing.assert_allclose(cached.numpy(), keys[:-1], atol=within)


class Comparing(At):
    compares = True

    def __init__(self, *layers: int):
        super().__init__(*layers, reads_logits=True)
        self.pairs, self.begun = list[list[tuple[ExitPoint, Any]]](), 0

    def begin(self, session: Any) -> None:
        self.begun += 1

    def learn_from_pairs(self, pairs: Any) -> None:
        self.pairs.append(list(pairs))


def test_rows_of_tokens_that_wait_are_kept_only_to_be_compared() -> None:
    """A row has as many numbers as the vocabulary has tokens."""
    for rule, kept in ((At(1, 1, 1, reads_logits=True), 0), (Comparing(1, 1, 1), 3)):
        target, _ = begun(rule, "postpone")
        run(target, [7, 8, 9])
        assert len(target.unfilled) == 3
        assert list(target.points) == target.unfilled[:kept]


@pytest.mark.parametrize("m", [M, TableModel(3, vocabulary=10)], ids=["transformer", "table"])
@pytest.mark.parametrize("fill", ["postpone", "restart"])
def test_a_rule_learns_from_the_rows_of_tokens_that_waited(m: Any, fill: str) -> None:
    """Each token comes once: where it was asked last, and the row of the whole model."""
    rule = Comparing(1, 2, L, 1)
    target, forward_log = begun(rule, fill, m)
    run(target, [7, 8, 9, 2])
    assert rule.begun == 1 and len(rule.pairs) == 1
    assert [point.layer for point, _ in rule.pairs[0]] == [1, 2, L - 1]
    text = [*PROMPT, 7, 8]
    for at, (point, deep) in enumerate(rule.pairs[0]):
        fresh = m.session()
        fresh.extend(text[: len(PROMPT) + at])
        early = fresh.view(Plan(last=point.layer)).score(EMPTY).logits[0]
        full = fresh.score(EMPTY).logits[0]
        for got, row in ((point.logits, early), (deep, full)):
            np.testing.assert_allclose(
                np.array(got, dtype=float), np.array(row, dtype=float), atol=1e-10
            )
    assert max(call.head_rows for call in forward_log) == 3  # those of the two that waited count
