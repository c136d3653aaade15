"""What the terminal shows: text in the colours of its origin, a race played back, reports, text as
it grows.

A token's origin is told by its colour (Okabe and Ito's palette, which the colour-blind tell apart)
and by its face, so that it survives a terminal without colours. Characters that would steer a
terminal are shown, not sent.
"""

import re
import time
from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tinyspec.show.race import Lane, Outcome, cut_lane

STYLES = {
    "accepted": Style(color="#009e73", bold=True),
    "recovered": Style(color="#d55e00", reverse=True),
    "bonus": Style(color="#3a9bd9", underline=True),
    "plain": Style(),
}
MEANING = {
    "accepted": " draft token",
    "recovered": " after rejection",
    "bonus": " after full draft",
    "plain": "",
}
PLAYBACK_SECONDS = (
    8.0  # how long a race is on the screen: the eye can follow 30 forward passes in this time
)
REAL_TIME_SECONDS = 1.0  # a race of at least this length is watched as it was
HOLD_SECONDS = 1.0  # how long the finish stays on the screen
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def escape_controls(text: str) -> str:
    """Return a text whose control characters are pictures; line feeds and tabs stay.

    A model may write anything, and a terminal obeys control characters; XML refuses them.

    >>> escape_controls("a\\x1b[2J")
    'a␛[2J'
    """
    return _CONTROL.sub(
        lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 0x20 else "\ufffd", text
    )


def colour_tokens(pieces: Sequence[str], origins: Sequence[str]) -> Text:
    """Return a text, each token in the style of its origin.

    A line feed keeps no style: a reversed one would paint a bar.
    """
    text = Text()
    for piece, origin in zip(pieces, origins, strict=False):
        for part in re.split(r"(\n)", escape_controls(piece)):
            text.append(part, STYLES[origin] if part.strip() else Style())
    return text


def style_legend(kinds: Sequence[str]) -> Text:
    """Return what the styles mean, for these kinds."""
    text = Text()
    for kind in (k for k in STYLES if k in kinds):
        text.append("  " if text else "")
        text.append(kind, STYLES[kind]).append(MEANING[kind], Style(dim=True))
    return text


def count_of(n: int, noun: str, plural_ending: str = "s") -> str:
    """Return a number with its noun.

    >>> count_of(1, "token"), count_of(2, "forward pass", "es")
    ('1 token', '2 forward passes')
    """
    return f"{n} {noun}{'' if n == 1 else plural_ending}"


def ratio_in_words(ratio: float, ratios: Sequence[float] = ()) -> str:
    """Say a ratio as it must be read: a slow-down is called one. `ratios`: of each race, where
    there were several.

    >>> ratio_in_words(1.5), ratio_in_words(0.8)
    ('1.50x as fast as plain decoding', 'a slow-down: 1.25x the time of plain decoding')
    >>> ratio_in_words(1.5, [1.4, 1.6, 1.5])
    '1.50x as fast as plain decoding (median of 3 races, 1.40 to 1.60)'
    """
    said, shown = f"{ratio:.2f}x as fast as plain decoding", list(ratios)
    if ratio < 1:
        shown = [1 / other if other else float("inf") for other in ratios]
        said = (
            f"a slow-down: {1 / ratio if ratio else float('inf'):.2f}x the time of plain decoding"
        )
    if len(shown) > 1:
        said += f" (median of {len(shown)} races, {min(shown):.2f} to {max(shown):.2f})"
    return said


# ---------------------------------------------------------------------- the race


def name_lane(method: str) -> str:
    """Return what the screen calls a lane."""
    return "plain decoding" if method == "autoregressive" else method


def choose_speed(lanes: Sequence[Lane]) -> float:
    """Return the speed of a playback.

    A short race is stretched to `PLAYBACK_SECONDS`; others are played in real time.
    """
    longest = max(lane.seconds for lane in lanes)
    return longest / PLAYBACK_SECONDS if 0 < longest < REAL_TIME_SECONDS else 1.0


def pace_in_words(speed: float) -> str:
    """Say how a playback relates to real time.

    >>> pace_in_words(1), pace_in_words(1 / 61), pace_in_words(0.4), pace_in_words(3)
    ('in real time', 'slowed 61x', 'slowed 2.5x', '3x as fast as it was')
    """
    if speed == 1:
        return "in real time"
    factor = max(speed, 1 / speed)
    return (
        f"slowed {factor:.{0 if factor >= 10 else 1}f}x"
        if speed < 1
        else f"{factor:g}x as fast as it was"
    )


class RaceStage:
    """A race on the terminal.

    `play` shows a race that is over; `draw` shows where its lanes stand at one moment.
    """

    def __init__(self, console: Console, prompt: str, title: str = "", fps: float = 20.0):
        self.console, self.prompt, self.title, self.fps = console, prompt, title, fps

    def play(self, lanes: Sequence[Lane], speed: float) -> None:
        """Play a race back, `speed` times as fast as it was run: all clocks stretch alike."""
        longest = max(lane.seconds for lane in lanes)
        note = f"measured before, played back {pace_in_words(speed)}"
        with Live(
            console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop"
        ) as live:
            began = self.console.get_time()
            now = 0.0
            while now < longest:
                now = (self.console.get_time() - began) * speed
                cut = [cut_lane(lane, now) for lane in lanes]
                live.update(self.draw(cut, self.console.height, lanes, note), refresh=True)
                time.sleep(1 / self.fps)
            time.sleep(HOLD_SECONDS)

    def draw(
        self,
        lanes: Sequence[Lane],
        height: int | None = None,
        whole: Sequence[Lane] = (),
        note: str = "",
    ) -> RenderableType:
        """Return the lanes side by side, or one below the other where the terminal is narrow.

        height  rows of the terminal; one stays free for the cursor
        whole   the lanes at the finish: the picture is as tall as it will be then, and does not
                jump
        """
        whole = whole or lanes
        beside = self.console.width >= 36 * len(lanes)
        wide = self.console.width // len(lanes) if beside else self.console.width
        head = [
            Text(escape_controls(line), style="bold" if line == self.title else "dim")
            for line in (self.title, note)
            if line
        ]
        for line in head:
            line.truncate(self.console.width, overflow="ellipsis")
        keys = style_legend([kind for lane in whole for kind in lane.trace.origins])
        high = None
        if height is not None:
            room = height - 1 - len(head) - len(keys.wrap(self.console, self.console.width))
            # Beside its text a panel has two borders, the bar and the figures.
            # A strip has the last two.
            high = max(room - 4 if beside else room // len(lanes) - 2, 1)
        tallest = max(len(self._body(lane, wide, high)) for lane in whole)
        goal = max(len(lane.tokens) for lane in whole)
        shown = [
            (self._panel if beside else self._strip)(
                lane, self._body(lane, wide, high), wide, tallest, goal
            )
            for lane in lanes
        ]
        if beside:
            grid = Table.grid(expand=True)
            for _ in shown:
                grid.add_column(ratio=1)
            grid.add_row(*shown)
            shown = [grid]
        return Group(*head, *shown, keys)

    def tell(self, lane: Lane, lines: int) -> RenderableType:
        """Return at most so many lines of a lane's text in the terminal's width, and the legend."""
        body = self._body(lane, self.console.width + 4, lines)
        while body and not body[0].plain.strip():
            del body[0]
        return Group(Text("\n").join(body), style_legend(lane.trace.origins))

    def _body(self, lane: Lane, wide: int, high: int | None) -> list[Text]:
        """Return the lines of a lane's text in a panel of this width; of too many, the newest."""
        text = Text.assemble(
            (escape_controls(self.prompt), Style(dim=True)),
            colour_tokens(lane.pieces, lane.trace.origins),
        )
        lines = list(text.wrap(self.console, max(wide - 4, 8)))
        return lines if high is None else lines[max(len(lines) - high, 0) :]

    def _panel(
        self, lane: Lane, body: list[Text], wide: int, lines: int, goal: int
    ) -> RenderableType:
        """Return a lane in a frame: text, bar, figures."""
        figures, clock = self._state(lane)
        content = Group(_padded(body, lines), self._bar(lane, wide - 4, goal), figures)
        return Panel(content, title=name_lane(lane.method), subtitle=clock, box=ROUNDED)

    def _strip(
        self, lane: Lane, body: list[Text], wide: int, lines: int, goal: int
    ) -> RenderableType:
        """Return a lane without a frame, which leaves more lines to its text."""
        figures, clock = self._state(lane)
        head = Text.assemble(
            (name_lane(lane.method), "bold"), ": ", figures, ", ", clock,
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
        return Group(head, self._bar(lane, wide, goal), _padded(body, lines))

    def _state(self, lane: Lane) -> tuple[Text, str]:
        """Return what a lane has written, and what its clock shows."""
        passes = count_of(lane.stats.target_calls, "forward pass", "es")
        figures = f"{count_of(len(lane.tokens), 'token')} in {passes}"
        clock = f"{lane.seconds:.{2 if lane.seconds >= 1 else 3}f} s"
        done = ", done" if lane.finished else ""
        return Text(figures, no_wrap=True, overflow="ellipsis"), clock + done

    def _bar(self, lane: Lane, wide: int, goal: int) -> Text:
        done = 1.0 if lane.finished else min(len(lane.tokens) / max(goal, 1), 1.0)
        return Text("━" * round(done * wide), "#009e73" if lane.finished else "")


def _padded(body: Sequence[Text], lines: int) -> Text:
    """Return a text of so many lines; empty ones follow it."""
    return Text("\n").join([*body, *[Text()] * (lines - len(body))])


def race_report(
    lanes: Sequence[Lane], outcomes: Sequence[Outcome], promises: Sequence[str]
) -> RenderableType:
    """Return the figures of the race that is shown, and the verdict over all races.

    promises  each outcome's guarantee at its settings, "lossy" among them
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=True)
    names, columns = [name_lane(lane.method) for lane in lanes], report_rows(lanes)
    rows: list[Sequence[str]] = [(name, *cells) for name, cells in columns.items()]
    head = ["", *names]
    if len(lanes) > 2:  # a row for each lane: so many names do not fit beside each other
        head, rows = ["", *columns], [*zip(names, *columns.values(), strict=True)]
        table.padding = (0, 1, 0, 0)
    table.add_column("", no_wrap=True)
    for name in head[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    said: list[RenderableType] = [table, Text()]
    for outcome, promise in zip(outcomes, promises, strict=True):
        who, lead = (f"{outcome.method}: ", "  ") if len(outcomes) > 1 else ("", "")
        said += [
            Text(who + ratio_in_words(outcome.ratio, outcome.ratios), "bold"),
            Text(lead + describe_identity(outcome, promise)),
        ]
    return Group(*said)


def report_rows(lanes: Sequence[Lane]) -> dict[str, list[str]]:
    """Return the rows of the report, a cell for each lane."""
    return {
        "tokens": [f"{lane.stats.emitted}" for lane in lanes],
        "forward passes": [f"{lane.stats.target_calls}" for lane in lanes],
        "tokens per forward pass": [f"{lane.stats.tokens_per_call:.2f}" for lane in lanes],
        "draft tokens accepted": [
            f"{lane.stats.accepted} of {lane.stats.drafted}" if lane.stats.drafted else "-"
            for lane in lanes
        ],
        "distinct 4-grams": [f"{lane.distinct:.2f}" for lane in lanes],
        "seconds": [f"{lane.seconds:.3f}" for lane in lanes],
        "tokens/s": [f"{lane.tokens_per_second:.1f}" for lane in lanes],
    }


def describe_identity(outcome: Outcome, promise: str) -> str:
    """Say whether the texts are what they must be."""
    if outcome.identical is None:
        lossy = promise in ("lossy", "approx")
        same = (
            "another distribution, by its settings"
            if lossy
            else "same distribution, not the same text"
        )
        return f"identical: not expected ({same})"
    if outcome.identical:
        return "identical: yes"
    where = f"identical: NO, from new token {outcome.differs_at} on"
    return where + (
        " (lossy by its settings)"
        if promise in ("lossy", "approx")
        else ", which it promises to be"
    )


# ---------------------------------------------------------------------- text as it grows


def describe_layers(layers_run: Sequence[int], n_layers: int) -> str:
    """Return the mean of the layers that ran for each token; nothing if every token ran all.

    >>> describe_layers([2, 10, 3], 10), describe_layers([10, 10], 10)
    (', 5.0 of 10 layers per token', '')
    """
    if min(layers_run, default=n_layers) >= n_layers:
        return ""
    return f", {sum(layers_run) / len(layers_run):.1f} of {n_layers} layers per token"
