"""`tinyspec bench heads` on tiny models: every depth is counted, and heads stand beside lookup."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments.heads import count_depths, summarize_counts
from tinyspec.tree import ROOT, TokenTree

QUICK = ("--prompts", "2", "--tokens", "6", "--dtype", "float32", "--quiet")


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    return tiny_zoo(tmp_path)


def made_round(parents: list[int], accepted: list[int], probe: list[bool] | None = None) -> Any:
    n = len(parents)
    tree = TokenTree([0] * n, parents, [None] * n, probe or [False] * n)
    tokens = (0,) * (len(accepted) + 1)
    return SimpleNamespace(tree=tree, tokens=tokens, verdict=SimpleNamespace(accepted=accepted))


def test_a_depth_counts_where_the_draft_went_on() -> None:
    counts = Counter[Any]()
    rounds = [
        made_round([], []),  # no draft
        made_round([ROOT, 0, 1], []),  # rejected at depth 1
        made_round([ROOT, ROOT, 0], [1]),  # accepted, and nothing below it
        made_round([ROOT, 0, 1], [0, 1]),  # rejected at depth 3
        made_round([ROOT, 0], [0, 1]),  # accepted whole
        made_round([ROOT, 0], [], [True, True]),  # probes are no draft tokens
    ]
    count_depths(rounds, counts)
    found = summarize_counts(counts)
    assert found["tested"] == [4, 2, 1, 0, 0]
    assert found["depths"] == [3 / 4, 1.0, 0.0, None, None]
    assert found["tau"] == (6 + 5) / 6 and found["nodes"] == 11 / 6


@pytest.mark.slow
def test_heads_stand_beside_lookup_and_the_draft(zoo: Zoo, tmp_path: Path) -> None:
    out, page, picture = (tmp_path / name for name in ("heads.json", "heads.md", "heads.svg"))
    head = tmp_path / "cache" / "models" / "head"
    values = ["head.heads=2", "texts.texts=12", "texts.tokens=12", "train.steps=2"]
    sets = [word for value in values for word in ("--set", value)]
    asked = ("--for", zoo.big, "--method", "medusa", "--out", str(head), "--quiet")
    assert run("train", "head", *asked, *sets).exit_code == 0
    files = ("--out", str(out), "--markdown", str(page), "--svg", str(picture))
    done = run("bench", "heads", "--model", zoo.big, *QUICK, *files)
    assert done.exit_code == 0, done.output
    arms = json.loads(out.read_text(encoding="utf-8"))["arms"]
    assert {"medusa", "medusa:nodes=5", "llma"} <= set(arms)
    assert all(arm["tau"] >= 1 for arm in arms.values())
    assert arms["medusa"]["head"] == "head" and arms["medusa"]["megabytes"] > 0
    assert arms["llma"]["head"] is None and arms["llma"]["minutes"] is None
    assert "| medusa |" in page.read_text() and "<svg" in picture.read_text()


def test_a_model_without_heads_says_how_to_train_one(zoo: Zoo) -> None:
    message = failed(run("bench", "heads", "--model", zoo.big, *QUICK))
    assert "no head of" in message and "tinyspec train head --for" in message
