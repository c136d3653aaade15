"""Streams and stops on the storyteller's own vocabulary, and the defects that their laws must see.

Other vocabularies (metaspace, byte fallback, word pieces) are in tests/lm/test_tokenizer.py; stops
of ids at every alignment, in whole decoders, are in tinyspec.laws.request_laws and loop_laws.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.laws import streaming
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import LawViolated
from tinyspec.lm.tokenizer import Tokenizer

ZOO = Path(__file__).parents[2] / "models"


@cache
def storyteller() -> Tokenizer:
    return Tokenizer.from_folder(ZOO / "storyteller")


def test_the_storytellers_pieces_join_to_its_text() -> None:
    assert streaming.streaming_law(storyteller()).cases > 150


def test_stop_strings_are_found_wherever_tokens_cut_them() -> None:
    assert streaming.stop_strings(storyteller()).cases > 150


@given(st.text(max_size=30))
def test_any_text_comes_back_from_the_storytellers_ids(text: str) -> None:
    assert storyteller().decode(storyteller().encode(text)) == text


def test_characters_are_cut_apart_by_the_storytellers_tokens() -> None:
    """Otherwise the laws above would look at nothing."""
    ids = storyteller().encode("語🦊")
    assert len(ids) > 2
    assert streaming.BROKEN in storyteller().decode(ids[:1])


# --- what each law kills --------------------------------------------------------------------------


class Pieces:
    """A stream in the making: `show` says what of the text so far is out."""

    def __init__(self, show: Callable[[str, str], str]):
        self.show, self.ids, self.out = show, list[int](), ""

    def push(self, ids: Iterable[int]) -> str:
        self.ids += ids
        piece = self.show(storyteller().decode(self.ids), self.out)
        self.out += piece
        return piece

    def flush(self) -> str:
        rest = storyteller().decode(self.ids)[len(self.out) :]
        self.ids, self.out = [], ""
        return rest


class EachAlone(Pieces):
    """Decodes what is pushed by itself."""

    def __init__(self) -> None:
        super().__init__(lambda text, out: "")

    def push(self, ids: Iterable[int]) -> str:
        return storyteller().decode(list(ids))

    def flush(self) -> str:
        return ""


class Unflushed(Pieces):
    """Loses the half character at the end of a text."""

    def flush(self) -> str:
        rest = super().flush()
        return rest.rstrip(streaming.BROKEN)


class Unended(Pieces):
    """Goes on with the old text after a flush."""

    def flush(self) -> str:
        ids = list(self.ids)
        rest = super().flush()
        self.ids, self.out = ids, storyteller().decode(ids)
        return rest


def whole_characters(text: str, out: str) -> str:
    return "" if text.endswith(streaming.BROKEN) else text[len(out) :]


STREAMS: dict[str, Callable[[], Any]] = {
    "each push is decoded alone": EachAlone,
    "half characters are shown": lambda: Pieces(lambda text, out: text[len(out) :]),
    "the last half character is lost": lambda: Unflushed(whole_characters),
    "a flush does not end the text": lambda: Unended(whole_characters),
}


@pytest.mark.parametrize("defect", STREAMS)
def test_a_defective_stream_is_accused(defect: str) -> None:
    with pytest.raises(LawViolated, match=streaming.STREAM_LAW):
        streaming.streaming_law(storyteller(), STREAMS[defect])


class NewBlock(StoppingCriteria):
    """Looks into the block that is new, not across its beginning."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, str | None]:
        return super().cut((), fresh, limit)


class LastToken(StoppingCriteria):
    """A stop string must be a token's whole text."""

    def _completes_stop_string(self, seen: Sequence[int]) -> bool:
        return self.decode is not None and self.decode(seen[-1:]) in self.strings


class Characters(StoppingCriteria):
    """Counts a token as a character at least."""

    def _completes_stop_string(self, seen: Sequence[int]) -> bool:
        window = max(len(s) for s in self.strings)
        return self.decode is not None and any(
            s in self.decode(seen[-window:]) for s in self.strings
        )


class Kept(StoppingCriteria):
    """Keeps the stop string in the text."""

    def trim(self, text: str) -> str:
        ends = [at + len(s) for s in self.strings if (at := text.find(s)) >= 0]
        return text[: min(ends)] if ends else text


class Hasty(StoppingCriteria):
    """Shows what may become a stop string."""

    def withheld(self, text: str) -> int:
        return 0


@pytest.mark.parametrize("kind", [NewBlock, LastToken, Characters, Kept, Hasty])
def test_a_defective_stop_is_accused(kind: type[StoppingCriteria]) -> None:
    with pytest.raises(LawViolated, match=streaming.STOP_STRINGS):
        streaming.stop_strings(storyteller(), kind)
