"""train exits, calibrate, bench exits on a tiny model: figures from samples, and errors."""

import gzip
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
from tinyspec import models
from tinyspec.bench.bootstrap import Lead
from tinyspec.bench.chapters import list_decoders
from tinyspec.bench.experiments import calibrate, exit_arms, exits
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plan import ArmSpec
from tinyspec.bench.plot import draw_chart
from tinyspec.early_exit.calibrate import textual_loss
from tinyspec.early_exit.ee_llm import count_pipeline_steps
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import Card, Guarantee, Knob, find_technique
from tinyspec.training.bitext import train_joint_tokenizer

RESULTS = sorted((Path(__file__).parents[2] / "tutorials" / "results").glob("exits*.json"))
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


METHODS = ("calm", "calm:measure=saturation", "calm:measure=classifier")


@pytest.fixture(scope="module")
def result(trained: str, texts: str) -> dict[str, Any]:
    """Every technique of the chapter on a tiny model."""
    given = exits.ExitSettings(
        trained, (), (0.05, 0.9), texts=(Path(texts).read_text(),), prompts=3, prompt_tokens=8,
        tokens=6,
    )  # fmt: skip
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


# ---------------------------------------------------------------------- arms


def test_every_technique_of_the_chapter_has_a_row_or_a_reason(result: dict[str, Any]) -> None:
    families = {exit_arms.name_family(label) for label in result["figures"]}
    named = {ArmSpec.parse(family).name for family in families | set(result["skipped"])}
    assert named == {*list_decoders("early_exit"), "full", "fixed"}
    assert set(result["skipped"]) == {
        *("kangaroo", "eesd", "eesd:control=fixed", "consistent_ee", "depth_adaptive"),
        *("depth_adaptive:predictor=multinomial", "depth_adaptive:predictor=sequence"),
    }  # what needs something trained
    assert all("train" in reason for reason in result["skipped"].values())
    assert any("was not tuned for free" in line for line in exits.note_exits(result))


def test_a_technique_joins_by_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lossy knob that is a share, a ratio, a whole number or a choice; ways; neither."""

    def card(name: str, lossy: Any, *knobs: Knob) -> Card:
        build = lambda request, **given: None  # noqa: E731
        build.__module__ = f"tinyspec.early_exit.{name}"
        return Card(name, "", "", "", Guarantee.LOSSY, knobs, build, lossy=lossy)

    new = {
        card.name: card
        for card in (
            card("share", ("t", math.inf), Knob("t", 0.5, "", 0.0, 1.0, beyond=math.inf)),
            card("ratio", ("s", 1.0), Knob("s", 2.0, "", 1.0, 2.5)),
            card("whole", ("n", 1), Knob("n", 2, "", 1, 9), Knob("w", "a", "", choices=("a", "b"))),
            card("choice", ("c", "no"), Knob("c", "yes", "", choices=("yes", "no"))),
            card("plainer", None, Knob("gamma", 3, "")),
        )
    }
    monkeypatch.setattr(exit_arms, "find_technique", new.__getitem__)
    monkeypatch.setattr(exit_arms, "list_decoders", lambda chapter: list(new))
    specs = exit_arms.list_families(())
    arms = [arm for spec in specs for arm in exit_arms.list_exit_arms(spec, (0.3,))]
    assert [arm.label for arm in arms] == [
        "share 0.3",
        *("ratio 1.25", "ratio 1.5", "ratio 2"),
        *("whole 2", "whole 3", "whole:w=b 2", "whole:w=b 3"),
        "choice yes",
        "plainer",
    ]
    assert arms[-4].knobs == {"w": "b", "n": 2}


def test_what_was_asked_for_runs_alone() -> None:
    assert [s.label for s in exit_arms.list_families(("free:zeta=0.5",))] == ["free:zeta=0.5"]
    spec = ArmSpec.parse("calm:threshold=0.3")
    assert [arm.label for arm in exit_arms.list_exit_arms(spec, (0.5, 0.9))] == [spec.label]


# ---------------------------------------------------------------------- figures


def test_figures_follow_from_the_samples_and_the_full_model_is_one(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(exits.summarize_exits(result))) == result["figures"]
    full = result["figures"]["full"]
    for way in ("forced", "free"):
        assert full[way]["agreement"] == full[way]["work"] == 1
        assert full[way]["layers"] == full[way]["in_a_row"] == 2
        assert full[way]["fills"] == 0 and full[way]["heads"] == 1
    assert full["free"]["perplexity"] < full["forced"]["perplexity"]
    fixed = result["figures"]["fixed 1"]["forced"]
    assert fixed["layers"] == fixed["heads"] == 1 and fixed["fills"] == pytest.approx(
        5 / 6
    )  # the last of six is read by nobody
    soft = result["figures"]["calm 0.9"]["forced"]
    assert soft["heads"] >= soft["layers"]  # a head product in every layer it looked at
    assert all(len(row) == 13 for rows in result["samples"].values() for row in rows)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
@pytest.mark.slow
def test_a_committed_result_follows_from_its_samples(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(dump_json(exits.summarize_exits(result))) == result["figures"]


def test_lossless_techniques_write_the_full_models_text(result: dict[str, Any]) -> None:
    for label in ("layerskip", "ppd"):
        of = result["figures"][label]
        assert of["forced"]["agreement"] == of["free"]["agreement"] == 1
        assert of["forced"]["perplexity"] == result["figures"]["full"]["forced"]["perplexity"]
        assert of["forced"]["layers"] == of["free"]["layers"] > 2
        assert of["lead"][0] == 0  # it runs more than the full model
    ppd = result["figures"]["ppd"]["free"]
    assert ppd["clock"] < ppd["in_a_row"]  # the guesses run beside the newest token


def test_a_lossless_technique_that_writes_another_text_is_an_error(
    trained: str, texts: str
) -> None:
    subject = exit_arms.LanguageSubject(tinyspec.load(trained))
    drawn = subject.draw_texts([Path(texts).read_text()], 1, 8, 4, 0)
    whole = exit_arms.run_full_model(subject, drawn[0])
    wrong = whole._replace(text=[token + 1 for token in whole.text])
    arm = exit_arms.ExitArm("layerskip", "layerskip", {})
    with pytest.raises(RuntimeError, match="layerskip is lossless and wrote another text"):
        list(exit_arms.run_both_ways(subject, drawn, [wrong], arm, 2))


def test_free_saves_layers_in_a_row_and_no_evaluations(trained: str, texts: str) -> None:
    """Every token runs all layers in the end, but those that waited run them beside another one."""
    model = tinyspec.load(trained, dtype="float32")
    subject = exit_arms.LanguageSubject(model)
    drawn = subject.draw_texts([Path(texts).read_text()], 4, 8, 12, 0)
    whole = [exit_arms.run_full_model(subject, text) for text in drawn]
    gaps = sorted(
        float((top := row.softmax(-1).topk(2).values)[0] - top[1])
        for text in drawn
        for row in [model.logits([*text.prompt, *text.rest])[-1]]
    )
    knobs = {"shallow": 1, "threshold": gaps[0] / 4, "adaptive": False}
    arm = exit_arms.ExitArm("free", "free", knobs)
    ran = list(exit_arms.run_both_ways(subject, drawn, whole, arm, 2))
    forced = [one for one in ran if one.way == "forced"]
    assert sum(one.in_a_row or 0 for one in forced) < sum(one.layers for one in forced)
    assert all(one.layers <= 2 * one.tokens and one.fills == 0 for one in forced)


def test_the_pipeline_of_ee_llm_has_a_clock(result: dict[str, Any], trained: str) -> None:
    """`count_pipeline_steps` of the exits of the text that it wrote."""
    for label, of in result["figures"].items():
        has_clock = label.startswith(("ee_llm:inference=pipeline", "ppd"))
        assert (of["free"]["clock"] is not None) == has_clock, label
    clock = result["figures"]["ee_llm:inference=pipeline 0.9"]["free"]["clock"]
    assert 1 <= clock <= 2
    subject = exit_arms.LanguageSubject(tinyspec.load(trained))
    text = exit_arms.ExitText(subject.model, list(range(3, 9)), [0] * 9, [], "")
    arm = exit_arms.ExitArm(
        "p", "ee_llm", {"inference": "pipeline", "threshold": 0.0, "exits": "1"}
    )
    running = subject.start(text, arm)
    layers = [int(round.scores.layers[0]) for round in running.decoder.run(running.rng)]
    expected = count_pipeline_steps(layers, 2, 2)[-1]
    whole = exit_arms.run_full_model(subject, text)
    assert exit_arms.run_free(subject, 0, text, whole, arm, 4).clock == expected < 18


def test_a_persistent_technique_begins_each_arm_anew(trained: str, texts: str) -> None:
    subject = exit_arms.LanguageSubject(tinyspec.load(trained))
    drawn = subject.draw_texts([Path(texts).read_text()], 3, 8, 6, 0)
    whole = [exit_arms.run_full_model(subject, text) for text in drawn]
    arm = exit_arms.ExitArm("free 0.1", "free", {"threshold": 0.1})

    def count() -> list[Any]:
        ran = exit_arms.run_both_ways(subject, drawn, whole, arm, 2)
        return [one[:9] for one in ran]

    assert count() == count()


# ---------------------------------------------------------------------- the verdict


def sample(passage: int, right: int, layers: float, way: str = "forced") -> list[Any]:
    return exit_arms.ExitSample(way, passage, 10, right, 10.0, layers, 0, 0).as_row()


def judge(lucky: bool) -> dict[str, Any]:
    """Two texts' worth of an arm at the depth of `fixed 1`: right everywhere, or on one text."""
    n = 8
    rows: dict[str, list[Any]] = {"full": [], "fixed 1": [], "calm 0.5": []}
    for at in range(n):
        rows["full"].append(sample(at, 10, 20.0))
        rows["fixed 1"].append(sample(at, 5, 10.0))
        right = (10 if at == 0 else 5) if lucky else 7
        rows["calm 0.5"].append(sample(at, right, 10.0))
    rows = {
        label: own + [sample(at, 0, 0.0, "free") for at in range(n)] for label, own in rows.items()
    }
    costs = {"layer": 4, "fill": 1, "head": 0, "depth": 2}
    return exits.summarize_exits({"samples": rows, "costs": costs})


def test_a_lead_must_be_more_than_noise() -> None:
    steady, lucky = judge(lucky=False)["calm 0.5"]["lead"], judge(lucky=True)["calm 0.5"]["lead"]
    assert steady[0] == pytest.approx(0.2) and Lead(*steady).verdict == "above"
    assert lucky[0] > 0 and Lead(*lucky).verdict == "no difference"
    assert judge(lucky=False)["fixed 1"]["lead"] is None


def test_the_best_setting_of_a_family_has_the_surest_lead() -> None:
    """Not the greatest: that may be luck. A fixed exit is no family of its own."""
    figures = {
        "fixed 1": {"lead": None},
        "calm 0.1": {"lead": [0.9, -0.1, 1.0]},
        "calm 0.5": {"lead": [0.2, 0.1, 0.3]},
        "calm 0.9": {"lead": [0.1, 0.0, 0.2]},
        "free 0.5": {"lead": [-0.2, -0.3, -0.1]},
    }
    assert list(exits.choose_best_rows({"figures": figures})) == ["calm 0.5", "free 0.5"]


def test_notes_say_that_the_best_setting_was_chosen_after_looking(result: dict[str, Any]) -> None:
    notes = "\n".join(exits.note_exits(result))
    assert "chosen after all of them were measured, on the same texts" in notes
    assert "before all columns and rows of today" not in notes
    old = {**result, "columns": result["columns"][:8]}
    assert "before all columns and rows of today" in "\n".join(exits.note_exits(old))


def test_between_two_fixed_exits_tokens_are_shared_out() -> None:
    """At half way in work the rival has half way in quality; no rival is below a cheaper one."""
    curves = [(np.array([0.2]), np.array([0.4])), (np.array([0.6]), np.array([0.8]))]
    worse = (np.array([0.5]), np.array([0.1]))
    found = exits._interpolate_fixed([*curves, worse], np.array([0.4]))
    assert found[0] == pytest.approx(0.4)
    assert exits._interpolate_fixed(curves, np.array([0.4]))[0] == pytest.approx(0.6)
    assert exits._interpolate_fixed(curves, np.array([9.0]))[0] == 0.8


def test_the_rival_is_drawn_again_with_the_technique() -> None:
    """In each resample the fixed exits have the work and the quality of that resample."""
    curves = [
        (np.array([0.2, 0.2]), np.array([0.4, 0.0])),
        (np.array([0.6, 0.6]), np.array([0.8, 1.0])),
    ]
    found = exits._interpolate_fixed(curves, np.array([0.4, 0.3]))
    assert found == pytest.approx([0.6, 0.25])


def test_the_front_holds_what_nothing_cheaper_beats(result: dict[str, Any]) -> None:
    rows = {label: of["forced"] for label, of in result["figures"].items()}
    for label, of in result["figures"].items():
        beaten = any(
            r["work"] <= rows[label]["work"] and r["agreement"] > rows[label]["agreement"]
            for r in rows.values()
        )
        assert of["front"] != beaten


def test_a_row_tells_its_knobs(result: dict[str, Any]) -> None:
    ran = result["knobs"]
    assert list(ran) == list(result["figures"])
    assert ran["full"] == {}
    assert set(ran["calm 0.9"]) == {knob.name for knob in find_technique("calm").knobs}
    chosen = {"measure": "softmax", "threshold": 0.9, "decay": "paper"}
    assert {**ran["calm 0.9"], **chosen} == ran["calm 0.9"]


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
    costs = exit_arms.price_weights(config)
    assert costs.relative_work(2, 0, 1) == 1
    assert costs.relative_work(1, 1, 1) == pytest.approx(
        (layer + 2 * 2 * 4 + 40) / (2 * layer + 40)
    )
    assert exit_arms.price_weights(config, reads_source=True).layer == layer + 2 * 4 * 4


# ---------------------------------------------------------------------- a translator


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model with exits, as multi30k-exits is one, untrained; and the test sentences."""
    root = tmp_path_factory.mktemp("translator")
    english = ["A dog runs.", "Two dogs sleep.", "A boy sees a dog."]
    german = ["Ein Hund rennt.", "Zwei Hunde schlafen.", "Ein Junge sieht einen Hund."]
    tokenizer = train_joint_tokenizer(3 * (english + german), 300, root / "tokenizer")
    config = Seq2SeqConfig(
        tokenizer.vocab_size, d_model=16, n_heads=2, d_ff=24, encoder_layers=1, decoder_layers=3,
        max_positions=32, extra={"trained_for": "teacher", "exits": "uniform"},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    Seq2Seq.create(config, generator, tokenizer=tokenizer).save(root / "exits")
    (root / "data/multi30k").mkdir(parents=True)
    for language, lines in (("en", english), ("de", german)):
        content = "".join(line + "\n" for line in lines).encode()
        file = root / f"data/multi30k/test_2016_flickr.{language}.gz"
        file.write_bytes(gzip.compress(content))
    return str(root / "exits"), root / "data"


@pytest.mark.slow
def test_a_translator_is_judged_by_bleu(translator: tuple[str, Path]) -> None:
    name, folder = translator
    given = exits.ExitSettings(name, (), (0.0, 0.5), prompts=2, data_folder=folder)
    found = exits.measure_exits(given, quiet=True)
    assert {"kangaroo", "calm:measure=classifier"} <= set(found["skipped"])
    assert json.loads(json.dumps(exits.summarize_exits(found))) == json.loads(
        json.dumps(found["figures"])
    )
    full, skipping = found["figures"]["full"], found["figures"]["skip_decode 2"]
    assert full["free"]["bleu"] is not None and full["free"]["agreement"] == 1
    assert full["forced"]["layers"] == 3 and skipping["forced"]["layers"] < 2.5
    ran = tinyspec.translate(tinyspec.load_translator(name), "A dog runs.", method="plain")
    assert not isinstance(ran, list)
    sample = exit_arms.ExitSample.from_row(found["samples"]["full"][1])
    assert (sample.way, sample.tokens) == ("free", len(ran.tokens))
    assert [*sample.counts][-1] == 4  # words of the reference: Ein Hund rennt .
    grids, chart = exits.tabulate_exits(found), exits.chart_exits(found)
    assert "BLEU" in grids[0].header and "BLEU" in grids[1].header
    assert chart.panels[0].title == "BLEU"
    assert found["settings"]["texts"] == "test_2016_flickr"
    ElementTree.fromstring(draw_chart(chart))


def test_a_model_that_is_not_trained_yet_names_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "multi30k-other"
    folder.mkdir()
    command = "tinyspec train mt --recipe models/multi30k-other/recipe.toml --out X"
    (folder / "recipe.toml").write_text(f"# A model.\n# {command}\n", encoding="utf-8")
    monkeypatch.setattr(models, "_zoos", lambda: [tmp_path])
    for name in ("multi30k-other", str(folder)):
        found = failed(run("bench", "exits", "--model", name, *QUICK))
        assert f"is not trained yet: {command}" in found


# ---------------------------------------------------------------------- tables, pictures, files


def test_the_tables_have_a_row_a_setting_and_the_picture_a_line_a_technique(
    result: dict[str, Any],
) -> None:
    verdict, grid = exits.tabulate_exits(result)
    assert len(grid.rows) == len(exits.merge_equal_rows(result["figures"]))
    assert all(len(row) == len(grid.header) for row in grid.rows)
    families = {exit_arms.name_family(label) for label in result["figures"]} - {"full", "fixed"}
    assert {exit_arms.name_family(row[0]) for row in verdict.rows} == families
    assert {row[-1] for row in verdict.rows} <= {"above", "no difference", "below"}
    chart = exits.chart_exits(result)
    drawn = {ArmSpec.parse(family).name for family in families} | {"one exit for all tokens"}
    assert len(chart.panels) == 3
    assert all(set(panel.lines) == drawn for panel in chart.panels)  # type: ignore[union-attr]
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
    made = run(*words, "--methods", "calm", "--svg", str(svg), "--markdown", str(page))
    assert made.exit_code == 0, made.output
    first = json.loads(out.read_text())
    assert "| calm 0.5" in page.read_text() and "Work: layers, fills" in page.read_text()
    ElementTree.fromstring(svg.read_text())
    first["samples"]["calm 0.5"][0][3] = 5  # to be known again
    out.write_text(json.dumps(first))
    assert run(*words, "--methods", "calm,calm:measure=saturation", "--resume").exit_code == 0
    second = json.loads(out.read_text())
    assert second["samples"]["calm 0.5"] == first["samples"]["calm 0.5"]
    assert "calm:measure=saturation 0.5" in second["samples"]
    assert "made with tokens 6, not 7" in failed(
        run(*words[:-2], "--methods", "calm", "--tokens", "7", "--out", str(out), "--resume")
    )
    more = tmp_path / "more.txt"
    more.write_text(Path(texts).read_text()[1:])
    assert "was made with inputs" in failed(
        run(*words, "--texts", str(more), "--methods", "calm", "--resume")
    )
    out.write_text("{}")
    assert "no result of `tinyspec bench exits`" in failed(run(*words, "--resume"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--thresholds", "0.5,x"), "--thresholds 0.5,x: write numbers"),
        (("--thresholds", "1.5"), "threshold is 1.5: it must be from 0.0 to 1.0, or inf"),
        (("--methods", "calm:measure=entropy"),
         "measure is 'entropy': it must be one of softmax, saturation, classifier"),
        (("--methods", "clam"), "there is no method 'clam': did you mean"),
        (("--tokens", "500"), "do not fit into the context"),
        (("--methods", "calm:min_exit=3"), "min_exit is 3: big has 2 layers"),
        (("--resume",), "--resume goes on with the file of --out"),
        (("--methods", "calm:measure=classifier"),
         "big has no exit classifier: `tinyspec train exits --model big`"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(zoo: Zoo, texts: str, words: tuple[str, ...], said: str) -> None:
    methods = () if "--methods" in words else ("--methods", "calm")
    assert said in failed(
        run("bench", "exits", "--model", zoo.big, "--texts", texts, *QUICK, *methods, *words)
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
    drawn = exit_arms.draw_passages(model, [Path(texts).read_text()], 3, 8, 4, 0)
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
