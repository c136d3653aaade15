"""Pictures of a run, as self-contained SVGs that are readable on light and dark pages: no script,
no font, no link.

`speedups`: a panel for each task and a bar for each arm, from 1 (plain decoding) to the right, or
to the left where it is slower; the thin line spans the quartiles. `curve`: what k new tokens cost
against one, with the floor of the machine. What a colour says, a mark or a number beside it says
too.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tinyspec.bench.plan import PLAIN, ArmSpec
from tinyspec.bench.report import notes

WIDTH, MARGIN = 960.0, 24.0
ROW, HEAD, LETTER = 20.0, 34.0, 6.8  # a bar with its gap, a panel's title, a letter of a name
COLUMNS = 3  # panels side by side
MARKS = (
    "",
    "6 4",
    "2 3",
    "10 3 2 3",
    "1 4",
)  # dashes of lines that colours alone must not tell apart
STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2328}
.title{font-size:17px;font-weight:600}.head{font-weight:600;font-size:13px}.quiet{fill:#59636e}.end{text-anchor:end}
.mid{text-anchor:middle}.line{stroke:#d1d9e0;stroke-width:1;fill:none}.one{stroke:#59636e;stroke-width:1}
.fast{fill:#0072b2}.slow{fill:#d55e00}.peer{fill:#8c959f}.span{stroke:#1f2328;stroke-width:1.2}
.s0{stroke:#0072b2}.s1{stroke:#d55e00}.s2{stroke:#009e73}.s3{stroke:#aa4499}.s4{stroke:#8a6d00}
.curve{fill:none;stroke-width:2.2}.floor{fill:none;stroke:#59636e;stroke-width:1.4;stroke-dasharray:3 3}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.quiet{fill:#9198a1}.line{stroke:#3d444d}.one{stroke:#9198a1}.span{stroke:#e6edf3}
.fast{fill:#4aa8e8}.slow{fill:#f0793a}.peer{fill:#7d8590}.floor{stroke:#9198a1}
.s0{stroke:#4aa8e8}.s1{stroke:#f0793a}.s2{stroke:#1fb58a}.s3{stroke:#e08bd8}.s4{stroke:#d9b93b}}
""".strip()


def write(folder: Path, result: Mapping[str, Any], name: str = "bench") -> list[Path]:
    """The pictures of a result, NAME-speedups.svg and NAME-curve.svg, into the folder; returns
    their paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {f"{name}-speedups.svg": speedups(result)}
    if "curve_figures" in result:
        drawn[f"{name}-curve.svg"] = curve(result)
    for file, svg in drawn.items():
        (folder / file).write_text(svg, encoding="utf-8")
    return [folder / file for file in drawn]


def speedups(result: Mapping[str, Any]) -> str:
    """How many times as fast as plain decoding each arm is, task by task."""
    tasks = result["figures"]["tasks"]
    arms = [arm for arm in result["figures"]["overall"] if arm != PLAIN]
    highs = [
        f["speedup"]["q3"]
        for of in tasks.values()
        for arm, f in of.items()
        if arm in arms and f["speedup"]
    ]
    top = max([1.5, *highs]) * 1.08
    names = 16 + LETTER * max(map(len, arms), default=0)  # the column of names
    wide = (WIDTH - 2 * MARGIN - names) / COLUMNS
    high = HEAD + ROW * max(len(arms), 1) + 14
    body = [
        _text(
            MARGIN, 32, f"{result['settings']['model']}: times as fast as plain decoding", "title"
        )
    ]
    for i, (name, of) in enumerate(tasks.items()):
        column, y = i % COLUMNS, 52 + i // COLUMNS * high
        x = MARGIN + names + column * wide
        if column == 0:
            body += [
                _text(MARGIN + names - 10, y + HEAD + ROW * n + 12, arm, "end")
                for n, arm in enumerate(arms)
            ]
        body.append(_text(x, y + 22, name.replace("_", " "), "head"))
        body += _panel([(arm, of[arm]["speedup"]) for arm in arms], x, y + HEAD, wide - 14, top)
    end = 52 + -(-len(tasks) // COLUMNS) * high + 8
    for line in [
        "The thin line spans the quartiles over prompts; peers are grey.",
        *notes(result)[:2],
    ]:
        body.append(_text(MARGIN, end, line, "quiet"))
        end += 18
    said = "; ".join(
        f"{arm} {result['figures']['overall'][arm]['mean']:.2f}"
        for arm in arms
        if result["figures"]["overall"][arm]["mean"] is not None
    )
    return _svg(body, end, "Speed-ups over plain decoding", f"mean over tasks: {said}")


def _panel(
    bars: Sequence[tuple[str, Mapping[str, float] | None]],
    x: float,
    y: float,
    wide: float,
    top: float,
) -> list[str]:
    """Bars from 1 on a scale from 0 to `top`; the number stands behind the bar."""
    scale = (wide - 36) / top
    one = x + scale
    drawn = [f'<path class="one" d="M{one:.1f} {y - 4:.1f}V{y + ROW * len(bars):.1f}"/>']
    for n, (arm, five) in enumerate(bars):
        if five is None:
            continue
        value, at = five["median"], y + ROW * n
        begin, end = sorted((one, x + value * scale))
        kind = "peer" if ArmSpec.read(arm).peer else "fast" if value >= 1 else "slow"
        drawn.append(
            f'<path class="{kind}" d="M{begin:.1f} {at + 2:.1f}h{max(end - begin, 0.5):.1f}v12h-{max(end - begin, 0.5):.1f}z"/>'
        )
        drawn.append(
            f'<path class="span" d="M{x + five["q1"] * scale:.1f} {at + 8:.1f}H{x + five["q3"] * scale:.1f}"/>'
        )
        drawn.append(_text(x + max(value, five["q3"], 1) * scale + 5, at + 12, f"{value:.2f}"))
    return drawn


def curve(result: Mapping[str, Any]) -> str:
    """What a forward over k tokens takes, in milliseconds and against one token, with the machine's
    floor.
    """
    figures = result["curve_figures"]
    rows = {
        label: {int(k): row for k, row in of["rows"].items()}
        for label, of in figures["curves"].items()
    }
    own = rows.get("tinyspec", {})
    floor = {k: row["floor"] for k, row in own.items() if "floor" in row}
    wide, y = (WIDTH - 2 * MARGIN - 90) / 2, 66.0
    body = [
        _text(
            MARGIN,
            32,
            f"{result['settings']['model']}: the cost of a forward over k new tokens",
            "title",
        )
    ]
    times = {
        label: {k: row["milliseconds"] for k, row in line.items()} for label, line in rows.items()
    }
    ratios = {
        label: {k: row["against_one"] for k, row in line.items()} for label, line in rows.items()
    }
    against = {k: ms / own[min(own)]["milliseconds"] for k, ms in floor.items()}
    body += _lines(times, floor, "milliseconds", MARGIN + 36, y, wide)
    body += _lines(
        ratios, against, "time of k over the program's own time of one", MARGIN + 90 + wide, y, wide
    )
    end = y + 360
    for i, label in enumerate([*rows, *(["the machine's floor"] if floor else [])]):
        drawn = f'class="curve s{i % 5}"{_dash(i)}' if label in rows else 'class="floor"'
        body.append(f'<path {drawn} d="M{MARGIN + 36:.1f} {end - 4:.1f}h32"/>')
        body.append(_text(MARGIN + 78, end, label))
        end += 20
    for note in [f"Behind {figures['cached']} cached tokens.", *notes(result)[:2]]:
        body.append(_text(MARGIN + 36, end + 4, note, "quiet"))
        end += 18
    said = "; ".join(
        f"{label} at {max(line)} tokens {line[max(line)]:.2f}"
        for label, line in ratios.items()
        if line
    )
    return _svg(body, end, "Cost curve of a forward", said)


def _lines(
    lines: Mapping[str, Mapping[int, float]],
    floor: Mapping[int, float],
    title: str,
    x: float,
    y: float,
    wide: float,
) -> list[str]:
    """One panel: a line for each program over k, and the floor dotted."""
    high, right = 290.0, max((k for line in lines.values() for k in line), default=1)
    highest = max((v for line in (*lines.values(), floor) for v in line.values()), default=1.0)
    step = next(
        s for p in range(-3, 9) for s in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if highest / s <= 8
    )
    top = step * max(1, math.ceil(highest / step))

    def at(k: float, value: float) -> str:
        return f"{x + k / right * wide:.1f} {y + high - value / top * high:.1f}"

    def path(line: Mapping[int, float]) -> str:
        return "M" + " L".join(at(k, value) for k, value in sorted(line.items()))

    drawn = [_text(x - 30, y - 10, title, "head")]
    for i in range(round(top / step) + 1):
        drawn.append(f'<path class="line" d="M{at(0, i * step)}h{wide:.1f}"/>')
        drawn.append(
            _text(x - 6, y + high - i * step / top * high + 4, f"{i * step:g}", "end quiet")
        )
    for k in sorted(
        {k for line in lines.values() for k in line if k in (1, 4, 8, 12, 16, 24, 32) or k == right}
    ):
        drawn.append(_text(x + k / right * wide, y + high + 18, str(k), "mid quiet"))
    drawn += [f'<path class="floor" d="{path(floor)}"/>'] if floor else []
    drawn += [
        f'<path class="curve s{i % 5}"{_dash(i)} d="{path(line)}"/>'
        for i, line in enumerate(lines.values())
        if line
    ]
    return drawn


def _dash(i: int) -> str:
    return f' stroke-dasharray="{MARKS[i % 5]}"' if MARKS[i % 5] else ""


def _text(x: float, y: float, said: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(said)}</text>'


def _svg(body: Sequence[str], height: float, title: str, summary: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="t d">'
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(summary)}</desc><style>{STYLE}</style>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"
