"""What a profile runs, what a state remembers, and what the committed runs found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.laws import hosted
from tests.laws.test_suites import BROKEN, SPECULATIVE
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.card_laws import REQUEST_LAWS
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.prove import (
    CI,
    FIVE_SECONDS,
    Profile,
    State,
    code_fingerprint,
    list_questions,
    nothing_correct_is_accused,
    prove_technique,
)
from tinyspec.laws.stage import small_knob
from tinyspec.laws.suites import knob_ladder, technique_cases
from tinyspec.technique import Card, Knob, Request, find_technique


def test_a_knob_is_made_small_unless_its_card_says_how() -> None:
    assert small_knob(Knob("k", 15, "", low=1), 2) == 2
    assert small_knob(Knob("k", 1, ""), 2) == 1
    assert small_knob(Knob("k", 9, "", low=4), 2) == 4
    assert small_knob(Knob("k", 9, "", small=(3, 5)), 2) == 3
    assert small_knob(Knob("on", True, ""), 2) is True
    assert small_knob(Knob("x", 0.3, ""), 2) == 0.3
    assert small_knob(Knob("which", 5, "", choices=(5, 7)), 2) == 5


def test_every_choice_and_every_small_value_of_a_knob_is_proved_once() -> None:
    titles = {case.title for case in technique_cases(find_technique("llma"))}
    assert {"which first", "which frequent", "own False"} <= titles
    card = replace(hosted.siblings(True), knobs=(Knob("k", 4, "", small=(2, 1)),))
    assert "k 1" in {case.title for case in technique_cases(card)}


def test_the_ladder_of_a_knob_starts_at_its_neutral_value() -> None:
    assert knob_ladder(SPECULATIVE)[0] == 1.0
    assert knob_ladder(SPECULATIVE) == sorted(knob_ladder(SPECULATIVE), reverse=True)
    assert knob_ladder(hosted.EARLY) == [3, 2, 1]
    choice = replace(
        hosted.EARLY, lossy=("layers", 3), knobs=(Knob("layers", 3, "", choices=(1, 2, 3)),)
    )
    assert knob_ladder(choice) == [3, 2, 1]


def test_a_profile_asks_the_same_questions_every_time() -> None:
    card = find_technique("llma")
    first, again = ([key for key, _ in list_questions(card, profile)] for profile in (CI, CI))
    assert first == again
    assert len(set(first)) == len(first)
    sample = [key for key, _ in list_questions(card, FIVE_SECONDS)]
    assert len(sample) == FIVE_SECONDS.sample
    assert set(sample) < set(first)
    thorough = list_questions(card, Profile("x", range(10)))
    once = 1 + len(REQUEST_LAWS)  # contracts and whole requests ask the same whatever the seed
    assert len(thorough) == 10 * (len(first) - once) + once


def test_what_was_proved_is_not_proved_again(tmp_path: Path) -> None:
    file, profile = tmp_path / "state.json", Profile("short", sample=4)
    card = find_technique("autoregressive")
    begun = prove_technique(card, profile, State(file, profile.name))
    calls: list[int] = []

    def build(request: Request) -> Decoder:
        calls.append(1)
        return request.decoder(BaseDrafter(), verify_tree)

    assert prove_technique(replace(card, build=build), profile, State(file, profile.name)) == begun
    assert not calls
    with pytest.raises(TinyspecError, match="begun under"):
        State(file, "thorough")
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(code_fingerprint(), "another"), encoding="utf-8")
    with pytest.raises(TinyspecError, match="other code"):
        State(file, profile.name)
    file.write_text("[]")
    with pytest.raises(TinyspecError, match="not a file"):
        State(file, profile.name)


def test_a_run_over_seeds_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "seeds.json"
    cards = [find_technique("autoregressive")]

    class Stop(Exception):
        pass

    def stop(card: Card, seed: int) -> None:
        if seed == 1:
            raise Stop

    state = State(file, "seeds")
    with pytest.raises(Stop):
        nothing_correct_is_accused(cards, 2, state, stop)
    state.write()
    report = nothing_correct_is_accused(cards, 2, State(file, "seeds"))
    whole = nothing_correct_is_accused(cards, 2, State(None, "seeds"))
    assert report["accused"] == whole["accused"] == []
    for key in ("seeds", "cases", "branches"):
        assert report["methods"]["autoregressive"][key] == whole["methods"]["autoregressive"][key]


def test_an_accusation_on_one_seed_is_noted_and_the_run_goes_on(tmp_path: Path) -> None:
    card = BROKEN["bonus from the wrong row"][0]
    report = nothing_correct_is_accused([card], 2, State(tmp_path / "s.json", "seeds"))
    assert {entry["law"] for entry in report["accused"]} == {JOINT}
    assert report["methods"][card.name]["seeds"] == 2


RESULTS = Path(__file__).parent.parent.parent / "tutorials" / "results"


def test_the_committed_runs_accuse_nobody() -> None:
    seeds = json.loads((RESULTS / "laws_seeds.json").read_text(encoding="utf-8"))
    assert seeds["accused"] == []
    assert {name: found["seeds"] for name, found in seeds["methods"].items()} == {
        "autoregressive": 200, "speculative_decoding": 200, "llma": 200,
    }  # fmt: skip
    thorough = json.loads((RESULTS / "laws_thorough.json").read_text(encoding="utf-8"))
    assert thorough["profile"] == "thorough"
    assert all(entry["accused"] is None and entry["proved"] for entry in thorough["methods"])
