"""Show results in a notebook: a text coloured by the origin of its tokens, and tables, as plain
HTML.

There is no script, no style sheet and no frame in it: notebooks that are not trusted strip those,
and so does GitHub. Whatever a model wrote is escaped.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from tinyspec.decoding.trace import Trace, TraceRound
from tinyspec.lm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyspec.technique import Card

ROUNDS_SHOWN = 200  # rounds that are listed below a text
NODES_SHOWN = 12  # draft tokens that are listed in a round
PROMPT_SHOWN = 300  # characters of the prompt, from its end

# Okabe and Ito's palette, as in the terminal: readable on light and dark, never told by colour
# alone.
STYLES = {
    "accepted": "color:#009e73;font-weight:bold",
    "recovered": "color:#d55e00;border:1px solid #d55e00",
    "bonus": "color:#3a9bd9;text-decoration:underline",
    "plain": "",
}
MEANING = {
    "accepted": "proposed by the draft and accepted",
    "recovered": "sampled after a rejected draft token",
    "bonus": "sampled after a draft that was accepted whole",
    "plain": "no draft",
}
_PICTURES = {
    code: 0x2400 + code for code in range(32) if code not in (9, 10)
}  # of control characters


def escape_text(text: str) -> str:
    """Return a text as HTML.

    >>> escape_text("a<b>\\x1b")
    'a&lt;b&gt;␛'
    """
    return escape(text.translate(_PICTURES))


def render_generation(text: str, trace: Trace, tokenizer: Tokenizer | None, figures: str) -> str:
    """Return a generation as HTML: prompt, text by origin, figures, and the rounds, folded away."""
    if tokenizer is None or not trace.rounds:
        return _block(escape_text(text)) + _small(escape_text(figures))
    prompt = tokenizer.decode(trace.prompt)
    prompt = prompt if len(prompt) <= PROMPT_SHOWN else "..." + prompt[-PROMPT_SHOWN:]
    spans = "".join(
        _span(piece, kind, title) for piece, kind, title in split_text(text, trace, tokenizer)
    )
    shown = [kind for kind in STYLES if kind in trace.origins]
    legend = " &nbsp; ".join(f"{_span(kind, kind, '')} {MEANING[kind]}" for kind in shown)
    body = f'<span style="opacity:.6">{escape_text(prompt)}</span>{spans}'
    return (
        _block(body)
        + _small(f"{escape_text(figures)}<br>{legend}")
        + _fold("round by round", _rounds(trace, tokenizer))
    )


def render_passes(
    text: str, passes: Sequence[tuple[list[int], list[int]]], tokenizer: Tokenizer, figures: str
) -> str:
    """Return a translation as HTML: text, figures, and what each pass made of it, folded away.

    passes  (tokens, places that changed), one pair a pass
    """
    rows = []
    for number, (tokens, changed) in enumerate(passes, 1):
        words = [
            _span(tokenizer.token_text(token), "accepted" if place in changed else "plain", "")
            for place, token in enumerate(tokens)
        ]
        rows.append(f"{number:>3}. {''.join(words)}")
    return (
        _block(escape_text(text))
        + _small(escape_text(figures))
        + _fold("pass by pass", "\n".join(rows))
    )


def split_text(text: str, trace: Trace, tokenizer: Tokenizer) -> Iterator[tuple[str, str, str]]:
    """Yield what each token added to a text, its origin, and its round; the pieces make the
    text.
    """
    stream, left, kind, title = tokenizer.stream(), text, "plain", ""
    for number, entry in enumerate(trace.rounds, 1):
        for token, kind in zip(entry.emitted, entry.origins, strict=True):
            title = f"round {number}: {kind}"
            piece = stream.push([token])[
                : len(left)
            ]  # the text ends before a stop string, its tokens later
            left = left[len(piece) :]
            if piece:
                yield piece, kind, title
    if left:
        yield left, kind, title


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML."""
    cell = '<td style="text-align:left;vertical-align:top">{}</td>'
    body = "".join(
        "<tr>" + "".join(cell.format(escape_text(x)) for x in row) + "</tr>" for row in rows
    )
    titles = "".join(f'<th style="text-align:left">{escape_text(x)}</th>' for x in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _rounds(trace: Trace, tokenizer: Tokenizer) -> str:
    lines = [
        f"{number:>3}. {_round(entry, tokenizer)}"
        for number, entry in enumerate(trace.rounds[:ROUNDS_SHOWN], 1)
    ]
    more = len(trace.rounds) - ROUNDS_SHOWN
    return "\n".join(lines + ([f"and {more} more rounds"] if more > 0 else []))


def _round(entry: TraceRound, tokenizer: Tokenizer) -> str:
    """Return one round: its draft tokens, and the token after them.

    A draft token that is not accepted is struck through.
    """
    words = []
    for node in range(min(len(entry.tokens), NODES_SHOWN)):
        word = escape_text(tokenizer.token_text(entry.tokens[node]).replace("\n", "\u23ce"))
        style = (
            STYLES["accepted"] if node in entry.path else "opacity:.6;text-decoration:line-through"
        )
        words.append(f'<span style="{style}">{word}</span>')
    if len(entry.tokens) > NODES_SHOWN:
        words.append(f" and {len(entry.tokens) - NODES_SHOWN} more")
    if entry.emitted and entry.origins[-1] != "accepted":
        newest = tokenizer.token_text(entry.emitted[-1]).replace("\n", "\u23ce")
        words.append((" &rarr; " if words else "") + _span(newest, entry.origins[-1], ""))
    return "".join(words)


def _span(text: str, kind: str, title: str) -> str:
    about = f' title="{escape(title)}"' if title else ""
    return f'<span style="{STYLES[kind]}"{about}>{escape_text(text)}</span>'


def _block(inner: str) -> str:
    return f'<div style="white-space:pre-wrap;font-family:monospace;max-width:50em">{inner}</div>'


def _small(inner: str) -> str:
    return f'<div style="font-size:85%;opacity:.8;margin-top:.5em">{inner}</div>'


def _fold(title: str, inner: str) -> str:
    return f"<details><summary>{title}</summary>{_block(inner)}</details>"


class Catalogue(list["Card"]):
    """Cards of techniques as a list; shown at a prompt or in a notebook, a table."""

    HEAD = ("method", "family", "guarantee", "what it does", "paper")

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (card.name, card.family, card.guarantee.value, card.summary or card.title, card.paper)
            for card in self
        ]

    def __repr__(self) -> str:
        rows = [self.HEAD[:4], *(row[:4] for row in self._rows())]
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join("  ".join([*map(str.ljust, row, wide), row[3]]) for row in rows)

    def _repr_html_(self) -> str:
        return render_table(self.HEAD, self._rows())
