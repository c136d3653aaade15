"""The picture of a race, as one self-contained SVG.

Each lane is a skyline over a common time axis: a column is one forward pass of the target, as wide
as it took, with a box for each token it committed. Plain decoding is one box high. Hollow boxes are
draft tokens that were rejected. What a token's colour says (Okabe and Ito's palette), its mark says
too (slash, dot). No script, no font, no link: it may be embedded anywhere. It brings its own
background: a page's theme and the browser's need not be the same.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from tinyspec.decoding.trace import Trace
from tinyspec.show.display import count_of, escape_controls

WIDTH, MARGIN = 960.0, 24.0
BOX, GAP = 15.0, 2.0  # height of a token's box, space between boxes
LINE = 22.0  # height of a line of text
LETTERS = 96  # in a line of text
KINDS = ("accepted", "recovered", "bonus", "plain")
MEANING = {
    "accepted": "accepted draft token",
    "recovered": "recovered after a rejection",
    "bonus": "bonus after a full draft",
    "plain": "plain: no draft",
    "rejected": "rejected draft token",
}
STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,\
sans-serif;font-size:16px;fill:#1f2328}
.page{fill:#fff;stroke:#d1d9e0}.name{font-weight:600;font-size:18px}\
.quiet,tspan.quiet{fill:#59636e}.small{font-size:14px}
.big{font-weight:700;font-size:28px}
.mono,.mono tspan{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",\
monospace;font-size:15px}
.line{stroke:#d1d9e0;stroke-width:1}.end{stroke:#59636e;stroke-width:1;stroke-dasharray:3 3}
.accepted{fill:#009e73}.recovered{fill:#d55e00}.bonus{fill:#0072b2}.plain{fill:#8c959f}
.rejected{fill:none;stroke:#8c959f;stroke-width:1}.slash{stroke:#fff;stroke-width:1.5;fill:none}\
.dot{fill:#fff}
tspan.accepted{fill:#00704f;font-weight:700}tspan.recovered{fill:#b34700;font-weight:700}
tspan.bonus{fill:#005f96;text-decoration:underline}tspan.plain{fill:#1f2328}
@media (prefers-color-scheme:dark){
.page{fill:#0d1117;stroke:#3d444d}
text,tspan.plain{fill:#e6edf3}.quiet,tspan.quiet{fill:#9198a1}.line{stroke:#3d444d}\
.end{stroke:#9198a1}
.accepted{fill:#1fb58a}.recovered{fill:#f0793a}.bonus{fill:#4aa8e8}.plain{fill:#7d8590}
.rejected{fill:none;stroke:#7d8590}.slash{stroke:#0d1117}.dot{fill:#0d1117}
tspan.accepted{fill:#3fd6a8}tspan.recovered{fill:#ff9a5c}tspan.bonus{fill:#7cc4f5}}
""".strip()


class Track(NamedTuple):
    """One lane, in plain data. Its rounds ended at `ends` (seconds); the first began at `began`."""

    name: str
    trace: Trace
    ends: Sequence[float]
    began: float = 0.0
    pieces: Sequence[str] = ()  # the text of each token, for the excerpt
    verdict: str = ""  # in large letters beside the finish: "1.4x as fast"
    note: str = ""  # below it: "identical text"
    prompt: str = ""  # what the text continues


def draw_race(tracks: Sequence[Track], title: str, lines: int = 5) -> str:
    """Draw the tracks one below the other; `lines` of the last one's text stand under them."""
    longest = max((track.ends[-1] for track in tracks if track.ends), default=1.0) or 1.0
    scale = (WIDTH - 2 * MARGIN) / longest
    body, y = (
        [f'<text x="{MARGIN:g}" y="34" class="big" style="font-size:20px">{escape(title)}</text>'],
        52.0,
    )
    for track in tracks:
        height = _tallest(track) * (BOX + GAP)
        finish = MARGIN + (track.ends[-1] if track.ends else 0) * scale
        roomy = WIDTH - MARGIN - finish >= 150
        body += _heading(track, y + 16, not roomy)
        body += _verdict(track, finish, y + 30 + height) if roomy else []
        body += _skyline(track, y + 30 + height, scale)
        y += 30 + height + 12
    body += _axis(y, longest, scale)
    y += 40
    if lines and tracks and tracks[-1].pieces:
        excerpt = _excerpt(tracks[-1], y + 14, lines)
        body += excerpt
        y += LINE * len(excerpt) + 14
    y = _legend(body, y + 12, tracks)
    summary = escape(
        "; ".join(f"{t.name}: {_figures(t)} {t.verdict} {t.note}".strip() for t in tracks)
    )
    named = f'<title id="t">{escape(title)}</title><desc id="d">{summary}</desc>'
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH:g} {y:g}" role="img" aria-labelledby="t d">'
    )
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1:g}" height="{y - 1:g}" rx="8"/>'
    return "\n".join([head, named, f"<style>{STYLE}</style>", page, *body, "</svg>", ""])


def _tallest(track: Track) -> int:
    """Boxes of the highest column."""
    return max(
        (len(r.emitted) + _count_rejected(r.tokens, r.path) for r in track.trace.rounds), default=1
    )


def _count_rejected(tokens: Sequence[int], path: Sequence[int]) -> int:
    """Count a column's hollow boxes: rejected draft tokens, less the one whose place was taken."""
    return max(len(tokens) - len(path) - 1, 0)


def _figures(track: Track) -> str:
    emitted = sum(len(r.emitted) for r in track.trace.rounds)
    calls = len(track.trace.rounds)
    seconds = track.ends[-1] if track.ends else 0.0
    rate = f" · {seconds:.3g} s" if seconds else ""
    made = f"{count_of(emitted, 'token')} in {count_of(calls, 'forward pass', 'es')}"
    return f"{made} · {emitted / max(calls, 1):.2f} tokens per pass{rate}"


def _heading(track: Track, y: float, judged: bool) -> list[str]:
    """Name and figures; with the verdict where there is no room for it after the finish."""
    said = track.verdict if judged else ""
    after = f'<tspan class="quiet" dx="12">{escape(said)}</tspan>' if said else ""
    return [
        f'<text x="{MARGIN:g}" y="{y:g}" class="name">{escape(track.name)}{after}</text>',
        f'<text x="{WIDTH - MARGIN:g}" y="{y:g}" text-anchor="end" '
        f'class="quiet">{_figures(track)}</text>',
    ]


def _skyline(track: Track, floor: float, scale: float) -> list[str]:
    """Return one path for each kind of box and of mark, and the finish."""
    boxes: dict[str, list[str]] = {kind: [] for kind in (*KINDS, "rejected")}
    slashes: list[str] = []
    dots: list[str] = []
    began = track.began
    for round, end in zip(track.trace.rounds, track.ends, strict=True):
        x, wide = MARGIN + began * scale, max((end - began) * scale - 1, 0.8)
        kinds = [
            *round.origins[: len(round.emitted)],
            *["rejected"] * _count_rejected(round.tokens, round.path),
        ]
        for level, kind in enumerate(kinds):
            y = floor - (level + 1) * (BOX + GAP) + GAP
            if kind == "rejected":
                boxes[kind].append(_box(x + 0.5, y + 0.5, max(wide - 1, 0.5), BOX - 1))
                continue
            boxes[kind].append(_box(x, y, wide, BOX))
            if wide >= 4:
                middle = x + wide / 2
                if kind == "recovered":
                    slashes.append(f"M{middle - 2:.1f} {y + 10.5:.1f}l4-6")
                if kind == "bonus":
                    dots.append(
                        f"M{middle - 1.6:.1f} {y + BOX / 2:.1f}a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 "
                        f"0-3.2 0"
                    )
        began = end
    drawn = [f'<path class="{kind}" d="{"".join(d)}"/>' for kind, d in boxes.items() if d]
    drawn += [
        f'<path class="{mark}" d="{"".join(d)}"/>'
        for mark, d in (("slash", slashes), ("dot", dots))
        if d
    ]
    drawn.append(f'<path class="line" d="M{MARGIN:g} {floor + 1.5:g}H{WIDTH - MARGIN:g}"/>')
    finish = MARGIN + began * scale
    drawn.append(
        f'<path class="end" d="M{finish:.1f} '
        f'{floor - _tallest(track) * (BOX + GAP):.1f}V{floor + 8:.1f}"/>'
    )
    return drawn


def _verdict(track: Track, finish: float, floor: float) -> list[str]:
    """Return what the finish means, in large letters beside it."""
    x, size = (
        finish + 14,
        min(26.0, 1.6 * (WIDTH - MARGIN - finish - 14) / max(len(track.verdict), 1)),
    )
    return [
        f'<text x="{x:.1f}" y="{floor - 30:.1f}" class="big" style="font-size:{size:.0f}px">'
        f"{escape(track.verdict)}</text>",
        f'<text x="{x:.1f}" y="{floor - 8:.1f}" class="quiet">{escape(track.note)}</text>',
    ]


def _box(x: float, y: float, wide: float, high: float) -> str:
    return f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:g}h-{wide:.1f}z"


def _axis(y: float, longest: float, scale: float) -> list[str]:
    """Ticks at a round step, about eight of them."""
    step = next(
        (s for p in range(-4, 6) for s in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if longest / s <= 9),
        longest,
    )
    marks: list[str] = []
    for i in range(int(longest / step) + 1):
        x = MARGIN + i * step * scale
        anchor = "start" if i == 0 else "middle"
        marks.append(
            f'<text x="{x:.1f}" y="{y + 16:g}" text-anchor="{anchor}" '
            f'class="quiet small">{i * step:g} s</text>'
        )
        marks.append(f'<path class="line" d="M{x:.1f} {y - 2:g}v5"/>')
    return marks


def _excerpt(track: Track, y: float, lines: int) -> list[str]:
    """Return the first lines of the prompt and the text, each token in its colour."""
    whole = Text()
    for piece, kind in [
        (track.prompt, "quiet"),
        *zip(track.pieces, track.trace.origins, strict=False),
    ]:
        whole.append(escape_controls(piece).replace("\n", " ").replace("\t", " "), kind)
    rows = whole.wrap(Console(width=LETTERS), LETTERS)
    if len(rows) > lines:
        rows[lines - 1].truncate(LETTERS - 2)
        rows[lines - 1].append(" …", "quiet")
    drawn: list[str] = []
    for i, row in enumerate(rows[:lines]):
        parts = "".join(
            f'<tspan class="{span.style}">{escape(row.plain[span.start : span.end])}</tspan>'
            for span in row.spans
        )
        drawn.append(
            f'<text x="{MARGIN:g}" y="{y + LINE * i:g}" class="mono" '
            f'xml:space="preserve">{parts}</text>'
        )
    return drawn


def _legend(body: list[str], y: float, tracks: Sequence[Track]) -> float:
    """Draw what the colours and marks mean, for the kinds that occur; return the picture's end."""
    seen = {kind for track in tracks for kind in track.trace.origins}
    if any(_count_rejected(r.tokens, r.path) for track in tracks for r in track.trace.rounds):
        seen.add("rejected")
    x = MARGIN
    for kind, meaning in MEANING.items():
        if kind not in seen:
            continue
        wide = 32 + 7.0 * len(meaning)
        if x + wide > WIDTH - MARGIN:
            x, y = MARGIN, y + 22
        body.append(f'<path class="{kind}" d="{_box(x, y, 11, 13)}"/>')
        if kind == "recovered":
            body.append(f'<path class="slash" d="M{x + 3.5:.1f} {y + 9.5:.1f}l4-6"/>')
        if kind == "bonus":
            body.append(f'<circle class="dot" cx="{x + 5.5:.1f}" cy="{y + 6.5:.1f}" r="1.6"/>')
        body.append(
            f'<text x="{x + 17:.1f}" y="{y + 11:.1f}" class="small">{escape(meaning)}</text>'
        )
        x += wide
    return y + 26
