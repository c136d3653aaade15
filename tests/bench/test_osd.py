"""`tinyspec bench osd` on tiny models: two arms, figures from samples, a run that goes on."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import TEXT, Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments import osd
from tinyspec.bench.experiments.osd import OnlineSample, OnlineSettings, measure_online
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart
from tinyspec.errors import TinyspecError


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def settings(zoo: Zoo, **more: Any) -> OnlineSettings:
    given: dict[str, Any] = {
        "prompts": 6, "chunk": 4, "tokens": 12, "interval": 2, "lr": 0.02, "prompt_tokens": 8,
        "texts": (TEXT,),
    }  # fmt: skip
    return OnlineSettings(zoo.big, **{**given, **more})


def measured(zoo: Zoo, **options: Any) -> dict[str, Any]:
    running = {name: options.pop(name) for name in ("out", "resume") if name in options}
    made = measure_online(settings(zoo, **options), quiet=True, **running)
    found: dict[str, Any] = json.loads(dump_json(made))
    return found


@pytest.fixture(scope="module")
def result(zoo: Zoo) -> dict[str, Any]:
    return measured(zoo)


def test_figures_follow_from_the_samples(result: dict[str, Any]) -> None:
    assert json.loads(dump_json(osd.summarize_online(result))) == result["figures"]
    assert list(result["figures"]) == ["1 to 4", "5 to 6", "1 to 6"]
    samples = [OnlineSample._make(row) for row in result["samples"]]
    assert len(samples) == 12 and {sample.tokens for sample in samples} == {12}
    assert all(0 <= sample.accepted <= sample.tested for sample in samples)
    assert all(sample.tokens == sample.accepted + sample.passes for sample in samples)


def test_both_arms_draft_alike_until_the_first_update(result: dict[str, Any]) -> None:
    by_arm = {arm: dict[int, Any]() for arm in osd.METHODS}
    for row in result["samples"]:
        sample = OnlineSample._make(row)
        by_arm[sample.arm][sample.prompt] = sample.counts
    same = [by_arm["online"][i] == by_arm["frozen"][i] for i in range(6)]
    assert same[:2] == [True, True] and not all(same)


def test_the_table_has_a_row_a_chunk_and_the_chart_both_arms(result: dict[str, Any]) -> None:
    (grid,) = osd.tabulate_online(result)
    assert [row[0] for row in grid.rows] == list(result["figures"])
    assert all(len(row) == len(grid.header) for row in grid.rows)
    chart = osd.chart_online(result)
    assert [len(panel.lines) for panel in chart.panels] == [2, 2]  # type: ignore[union-attr]
    ElementTree.fromstring(draw_chart(chart))


def test_an_interrupted_run_learns_again_and_goes_on(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]
) -> None:
    out, answer, answered = tmp_path / "o.json", osd._answer, list[Any]()

    def interrupted(*given: Any) -> OnlineSample:
        answered.append(given[2:4])
        if len(answered) == 8:
            raise KeyboardInterrupt
        return answer(*given)

    with monkeypatch.context() as patch:
        patch.setattr(osd, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measured(zoo, out=out)
        assert len(json.loads(out.read_text())["samples"]) == 6
        answered[:] = [None] * 8  # nobody interrupts now
        whole = measured(zoo, out=out, resume=True)
    assert answered[8:11] == [(0, "online"), (1, "online"), (2, "online")]
    assert answered[11:13] == [(3, "frozen"), (3, "online")]

    def counts(of: dict[str, Any]) -> list[Any]:
        return [row[:6] for row in of["samples"]]

    assert counts(whole) == counts(result)
    assert counts(measured(zoo, out=out, resume=True)) == counts(result)
    with pytest.raises(TinyspecError, match=r"made with knobs .* name another --out"):
        measured(zoo, out=out, resume=True, lr=0.01)
    with pytest.raises(TinyspecError, match="was made with inputs"):
        measured(zoo, out=out, resume=True, texts=(TEXT[::-1],))
    broken = json.loads(out.read_text())
    broken["samples"] = broken["samples"][:3]
    out.write_text(json.dumps(broken))
    with pytest.raises(TinyspecError, match="is no result of `tinyspec bench osd`"):
        measured(zoo, out=out, resume=True)


def test_a_draft_that_learned_otherwise_is_reported(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    measured(zoo, out=out, prompts=3)
    found = json.loads(out.read_text())
    found["samples"] = found["samples"][:4]  # of two prompts
    found["samples"][1][4] += 1  # an accepted token more
    out.write_text(json.dumps(found))
    with pytest.raises(TinyspecError, match=r"prompt 0 of .* has other counts"):
        measured(zoo, out=out, resume=True, prompts=3)


def test_the_command_writes_all_three(zoo: Zoo, tmp_path: Path) -> None:
    texts, out, page, drawn = (tmp_path / name for name in ("t.txt", "o.json", "o.md", "o.svg"))
    texts.write_text(TEXT)
    call = ["bench", "osd", "--model", zoo.big, "--prompts", "2", "--tokens", "6", "--quiet"]
    call += ["--prompt-tokens", "4", "--texts", str(texts), "--interval", "1", "--chunk", "1"]
    made = run(*call, "--out", str(out), "--markdown", str(page), "--svg", str(drawn))
    assert made.exit_code == 0, made.output
    assert "accepted, online" in made.stdout
    assert page.read_text(encoding="utf-8").startswith("`tinyspec ")
    assert "<svg" in drawn.read_text(encoding="utf-8")
    assert json.loads(out.read_text())["settings"]["knobs"]["online"]["interval"] == 1


def test_wrong_input_is_one_line(zoo: Zoo) -> None:
    call = ["bench", "osd", "--model", zoo.big, "--quiet"]
    assert "lr is 7.0: it must be from 0.0 to 1.0" in failed(run(*call, "--lr", "7"))
    assert "names no draft" in failed(run(*call[:3], zoo.other, "--quiet"))
    assert "do not fit into the context" in failed(run(*call, "--tokens", "96"))
