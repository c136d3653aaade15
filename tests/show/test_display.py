"""The display shows origins with and without colour, and no text steers the terminal.

The pieces that it prints make the whole text.
"""

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.zoo import Zoo, tiny_zoo
from tinyspec.generation import TextStreamer, generate, start_generation
from tinyspec.models import load
from tinyspec.show.display import (
    HOLD_SECONDS,
    PLAYBACK_SECONDS,
    STYLES,
    RaceStage,
    choose_speed,
    colour_tokens,
    escape_controls,
    name_lane,
    pace_in_words,
    race_report,
    ratio_in_words,
    style_legend,
)
from tinyspec.show.race import Lane, compare_lanes, cut_lane, race


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def test_origins_differ_without_colour() -> None:
    faces = {
        (style.bold, style.underline, style.reverse, style.italic) for style in STYLES.values()
    }
    assert len(faces) == len(STYLES)
    assert len({style.color for style in STYLES.values()}) == len(STYLES)


def test_control_characters_are_shown_not_sent() -> None:
    out = io.StringIO()
    Console(file=out, no_color=True).print(
        colour_tokens(["a\x1b[2J", "\x9b", "\n"], ["plain", "accepted", "bonus"])
    )
    assert "\x1b" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
    assert escape_controls("tab\tline\n") == "tab\tline\n"


def test_the_legend_names_what_occurs() -> None:
    legend = style_legend(["bonus", "plain"]).plain
    assert "bonus" in legend
    assert "recovered" not in legend


@pytest.mark.parametrize("ratio", [0.5, 0.99])
def test_a_slow_down_is_called_one(ratio: float) -> None:
    assert "slow-down" in ratio_in_words(ratio)
    assert "slow-down" not in ratio_in_words(1 / ratio)


def test_the_range_of_a_slow_down_is_in_its_own_terms() -> None:
    words = ratio_in_words(0.5, [0.4, 0.5, 0.8])
    assert (
        words == "a slow-down: 2.00x the time of plain decoding (median of 3 races, 1.25 to 2.50)"
    )


@pytest.fixture(scope="module")
def lanes(zoo: Zoo) -> list[Lane]:
    """A race that is over."""
    target, small = load(zoo.big), load(zoo.small)
    starts = [
        (
            method,
            lambda m=method: start_generation(
                target, "the cat", method=m, draft=small, max_new_tokens=60
            ),
        )
        for method in ("autoregressive", "speculative_decoding")
    ]
    return race(target, starts)


def capture_lines(console: Console, shown: Any) -> list[str]:
    with console.capture() as seen:
        console.print(shown, highlight=False)
    return seen.get().splitlines()


@pytest.mark.parametrize("prompt", ["the cat", "the cat sat on the mat and ran " * 20])
@pytest.mark.parametrize("wide", [40, 80, 160])
def test_every_frame_fits_its_terminal_and_is_as_tall_as_the_last(
    lanes: list[Lane], wide: int, prompt: str
) -> None:
    console = Console(file=io.StringIO(), width=wide, height=24)
    stage = RaceStage(console, prompt, "a title " * 30)
    longest = max(lane.seconds for lane in lanes)
    heights = set[int]()
    for share in (0, 0.01, 0.3, 0.7, 0.99, 1):
        cut = [cut_lane(lane, share * longest) for lane in lanes]
        lines = capture_lines(console, stage.draw(cut, 24, lanes, "slowed 100x " * 30))
        assert max(map(cell_len, lines)) <= wide
        heights.add(len(lines))
    assert len(heights) == 1
    assert heights.pop() < 24  # a row is left for the cursor
    assert len(capture_lines(console, stage.tell(lanes[1], 8))) <= 8 + len(
        capture_lines(console, style_legend(list(STYLES)))
    )


def test_four_lanes_are_readable_on_a_small_terminal(lanes: list[Lane]) -> None:
    """At 80 x 24 each of four lanes keeps three lines of text, and the report cuts no word."""
    many = [*lanes, *(replace(lanes[1], method=name) for name in ("token_recycling", "llma"))]
    console = Console(file=io.StringIO(), width=80, height=24)
    lines = capture_lines(
        console, RaceStage(console, "the cat sat on the mat " * 20, "a title").draw(many, 24)
    )
    heads = [i for i, line in enumerate(lines) if "forward passes, " in line]
    assert [lines[i].partition(":")[0] for i in heads] == [name_lane(lane.method) for lane in many]
    assert len(lines) < 24 and min(b - a for a, b in pairwise(heads)) == 5  # head, bar, text
    outcomes = compare_lanes([many], [True] * 9)
    report = capture_lines(console, race_report(many, outcomes, ["exact"] * 3))
    assert max(map(cell_len, report)) <= 80 and not any("…" in line for line in report)
    assert all(any(line.startswith(name_lane(lane.method)) for line in report) for lane in many)


def test_the_newest_text_is_shown(lanes: list[Lane]) -> None:
    console = Console(file=io.StringIO(), width=80, height=24)
    lines = capture_lines(
        console, RaceStage(console, "far away\n" + "the cat sat on the mat " * 60).draw(lanes, 24)
    )
    assert not any("far away" in line for line in lines)
    newest = lanes[0].text.split()[-1]
    assert any(newest in line for line in lines)


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
@pytest.mark.slow
def test_a_playback_stretches_all_clocks_alike(
    lanes: list[Lane], speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, naps = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("tinyspec.show.display.time.sleep", sleep)
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, get_time=lambda: now[0])
    slow = [replace(lane, prefill=1.0, rounds=[0.1] * len(lane.rounds)) for lane in lanes]
    RaceStage(console, "the cat").play(slow, speed)
    assert naps.pop() == HOLD_SECONDS
    assert sum(naps) == pytest.approx(max(lane.seconds for lane in slow) / speed, abs=0.11)
    assert pace_in_words(speed) in out.getvalue()
    assert out.getvalue().count(", done") >= 2


def test_a_short_race_is_slowed_and_a_long_one_is_played_as_it_was() -> None:
    short = Lane("a", rounds=[0.04])
    assert choose_speed([short, Lane("b", rounds=[0.02])]) == pytest.approx(0.04 / PLAYBACK_SECONDS)
    for seconds in (1.0, 5.0, 20.0):
        assert choose_speed([short, Lane("c", rounds=[seconds])]) == 1
    assert choose_speed([Lane("d")]) == 1


def test_the_report_speaks_plainly(lanes: list[Lane]) -> None:
    console = Console(file=io.StringIO(), width=80, height=24)
    text = "\n".join(
        capture_lines(
            console, race_report(lanes, compare_lanes([lanes] * 3, [True] * 9), ["exact"])
        )
    )
    assert "identical: yes" in text
    assert "median of 3 races" in text
    assert "tokens per forward pass" in text
    sampled = "\n".join(
        capture_lines(console, race_report(lanes, compare_lanes([lanes], [False] * 9), ["exact"]))
    )
    assert "identical: not expected (same distribution, not the same text)" in sampled


@pytest.mark.parametrize("stop", [(), (" ",), ("he",)])
def test_growing_text_equals_the_whole(zoo: Zoo, stop: tuple[str, ...]) -> None:
    target = load(zoo.big)
    options = {"temperature": 1.0, "seed": 5, "stop": stop, "max_new_tokens": 40}
    growing = TextStreamer(start_generation(target, "the cat", **options))
    assert "".join(growing) == generate(target, "the cat", **options).text
    assert "tokens in" in growing.running.stats.describe("length")
