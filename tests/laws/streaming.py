"""Laws of streamed text: a stream is the whole decoding, and stop strings are found anywhere.

Tokens of a byte-level vocabulary may end inside a character. Which of them do depends on the
vocabulary, so both laws take a real tokenizer. Texts are drawn from all of Unicode, ids from the
whole vocabulary, and both are split at any place.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.strategies import search_cases, st
from tinyspec.lm.tokenizer import Detokeniser, Tokenizer

STREAM_LAW = "a stream is the whole decoding"
STOP_STRINGS = "stop strings"
BROKEN = "\ufffd"  # what half a character decodes to

STREAM_CHARACTERS = st.sampled_from("a b.eé€語🦊\n") | st.characters(exclude_categories=["Cs"])


@st.composite
def token_spellings(draw: st.DrawFn, tokenizer: Tokenizer, whole: bool = False) -> list[int]:
    """Draw the ids of some text; unless `whole`, also any ids, and texts cut inside a character."""
    kind = "text" if whole else draw(st.sampled_from(["text", "cut", "ids"]))
    if kind == "ids":
        return draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=12))
    text = draw(st.text(STREAM_CHARACTERS, max_size=16))
    ids = tokenizer.encode(text if not whole else text.replace(BROKEN, ""))
    first = draw(st.integers(0, len(ids))) if kind == "cut" else 0
    return ids[first : draw(st.integers(first, len(ids)))] if kind == "cut" else ids


@st.composite
def split_blocks(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    """Split the ids, in order, into blocks of any size, empty ones included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 1)))
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def streaming_law(
    tokenizer: Tokenizer, stream: Callable[[], Detokeniser] | None = None, examples: int = 200
) -> Evidence:
    """Check that the pieces of a stream, joined, are the decoding of all ids.

    Nothing shown is taken back, and no half character is shown.

    A flushed stream begins a new text.
    """

    @st.composite
    def cases(draw: st.DrawFn) -> list[list[int]]:
        return draw(split_blocks(draw(token_spellings(tokenizer))))

    def judge(blocks: list[list[int]]) -> None:
        ids = [token for block in blocks for token in block]
        whole, shown, pieces = tokenizer.decode(ids), "", (stream or tokenizer.stream)()
        case = {"blocks": blocks, "tokens": [tokenizer.token_text(token) for token in ids]}
        for block in blocks:
            shown += pieces.push(block)
            if not whole.startswith(shown):
                accuse(STREAM_LAW, f"a beginning of {whole!r}", repr(shown), **case)
        shown += pieces.flush()
        if shown != whole:
            accuse(STREAM_LAW, repr(whole), repr(shown), **case)
        again = pieces.push(ids) + pieces.flush()
        if again != whole:
            accuse(STREAM_LAW, repr(whole), repr(again), **case, after="a flush")

    return search_cases(cases(), judge, STREAM_LAW, examples)


def stop_strings(
    tokenizer: Tokenizer,
    stop: Callable[..., StoppingCriteria] = StoppingCriteria,
    examples: int = 200,
) -> Evidence:
    """Check that a text ends with the token that completes a stop string.

    The string may lie anywhere in tokens and blocks. The text before it is kept; what is withheld
    while the text grows is all that may become a stop string.
    """

    @st.composite
    def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[str]]:
        ids = draw(token_spellings(tokenizer, whole=True).filter(bool))
        text = tokenizer.decode(ids)
        strings = []
        for _ in range(draw(st.integers(1, 2))):
            first = draw(st.integers(0, len(text) - 1))
            strings.append(text[first : draw(st.integers(first + 1, min(len(text), first + 5)))])
        return draw(split_blocks(ids)), [*strings, *(["zzz"] if draw(st.booleans()) else [])]

    def judge(drawn: tuple[list[list[int]], list[str]]) -> None:
        blocks, strings = drawn
        ids = [token for block in blocks for token in block]
        texts = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        ends = next(
            (n for n, text in enumerate(texts) if any(s in text for s in strings)), len(ids)
        )
        before = min(
            [at for s in strings if (at := texts[ends].find(s)) >= 0], default=len(texts[ends])
        )
        rule = stop(strings=tuple(strings), decode=tokenizer.decode)
        case = {"blocks": blocks, "text": texts[-1], "stop": strings}
        new: list[int] = []
        reason, pieces, shown = None, tokenizer.stream(), ""
        for block in blocks:
            if reason is None:
                kept, reason = rule.cut(new, block)
                new += block[:kept]
                grown = rule.trim(shown + pieces.push(block[:kept]))
                shown, safe = grown, len(grown) - (0 if reason else rule.withheld(grown))
                if not texts[ends][:before].startswith(grown[:safe]):
                    accuse(
                        STOP_STRINGS,
                        f"a beginning of {texts[ends][:before]!r}",
                        repr(grown[:safe]),
                        **case,
                        of="shown",
                    )
        expected: Any = (ids[:ends], "stop" if any(s in texts[ends] for s in strings) else None)
        if (new, reason) != expected:
            accuse(STOP_STRINGS, expected, (new, reason), **case, of="tokens")
        if rule.trim(tokenizer.decode(new)) != texts[ends][:before]:
            accuse(
                STOP_STRINGS,
                repr(texts[ends][:before]),
                repr(rule.trim(tokenizer.decode(new))),
                **case,
                of="text",
            )

    return search_cases(cases(), judge, STOP_STRINGS, examples)
