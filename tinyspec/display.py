"""What the terminal shows: text in the colours of its origin, the lanes of a race, reports, text as it grows.

A token's origin is told by its colour (Okabe and Ito's palette, which the colour-blind tell apart) and by its face, so
that it survives a terminal without colours. Characters that would steer a terminal are shown, not sent.
"""

import re
from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tinyspec.decoding.trace import Statistics
from tinyspec.race import Lane, Outcome

STYLES = {
    "accepted": Style(color="#009e73", bold=True),
    "recovered": Style(color="#d55e00", reverse=True),
    "bonus": Style(color="#3a9bd9", underline=True),
    "plain": Style(),
}
MEANING = {
    "accepted": "guessed by the draft",
    "recovered": "in a refused guess's place",
    "bonus": "behind a draft that passed whole",
    "plain": "no draft",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def visible(text: str) -> str:
    """A model may write anything: control characters become pictures (XML refuses them too); line feeds and tabs stay.

    >>> visible("a\\x1b[2J")
    'a␛[2J'
    """
    return _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 0x20 else "\ufffd", text)


def coloured(pieces: Sequence[str], origins: Sequence[str]) -> Text:
    """A text, each token in the style of its origin. A line feed keeps no style: a reversed one would paint a bar."""
    text = Text()
    for piece, origin in zip(pieces, origins, strict=False):
        for part in re.split(r"(\n)", visible(piece)):
            text.append(part, STYLES[origin] if part.strip() else Style())
    return text


def legend(kinds: Sequence[str]) -> Text:
    """What the styles mean, for these kinds."""
    text = Text()
    for kind in (k for k in STYLES if k in kinds):
        text.append("   " if text else "")
        text.append(kind, STYLES[kind]).append(f" {MEANING[kind]}", Style(dim=True))
    return text


def ratio_in_words(ratio: float) -> str:
    """A ratio as it must be read: a slow-down is called one.

    >>> ratio_in_words(1.5), ratio_in_words(0.8)
    ('1.50x as fast as plain decoding', '0.80x: a slow-down, 1.25 times the time of plain decoding')
    """
    if ratio >= 1:
        return f"{ratio:.2f}x as fast as plain decoding"
    return f"{ratio:.2f}x: a slow-down, {1 / ratio if ratio else float('inf'):.2f} times the time of plain decoding"


# ---------------------------------------------------------------------- the race


class Stage:
    """The live picture of a race: `watch` draws it, at most `fps` times a second of real time.

    Nothing is drawn from a second thread: it would compete with the steps that are being timed.
    """

    def __init__(self, console: Console, prompt: str, total: int, title: str = "", fps: float = 15.0):
        self.console, self.prompt, self.total, self.title, self.every = console, prompt, total, title, 1 / fps
        self.live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self.drawn = 0.0

    def __enter__(self) -> "Stage":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def watch(self, lanes: Sequence[Lane]) -> None:
        """Show the lanes, unless it was done just now."""
        now = self.console.get_time()
        if now - self.drawn >= self.every or all(lane.finished for lane in lanes):
            self.live.update(self.draw(lanes, self.console.height - 6), refresh=True)
            self.drawn = self.console.get_time()

    def watch_reversed(self, lanes: Sequence[Lane]) -> None:
        """Show lanes that were started in the other order, each in its usual place."""
        self.watch(lanes[::-1])

    def draw(self, lanes: Sequence[Lane], height: int | None = None) -> RenderableType:
        """The lanes side by side, or one below the other where the terminal is narrow."""
        beside = self.console.width >= 36 * len(lanes)
        wide = self.console.width // len(lanes) if beside else self.console.width
        high = None if height is None else max(height if beside else height // len(lanes), 4)
        bodies = [self._body(lane, wide, high) for lane in lanes]
        tallest = max(len(body) for body in bodies)
        panels = [self._panel(lane, body, wide, tallest) for lane, body in zip(lanes, bodies, strict=True)]
        rows: list[RenderableType] = [*panels]
        if beside:
            grid = Table.grid(expand=True)
            for _ in panels:
                grid.add_column(ratio=1)
            grid.add_row(*panels)
            rows = [grid]
        kinds = {kind for lane in lanes for kind in lane.trace.origins}
        head = Text(visible(self.title), style="bold", no_wrap=True, overflow="ellipsis")
        return Group(head, *rows, legend(list(kinds)))

    def _body(self, lane: Lane, wide: int, high: int | None) -> list[Text]:
        """The lines of a lane's text; where they are too many, the newest."""
        text = Text.assemble((visible(self.prompt), Style(dim=True)), coloured(lane.pieces, lane.trace.origins))
        lines = list(text.wrap(self.console, max(wide - 4, 8)))
        return lines if high is None else lines[max(len(lines) - (high - 4), 0) :]

    def _panel(self, lane: Lane, body: list[Text], wide: int, lines: int) -> Panel:
        done = min(len(lane.tokens) / max(self.total, 1), 1.0)
        bar = Text("━" * round(done * (wide - 4)), "#009e73" if lane.finished else "")
        figures = Text(
            f"{len(lane.tokens)} tokens  {lane.stats.tokens_per_call:.2f} a call  {lane.tokens_per_second:.0f}/s",
            no_wrap=True,
            overflow="ellipsis",
        )
        clock = f"{lane.seconds:.2f} s" + (f" ({lane.finished})" if lane.finished else "")
        content = Group(Text("\n").join([*body, *[Text()] * (lines - len(body))]), bar, figures)
        return Panel(content, title=lane.method, subtitle=clock, box=ROUNDED)


def report(repeats: Sequence[Sequence[Lane]], outcomes: Sequence[Outcome], promises: Sequence[str]) -> RenderableType:
    """The figures of a race; `promises` holds each outcome's guarantee at its settings, "lossy" among them."""
    lanes = repeats[0]
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=True)
    table.add_column("")
    for lane in lanes:
        table.add_column(lane.method, justify="right")
    for name, cells in figures(repeats).items():
        table.add_row(name, *cells)
    said: list[RenderableType] = [table, Text()]
    for outcome, promise in zip(outcomes, promises, strict=True):
        who = f"{outcome.method}: " if len(outcomes) > 1 else ""
        many = ""
        if len(outcome.ratios) > 1:
            low, high = min(outcome.ratios), max(outcome.ratios)
            many = f" (ratio of medians of {len(outcome.ratios)} repeats, from {low:.2f} to {high:.2f})"
        said += [Text(f"{who}{ratio_in_words(outcome.ratio)}{many}", "bold"), Text(who + verdict(outcome, promise))]
    return Group(*said)


def figures(repeats: Sequence[Sequence[Lane]]) -> dict[str, list[str]]:
    """Rows of the report, a cell for each lane. Times are of the first repeat."""
    lanes = repeats[0]
    rows = {
        "tokens": [f"{lane.stats.emitted}" for lane in lanes],
        "target calls": [f"{lane.stats.target_calls}" for lane in lanes],
        "tokens per target call": [f"{lane.stats.tokens_per_call:.2f}" for lane in lanes],
        "accepted of drafted": [
            f"{lane.stats.accepted} of {lane.stats.drafted}" if lane.stats.drafted else "-" for lane in lanes
        ],
        "distinct 4-grams": [f"{lane.distinct:.2f}" for lane in lanes],
    }
    for number, repeat in enumerate(repeats, 1):
        name = "seconds" if len(repeats) == 1 else f"seconds, repeat {number}"
        rows[name] = [f"{lane.seconds:.3f}" for lane in repeat]
    rows["tokens/s"] = [f"{lane.tokens_per_second:.1f}" for lane in lanes]
    return rows


def verdict(outcome: Outcome, promise: str) -> str:
    """Whether the texts are what they must be."""
    if outcome.identical is None:
        same = "another law (its knobs make it lossy)" if promise in ("lossy", "approx") else "the same law"
        return f"identical: not expected above temperature 0 ({same}, not the same text)"
    if outcome.identical:
        return "identical: yes"
    where = f"identical: NO, from new token {outcome.differs_at} on"
    return where + (" (lossy by its settings)" if promise in ("lossy", "approx") else ", which it promises to be")


# ---------------------------------------------------------------------- text as it grows


def describe_layers(layers_run: Sequence[int], n_layers: int) -> str:
    """Return the mean of the layers that ran for each token; nothing if every token ran all of them.

    >>> describe_layers([2, 10, 3], 10), describe_layers([10, 10], 10)
    (', 5.0 of 10 layers per token', '')
    """
    if min(layers_run, default=n_layers) >= n_layers:
        return ""
    return f", {sum(layers_run) / len(layers_run):.1f} of {n_layers} layers per token"


def statistics(stats: Statistics, reason: str, layers: str = "") -> str:
    """Return a request's figures on one line. `layers` is what `describe_layers` says of it."""
    return stats.describe(reason, layers)
