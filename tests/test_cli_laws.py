"""`tinyspec laws`: what it prints, in a pipe and as JSON, how it ends, and what it rejects."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import failed, run
from tinyspec import technique
from tinyspec.decoding.decode import Decoder, TargetProbs
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import museum, prove, statistics
from tinyspec.technique import Card, Guarantee, Request, find_technique
from tinyspec.tree import ROOT, TokenTree


@pytest.fixture(autouse=True)
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is tried, not the techniques."""
    monkeypatch.setattr(prove, "CI", prove.Profile("ci", sample=5))
    monkeypatch.setattr(prove, "THOROUGH", prove.Profile("thorough", (0, 1), 5))
    monkeypatch.setattr(prove, "FIVE_SECONDS", prove.Profile("five-second", sample=2))


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a registered technique whose bonus is drawn from the wrong row."""

    def wrong(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        verdict = verify_tree(tree, p, rng)
        return (
            verdict
            if not verdict.accepted
            else Verdict(verdict.accepted, rng.draw(p[ROOT]), verdict.rejected)
        )

    def build(request: Request) -> Decoder:
        from tinyspec.decoding.modeldraft import ModelDrafter

        return request.decoder(ModelDrafter(request.drafts[0], 2, request.stop.eos), wrong)

    card = Card("biased", "Biased", "none", "toy", Guarantee.EXACT, (), build, drafts=1)
    monkeypatch.setattr(technique, "_cards", {**technique.load_techniques(), "biased": card})
    monkeypatch.setattr(prove, "CI", prove.Profile("ci"))
    return card.name


def test_it_prints_what_was_proved() -> None:
    result = run("laws", "autoregressive", "llma")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    for word in (
        "autoregressive",
        "llma",
        "exact",
        "joint distribution",
        "cases",
        "outcomes",
        "seconds",
    ):
        assert word in result.output


@pytest.mark.slow
def test_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """All techniques are here one of each kind: tests/laws/test_suites.py proves the others."""
    names = ("autoregressive", "speculative_decoding", "llma", "planner", "mask_predict", "apar")
    few = {name: find_technique(name) for name in (*names, "sarathi")}
    monkeypatch.setattr(technique, "_cards", few)
    told = json.loads(run("laws", "--all", "--json").stdout)
    assert told["profile"] == "ci"
    assert {entry["method"] for entry in told["methods"]} == set(few)
    for entry in told["methods"]:
        assert entry["accused"] is None
        analysis = (
            find_technique(entry["method"]).kind == "analysis"
        )  # decodes nothing, so no law applies
        cases = sum(law["cases"] for law in entry["proved"])
        # Of five cases two may need a verifier (the shared one, or its own) that it does not have.
        assert cases == 0 if analysis else cases >= 3


def test_an_accusation_is_in_the_words_of_the_task_and_ends_with_code_1(biased: str) -> None:
    result = run("laws", biased)
    assert result.exit_code == 1
    for word in (
        "ACCUSED: joint distribution",
        "broken: joint distribution",
        "p along the text",
        "q along the text",
        "expected",
        "got",
    ):
        assert word in result.output
    result = run("laws", biased, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["methods"][0]["accused"]["law"] == "joint distribution"


def test_the_thorough_profile_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "thorough.json"
    first = json.loads(run("laws", "llma", "--thorough", "--resume", str(file), "--json").stdout)
    assert len(json.loads(file.read_text())["done"]["llma"]) == 10
    assert (
        json.loads(run("laws", "llma", "--thorough", "--resume", str(file), "--json").stdout)
        == first
    )
    assert "begun under" in failed(run("laws", "llma", "--resume", str(file)))


def test_seeds_count_what_they_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "seeds.json"
    result = run("laws", "llma", "--seeds", "2", "--resume", str(file))
    assert result.exit_code == 0, result.output
    assert "llma: 2 seeds" in result.output
    assert "accused 0 times" in result.output
    told = json.loads(run("laws", "llma", "--seeds", "3", "--resume", str(file), "--json").stdout)
    assert told["methods"]["llma"]["seeds"] == 3
    assert told["accused"] == []


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    for call in (("--seeds", "1"), ("--thorough",)):
        file = tmp_path / "result.json"
        assert run("laws", "autoregressive", *call, "--out", str(file)).exit_code == 0
        result = json.loads(file.read_text(encoding="utf-8"))
        assert {"command", "commit", "date", "machine", "profile", "methods"} <= set(result)


def test_seeds_tell_who_was_accused(biased: str) -> None:
    result = run("laws", biased, "--seeds", "3")
    assert result.exit_code == 1
    assert "broken: " in result.output


@pytest.mark.parametrize(
    ("what", "module", "function"),
    [("mutants", museum, "judge_mutants"), ("toys", museum, "judge_toys")],
)
def test_the_matrices_are_printed(
    monkeypatch: pytest.MonkeyPatch, what: str, module: Any, function: str
) -> None:
    name, group = what[:-1], "law" if what == "mutants" else "technique"
    killed = {
        name: "always accepts",
        group: "the joint distribution",
        "killed_by": "joint distribution",
        "counterexample": {"case": {"p": "[1, 0]"}, "expected": "1", "got": "0"},
    }
    monkeypatch.setattr(module, function, lambda watch: [killed, killed])
    result = run("laws", f"--{what}")
    assert result.exit_code == 0, result.output
    assert result.output == f"the joint distribution: 2 of 2 killed\n2 of 2 {what} killed\n"
    result = run("laws", f"--{what}", "--verbose")
    assert "always accepts" in result.output
    assert "joint distribution" in result.output
    assert "expected 1, got 0" in result.output
    assert f"2 of 2 {what} killed" in result.output
    assert json.loads(run("laws", f"--{what}", "--json").stdout) == [killed, killed]
    lives = {
        name: "drifts",
        group: "the joint distribution",
        "killed_by": None,
        "counterexample": None,
    }
    monkeypatch.setattr(module, function, lambda watch: [killed, lives])
    for options in ((), ("--verbose",)):
        result = run("laws", f"--{what}", *options)
        assert result.exit_code == 1
        assert "survived" in result.output and "drifts" in result.output
        assert f"1 of 2 {what} killed" in result.output


def test_a_matrix_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    two = museum.mutants()[:2]
    monkeypatch.setattr(museum, "mutants", lambda: two)
    museum.judge_mutants(lambda *now: told.append(now))
    assert [(at, of) for _, at, of in told] == [(0, 2), (1, 2)]


def test_the_demo_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyspec.cli import base

    told = {"kind": "statistical demo: evidence, not proof", "texts": 3}
    monkeypatch.setattr(base, "load_all", lambda *args: (None, None))
    monkeypatch.setattr(statistics, "run_demo", lambda *args, **options: told)
    monkeypatch.setattr(statistics, "format_demo", lambda told: told["kind"])
    result = run("laws", "--demo", "--samples", "3")
    assert result.exit_code == 0, result.output
    assert "evidence, not proof" in result.output
    assert json.loads(run("laws", "--demo", "--json").stdout) == told


def test_what_it_rejects(tmp_path: Path) -> None:
    assert "--all" in failed(run("laws"))
    assert "llma" in failed(run("laws", "lmla"))
    assert "choose one" in failed(run("laws", "--mutants", "--toys"))
    for option in (("--out", "a.json"), ("--resume", "a.json"), ("--jobs", "2")):
        assert "are for proofs" in failed(run("laws", "--mutants", *option))
    (tmp_path / "x.json").write_text("no")
    assert "--resume" in failed(run("laws", "llma", "--resume", str(tmp_path / "x.json")))
