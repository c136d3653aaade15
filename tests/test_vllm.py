"""The proposer of vLLM's `custom_class`: a chain for each request, from its tokens alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyspec.errors import TinyspecError
from tinyspec.speculative.drafting.datastore import write_datastore
from tinyspec.vllm import VARIABLE, Proposer, read_method

ROOM = 64
Next = Callable[[Sequence[int]], int]


def config(k: int = 4, room: int = ROOM) -> Any:
    """What the proposer reads of vLLM's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=room),
    )


def ask(proposer: Proposer, texts: Sequence[Sequence[int]], sampled: Any = None) -> list[list[int]]:
    """Ask for drafts as vLLM does: texts are rows of one array, with their lengths."""
    rows = np.zeros((len(texts), ROOM), dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    sampled = [[text[-1]] for text in texts] if sampled is None else sampled
    return proposer.propose(sampled, lengths, rows, slot_mappings=None)


def repeat(period: int) -> Next:
    return lambda text: text[-period]


def decode(proposer: Proposer, prompts: Sequence[list[int]], nexts: Sequence[Next], n: int) -> Any:
    """Decode a batch greedily with a target by hand. Returns texts, and accepted draft tokens."""
    texts, accepted = [list(prompt) for prompt in prompts], 0
    texts = [[*text, target(text)] for text, target in zip(texts, nexts, strict=True)]
    while min(len(text) for text in texts) < n:
        for text, target, draft in zip(texts, nexts, ask(proposer, texts), strict=True):
            for token in draft:
                if target(text) != token:
                    break
                text.append(token)
                accepted += 1
            text.append(target(text))
    return texts, accepted


@pytest.mark.parametrize("method", ["suffix_decoding", "llma:n=2:k=4", "lookahead_trie"])
def test_a_batch_gets_its_texts_and_drafts_are_accepted(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, method)
    prompts, nexts = [[1, 2, 3, 1, 2, 3], [7, 8, 7, 8, 7]], [repeat(3), repeat(2)]
    texts, accepted = decode(Proposer(config()), prompts, nexts, 24)
    for text, prompt, target in zip(texts, prompts, nexts, strict=True):
        alone = list(prompt)
        while len(alone) < len(text):
            alone.append(target(alone))
        assert text == alone
    assert accepted > 20


def test_rest_drafts_what_followed_in_its_datastore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store `1 2 3 4 5 6` and `7 8 9`. After `9 1 2` the draft is `3 4 5 6`, after `7 8` it is `9`."""
    store = tmp_path / "store"
    write_datastore(store, [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    monkeypatch.setenv(VARIABLE, f"rest:datastore={store}")
    proposer = Proposer(config(k=4))
    assert ask(proposer, [[9, 1, 2], [7, 8], [5, 5]]) == [[3, 4, 5, 6], [9], []]
    assert ask(proposer, [[9, 1, 2, 3, 4, 5]]) == [[6]]


def test_a_request_whose_prompt_is_still_read_has_no_draft() -> None:
    assert ask(Proposer(config()), [[1, 2, 1, 2], [1, 2, 1]], [[], [1]])[0] == []


def test_no_draft_reaches_beyond_the_context() -> None:
    proposer = Proposer(config(k=4, room=8))
    assert ask(proposer, [[1, 2] * 2 + [1]]) == [[2, 1]]
    assert ask(proposer, [[1, 2] * 3 + [1]]) == [[]]


def test_a_request_is_known_by_its_text_wherever_its_row_is() -> None:
    """vLLM moves rows when a request ends."""
    proposer = Proposer(config(k=2))
    ask(proposer, [[9, 9, 9], [1, 2, 1, 2, 1]])
    kept = proposer.live[1]
    assert ask(proposer, [[1, 2, 1, 2, 1, 2]]) == [[1, 2]]
    assert proposer.live == [kept]


def test_a_text_that_was_changed_is_read_anew() -> None:
    proposer = Proposer(config(k=2))
    ask(proposer, [[1, 2, 1, 2, 1]])
    assert ask(proposer, [[5, 6, 5, 6, 5]]) == [[6, 5]]


@pytest.mark.parametrize("method", ["token_recycling", "medusa", "speculative_decoding", "sarathi"])
def test_a_method_that_reads_more_than_tokens_is_refused(method: str) -> None:
    with pytest.raises(TinyspecError, match="needs more than the tokens that vLLM gives"):
        read_method(method)


def test_wrong_knobs_are_named_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, words in (("llma:kk=3", "no knob 'kk'"), ("llma:k", "NAME:knob=value")):
        monkeypatch.setenv(VARIABLE, method)
        with pytest.raises(TinyspecError, match=words):
            Proposer(config())
    monkeypatch.setenv(VARIABLE, "rest")
    with pytest.raises(TinyspecError, match="datastore"):
        Proposer(config())
