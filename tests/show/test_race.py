"""A race: clocks count decoding steps and nothing else, and the lane that is late moves next.

Its picture is tested too.
"""

import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lm.small import LLAMA, model
from tinyspec.decoding.trace import Trace, TraceRound
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.show.picture import LETTERS, Track, draw_race
from tinyspec.show.race import Lane, compare_lanes, cut_lane, find_median_race, race, warm_up

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    return model(LLAMA), model(LLAMA, seed=1)


def starts(pair: tuple[Model, Model], **options: Any) -> list[Any]:
    target, draft = pair
    common = {"max_new_tokens": 12, **options}
    return [
        ("autoregressive", lambda: start_generation(target, [1, 2, 3], **common)),
        (
            "speculative_decoding",
            lambda: start_generation(
                target, [1, 2, 3], method="speculative_decoding", draft=draft, **common
            ),
        ),
    ]


class Ticking:
    """A clock that shows one second more at each reading, so whatever is timed takes one second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_greedy_lanes_write_the_same_text(pair: tuple[Model, Model]) -> None:
    lanes = race(pair[0], starts(pair))
    assert lanes[0].tokens == lanes[1].tokens
    assert len(lanes[0].tokens) == 12
    assert [lane.finished for lane in lanes] == ["length", "length"]
    assert compare_lanes([lanes], [True])[0].identical is True
    assert compare_lanes([lanes], [False])[0].identical is None


def test_a_lane_tells_the_knobs_of_its_method(pair: tuple[Model, Model]) -> None:
    lanes = race(pair[0], starts(pair))
    assert [lane.knobs for lane in lanes] == [{}, {"gamma": 3, "lenience": 1.0}]


def test_a_clock_counts_the_prompt_and_every_round(pair: tuple[Model, Model]) -> None:
    for lane in race(pair[0], starts(pair), clock=Ticking()):
        assert lane.prefill == 1
        assert lane.rounds == [1.0] * lane.stats.target_calls
        assert lane.seconds == lane.stats.seconds == 1 + lane.stats.target_calls
        assert lane.ends[-1] == lane.seconds
        assert len(lane.trace.rounds) == lane.stats.target_calls


def test_the_lane_with_the_least_time_moves(pair: tuple[Model, Model]) -> None:
    clock, moves = Ticking(), list[tuple[int, float]]()

    def watched(number: int, begin: Any) -> Any:
        def make() -> Any:
            request = begin()
            step = request.decoder.step
            request.decoder.step = lambda rng: (moves.append((number, clock.now)), step(rng))[1]
            return request

        return make

    pairs = [(name, watched(number, begin)) for number, (name, begin) in enumerate(starts(pair))]
    race(pair[0], pairs, clock)
    order = [number for number, _ in moves]
    calls = min(order.count(0), order.count(1))
    assert (
        order[: 2 * calls] == [0, 1] * calls
    )  # every step takes one second: they take turns until one has finished


def test_a_cut_lane_holds_what_had_been_written(pair: tuple[Model, Model]) -> None:
    for lane in race(pair[0], starts(pair), clock=Ticking()):
        assert cut_lane(lane, 0).tokens == []
        assert cut_lane(lane, lane.seconds) is lane
        for ended, end in enumerate(lane.ends[:-1], 1):
            for seconds in (end, end + 0.5):
                cut = cut_lane(lane, seconds)
                assert (
                    cut.tokens
                    == lane.tokens[: sum(len(r.emitted) for r in lane.trace.rounds[:ended])]
                )
                assert (
                    len(cut.pieces)
                    == len(cut.trace.origins)
                    == cut.stats.emitted
                    == len(cut.tokens)
                )
                assert cut.stats.target_calls == ended
                assert cut.seconds == pytest.approx(seconds)
                assert cut.finished is None


def test_the_warm_up_ends(pair: tuple[Model, Model]) -> None:
    warm_up([begin for _, begin in starts(pair)])


def lanes_of(*runs: tuple[list[int], float]) -> list[Lane]:
    return [
        Lane(str(i), rounds=[seconds], tokens=tokens) for i, (tokens, seconds) in enumerate(runs)
    ]


def test_the_ratio_is_the_median_of_seconds_per_token() -> None:
    plain, fast = [1, 2, 3, 4], [1, 2]
    repeats = [lanes_of((plain, 4.0), (fast, second)) for second in (1.0, 2.0, 8.0)]
    outcome = compare_lanes(repeats, [True])[0]
    assert outcome.ratio == 1.0
    assert outcome.ratios == [2.0, 1.0, 0.25]
    assert find_median_race(outcome.ratios) == 1
    assert outcome.identical is False
    assert outcome.differs_at == 2


def test_of_two_races_in_the_middle_the_slower_is_shown() -> None:
    assert find_median_race([2.0, 1.0, 1.5, 1.2]) == 3


# ---------------------------------------------------------------------- the picture


def make_trace(rounds: int, seed: int = 0) -> Trace:
    """A trace as speculative decoding leaves it: gamma 4, some accepted, then one of its own."""
    draw, trace = random.Random(seed), Trace([1])
    for _ in range(rounds):
        kept = draw.randint(0, 4)
        origins = ["accepted"] * kept + ["bonus" if kept == 4 else "recovered"]
        trace.rounds.append(
            TraceRound(
                [5] * 4,
                [-1, 0, 1, 2],
                list(range(kept)),
                [],
                [5] * (kept + 1),
                origins,
                [2] * 5,
                1,
                4,
            )
        )
    return trace


def plain(rounds: int) -> Trace:
    return Trace(
        [1], [TraceRound([], [], [], [], [5], ["plain"], [2], 1, 0) for _ in range(rounds)]
    )


def track(trace: Trace, pace: float, **more: Any) -> Track:
    return Track(
        "name <&>", trace, [0.1 + pace * (i + 1) for i in range(len(trace.rounds))], 0.1, **more
    )


def boxes(root: ElementTree.Element, kind: str) -> Iterator[int]:
    for path in root.iter(f"{SVG}path"):
        if path.get("class") == kind:
            yield path.get("d", "").count("M")


def test_every_token_has_a_box_of_its_origin() -> None:
    fast = make_trace(40)
    root = ElementTree.fromstring(draw_race([track(plain(60), 0.01), track(fast, 0.01)], "a race"))
    legend = 1
    for kind in ("accepted", "recovered", "bonus"):
        assert sum(boxes(root, kind)) == fast.origins.count(kind) + legend
    assert sum(boxes(root, "plain")) == 60 + legend
    assert (
        sum(boxes(root, "rejected")) == sum(3 - min(len(r.path), 3) for r in fast.rounds) + legend
    )


def test_the_picture_stands_alone_and_is_small() -> None:
    pieces = ["wo\x1brd ", "<b>", "&"] * 200
    drawn = draw_race(
        [
            track(plain(512), 0.01),
            track(make_trace(200), 0.02, pieces=pieces, verdict="1.30x as fast"),
        ],
        'A "race" & more',
    )
    assert len(drawn.encode()) < 60_000
    assert "prefers-color-scheme" in drawn
    assert "<script" not in drawn
    assert "url(" not in drawn
    assert "href" not in drawn
    root = ElementTree.fromstring(drawn)  # well formed, whatever the model wrote
    assert root.get("viewBox")
    assert root.get("width") is None
    words = " ".join(root.itertext())
    assert "1.30x as fast" in words
    assert "512 forward passes" in words


def test_the_picture_brings_its_own_background() -> None:
    root = ElementTree.fromstring(draw_race([track(plain(3), 0.1)], "a race"))
    page = root.find(f"{SVG}rect")
    assert page is not None
    assert page.get("class") == "page"
    *_, wide, high = map(float, root.get("viewBox", "").split())
    assert (float(page.get("width", "0")), float(page.get("height", "0"))) == (wide - 1, high - 1)


def test_the_excerpt_breaks_between_words_and_keeps_the_colours() -> None:
    pieces = [" alpha", "bet", " soup"] * 30
    drawn = draw_race(
        [track(make_trace(60), 0.1, pieces=pieces, prompt="Once <upon> a time")], "a race"
    )
    lines = [
        t for t in ElementTree.fromstring(drawn).iter(f"{SVG}text") if t.get("class") == "mono"
    ]
    words = " ".join("".join(line.itertext()) for line in lines).split()
    assert words == ["Once", "<upon>", "a", "time"] + ["alphabet", "soup"] * 30
    assert max(len("".join(line.itertext())) for line in lines) <= LETTERS
    assert lines[0][0].get("class") == "quiet"
    assert lines[0][1].get("class") in ("accepted", "recovered", "bonus")


def test_columns_share_one_time_axis() -> None:
    drawn = draw_race([track(plain(10), 0.1), track(make_trace(5), 0.1)], "a race")
    root = ElementTree.fromstring(drawn)
    finishes = [
        float(p.get("d", "")[1:].split()[0])
        for p in root.iter(f"{SVG}path")
        if p.get("class") == "end"
    ]
    assert finishes[0] == pytest.approx(936)
    assert finishes[1] == pytest.approx(24 + 912 * 0.6 / 1.1, abs=0.1)


def test_a_race_without_tokens_is_drawn() -> None:
    ElementTree.fromstring(draw_race([Track("empty", Trace([1]), [])], "nothing"))
