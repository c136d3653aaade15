"""`tinyspec race` and `tinyspec bench`: their output, plain and as JSON, and what they reject."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.zoo import Zoo, failed, full_disk, run, tiny_zoo
from tinyspec.cli.race import EDIT, STORY

STORYTELLER = Path(__file__).parent.parent / "models" / "storyteller" / "model.safetensors"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def test_race_reports_as_json(zoo: Zoo, tmp_path: Path) -> None:
    picture = tmp_path / "race.svg"
    call = [
        "race",
        "--model",
        zoo.big,
        "-n",
        "24",
        "-p",
        "the cat",
        "--repeat",
        "2",
        "-t",
        "0",
        "--json",
    ]
    result = run(*call, "--svg", str(picture))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["identical"] is True
    assert report["ratio"] > 0
    assert report["tokens_per_call"] == report["lanes"][1]["tokens_per_call"] >= 1
    assert report["lanes"][0]["tokens_per_call"] == 1
    assert len(report["seconds"]) == 2
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_race_in_a_pipe_is_plain(zoo: Zoo) -> None:
    call = ["race", "--model", zoo.big, "-n", "24", "-p", "the cat", "-t", "0", "--method", "llma"]
    result = run(*call, "--method", "speculative_decoding")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert re.search("^llma: .*\n  identical: yes$", result.output, re.M)
    assert "tokens per forward pass" in result.output
    assert "distinct 4-grams" in result.output
    assert "played back" not in result.output


def test_a_sampled_race_of_drafts_without_probabilities_has_one_text(zoo: Zoo) -> None:
    call = ["race", "--model", zoo.big, "-n", "16", "-p", "the cat sat on the cat"]
    call += ["--temperature", "0.8", "--method", "llma"]
    assert "identical: yes" in run(*call).output
    assert json.loads(run(*call, "--json").stdout)["identical"] is True


def test_a_sampled_race_with_a_draft_model_expects_no_identity(zoo: Zoo) -> None:
    call = ["race", "--model", zoo.big, "-n", "16", "-p", "the cat", "--temperature", "0.8"]
    assert "not expected" in run(*call).output
    assert json.loads(run(*call, "--json").stdout)["identical"] is None


def test_race_needs_an_opponent(zoo: Zoo) -> None:
    assert "against itself" in failed(run("race", "--method", "autoregressive", "--model", zoo.big))
    assert "--gamma" in failed(run("race", "--gama", "3", "--model", zoo.big))
    assert "draft" in failed(run("race", "--model", zoo.small, "-p", "the cat"))


def test_the_race_that_is_shown_is_the_median(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tinyspec.cli.race.ENOUGH_SECONDS", float("inf")
    )  # nine races on a busy machine too
    report = json.loads(
        run("race", "--model", zoo.big, "-n", "12", "-p", "the cat", "--json", "-t", "0").stdout
    )
    outcome, shown = report["outcomes"][0], report["shown"]
    assert len(outcome["ratios"]) == len(report["seconds"]) == 9
    assert sorted(outcome["ratios"])[4] == outcome["ratios"][shown] == report["ratio"]
    assert [lane["seconds"] for lane in report["lanes"]] == report["seconds"][shown]


def test_a_long_race_is_not_repeated_unasked(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyspec.cli.race.ENOUGH_SECONDS", 0.0)
    call = ["race", "--model", zoo.big, "-n", "8", "-p", "the cat", "--json"]
    assert len(json.loads(run(*call).stdout)["seconds"]) == 1
    assert len(json.loads(run(*call, "--repeat", "2").stdout)["seconds"]) == 2


@pytest.mark.slow
def test_greedy_text_of_a_base_model_is_kept_from_looping(zoo: Zoo) -> None:
    call = ["race", "--model", zoo.big, "-n", "8", "-p", "the cat", "-r", "1"]
    greedy = [*call, "-t", "0"]
    assert "greedy, repetition penalty 1.2" in run(*greedy).stdout
    assert json.loads(run(*greedy, "--json").stdout)["repetition_penalty"] == 1.2
    assert (
        json.loads(run(*greedy, "--json", "--repetition-penalty", "1").stdout)["repetition_penalty"]
        == 1.0
    )
    chat = json.loads(run(*call, "--json", "--chat").stdout)
    assert (chat["temperature"], chat["repetition_penalty"], chat["top_p"]) == (0.0, 1.0, None)
    assert STORY.keys() == EDIT.keys()


class Terminal:
    """What a command shows on a terminal of 80 x 24.

    Its clock runs with the playback: no test waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.out, self.now = io.StringIO(), 0.0
        console = Console(
            file=self.out,
            width=80,
            height=24,
            force_terminal=True,
            get_time=lambda: self.now,
            legacy_windows=False,
        )
        monkeypatch.setattr("tinyspec.cli.base.console", lambda: console)
        monkeypatch.setattr("tinyspec.show.display.time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def screens(self) -> list[list[str]]:
        """Return what was written between two moves of the cursor, as lines without colour."""
        parts = re.split(r"(?:\r?\x1b\[(?:2K|1A|\?25[lh]))+", self.out.getvalue())
        return [re.sub(r"\x1b\[[0-9;]*m", "", part).splitlines() for part in parts if part.strip()]


def test_frames_and_report_fit_the_terminal(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    prompt = "the cat sat on the mat " * 3
    result = run("race", "--model", zoo.big, "-n", "40", "-p", prompt, "-r", "2")
    assert result.exit_code == 0, result.output
    *frames, report = terminal.screens
    played = [lines for lines in frames if any("slowed" in line for line in lines)]
    assert len(played) > 100
    assert 8 <= terminal.now <= 10
    for lines in [*played, report]:
        assert len(lines) < 24
        assert max(map(cell_len, lines)) <= 80
    assert "identical: not expected" in "".join(report)
    assert not any("╭" in line for line in report)


def test_interrupting_the_playback_still_prints_the_report(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyspec.show.display.time.sleep", interrupt)
    result = run("race", "--model", zoo.big, "-n", "8", "-p", "the cat", "-r", "1")
    assert result.exit_code == 0, result.output
    assert "identical: not expected" in terminal.out.getvalue()


@pytest.mark.parametrize("option", [("--no-live",), ("--json",)])
def test_a_terminal_may_be_told_not_to_play(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    terminal = Terminal(monkeypatch)
    assert (
        run("race", "--model", zoo.big, "-n", "8", "-p", "the cat", "-r", "1", *option).exit_code
        == 0
    )
    assert "\x1b[?25l" not in terminal.out.getvalue()
    assert terminal.now == 0


def test_speed_is_of_real_time(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    call = ["race", "--model", zoo.big, "-n", "8", "-p", "the cat", "-r", "1", "--speed"]
    assert run(*call, "1").exit_code == 0
    assert "in real time" in terminal.out.getvalue()
    assert terminal.now < 5
    assert "nan" in failed(run(*call, "nan"))
    assert "0" in failed(run(*call, "0"))


def test_a_picture_without_a_folder_is_an_error_before_the_race(zoo: Zoo, tmp_path: Path) -> None:
    nowhere = tmp_path / "none" / "race.svg"
    assert "none" in failed(run("race", "--model", zoo.big, "-p", "the cat", "--svg", str(nowhere)))


def test_a_full_disk_leaves_the_old_picture(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "race.svg").write_text("mine")
    call = ["race", "--model", zoo.big, "-n", "4", "-p", "the cat", "-r", "1"]
    with full_disk():
        said = failed(run(*call, "--svg", str(tmp_path / "race.svg")))
    assert "race.svg: File too large" in said
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.skipif(not STORYTELLER.exists(), reason="models/storyteller is not trained yet")
def test_the_first_command_tells_two_stories_that_do_not_loop() -> None:
    report = json.loads(run("race", "--json", "-r", "1").stdout)
    assert report["temperature"] == 0.8
    assert report["tokens_per_call"] > 1
    for lane in report["lanes"]:
        assert lane["distinct_4grams"] >= 0.8
        assert lane["finish_reason"] == "length"


@pytest.mark.skipif(not STORYTELLER.exists(), reason="models/storyteller is not trained yet")
@pytest.mark.parametrize("more", [(), ("--method", "medusa")], ids=["default", "medusa"])
def test_the_bundled_race_is_lossless(more: tuple[str, ...]) -> None:
    report = json.loads(run("race", "--json", "-n", "32", "-t", "0", "-r", "1", *more).stdout)
    assert report["identical"] is True
    assert report["tokens_per_call"] > 1


def test_bench_prints_figures_and_keeps_samples_for_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinyspec.bench.experiments import core

    figures = {
        "ratio": 1.25,
        "samples": {"a": [1.0]},
        "greedy": {"prompts": [{"x": 1}], "tokens_per_call": 2.5},
    }
    fake = replace(core.EXPERIMENT, run=lambda given, quiet: figures | {"rounds": given.rounds})
    monkeypatch.setattr(core, "EXPERIMENT", fake)
    out = tmp_path / "core.json"
    result = run("bench", "core", "--rounds", "3", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "ratio: 1.25" in result.stdout
    assert "  tokens per call: 2.5" in result.stdout
    assert "samples" not in result.stdout
    assert json.loads(out.read_text(encoding="utf-8")) == figures | {"rounds": 3}
    assert json.loads(run("bench", "core", "--json").stdout)["samples"] == {"a": [1.0]}
