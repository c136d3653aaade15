"""Stop rules: one cut for every technique, at every alignment of block and stop."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA
from tests.lm.test_tokenizer import byte_level
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.generation import stopping_criteria
from tinyspec.lm.model import Model

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def spell(ids: list[int]) -> str:
    return "".join("abcd"[i] for i in ids)


def plain(
    stop: StoppingCriteria, tokens: list[int], limit: int | None
) -> tuple[list[int], str | None]:
    """Token by token: what plain decoding does."""
    kept: list[int] = []
    reason = None
    for token in tokens:
        n, reason = stop.cut(kept, [token], limit)
        kept += [token][:n]
        if reason:
            break
    return kept, reason


@given(
    tokens=TOKENS,
    blocks=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    eos=st.frozensets(st.integers(0, 3), max_size=2),
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=2),
    strings=st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2),
    most=st.none() | st.integers(1, 12),
    limit=st.none() | st.integers(1, 12),
)
def test_blocks_stop_where_single_tokens_stop(
    tokens: list[int],
    blocks: list[int],
    eos: frozenset[int],
    sequences: list[tuple[int, ...]],
    strings: list[str],
    most: int | None,
    limit: int | None,
) -> None:
    stop = StoppingCriteria(eos, tuple(strings), tuple(sequences), most, spell)
    kept: list[int] = []
    reason, at = None, 0
    for size in blocks:
        block = tokens[at : at + size]
        at += size
        if reason or not block:
            break
        n, reason = stop.cut(kept, block, limit)
        kept += block[:n]
    assert (kept, reason) == plain(stop, tokens, limit)


def test_nothing_comes_after_the_first_end_of_text() -> None:
    assert StoppingCriteria(eos=frozenset({2, 3})).cut([], [1, 3, 2, 1]) == (2, "eos")


def test_an_end_of_text_at_the_last_allowed_token_is_eos_not_length() -> None:
    assert StoppingCriteria(eos=frozenset({2}), max_new_tokens=2).cut([1], [2]) == (1, "eos")


def test_no_tokens_are_kept_when_none_are_wanted() -> None:
    assert StoppingCriteria(max_new_tokens=0).cut([], [1]) == (0, "length")


def test_the_context_ends_a_text_before_a_larger_budget() -> None:
    assert StoppingCriteria(max_new_tokens=9).cut([1], [2, 3, 4], limit=3) == (2, "context")


def test_a_stop_string_made_of_bytes_of_one_character_is_found() -> None:
    stop = StoppingCriteria(
        strings=("é",), decode=lambda ids: bytes(ids).decode("utf-8", "replace")
    )
    assert stop.cut([], [*"aé".encode(), 98]) == (3, "stop")


def test_a_stop_string_in_a_long_run_of_byte_tokens_is_found() -> None:
    """SentencePiece spells a run that is not UTF-8 as U+FFFD as a whole."""

    def spell_run(ids: Sequence[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    ids = list("አበገደ።".encode())
    assert plain(StoppingCriteria(strings=("።",), decode=spell_run), ids, None) == (ids, "stop")


def test_a_string_that_began_long_before_the_block_is_found() -> None:
    long = "abcd" * 8
    ids = ["abcd".index(c) for c in long]
    assert StoppingCriteria(strings=(long,), decode=spell).cut(ids[:-1], [ids[-1], 0]) == (
        1,
        "stop",
    )


def test_tokens_without_text_hide_no_stop_string() -> None:
    """Special tokens may stand inside a stop string, more than it has bytes."""
    silent = 4
    decode = lambda ids: spell([id for id in ids if id != silent])  # noqa: E731
    stop = StoppingCriteria(strings=("abc",), decode=decode, silent=frozenset({silent}))
    ids = [0, *[silent] * 40, 1, *[silent] * 40, 2]
    assert plain(stop, [*ids, 3], None) == (ids, "stop")
    assert stop.cut([0, 1], [silent, 2, 3]) == (2, "stop")


def test_a_request_knows_which_ids_have_no_text() -> None:
    """Special tokens, and the ids that a padded embedding has beyond the vocabulary."""
    tokenizer = byte_level()
    size = tokenizer.vocab_size
    config = replace(LLAMA, vocab_size=size + 3)
    model = Model(config, Model.random(config).weights, tokenizer)
    stop = stopping_criteria(model, ["ab"], None)
    assert stop.silent == {*tokenizer.special_ids, size, size + 1, size + 2}
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    ids = [a, *[*stop.silent] * 20, b]
    assert stop.cut(ids[:-1], [b, a]) == (1, "stop")


def test_a_window_that_begins_inside_a_character_has_no_stop_of_its_own() -> None:
    """Its first bytes alone read as U+FFFD, which the whole text does not have."""
    ids = [*("é" * 20).encode(), 97, 98]
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")  # noqa: E731
    stop = StoppingCriteria(strings=("\ufffd",), decode=decode)
    assert stop.cut(ids[:-1], [98]) == (1, None)


@given(text=st.text("abc", max_size=8), stop=st.text("abc", min_size=1, max_size=4))
def test_what_is_withheld_is_the_longest_beginning_of_a_stop_string(text: str, stop: str) -> None:
    held = StoppingCriteria(strings=(stop,), decode=str).withheld(text)
    assert held == max(
        n for n in range(min(len(stop), len(text) + 1)) if text.endswith(stop[:n]) or n == 0
    )


def test_text_ends_before_the_first_stop_string() -> None:
    assert StoppingCriteria(strings=("zz", "b"), decode=str).trim("aab zz") == "aa"


@pytest.mark.parametrize(
    "wrong",
    [
        {"strings": ("",), "decode": str},
        {"sequences": ((),)},
        {"max_new_tokens": -1},
        {"strings": ("a",)},
    ],
)
def test_unusable_stops_are_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(TinyspecError):
        StoppingCriteria(**wrong)  # type: ignore[arg-type]
