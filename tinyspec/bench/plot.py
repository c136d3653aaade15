"""Draw charts of results by matplotlib, in one style that is legible on light and dark pages.

An experiment describes its chart as data: a `Chart` with panels of `Lines` or `Bars`. `draw_chart`
turns it into one self-contained SVG without script, font or link. Text stays text, and a title and
a description say what is shown. The same chart gives the same bytes.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import Any

from tinyspec.errors import TinyspecError

INK, QUIET, RULE = "#1f2328", "#59636e", "#d1d9e0"
HUES = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8a6d00")  # told apart by the colour-blind
FASTER, SLOWER, PEER = HUES[0], HUES[1], "#8c959f"
DASHES: tuple[Any, ...] = ("-", (0, (5, 3)), (0, (2, 2)), (0, (6, 2, 2, 2)), (0, (1, 3)))
MARKERS = "os^Dv"  # a line has a dash and a marker of its own: colour alone must not tell
HUES_ON_DARK = ("#4aa8e8", "#f0793a", "#1fb58a", "#e08bd8", "#d9b93b")
ON_DARK = {INK: "#e6edf3", QUIET: "#9198a1", RULE: "#3d444d", PEER: "#7d8590"}
ON_DARK |= dict(zip(HUES, HUES_ON_DARK, strict=True))
WIDTH = 9.6  # inches
NOTE_COLUMNS = 132  # letters of a note's line

STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": RULE,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tinyspec",  # the same chart, the same bytes
}


@dataclass(frozen=True)
class Lines:
    """A panel of lines.

    lines      label -> {x: y}
    floor      a dotted line to compare with, {x: y}, and its label
    reference  value of a thin horizontal line, such as 1 where y is a speed-up
    vertical   the same for x
    x_names    text of each tick of x; None: numbers
    x_log      whether x is logarithmic
    top        highest y; None: what the lines need
    """

    title: str
    lines: Mapping[str, Mapping[Any, float]]
    x_label: str = ""
    floor: Mapping[Any, float] | None = None
    floor_label: str = ""
    reference: float | None = None
    vertical: float | None = None
    x_names: Mapping[Any, str] | None = None
    x_log: bool = False
    top: float | None = None

    def draw_on(self, axes: Any) -> None:
        for n, (label, line) in enumerate(self.lines.items()):
            turn = n // len(HUES)  # when all hues were used, they meet other dashes and markers
            axes.plot(
                list(line), list(line.values()), label=label, color=HUES[n % len(HUES)], lw=1.8,
                ls=DASHES[(n + turn) % len(DASHES)], marker=MARKERS[(n + 2 * turn) % len(MARKERS)],
                ms=4, mfc="none", clip_on=False,
            )  # fmt: skip
        if self.floor:
            at = sorted(self.floor)
            axes.plot(
                at, [self.floor[x] for x in at], ":", color=QUIET, lw=1.4, label=self.floor_label
            )
        if self.reference is not None:
            axes.axhline(self.reference, color=QUIET, lw=1)
        if self.vertical is not None:
            axes.axvline(self.vertical, color=QUIET, lw=1)
        if self.x_log:
            axes.set_xscale("log")
            axes.minorticks_off()
        if self.x_names is not None:
            axes.set_xticks(list(self.x_names), list(self.x_names.values()))
        axes.set_ylim(0, self.top)
        axes.grid(axis="y", lw=0.7)
        axes.set_xlabel(self.x_label)
        if len(self.lines) + bool(self.floor) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars with their numbers. None leaves the row of a label empty.

    bars    label -> value
    spans   label -> (low, high), a thin line over the bar: quartiles
    origin  where bars begin: 1 where the value is a speed-up, so that a slow-down points left
    colours label -> colour; the others are blue
    top     end of the scale, the same for all panels that are to be compared
    """

    title: str
    bars: Mapping[str, float | None]
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    origin: float = 0.0
    colours: Mapping[str, str] = field(default_factory=dict)
    top: float | None = None
    digits: int = 1
    named: bool = True  # whether the labels are written at the left

    def draw_on(self, axes: Any) -> None:
        labels = list(self.bars)
        for row, label in enumerate(labels):
            value = self.bars[label]
            if value is None:
                continue
            axes.barh(
                row,
                value - self.origin,
                left=self.origin,
                height=0.6,
                color=self.colours.get(label, FASTER),
            )
            low, high = self.spans.get(label, (value, value))
            if low != high:
                axes.plot([low, high], [row, row], color=INK, lw=1.2)
            axes.annotate(
                f"{value:.{self.digits}f}", (max(value, high, self.origin), row), xytext=(4, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axes.axvline(self.origin, color=QUIET, lw=1)
        axes.set_yticks(range(len(labels)), labels if self.named else [""] * len(labels), color=INK)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        values = [high for _, high in self.spans.values()] + [
            v for v in self.bars.values() if v is not None
        ]
        axes.set_xlim(0, (self.top or max([*values, self.origin, 1e-9])) * 1.18)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)


@dataclass(frozen=True)
class Chart:
    """A picture: panels side by side, `columns` of them in a row, with notes below.

    summary  what a reader is told who cannot see it
    """

    title: str
    panels: Sequence[Lines | Bars]
    notes: Sequence[str] = ()
    summary: str = ""
    columns: int = 2


def draw_chart(chart: Chart) -> str:
    """Return a chart as an SVG. Raises TinyspecError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise TinyspecError("--svg draws with matplotlib: pip install 'tinyspec[bench]'") from None
    notes = [line for note in chart.notes for line in textwrap.wrap(note, NOTE_COLUMNS)]
    rows = -(-len(chart.panels) // chart.columns)
    heights = [
        0.45 + (0.24 * len(panel.bars) if isinstance(panel, Bars) else 3.0)
        for panel in chart.panels
    ]
    below, above = 0.17 * len(notes) + 0.1, 0.4  # inches
    height = rows * max(heights) + below + above
    with matplotlib.rc_context(STYLE):
        layout: Any = ConstrainedLayoutEngine(
            rect=(0, below / height, 1, 1 - (below + above) / height), wspace=0.04
        )
        figure: Any = Figure(figsize=(WIDTH, height), layout=layout)
        figure.patch.set_alpha(0)  # the page's own colour
        figure.text(0.01, 1 - 0.25 / height, chart.title, size=13, weight="bold", va="center")
        for at, panel in enumerate(chart.panels):
            axes = figure.add_subplot(rows, min(chart.columns, len(chart.panels)), at + 1)
            axes.patch.set_alpha(0)
            axes.set_title(panel.title)
            panel.draw_on(axes)
        for n, line in enumerate(reversed(notes)):
            figure.text(0.01, (0.1 + 0.17 * n) / height, line, size=8.5, color=QUIET)
        drawn = StringIO()
        figure.savefig(
            drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return _add_titles(drawn.getvalue(), chart)


def _add_titles(svg: str, chart: Chart) -> str:
    """Return matplotlib's SVG with a title, a description, and colours for dark pages."""
    opening, inside = re.search(r"<svg[^>]*>", svg), svg.index("<defs")  # past prolog and metadata
    assert opening is not None
    size = re.search(r'viewBox="([^"]*)"', opening[0])
    assert size is not None
    dark = "".join(
        f'[style*="{what}: {light}"]{{{what}:{colour}!important}}'
        for light, colour in ON_DARK.items()
        for what in ("fill", "stroke")
    )
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{size[1]}" role="img" aria-labelledby="t d">\n'
        f'<title id="t">{escape(chart.title)}</title>\n'
        f'<desc id="d">{escape(chart.summary)}</desc>\n'
        f"<style>@media (prefers-color-scheme:dark){{{dark}}}</style>\n"
    )
    return head + svg[inside:]
