"""The picture of `tinyspec bench exits`: agreement and perplexity against all the work that was
done, a line a measure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinyspec.bench import figures
from tinyspec.bench.exits import FIXED, FULL


def picture(result: Mapping[str, Any]) -> str:
    """Two panels over work: agreement and perplexity on forced text, a line a measure."""
    of = result["figures"]
    lines: dict[str, list[dict[str, float]]] = {}
    for label, row in of.items():
        if label != FULL:
            lines.setdefault(label.partition(" ")[0], []).append(row["forced"])
    full, settings, machine = of[FULL]["forced"], result["settings"], result["machine"]
    wide, y = (figures.WIDTH - 2 * figures.MARGIN - 120) / 2, 70.0
    body = [
        figures._text(
            figures.MARGIN,
            32,
            f"{settings['model']}: what early exits save, and what they cost",
            "title",
        )
    ]
    body += _panel(
        "agreement with the full model",
        lines,
        lambda row: row["agreement"],
        1.0,
        figures.MARGIN + 36,
        y,
        wide,
    )
    body += _panel(
        "perplexity over the full model's, to 4", lines, lambda row: min(row["perplexity"] / full["perplexity"], 4.0), 4.0,
        figures.MARGIN + 110 + wide, y, wide,
    )  # fmt: skip
    end = y + 250
    for i, name in enumerate(lines):
        shown = "one exit for all tokens" if name == FIXED else name
        body.append(
            f'<path class="curve s{i}"{figures._dash(i)} d="M{figures.MARGIN + 36:.1f} {end - 4:.1f}h32"/>'
        )
        body.append(figures._text(figures.MARGIN + 78, end, shown))
        end += 20
    for note in (
        "Across: layers, fills and head products of a token, all together, over the full model's (1, the upright line).",
        f"{settings['prompts']} passages of {settings['tokens']} tokens; threshold {settings['decay']}; {settings['dtype']}; "
        f"{machine['cores']} cores of {machine['cpu']}; {result['date']}, commit {result['commit']}",
    ):
        body.append(figures._text(figures.MARGIN + 36, end + 4, note, "quiet"))
        end += 18
    said = "; ".join(
        f"{name}: agreement {max(r['agreement'] for r in rows):.2f} at best"
        for name, rows in lines.items()
    )
    return figures._svg(body, end + 8, "What early exits save, and what they cost", said)


def _panel(
    title: str,
    lines: Mapping[str, Sequence[Mapping[str, float]]],
    value: Callable[[Mapping[str, float]], float],
    top: float,
    x: float,
    y: float,
    wide: float,
) -> list[str]:
    """Lines over work, from 0 to `top`."""
    high = 200.0
    most = max(1.2, *(row["work"] for rows in lines.values() for row in rows)) * 1.05
    drawn = [figures._text(x - 30, y - 12, title, "head")]
    for i in range(6):
        height = y + high * (1 - i / 5)
        drawn.append(f'<path class="line" d="M{x:.1f} {height:.1f}h{wide:.1f}"/>')
        drawn.append(figures._text(x - 6, height + 4, f"{top * i / 5:.2g}", "end quiet"))
    for i in range(int(most / 0.25) + 1):
        drawn.append(
            figures._text(x + i * 0.25 / most * wide, y + high + 18, f"{i * 0.25:g}", "mid quiet")
        )
    drawn.append(f'<path class="one" d="M{x + wide / most:.1f} {y:.1f}v{high:.1f}"/>')
    for i, rows in enumerate(lines.values()):
        spots = [(x + row["work"] / most * wide, y + high * (1 - value(row) / top)) for row in rows]
        drawn.append(
            f'<path class="curve s{i}"{figures._dash(i)} d="M{" L".join(f"{a:.1f} {b:.1f}" for a, b in spots)}"/>'
        )
        drawn += [
            f'<circle class="s{i}" cx="{a:.1f}" cy="{b:.1f}" r="3" fill="none" stroke-width="2"/>'
            for a, b in spots
        ]
    return drawn
