"""train exits, calibrate, bench exits on a tiny model: figures from samples, and errors."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyspec
from tests.zoo import TEXT, Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments import calibrate, exits
from tinyspec.bench.plot import draw_chart
from tinyspec.early_exit.calibrate import textual_loss
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.technique import find_technique

QUICK = ("--prompts", "2", "--prompt-tokens", "8", "--tokens", "6", "--quiet")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "cats.txt"
    file.write_text(TEXT * 3, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def trained(zoo: Zoo, texts: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("trained") / "m")
    made = run(
        "train",
        "exits",
        "--model",
        zoo.big,
        "--out",
        folder,
        "--texts",
        texts,
        "--steps",
        "4",
        "--context",
        "16",
        "-q",
    )
    assert made.exit_code == 0, made.output
    assert "held-out loss" in made.output
    return folder


@pytest.fixture(scope="module")
def result(trained: str, texts: str) -> dict[str, Any]:
    given = exits.ExitSettings(
        trained, (0.05, 0.9), texts=(Path(texts).read_text(),), prompts=2, prompt_tokens=8, tokens=6
    )
    made = exits.measure_exits(given, quiet=True)
    found: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))
    return found


def test_the_classifier_stands_beside_the_copy_and_the_model_is_the_same(
    zoo: Zoo, trained: str
) -> None:
    before, after = tinyspec.load(zoo.big), tinyspec.load(trained)
    assert set(after.extras) == {"exits.weight", "exits.bias"} and not before.extras
    assert all(torch.equal(after.weights[name], weight) for name, weight in before.weights.items())
    assert not (Path(trained) / ".tinyspec").exists()
    made = run(
        "generate",
        "--model",
        trained,
        "--method",
        "calm",
        "--measure",
        "classifier",
        "the cat",
        "-n",
        "4",
    )
    assert made.exit_code == 0, made.output


def test_figures_follow_from_the_samples_and_the_full_model_is_one(
    result: dict[str, Any], trained: str
) -> None:
    config = tinyspec.load(trained).config
    assert json.loads(json.dumps(exits.summarize_exits(result, config))) == result["figures"]
    full = result["figures"]["full"]
    for way in ("forced", "free"):
        assert full[way]["agreement"] == full[way]["work"] == 1
        assert full[way]["layers"] == 2 and full[way]["fills"] == 0 and full[way]["heads"] == 1
    labels = ["full", "fixed 1", *(f"{m} {t}" for m in exits.MEASURES for t in (0.05, 0.9))]
    assert list(result["figures"]) == labels
    fixed = result["figures"]["fixed 1"]["forced"]
    assert fixed["layers"] == fixed["heads"] == 1 and fixed["fills"] == pytest.approx(
        5 / 6
    )  # the last of six is read by nobody
    soft = result["figures"]["softmax 0.9"]["forced"]
    assert soft["heads"] >= soft["layers"]  # a head product in every layer it looked at


def test_a_row_tells_its_knobs(result: dict[str, Any]) -> None:
    ran = result["knobs"]
    assert list(ran) == list(result["figures"])
    assert ran["full"]["threshold"] == "inf"
    assert set(ran["softmax 0.9"]) == {knob.name for knob in find_technique("calm").knobs}
    chosen = {"measure": "softmax", "threshold": 0.9, "decay": "constant"}
    assert {**ran["softmax 0.9"], **chosen} == ran["softmax 0.9"]


def test_work_is_every_product_that_was_made() -> None:
    config = Config(
        vocab_size=10,
        d_model=4,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=2,
        d_ff=6,
        max_positions=16,
    )
    layer = 4 * 8 + 4 * 4 + 4 * 12 + 6 * 4  # qkv, out, gate and up, down
    assert exits.count_relative_work(config, 2, 0, 1) == 1
    assert exits.count_relative_work(config, 1, 1, 1) == pytest.approx(
        (layer + 2 * 2 * 4 + 40) / (2 * layer + 40)
    )


def test_the_front_holds_what_nothing_cheaper_beats(result: dict[str, Any]) -> None:
    rows = {label: of["forced"] for label, of in result["figures"].items()}
    for label, of in result["figures"].items():
        beaten = any(
            r["work"] <= rows[label]["work"] and r["agreement"] > rows[label]["agreement"]
            for r in rows.values()
        )
        assert of["front"] != beaten


def test_the_table_has_a_row_a_setting_and_the_picture_a_line_a_measure(
    result: dict[str, Any],
) -> None:
    (grid,) = exits.tabulate_exits(result)
    assert len(grid.rows) == len(result["figures"]) and all(
        len(row) == len(grid.header) for row in grid.rows
    )
    chart = exits.chart_exits(result)
    assert [len(panel.lines) for panel in chart.panels] == [4, 4]  # type: ignore[union-attr]
    ElementTree.fromstring(draw_chart(chart))


def test_the_command_writes_all_three_and_goes_on_where_it_was(
    trained: str, texts: str, tmp_path: Path
) -> None:
    out, svg, page = tmp_path / "e.json", tmp_path / "e.svg", tmp_path / "e.md"
    words = (
        "bench",
        "exits",
        "--model",
        trained,
        "--texts",
        texts,
        "--thresholds",
        "0.5",
        *QUICK,
        "--out",
        str(out),
    )
    made = run(*words, "--measures", "softmax", "--svg", str(svg), "--markdown", str(page))
    assert made.exit_code == 0, made.output
    first = json.loads(out.read_text())
    assert "tinyspec bench exits" in page.read_text() or "| softmax 0.5" in page.read_text()
    ElementTree.fromstring(svg.read_text())
    first["samples"]["softmax 0.5"][0][3] = 5  # to be known again
    out.write_text(json.dumps(first))
    assert run(*words, "--measures", "softmax,saturation", "--resume").exit_code == 0
    second = json.loads(out.read_text())
    assert second["samples"]["softmax 0.5"] == first["samples"]["softmax 0.5"]
    assert "saturation 0.5" in second["samples"]
    assert "made with tokens 6, not 7" in failed(
        run(*words[:-2], "--tokens", "7", "--out", str(out), "--resume")
    )
    out.write_text("{}")
    assert "no result of `tinyspec bench exits`" in failed(run(*words, "--resume"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--thresholds", "0.5,x"), "--thresholds 0.5,x: write numbers"),
        (("--thresholds", "1.5"), "threshold is 1.5: it must be from 0.0 to 1.0, or inf"),
        (("--measures", "entropy"),
         "there is no measure 'entropy': softmax, saturation, classifier"),
        (("--tokens", "500"), "do not fit into the context"),
        (("--min-exit", "3"), "min_exit is 3: big has 2 layers"),
        (("--resume",), "--resume goes on with the file of --out"),
        ((), "big has no exit classifier: `tinyspec train exits --model big`"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(zoo: Zoo, texts: str, words: tuple[str, ...], said: str) -> None:
    measures = () if not words or "--measures" in words else ("--measures", "softmax")
    assert said in failed(
        run("bench", "exits", "--model", zoo.big, "--texts", texts, *QUICK, *measures, *words)
    )


# ---------------------------------------------------------------------- calibrate


CALIBRATE = (
    "--prompt-tokens",
    "8",
    "--tokens",
    "4",
    "--step",
    "0.5",
    "--check",
    "3",
    "--quiet",
    "--json",
)


@pytest.mark.parametrize("consistency", ["textual", "risk"])
def test_calibrate_gives_the_last_threshold_that_passed(
    zoo: Zoo, texts: str, tmp_path: Path, consistency: str
) -> None:
    out = tmp_path / "c.json"
    made = run(
        "calibrate", "--model", zoo.big, "--texts", texts, "--delta", "0.9", "--epsilon", "0.3",
        "--prompts", "4",
        "--consistency", consistency, "--out", str(out), *CALIBRATE,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert json.loads(out.read_text())["tested"] == found["tested"]
    passed = [row["threshold"] for row in found["tested"] if row["passed"]]
    assert found["threshold"] == (passed[-1] if passed else "inf")
    assert [row["passed"] for row in found["tested"]] in (
        [True] * 3,
        *([True] * n + [False] for n in range(3)),
    )
    for row in found["tested"]:
        assert row["p"] == pytest.approx(math.exp(-2 * 4 * max(0, 0.9 - row["loss"]) ** 2))
    assert 0 <= found["checked"]["loss"] <= 1 and found["checked"]["prompts"] == 3


def test_a_loss_is_that_of_the_texts(zoo: Zoo, texts: str) -> None:
    given = calibrate.CalibrationSettings(
        zoo.big, 0.9, 0.3, texts=(Path(texts).read_text(),), prompts=3, prompt_tokens=8, tokens=4,
        step=1.0, check=0,
        measure="saturation", decay="constant",
    )  # fmt: skip
    found = calibrate.run_calibration(given, quiet=True)
    model = tinyspec.load(zoo.big)
    drawn = exits.draw_passages(model, [Path(texts).read_text()], 3, 8, 4, 0)
    for row in found["tested"]:
        losses = []
        for passage in drawn:
            pair = [
                tinyspec.generate(
                    model,
                    passage.prompt,
                    method="calm",
                    max_new_tokens=4,
                    measure="saturation",
                    decay="constant",
                    threshold=x,
                ).tokens
                for x in (row["threshold"], math.inf)
            ]
            losses.append(textual_loss(*pair))
        assert row["loss"] == pytest.approx(np.mean(losses))
    assert "checked" not in found


def test_calibration_reports_errors_before_anything_is_run(
    zoo: Zoo, texts: str, tmp_path: Path
) -> None:
    few = run("calibrate", "--model", "no such model", "--prompts", "100")
    assert (
        "100 calibration examples are too few for delta 0.1 and epsilon 0.05: at least 150 "
        "are needed"
    ) in failed(few)
    assert "delta is 1.5: it must be above 0 and below 1" in failed(
        run("calibrate", "--delta", "1.5")
    )
    short = tmp_path / "short.txt"
    short.write_text("the cat", encoding="utf-8")
    words = (
        "calibrate",
        "--model",
        zoo.big,
        "--delta",
        "0.9",
        "--epsilon",
        "0.3",
        "--prompts",
        "4",
        *CALIBRATE,
    )
    assert "no text has 12 tokens" in failed(run(*words, "--texts", str(short)))
    assert "has no exit classifier" in failed(
        run(*words, "--texts", texts, "--measure", "classifier")
    )
    with pytest.raises(TinyspecError, match="--step is 0"):
        calibrate.list_thresholds(0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context", "4000"), "--context 4000: big has a context of 96 tokens"),
        (("--context", "95", "--texts", "SHORT"), "give more, or a smaller --context"),
        (("--out", "SMALL"), "already holds a model"),
    ],
)  # fmt: skip
def test_wrong_input_of_a_training_is_one_line(
    zoo: Zoo, texts: str, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "short.txt").write_text("the cat", encoding="utf-8")
    words = tuple(
        {"SHORT": str(tmp_path / "short.txt"), "SMALL": zoo.small}.get(word, word) for word in words
    )
    given = () if "--texts" in words else ("--texts", texts)
    assert said in failed(run("train", "exits", "--model", zoo.big, *given, *words, "-q"))
    assert "one layer" in failed(
        run("train", "exits", "--model", zoo.small, "--texts", texts, "-q")
    )
