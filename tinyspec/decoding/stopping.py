"""Decide where a text ends: one rule for every method, applied inside the round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tinyspec.errors import TinyspecError

Reason = str  # "eos", "stop", "length", "context", "interrupted"


@dataclass(frozen=True)
class StoppingCriteria:
    """The rules that end a text.

    eos             ids that end the text; the id itself is kept as the last token
    strings         texts that end it; the token that completes one is the last token (the text is
                    cut before the string)
    sequences       token sequences that end it, kept whole
    max_new_tokens  None: no limit
    decode          ids -> text, needed for strings
    silent          ids without text, which may stand inside a string
    """

    eos: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    max_new_tokens: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    silent: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if any(not s for s in self.strings) or any(not s for s in self.sequences):
            raise TinyspecError(
                "a stop string or sequence is empty: it would stop before the first token"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise TinyspecError(f"max_new_tokens is {self.max_new_tokens}: it must be 0 or more")
        if self.strings and self.decode is None:
            raise TinyspecError(
                "stop strings need a tokenizer: pass stop sequences of token ids instead"
            )

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, Reason | None]:
        """Return how many `fresh` tokens to keep after the `new` ones, and the reason to end.

        The reason is None if the text goes on.

        limit  the most new tokens that the context still allows in all

        >>> StoppingCriteria(eos=frozenset({0}), max_new_tokens=9).cut([5], [7, 0, 8])
        (2, 'eos')
        >>> StoppingCriteria(sequences=((5, 7),)).cut([5], [7, 8])
        (1, 'stop')
        """
        seen = list(new)
        room = self.tokens_left(len(seen), limit)
        for kept, token in enumerate(fresh):
            if room is not None and kept >= room[0]:
                return kept, room[1]
            seen.append(token)
            if token in self.eos:
                return kept + 1, "eos"
            if any(
                tuple(seen[-len(s) :]) == s for s in self.sequences
            ) or self._completes_stop_string(seen):
                return kept + 1, "stop"
        if room is not None and len(fresh) >= room[0]:
            return room[0], room[1]
        return len(fresh), None

    def tokens_left(self, made: int, limit: int | None) -> tuple[int, Reason] | None:
        """Return how many tokens may follow `made` new ones, and the reason to end then.

        None if there is no limit.
        """
        ends: list[tuple[int, Reason]] = []
        if self.max_new_tokens is not None:
            ends.append((self.max_new_tokens - made, "length"))
        if limit is not None:
            ends.append((limit - made, "context"))
        return min(ends, key=lambda end: end[0]) if ends else None

    def _completes_stop_string(self, seen: Sequence[int]) -> bool:
        """Return whether the last token completed a stop string.

        A token may be a part of a character; a special one has no text. The last tokens with text
        are decoded first, which is quick. They may begin inside a character, so a hit is looked at
        again in the whole text.
        """
        if not self.strings or self.decode is None or seen[-1] in self.silent:
            return False
        window = max(len(s.encode()) for s in self.strings) + 8
        last = islice((token for token in reversed(seen) if token not in self.silent), window)
        near = self.decode([*last][::-1])
        # A cut character leaves up to 3 marks at an end; a cut run of byte tokens is all marks.
        may_hit = near.count("\ufffd") > 6 or self._has_stop_string(near)
        return may_hit and self._has_stop_string(self.decode(seen))

    def _has_stop_string(self, text: str) -> bool:
        return any(s in text for s in self.strings)

    def trim(self, text: str) -> str:
        """Return the text up to the first stop string."""
        ends = [at for s in self.strings if (at := text.find(s)) >= 0]
        return text[: min(ends)] if ends else text

    def withheld(self, text: str) -> int:
        """Return how many characters at the end could still become a stop string.

        Streaming must not show them yet.

        >>> StoppingCriteria(strings=("END",), decode=str).withheld("the EN")
        2
        """
        longest = 0
        for s in self.strings:
            for n in range(min(len(s) - 1, len(text)), longest, -1):
                if text.endswith(s[:n]):
                    longest = n
                    break
        return longest
