"""`tinyspec bench dialects`: which models mix dialects, and the command."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import failed, run
from tinyspec.bench.experiments import dialects
from tinyspec.bench.experiments.dialects import (
    AR,
    KD,
    RAW,
    SAMPLED,
    DialectSettings,
    DialectTrial,
    chart_dialects,
    choose_trained_cards,
    describe_dialects,
    summarize_dialects,
    tabulate_dialects,
)  # fmt: skip
from tinyspec.bench.plot import draw_chart
from tinyspec.technique import find_technique
from tinyspec.training import recipe

RESULTS = sorted((Path(__file__).parents[2] / "tutorials" / "results").glob("dialects*.json"))
QUICK = (
    *(
        "--words",
        "4",
        "--shortest",
        "2",
        "--longest",
        "3",
        "--modes",
        "2",
        "--pairs",
        "40",
        "--tests",
        "6",
    ),
    *(
        "--width",
        "8",
        "--layers",
        "1",
        "--steps",
        "2",
        "--batch",
        "4",
        "--passes",
        "1,2",
        "--lengths",
        "1,2",
        "--quiet",
    ),
)
TINY = DialectSettings(
    kinds=("lex", "fert"),
    passes=(1, 2),
    lengths=(1, 2),
    modes=2,
    words=4,
    shortest=2,
    longest=3,
    pairs=40,
    tests=6,
    width=8,
    layers=1,
    steps=2,
    batch=4,
)


def files(folder: Path) -> tuple[str, ...]:
    return (
        "--out",
        str(folder / "d.json"),
        "--svg",
        str(folder / "d.svg"),
        "--markdown",
        str(folder / "d.md"),
    )


@pytest.fixture(scope="module")
def dialects_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("dialects")
    done = run("bench", "dialects", "--kinds", "lex,fert", *QUICK, *files(folder))
    assert done.exit_code == 0, done.output
    return folder, json.loads((folder / "d.json").read_text(encoding="utf-8")), done.stdout


def test_every_kind_has_every_model_and_its_figures_follow_from_the_verdicts(
    dialects_run: Any,
) -> None:
    _, result, _ = dialects_run
    for kind in ("lex", "fert"):
        arms = result["kinds"][kind]["arms"]
        assert list(arms) == [
            AR,
            RAW,
            SAMPLED,
            KD,
            *("sat, K 2", "sat, K 2, distilled"),
            *("iterative refinement, T 1", "iterative refinement, T 2"),
            "iterative refinement without denoising, T 2",
            *(f"mask-predict, T {t}, l {n}" for t, n in ((1, 1), (2, 1), (2, 2))),
            *(
                f"{card.name}{ending}{drawn}"
                for card in choose_trained_cards(())
                if card.name not in dialects.RUN_HERE
                for ending in ("", ", distilled")
                for drawn in (("", dialects.DRAWN) if card.name == "flowseq" else ("",))
            ),
        ]
        assert arms["nar_crf"]["passes"] == 1
        assert all(len(row["verdicts"]) == 6 for row in arms.values())
    assert summarize_dialects(result) == result["figures"]
    assert {"command", "commit", "machine", "settings"} <= result.keys()


def test_shares_are_counted_by_the_digits() -> None:
    of = summarize_dialects({"kinds": {"lex": {"arms": {"a": {"verdicts": "3326"}}}}})["lex"]["a"]
    assert of == {"valid": 0.5, "single": 1.0, "repeated": 0.25}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_committed_result_follows_from_its_verdicts(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert summarize_dialects(result) == result["figures"]
    page = [f"`{result['command']}`", *(table.to_markdown() for table in tabulate_dialects(result))]
    assert path.with_suffix(".md").read_text(encoding="utf-8") == "\n\n".join(page) + "\n"


def test_the_files_are_a_table_a_kind_and_a_picture(dialects_run: Any) -> None:
    folder, result, shown = dialects_run
    page = (folder / "d.md").read_text(encoding="utf-8")
    assert page.startswith("`tinyspec ") and page.count("| autoregressive |") == 2
    drawn = (folder / "d.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    assert draw_chart(chart_dialects(result)) == drawn
    assert all(
        len(row) == len(table.header) for table in tabulate_dialects(result) for row in table.rows
    )
    assert "valid %" in shown and not (folder / "d.json.parts").exists()
    assert describe_dialects("ord") == "orders of their own"


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(
    dialects_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole, _ = dialects_run
    out, kept = tmp_path / "d.json", DialectTrial.run_mask_predict

    def stops(self: DialectTrial, *passes: Any) -> Any:
        if self.folder.name == "fert":
            raise KeyboardInterrupt
        return kept(self, *passes)

    monkeypatch.setattr(DialectTrial, "run_mask_predict", stops)
    with pytest.raises(KeyboardInterrupt):
        dialects.measure_dialects(TINY, out, quiet=True)
    monkeypatch.undo()
    assert (tmp_path / "d.json.parts" / "fert" / KD.replace(", ", "-") / "state.pt").exists()
    result = dialects.measure_dialects(TINY, out, resume=True, quiet=True)
    assert result["figures"] == whole["figures"]


def test_techniques_are_chosen_by_name() -> None:
    every = [card.name for card in choose_trained_cards(())]
    assert {"nat", "nar_crf", "nag_bert", *dialects.RUN_HERE} <= set(every)
    assert "parallel" not in every and "jacobi" not in every
    assert [card.name for card in choose_trained_cards(("sat", "nat"))] == [
        name for name in every if name in ("sat", "nat")
    ]


def test_a_card_is_trained_on_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NAT gets fertilities, NAG-BERT an encoder alone and its progress, a CRF its own weights."""
    trial = DialectTrial("fert", replace(TINY, steps=3), tmp_path)
    teacher, _ = trial.run_autoregressive()
    shapes = {}
    for name in ("nat", "nag_bert", "nar_crf"):
        model = trial.fit_card(name, find_technique(name), trial.targets, teacher)
        shapes[name] = model.config
    assert shapes["nat"].positional and shapes["nat"].fertilities
    assert (shapes["nag_bert"].encoder_layers, shapes["nag_bert"].decoder_layers) == (2, 0)
    assert shapes["nar_crf"].heads and shapes["nar_crf"].extra["transitions"] == "dynamic"
    seen = list[float]()
    card = find_technique("parallel")
    assert card.translator is not None

    def note_progress(training: Any, batch: Any, generator: Any) -> Any:
        seen.append(training.progress)
        return card.translator.loss(training, batch, generator)  # type: ignore[union-attr]

    noted = replace(card, translator=card.translator._replace(loss=note_progress))
    known = {**recipe.load_techniques(), "parallel": noted}
    monkeypatch.setattr(recipe, "load_techniques", lambda: known)
    trial.fit_card("noted", noted, trial.targets, teacher)
    assert seen == pytest.approx([0, 1 / 3, 2 / 3])


def test_wrong_input_is_one_line(dialects_run: Any, tmp_path: Path) -> None:
    folder, _, _ = dialects_run
    assert "jacobi has no row among dialects" in failed(
        run("bench", "dialects", "--methods", "jacobi", *QUICK)
    )
    assert "no dialect 'lax'" in failed(run("bench", "dialects", "--kinds", "lax", *QUICK))
    assert "such as 1,2,4" in failed(run("bench", "dialects", "--passes", "0", "--quiet"))
    assert "name it" in failed(run("bench", "dialects", *QUICK, "--resume"))
    assert "was made with seed 0, not 1" in failed(
        run("bench", "dialects", *QUICK, "--seed", "1", "--resume", "--out", str(folder / "d.json"))
    )
    (tmp_path / "x.json").write_text("{}")
    assert "no result of" in failed(
        run("bench", "dialects", *QUICK, "--resume", "--out", str(tmp_path / "x.json"))
    )


@pytest.mark.slow
def test_one_parallel_pass_mixes_dialects_and_the_others_do_not() -> None:
    """Dialects are equally likely, so no model is right by taking the most likely words.

    The other techniques have tests of their own.
    """
    given = DialectSettings(
        ("lex",), ("mask_predict",), modes=5, words=8, longest=6, pairs=8000, tests=200, steps=500, passes=(1, 4, 10),
        lengths=(1,),
        student_steps=1500,
    )  # fmt: skip
    result = dialects.measure_dialects(given, quiet=True)
    valid = {arm: of["valid"] for arm, of in result["figures"]["lex"].items()}
    assert min(valid[arm] for arm in (AR, KD, "mask-predict, T 10, l 1")) >= 0.95, valid
    assert valid[RAW] <= 0.2 and valid[SAMPLED] <= 0.05, valid
    assert valid["mask-predict, T 1, l 1"] <= 0.5, (
        valid
    )  # where two words are equally likely, the choice may favour one dialect
    assert (
        valid["mask-predict, T 1, l 1"]
        < valid["mask-predict, T 4, l 1"]
        <= valid["mask-predict, T 10, l 1"] + 0.02
    )
    floors, arms = result["kinds"]["lex"]["floors"], result["kinds"]["lex"]["arms"]
    assert (
        floors["sequence"] - 0.01 < arms[AR]["nats"] < 1.5 * floors["sequence"]
    )  # the choice of the dialect, once
    assert (
        floors["parallel"] - 0.01 < arms[RAW]["nats"] < 1.1 * floors["parallel"]
    )  # and once for every word
