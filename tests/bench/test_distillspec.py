"""`tinyspec bench distillspec` on tiny models: a draft for each pair, each trained once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import Zoo, failed, run, tiny_zoo

QUICK = ("--texts", "24", "--layers", "1", "--minutes", "1", "--quiet")


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path)


def grid(zoo: Zoo, tmp_path: Path, *more: str, steps: int = 3) -> Any:
    drafts = str(tmp_path / "drafts")
    call = ("bench", "distillspec", "--model", zoo.big, "--drafts", drafts, "--steps", str(steps))
    return run(*call, *QUICK, *more)


@pytest.mark.slow
def test_every_pair_has_a_draft_that_is_trained_once(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "grid.json", tmp_path / "grid.md"
    files = ("--out", str(out), "--markdown", str(page))
    pairs = ("--losses", "kl,tv", "--sources", "target,mix")
    done = grid(zoo, tmp_path, *pairs, *files)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))["figures"]
    assert {source: list(row) for source, row in found.items()} == {
        "target": ["kl", "tv"],
        "mix": ["kl", "tv"],
    }
    alphas = [cell["alpha"] for row in found.values() for cell in row.values()]
    assert all(0 < alpha < 1 for alpha in alphas) and len(set(alphas)) > 1
    assert {cell["steps"] for row in found.values() for cell in row.values()} == {3}
    assert "highest acceptance rate" in done.stdout and "| target |" in page.read_text()
    for name in ("target-kl", "target-tv", "mix-kl", "mix-tv"):
        config = json.loads((tmp_path / "drafts" / name / "config.json").read_text())
        assert config["tinyspec"]["draft_for"] == "distillspec"

    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr("tinyspec.bench.experiments.distillspec.distill", refuse)
    assert grid(zoo, tmp_path, *pairs, *files).exit_code == 0
    assert json.loads(out.read_text(encoding="utf-8"))["figures"] == found
    assert "is of other settings" in failed(grid(zoo, tmp_path, *pairs, steps=4))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--losses", "kl,kll", "loss is 'kll'"), ("--sources", "target,me", "source is 'me'")],
)
def test_what_is_not_known_is_named_before_anything_is_trained(
    zoo: Zoo, tmp_path: Path, option: str, value: str, said: str
) -> None:
    assert f"[distill] {said}" in failed(grid(zoo, tmp_path, option, value))
    assert not (tmp_path / "drafts").exists()
