"""The pictures of `tinyspec bench translation`: bars of all methods, or lines over Mask-Predict's
iterations.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tinyspec.bench import figures
from tinyspec.bench.translation import notes
from tinyspec.bench.translators import PLAIN, label_of


def picture(result: Mapping[str, Any]) -> str:
    """BLEU and time, side by side."""
    return (
        _iterations(result) if result["settings"]["experiment"] == "iterations" else _table(result)
    )


def lines(result: Mapping[str, Any], figure: str) -> dict[str, dict[int, float]]:
    """A figure of Mask-Predict by iterations, a line for each number of lengths."""
    found: dict[str, dict[int, float]] = {}
    for lengths in range(1, 100):
        line = {
            count: of[figure]
            for count in range(1, 1000)
            if (of := result["figures"].get(label_of(count, lengths))) is not None
        }
        if line:
            found[f"{lengths} length{'s' if lengths > 1 else ''}"] = line
    return found


def _iterations(result: Mapping[str, Any]) -> str:
    wide, y = (figures.WIDTH - 2 * figures.MARGIN - 90) / 2, 66.0
    plain = result["figures"][PLAIN]
    body = [
        figures._text(
            figures.MARGIN, 32, "Mask-Predict by its iterations: quality and time", "title"
        )
    ]
    scores, times = lines(result, "bleu"), lines(result, "milliseconds")
    last = max(count for line in scores.values() for count in line)
    for at, (title, found, figure) in enumerate(
        (("BLEU", scores, "bleu"), ("milliseconds a sentence, batch 1", times, "milliseconds"))
    ):
        floor = {1: plain[figure], last: plain[figure]}
        body += figures._lines(found, floor, title, figures.MARGIN + 36 + at * (wide + 54), y, wide)
    end = y + 360
    for i, label in enumerate([*scores, f"{PLAIN} decoding"]):
        drawn = f'class="curve s{i % 5}"{figures._dash(i)}' if label in scores else 'class="floor"'
        body.append(f'<path {drawn} d="M{figures.MARGIN + 36:.1f} {end - 4:.1f}h32"/>')
        body.append(figures._text(figures.MARGIN + 78, end, label))
        end += 20
    said = "; ".join(
        f"{label}: BLEU {line[max(line)]:.1f} at {max(line)} iterations"
        for label, line in scores.items()
    )
    return _ended(
        body,
        ["Across: iterations.", *notes(result)],
        end + 4,
        "Mask-Predict by its iterations",
        said,
    )


def _table(result: Mapping[str, Any]) -> str:
    found = result["figures"]
    names = 16 + figures.LETTER * max(map(len, found))
    wide = (figures.WIDTH - 2 * figures.MARGIN - names) / 2
    y = 76.0
    body = [figures._text(figures.MARGIN, 32, "Ways to translate: quality and time", "title")]
    body += [
        figures._text(figures.MARGIN + names - 10, y + figures.ROW * n + 12, label, "end")
        for n, label in enumerate(found)
    ]
    for at, (title, figure) in enumerate(
        (("BLEU", "bleu"), ("milliseconds a sentence, batch 1", "milliseconds"))
    ):
        x = figures.MARGIN + names + at * wide
        body.append(figures._text(x, y - 12, title, "head"))
        body += _bars([of[figure] for of in found.values()], x, y, wide - 60)
    end = y + figures.ROW * len(found) + 24
    said = "; ".join(
        f"{label}: BLEU {of['bleu']:.1f}, {of['milliseconds']:.1f} ms"
        for label, of in found.items()
    )
    return _ended(body, notes(result), end, "Ways to translate", said)


def _bars(values: Sequence[float], x: float, y: float, wide: float) -> list[str]:
    top = max([*values, 1e-9])
    drawn = []
    for n, value in enumerate(values):
        at, long = y + figures.ROW * n, max(value / top * wide, 0.5)
        drawn.append(f'<path class="fast" d="M{x:.1f} {at + 2:.1f}h{long:.1f}v12h-{long:.1f}z"/>')
        drawn.append(figures._text(x + long + 5, at + 12, f"{value:.1f}"))
    return drawn


def _ended(body: list[str], said: Sequence[str], end: float, title: str, summary: str) -> str:
    """The picture with its notes below, long ones on several lines."""
    for line in (line for note in said for line in textwrap.wrap(note, 140)):
        body.append(figures._text(figures.MARGIN, end, line, "quiet"))
        end += 18
    return figures._svg(body, end, title, summary)
