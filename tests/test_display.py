"""Laws of the display: origins are told with and without colour, nothing steers the terminal, pieces make the whole."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.zoo import Zoo, tiny_zoo
from tinyspec.display import STYLES, Stage, coloured, legend, ratio_in_words, report, statistics, visible
from tinyspec.generation import Growing, generate, start
from tinyspec.models import load
from tinyspec.race import compare, race


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def test_origins_differ_without_colour() -> None:
    faces = {(style.bold, style.underline, style.reverse, style.italic) for style in STYLES.values()}
    assert len(faces) == len(STYLES)
    assert len({style.color for style in STYLES.values()}) == len(STYLES)


def test_control_characters_are_shown_not_sent() -> None:
    out = io.StringIO()
    Console(file=out, no_color=True).print(coloured(["a\x1b[2J", "\x9b", "\n"], ["plain", "accepted", "bonus"]))
    assert "\x1b" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
    assert visible("tab\tline\n") == "tab\tline\n"


def test_the_legend_names_what_occurs() -> None:
    said = legend(["bonus", "plain"]).plain
    assert "bonus" in said
    assert "recovered" not in said


@pytest.mark.parametrize("ratio", [0.5, 0.99])
def test_a_slow_down_is_called_one(ratio: float) -> None:
    assert "slow-down" in ratio_in_words(ratio)
    assert "slow-down" not in ratio_in_words(1 / ratio)


@pytest.mark.parametrize("wide", [40, 80, 160])
def test_the_stage_fits_its_terminal(zoo: Zoo, wide: int) -> None:
    target, small = load(zoo.big), load(zoo.small)
    starts = [
        (method, lambda m=method: start(target, "the cat", method=m, draft=small, max_new_tokens=24))
        for method in ("autoregressive", "speculative_decoding")
    ]
    out = io.StringIO()
    console = Console(file=out, width=wide, height=24, force_terminal=True, color_system="truecolor")
    with Stage(console, "the cat", 24, "a title", fps=1e9) as stage:
        lanes = race(target, starts, stage.watch)
    flat = Console(file=io.StringIO(), width=wide, height=24)
    with flat.capture() as seen:
        flat.print(Stage(flat, "the cat", 24, "a title").draw(lanes, 18))
    lines = seen.get().splitlines()
    assert len(lines) <= 24
    assert max(map(cell_len, lines)) <= wide
    with flat.capture() as seen:
        flat.print(report([lanes, lanes], compare([lanes, lanes], greedy=True), ["exact"]))
    assert "identical: yes" in seen.get()
    assert "medians of 2" in " ".join(seen.get().split())


@pytest.mark.parametrize("stop", [(), (" ",), ("he",)])
def test_growing_text_equals_the_whole(zoo: Zoo, stop: tuple[str, ...]) -> None:
    target = load(zoo.big)
    options = {"temperature": 1.0, "seed": 5, "stop": stop, "max_new_tokens": 40}
    growing = Growing(start(target, "the cat", **options))
    assert "".join(growing) == generate(target, "the cat", **options).text
    assert "tokens in" in statistics(growing.running.stats, "length")
