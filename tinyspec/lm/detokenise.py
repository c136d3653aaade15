"""Ids to text while the ids are still coming, without ever showing half a character.

One token may end in the middle of a UTF-8 character, and what a token decodes to may depend on its
neighbours (a SentencePiece decoder drops the first space of a text; a run of byte tokens is judged
as a whole). The law both streams keep: the pieces, joined, are the decoding of all ids, however the
ids were split.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokeniser(Protocol):
    """A growing text. `flush` ends it (a half character becomes U+FFFD, as in a whole decode) and
    starts a new one.
    """

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class ByteStream:
    """For byte-level BPE: every token is a few bytes, and a text is their concatenation read as
    UTF-8.

    >>> stream = ByteStream({0: b"caf", 1: b"\\xc3", 2: b"\\xa9"}.__getitem__)
    >>> [stream.push([0, 1]), stream.push([2]), stream.flush()]
    ['caf', 'é', '']
    """

    def __init__(self, to_bytes: Callable[[int], bytes]) -> None:
        self._to_bytes = to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._to_bytes, ids)))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class WindowStream:
    """For every other decoder: decode a short window twice, with and without what is new, and show
    the difference.

    A decoder treats the first token of a text apart, so the window always begins with tokens
    already shown, and their text is cut off again. Nothing is shown while the end may still change:
    after a byte token (a run of them that is not UTF-8 turns to U+FFFD as a whole) and after a half
    character. A push costs a few tokens, not the whole text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], token: Callable[[int], str | None]
    ) -> None:
        self._decode, self._token = decode, token
        self._shown: list[
            int
        ] = []  # tokens whose text is out; they decode to something, unless nothing is out yet
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        self._held.extend(i for i in ids if self._token(i) is not None)
        if not self._held or _BYTE_TOKEN.fullmatch(self._token(self._held[-1]) or ""):
            return ""
        text = self._decode(self._shown + self._held)
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        text = self._show(self._decode(self._shown + self._held))
        self._shown = []
        return text

    def _show(self, text: str) -> str:
        new = text[len(self._decode(self._shown)) :]
        # Tokens that decode to nothing on their own ("▁" at the start of a text) cannot stand in
        # for what came before.
        self._shown = self._held if self._decode(self._held) else self._shown + self._held
        self._held = []
        return new
