"""Pictures of a run, as self-contained SVGs that are readable on light and dark pages: no script, no font, no link.

`speedups`: a panel for each task and a bar for each arm, from 1 (plain decoding) to the right, or to the left where it is
slower; the thin line spans the quartiles. `curve`: what k new tokens cost against one, with the floor of the machine. What a
colour says, a mark or a number beside it says too.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tinyspec.bench.plan import PLAIN, ArmSpec
from tinyspec.bench.report import notes

WIDTH, MARGIN = 960.0, 24.0
ROW, HEAD, NAME = 20.0, 34.0, 190.0  # a bar with its gap, a panel's title, the column of names
COLUMNS = 3  # panels side by side
MARKS = ("", "6 4", "2 3", "10 3 2 3", "1 4")  # dashes of lines that colours alone must not tell apart
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


def write(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """The pictures of a result, into the folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"bench-speedups.svg": speedups(result)}
    if "curve_figures" in result:
        drawn["bench-curve.svg"] = curve(result)
    for name, svg in drawn.items():
        (folder / name).write_text(svg, encoding="utf-8")
    return [folder / name for name in drawn]


def speedups(result: Mapping[str, Any]) -> str:
    """How many times as fast as plain decoding each arm is, task by task."""
    tasks = result["figures"]["tasks"]
    arms = [arm for arm in result["figures"]["overall"] if arm != PLAIN]
    highs = [f["speedup"]["q3"] for of in tasks.values() for arm, f in of.items() if arm in arms and f["speedup"]]
    top = max([1.5, *highs]) * 1.08
    wide = (WIDTH - 2 * MARGIN - NAME) / COLUMNS
    high = HEAD + ROW * max(len(arms), 1) + 14
    body = [_text(MARGIN, 32, f"{result['settings']['model']}: times as fast as plain decoding", "title")]
    for i, (name, of) in enumerate(tasks.items()):
        column, y = i % COLUMNS, 52 + i // COLUMNS * high
        x = MARGIN + NAME + column * wide
        if column == 0:
            body += [_text(MARGIN + NAME - 10, y + HEAD + ROW * n + 12, arm, "end") for n, arm in enumerate(arms)]
        body.append(_text(x, y + 22, name.replace("_", " "), "head"))
        body += _panel([(arm, of[arm]["speedup"]) for arm in arms], x, y + HEAD, wide - 14, top)
    end = 52 + -(-len(tasks) // COLUMNS) * high + 8
    for line in ["The thin line spans the quartiles over prompts; peers are grey.", *notes(result)[:2]]:
        body.append(_text(MARGIN, end, line, "quiet"))
        end += 18
    said = "; ".join(
        f"{arm} {result['figures']['overall'][arm]['mean']:.2f}"
        for arm in arms
        if result["figures"]["overall"][arm]["mean"] is not None
    )
    return _svg(body, end, "Speed-ups over plain decoding", f"mean over tasks: {said}")


def _panel(
    bars: Sequence[tuple[str, Mapping[str, float] | None]], x: float, y: float, wide: float, top: float
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
    """t(k)/t(1) of each program over k, and the machine's floor against our t(1)."""
    figures = result["curve_figures"]
    curves = {
        label: [(int(k), row["against_one"]) for k, row in of["rows"].items()]
        for label, of in figures["curves"].items()
    }
    own = figures["curves"].get("tinyspec", {}).get("rows", {})
    floor = [
        (int(k), row["floor"] / own["1"]["milliseconds"]) for k, row in own.items() if "floor" in row and "1" in own
    ]
    right = max((k for line in curves.values() for k, _ in line), default=1)
    top = min(max([2.0, *(y for line in curves.values() for _, y in line)]), 12.0)
    left, low, wide, high = MARGIN + 36, 400.0, WIDTH - 2 * MARGIN - 200, 320.0

    def at(k: float, y: float) -> str:
        return f"{left + k / right * wide:.1f} {low - min(y, top) / top * high:.1f}"

    body = [_text(MARGIN, 32, f"{result['settings']['model']}: the cost of a forward over k new tokens", "title")]
    for i in range(int(top) + 1):
        body.append(f'<path class="line" d="M{at(0, i)}H{left + wide:.1f}"/>')
        body.append(_text(left - 8, low - i / top * high + 4, str(i), "end quiet"))
    for k in sorted({k for line in curves.values() for k, _ in line if k in (1, 4, 8, 12, 16, 24, 32) or k == right}):
        body.append(_text(left + k / right * wide, low + 18, str(k), "mid quiet"))
    body.append(_text(left + wide / 2, low + 38, f"new tokens k, behind {figures['cached']} cached", "mid quiet"))
    body.append(_text(MARGIN, 62, "time of k over time of one", "quiet"))
    if floor:
        body.append(f'<path class="floor" d="M{" L".join(at(k, y) for k, y in floor)}"/>')
    for i, (label, line) in enumerate(curves.items()):
        dash = f' stroke-dasharray="{MARKS[i % 5]}"' if MARKS[i % 5] else ""
        body.append(f'<path class="curve s{i % 5}"{dash} d="M{" L".join(at(k, y) for k, y in line)}"/>')
        y = 84 + 20 * i
        body.append(f'<path class="curve s{i % 5}"{dash} d="M{left + wide + 16:.1f} {y - 4}h28"/>')
        body.append(_text(left + wide + 50, y, label))
    if floor:
        y = 84 + 20 * len(curves)
        body.append(f'<path class="floor" d="M{left + wide + 16:.1f} {y - 4}h28"/>')
        body.append(_text(left + wide + 50, y, "the machine's floor", "quiet"))
    end = low + 62
    for note in notes(result)[:2]:
        body.append(_text(MARGIN, end, note, "quiet"))
        end += 18
    said = "; ".join(f"{label} at {line[-1][0]} tokens {line[-1][1]:.2f}" for label, line in curves.items() if line)
    return _svg(body, end, "Cost curve of a forward", said)


def _text(x: float, y: float, said: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(said)}</text>'


def _svg(body: Sequence[str], height: float, title: str, summary: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="t d">'
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(summary)}</desc><style>{STYLE}</style>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"
