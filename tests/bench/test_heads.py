"""`tinyspec bench heads` on tiny models: every depth is counted, and heads stand beside lookup."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tinyspec
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench import answers, summary
from tinyspec.bench.experiments.heads import (
    count_depths,
    count_paying_sizes,
    note_heads,
    predict_time,
    read_curve,
    summarize_counts,
    tabulate_heads,
)
from tinyspec.decoding.costs import interpolate_seconds
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.heads import HeadFile, head_settings, head_weights, write_head
from tinyspec.technique import find_technique
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
    values = ["head.heads=2", "texts.texts=12", "texts.tokens=12", "train.steps=2"]
    sets = [word for value in values for word in ("--set", value)]
    for method, name in (("medusa", "head"), ("medusa2", "tuned")):
        folder = str(tmp_path / "cache" / "models" / name)
        asked = ("--for", zoo.big, "--method", method, "--out", folder, "--quiet")
        assert run("train", "head", *asked, *sets).exit_code == 0
    files = ("--out", str(out), "--markdown", str(page), "--svg", str(picture))
    done = run("bench", "heads", "--model", zoo.big, *QUICK, *files)
    assert done.exit_code == 0, done.output
    arms = json.loads(out.read_text(encoding="utf-8"))["arms"]
    assert {"medusa", "medusa:nodes=5", "llma"} <= set(arms)
    assert all(arm["tau"] >= 1 for arm in arms.values())
    assert arms["medusa"]["head"] == "head" and arms["medusa"]["megabytes"] > 0
    assert arms["llma"]["head"] is None and arms["llma"]["minutes"] is None
    assert arms["medusa2"]["head"] == "tuned"
    assert "their own: medusa2 (tuned)" in page.read_text()
    again = tmp_path / "again.json"
    asked = ("--methods", "medusa2", "--out", str(again))
    assert run("bench", "heads", "--model", zoo.big, *QUICK, *asked).exit_code == 0
    assert json.loads(again.read_text(encoding="utf-8"))["arms"]["medusa2"] == arms["medusa2"]
    assert "| medusa |" in page.read_text() and "<svg" in picture.read_text()


def test_rows_of_an_earlier_run_stay_beside_those_that_are_counted(
    zoo: Zoo, tmp_path: Path
) -> None:
    """A row that is counted again is new; another model's rows are refused."""
    asked = ("bench", "heads", "--model", zoo.big, *QUICK, "--methods")
    old, new, page = (str(tmp_path / name) for name in ("old.json", "new.json", "new.md"))
    assert run(*asked, "llma,suffix_decoding", "--out", old).exit_code == 0
    done = run(*asked, "llma", "--keep", old, "--out", new, "--markdown", page)
    assert done.exit_code == 0, done.output
    was, now = (json.loads(Path(name).read_text(encoding="utf-8")) for name in (old, new))
    assert now["arms"]["llma"] == was["arms"]["llma"]
    assert now["arms"]["suffix_decoding"] == {"kept": was["date"], **was["arms"]["suffix_decoding"]}
    assert f"From an earlier run: suffix_decoding ({was['date']})." in Path(page).read_text()
    for name in ("command", "commit", "date", "machine"):
        assert [one[name] for one in now["sittings"]] == [was[name], now[name]]
    message = failed(run(*asked, "llma", "--keep", old, "--tokens", "5"))
    assert "its tokens is 6, here it is 5" in message


def test_a_method_that_tunes_its_model_is_not_counted_on_another(zoo: Zoo) -> None:
    """Its head may be there all the same: `blockwise_tuned` has that of `blockwise`."""
    asked = ("bench", "heads", "--model", zoo.big, *QUICK, "--methods", "blockwise_tuned")
    assert "big was not tuned for blockwise_tuned: tinyspec train head" in failed(run(*asked))


@pytest.mark.slow
def test_two_processes_count_what_one_counts(zoo: Zoo, tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="several processes need joblib: pip install -e .[test]")
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        asked = ("--methods", "llma,suffix_decoding", "--jobs", jobs, "--out", str(out))
        assert run("bench", "heads", "--model", zoo.big, *QUICK, *asked).exit_code == 0
        found.append(json.loads(out.read_text(encoding="utf-8")))
    assert found[0]["arms"] == found[1]["arms"]
    assert found[0]["settings"] == found[1]["settings"]  # the number of processes is none


def test_a_model_without_heads_says_how_to_train_one(zoo: Zoo) -> None:
    message = failed(run("bench", "heads", "--model", zoo.big, *QUICK))
    assert "no head of" in message and "tinyspec train head --for" in message


# ---------------------------------------------------------------------- sizes of a tree

CURVE = {1: 0.010, 2: 0.011, 4: 0.012, 8: 0.016}


def test_the_curve_is_read_between_and_beyond_its_sizes() -> None:
    for k, expected in ((1, 0.010), (1.5, 0.0105), (3, 0.0115), (8, 0.016), (10, 0.018)):
        assert interpolate_seconds(CURVE, k) == pytest.approx(expected)


def test_the_predicted_time_is_the_passs_by_its_tokens() -> None:
    """Three draft tokens make a pass over four; 2.4 tokens come of 12 ms, and plain takes 10."""
    assert predict_time(CURVE, 2.4, 3) == {"milliseconds": 5.0, "speedup": 2.0}
    assert predict_time(CURVE, 1.0, 0)["speedup"] == 1.0


def write_curve(path: Path, model: str, curve: Any = CURVE) -> Path:
    """Write a result with a cost curve: the median of three samples each, one far off."""
    samples = {str(k): [seconds, 9 * seconds, seconds] for k, seconds in curve.items()}
    result = {"settings": {"model": model}, "curve": {"curves": {"tinyspec": samples}}}
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def test_a_curve_of_another_model_or_none_is_an_error(tmp_path: Path) -> None:
    file = write_curve(tmp_path / "bench.json", "models/mine")
    assert read_curve(file, "mine") == CURVE
    with pytest.raises(TinyspecError, match="the cost curve of models/mine, not of other"):
        read_curve(file, "other")
    write_curve(file, "mine", {2: 0.1, 3: 0.2})
    with pytest.raises(TinyspecError, match="needs the size 1"):
        read_curve(file, "mine")
    for text in ("{}", "[]", "no JSON", '{"settings": {"model": "mine"}, "curve": null}'):
        file.write_text(text)
        with pytest.raises(TinyspecError, match="no cost curve"):
            read_curve(file, "mine")


def sized_result(speeds: dict[int, float]) -> dict[str, Any]:
    arms = {
        f"medusa:nodes={size}": {
            "method": "medusa", "size": size, "nodes": float(size), "tau": 2.0,
            "milliseconds": 1.0, "speedup": speed,
        }
        for size, speed in speeds.items()
    }  # fmt: skip
    given = {"sizes": [*speeds], "curve": "bench.json", "prompts": 3, "tokens": 6, "temperature": 0}
    return {"model": "mine", "settings": given, "arms": arms}


def test_the_note_says_which_sizes_pay() -> None:
    said = count_paying_sizes(sized_result({1: 0.9, 3: 1.2, 7: 1.4, 15: 1.1, 63: 0.4}))
    assert "2 of 3 trees with at most 7 nodes, 1 of 2 trees with more" in said
    assert "medusa 7 (1.40)" in said
    assert answers.list_paying_sizes(sized_result({1: 0.9})) in note_heads(sized_result({1: 0.9}))


def save_random_head(zoo: Zoo, method: str, folder: Path) -> None:
    target = tinyspec.load(zoo.big)
    headed = add_random_head(target, find_technique(method), 0)
    check = embedding_checksum(target.weights["embed"])
    weights = {name: w.float() for name, w in head_weights(headed, method).items()}
    settings, own = head_settings(headed, method), {"model_type": method}
    write_head(folder / method, HeadFile(method, "big", check, settings, own, weights))


def test_sizes_are_counted_and_their_times_predicted(zoo: Zoo, tmp_path: Path) -> None:
    for method in ("medusa", "blockwise"):
        save_random_head(zoo, method, tmp_path / "cache" / "models")
    out, page, picture = (tmp_path / f"heads-sizes.{end}" for end in ("json", "md", "svg"))
    curve = write_curve(tmp_path / "bench.json", zoo.big)
    files = ("--out", str(out), "--markdown", str(page), "--svg", str(picture))
    asked = ("--sizes", "3,1,7", "--curve", str(curve), *QUICK, *files)
    done = run("bench", "heads", "--model", zoo.big, *asked)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text(encoding="utf-8"))
    arms = result["arms"]
    assert [*arms] == [
        "blockwise:k=2", "blockwise:k=4", "medusa:nodes=1", "medusa:nodes=3", "medusa:nodes=7",
    ]  # fmt: skip
    for arm in arms.values():
        predicted = predict_time(CURVE, arm["tau"], arm["nodes"])
        assert {name: arm[name] for name in predicted} == predicted
    sizes = [arms[f"medusa:nodes={size}"] for size in (1, 3, 7)]
    assert [arm["nodes"] for arm in sizes] == sorted(arm["nodes"] for arm in sizes)
    assert result["settings"]["curve"] == "bench.json"
    assert "| medusa:nodes=7 |" in page.read_text() and "Best size of each head" in page.read_text()
    assert "<svg" in picture.read_text()
    assert len(tabulate_heads(result)[0].rows) == 5
    alone = run("bench", "heads", "--model", zoo.big, "--methods", "medusa", "--sizes", "1", *QUICK)
    assert alone.exit_code == 0 and "medusa:nodes=1" in alone.stdout


def test_sizes_that_cannot_be_counted_are_an_error(zoo: Zoo, tmp_path: Path) -> None:
    curve = str(write_curve(tmp_path / "bench.json", zoo.big))
    told = ("bench", "heads", "--model", zoo.big, *QUICK)
    assert "--curve predicts the times of --sizes" in failed(run(*told, "--curve", curve))
    none = run(*told, "--methods", "llma", "--sizes", "1,3")
    assert "no method here has a tree of a size to choose" in failed(none)


def test_the_results_page_shows_the_sizes_as_soon_as_they_are_there(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "tutorials/results"
    for file in {*committed.glob("*.json")} - {committed / "heads-sizes.json"}:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "How large a tree pays" not in summary.write_readme(tmp_path)
    heads = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
    stamp = {name: heads[name] for name in ("command", "commit", "date", "machine")}
    (tmp_path / "heads-sizes.json").write_text(json.dumps(stamp | sized_result({3: 1.2, 63: 0.4})))
    page = summary.write_readme(tmp_path)
    assert "### How large a tree pays" in page and "| medusa:nodes=63 |" in page
    assert "0 of 1 trees with more. Best size of each head" in page
