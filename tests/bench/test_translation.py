"""`tinyspec bench translation`: figures from samples, resumed runs, a table and a chart."""

import gzip
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tinyspec import models
from tinyspec.bench.experiments import translation, translators
from tinyspec.bench.experiments.translation import (
    BlockSample,
    TranslationSettings,
    chart_translation,
    lines_by_iterations,
    summarize_translation,
)
from tinyspec.bench.experiments.translators import (
    BASE,
    PLAIN,
    list_absent_translators,
    load_translators_by_role,
    make_translator_arms,
)
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart
from tinyspec.cli import main
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.flowseq import FlowSeqSettings
from tinyspec.nonautoregressive.latent_transformer import LatentSettings
from tinyspec.technique import load_techniques
from tinyspec.training.bitext import train_joint_tokenizer
from tinyspec.training.bleu import corpus_bleu, load_chrf

ENGLISH = ["A dog runs.", "A red dog sleeps in the snow.", "Two dogs.", "A boy sees a dog."] * 2
GERMAN = [
    "Ein Hund rennt.",
    "Ein roter Hund schläft im Schnee.",
    "Zwei Hunde.",
    "Ein Junge sieht einen Hund.",
] * 2
SHAPES: dict[str, dict[str, Any]] = {
    "teacher": {},
    "nat": {"positional": True, "fertilities": 4},
    "mask_predict": {"lengths": 30},
    "shallow": {"extra": {"trained_for": "teacher", "teacher": "teacher"}},
    "parallel": {"lengths": 30},
    "sat": {"extra": {"trained_for": "sat", "k": 3}},
    "iterative_refinement": {"lengths": 30, "stacks": {"refiner": 1}},
    "nar_crf": {"lengths": 30},
    "nag_bert": {"decoder_layers": 0},
    "synst": {"stacks": {"parser": 1}, "extra": {"trained_for": "synst", "longest": 12}},
    "latent_transformer": {
        "stacks": {"prior": 1},
        "extra": {"trained_for": "latent_transformer", **asdict(LatentSettings())},
    },
    "flowseq": {
        "stacks": {"posterior": 1},
        "extra": {"trained_for": "flowseq", **asdict(FlowSeqSettings())},
    },
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models and 8 test sentences."""
    root = tmp_path_factory.mktemp("translators")
    tokenizer = train_joint_tokenizer(3 * (ENGLISH + GERMAN), 400, root / "tokenizer")
    for number, (role, shape) in enumerate(SHAPES.items()):
        config = Seq2SeqConfig(
            tokenizer.vocab_size, d_model=16, n_heads=2, d_ff=24, encoder_layers=1,
            max_positions=64, **{"decoder_layers": 1, "extra": {"trained_for": role}, **shape},
        )  # fmt: skip
        trained = load_techniques()[role].translator if role in load_techniques() else None
        if trained is not None:
            config = trained.equip(config, trained.settings())
        Seq2Seq.create(config, torch.Generator().manual_seed(number), tokenizer=tokenizer).save(
            root / role
        )
    (root / "data/multi30k").mkdir(parents=True)
    for language, texts in (("en", ENGLISH), ("de", GERMAN)):
        content = "".join(text + "\n" for text in texts).encode()
        (root / f"data/multi30k/test_2016_flickr.{language}.gz").write_bytes(gzip.compress(content))
    return root


def names(zoo: Path) -> list[str]:
    return [str(zoo / role) for role in SHAPES]


def measured(zoo: Path, **options: Any) -> dict[str, Any]:
    options = {
        "samples": (3,),
        "iterations": (1, 2),
        "lengths": (2,),
        "batch": 5,
        "rounds": 2,
        **options,
    }
    running = {name: options.pop(name) for name in ("out", "resume", "clock") if name in options}
    given = TranslationSettings(tuple(names(zoo)), data_folder=zoo / "data", **options)
    made = translation.measure_translation(given, block=4, quiet=True, **running)
    found: dict[str, Any] = json.loads(dump_json(made))
    return found


@pytest.fixture(scope="module")
def result(zoo: Path) -> dict[str, Any]:
    return measured(zoo)


def test_figures_follow_from_the_samples(result: dict[str, Any]) -> None:
    assert json.loads(dump_json(summarize_translation(result))) == result["figures"]
    samples = [BlockSample.from_row(row) for row in result["samples"]]
    assert all(len(row) == len(result["columns"]) for row in result["samples"])
    assert {sample.block for sample in samples} == {0, 1}
    assert sum(sample.sentences for sample in samples if sample.arm == PLAIN) == 8
    assert result["figures"][PLAIN]["speedup"]["median"] == 1
    assert result["figures"][PLAIN]["signature"].startswith(
        "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
    )


def test_a_row_tells_its_knobs(result: dict[str, Any]) -> None:
    ran = result["knobs"]
    assert list(ran) == result["settings"]["arms"]
    assert (ran[PLAIN], ran["teacher, beam 4"]) == ({}, {"beam": 4})
    assert (ran["nat, NPD 3"]["samples"], ran["nat, NPD 3"]["fertility"]) == (3, "argmax")
    assert ran["mask_predict, T 2, 2 lengths"] == {"iterations": 2, "lengths": 2}


@pytest.mark.slow
def test_committed_results_say_what_their_samples_say() -> None:
    for path in (Path(__file__).parent.parent.parent / "tutorials/results").glob(
        "translation*.json"
    ):
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = json.loads(dump_json(summarize_translation(kept)))
        for label, of in kept["figures"].items():
            assert {**found[label], "signature": ""} == {
                **of,
                "signature": "",
            }  # sacrebleu's version may be another


@pytest.mark.slow
def test_bleu_of_the_blocks_is_bleu_of_all_sentences_together(
    zoo: Path, result: dict[str, Any]
) -> None:
    found = load_translators_by_role(names(zoo))
    for arm in make_translator_arms("table", found, (3,), (1, 2), (2,)):
        texts = [arm.one(text) for text in ENGLISH]
        assert (
            result["figures"][arm.label]["bleu"]
            == corpus_bleu([made.text for made in texts], GERMAN).score
        )
        assert (
            result["figures"][arm.label]["decoder_passes"]
            == sum(made.decoder for made in texts) / 8
        )


def test_chrf_of_the_blocks_is_chrf_of_all_sentences_together(
    zoo: Path, result: dict[str, Any]
) -> None:
    found = load_translators_by_role(names(zoo))
    for arm in make_translator_arms("table", found, (3,), (1,), (2,))[:4]:
        texts = [arm.one(text).text for text in ENGLISH]
        score = load_chrf().corpus_score(texts, [GERMAN]).score
        assert result["figures"][arm.label]["chrf"]["score"] == pytest.approx(score, abs=1e-4)
    signature = result["figures"][PLAIN]["chrf"]["signature"]
    assert signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert f"chrF: sacrebleu, {signature}." in translation.describe_translation(result)


def test_a_lead_over_the_base_has_an_interval(result: dict[str, Any]) -> None:
    figures = result["figures"]
    assert figures[BASE]["lead"] is None
    for label, of in figures.items():
        if label != BASE:
            lead, low, high = of["lead"]
            assert lead == pytest.approx(of["bleu"] - figures[BASE]["bleu"], abs=1e-3)
            assert low <= lead + 1e-9 and lead - 1e-9 <= high
    notes = "\n".join(translation.note_translation(result))
    assert "paired bootstrap over blocks of 4 sentences" in notes
    assert f"no model of `{BASE}`" not in notes
    without = {label: of for label, of in figures.items() if label != BASE}
    notes = "\n".join(translation.note_translation({**result, "figures": without}))
    assert f"no model of `{BASE}`" in notes and "paired bootstrap" not in notes


def test_the_same_translations_lead_by_nothing(result: dict[str, Any]) -> None:
    again = json.loads(json.dumps(result))
    rows = [row for row in again["samples"] if row[0] == BASE]
    again["samples"] += [["copy of it", *row[1:]] for row in rows]
    assert summarize_translation(again)["copy of it"]["lead"] == [0, 0, 0]


@pytest.mark.slow
def test_a_model_that_is_not_trained_is_named_with_its_recipe(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = "tinyspec train mt --recipe models/X/recipe.toml --out X"
    for name, text in (
        ("multi30k-far", f'# Far.\n# {train}\nmethod = "sat"\n'),
        ("multi30k-leaving", f'# {train}\nmethod = "teacher"\n[exits]\n'),
        ("multi30k-deciding", f'# {train}\nmethod = "calm"\n'),
        ("storyteller-far", '# tinyspec train head --recipe Y\nmethod = "blockwise"\n'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(models, "_zoos", lambda: [tmp_path])
    absent = list_absent_translators(load_translators_by_role(names(zoo)))
    assert absent == {"multi30k-far": train}
    notes = translation.note_translation(
        {**measured(zoo, sentences=1, rounds=1, iterations=(1,)), "absent": absent}
    )
    assert notes[-1] == f"No row of multi30k-far, which is not trained here: `{train}`."
    with pytest.raises(TinyspecError, match="multi30k-far is not trained yet: tinyspec train mt"):
        models.load_translator("multi30k-far")


def test_a_technique_that_is_new_has_rows_by_its_card(
    zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those have that are not in ROLES: one, and one more if a teacher may choose a length."""
    known = tuple(role for role in translators.ROLES if role != "parallel")
    monkeypatch.setattr(translators, "ROLES", known)
    monkeypatch.setattr(translators, "BASE", "none")
    found = load_translators_by_role(names(zoo))
    arms = {arm.label: arm for arm in make_translator_arms("table", found, (3,), (1,), (2,))}
    assert [label for label in arms if label.startswith("parallel")] == [
        "parallel",
        "parallel, 9 lengths",
    ]
    assert arms["parallel, 9 lengths"].one(ENGLISH[0]).teacher == 2


def test_a_model_that_learnt_from_people_has_rows_of_its_own(zoo: Path, tmp_path: Path) -> None:
    crf = load_translators_by_role(names(zoo))["nar_crf"]
    for name, extra in (("raw", {}), ("taught", {"distilled": {"beam": 4}})):
        config = replace(crf.config, extra={**crf.config.extra, "teacher": "teacher", **extra})
        Seq2Seq(config, crf.weights, crf.tokenizer, name).save(tmp_path / name)
    others = [name for name in names(zoo) if not name.endswith("nar_crf")]
    found = load_translators_by_role([*others, str(tmp_path / "raw"), str(tmp_path / "taught")])
    assert [role for role in found if "crf" in role] == ["nar_crf", "nar_crf, raw"]
    assert found["nar_crf"].name == "taught"
    labels = [arm.label for arm in make_translator_arms("table", found, (3,), (1,), (2,))]
    assert [label for label in labels if label.startswith("nar_crf, raw")] == [
        f"nar_crf, raw, {kind}" for kind in ("dynamic", "static", "none", "dynamic, 9 lengths")
    ]


def test_a_model_for_exits_is_no_teacher(zoo: Path, tmp_path: Path) -> None:
    teacher = load_translators_by_role(names(zoo))["teacher"]
    config = replace(teacher.config, extra={"trained_for": "teacher", "exits": "uniform"})
    Seq2Seq(config, teacher.weights, teacher.tokenizer, "a").save(tmp_path / "a")
    found = load_translators_by_role([str(tmp_path / "a"), *names(zoo)])
    assert found["teacher"].name == "teacher" and "exits" not in found
    teacher.save(tmp_path / "b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_zoos", lambda: [tmp_path])
        assert models.name_for_method("plain", needs_own=False) == "b"


def test_passes_are_those_of_the_method(result: dict[str, Any]) -> None:
    figures = result["figures"]
    passes = {
        label: (of["decoder_passes"], of["encoder_passes"], of["teacher_passes"])
        for label, of in figures.items()
    }
    assert passes["nat, argmax"] == passes["nat, average"] == (1, 1, 0)
    assert passes["nat, NPD 3"] == (1, 1, 2)
    assert passes["mask_predict, T 2, 2 lengths"] == (2, 1, 0)
    assert (passes["parallel"], passes["parallel, 9 lengths"]) == ((1, 1, 0), (1, 1, 2))
    assert passes["iterative_refinement, T 2"] == (2, 1, 0)
    assert passes["nar_crf, dynamic"] == passes["nar_crf, static"] == (1, 1, 0)
    assert passes["nar_crf, dynamic, 9 lengths"] == (1, 1, 2)
    assert passes["nag_bert, ratio 1.0"] == passes["nag_bert, ratio 0.5"] == (1, 1, 0)
    assert passes["synst"][1:] == (1, 0) and passes["synst"][0] > 2
    assert passes["sat, K 3, beam 4"][0] >= 1
    codes, _, judged = passes["latent_transformer, 10 samples"]
    assert passes["latent_transformer"] == (codes, 1, 0) and 2 < codes < 9 and judged == 2
    assert passes["flowseq"] == (1, 1, 0) and passes["flowseq, 9 lengths"] == (1, 1, 2)
    assert passes["flowseq, 10 samples, teacher"] == (1, 1, 2)
    assert passes["flowseq, 10 samples, importance"] == (2, 1, 0)
    assert passes["sat, K 3"][0] < passes["shallow decoder, greedy"][0]
    assert all(encoder == 1 for _, encoder, _ in passes.values())
    assert passes["teacher, jacobi"][0] <= passes[PLAIN][0]
    assert figures["teacher, jacobi"]["bleu"] == figures[PLAIN]["bleu"]


@pytest.mark.slow
def test_without_lengths_the_table_has_rows_of_the_papers_length_beam(zoo: Path) -> None:
    few = measured(zoo, lengths=(), iterations=(1,), rounds=1, sentences=2)
    assert {"mask_predict, T 1, 3 lengths", "mask_predict, T 1, 5 lengths"} <= few["figures"].keys()


@pytest.mark.slow
def test_a_large_batch_translates_as_one_sentence_does(zoo: Path) -> None:
    found = {role: _wide(model) for role, model in load_translators_by_role(names(zoo)).items()}
    ids = [found["teacher"].tokenizer.encode(text) for text in ENGLISH[:4]]
    for arm in make_translator_arms("table", found, (3,), (1, 2), (2,)):
        if (
            arm.many is not None and "NPD" not in arm.label
        ):  # which draws with one seed for each place in the batch
            assert arm.many(ids) == [arm.one(text).tokens for text in ENGLISH[:4]], arm.label


def _wide(model: Seq2Seq) -> Seq2Seq:
    """In float64, where a batch rounds like one sentence."""
    weights = {name: weight.double() for name, weight in model.weights.items()}
    return Seq2Seq(model.config, weights, model.tokenizer, model.name)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "t.json", translation._translate_block

    def interrupted(asked: Any, number: int, *rest: Any) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return done(asked, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(translation, "_translate_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measured(zoo, out=out)
    first = json.loads(out.read_text())["samples"]
    whole = measured(zoo, out=out, resume=True)
    assert whole["samples"][: len(first)] == first
    assert len(whole["samples"]) == 2 * len(first)
    assert {len(taken) for taken in whole["batches"].values()} == {2}
    again = measured(zoo, out=out, resume=True)
    assert (again["samples"], again["batches"]) == (whole["samples"], whole["batches"])
    with pytest.raises(TinyspecError, match=r"made with arms .* name another --out"):
        measured(zoo, out=out, resume=True, iterations=(1, 3))
    out.write_text("{}")
    with pytest.raises(TinyspecError, match="is no result of `tinyspec bench translation`"):
        measured(zoo, out=out, resume=True)
    with pytest.raises(TinyspecError, match="name it"):
        measured(zoo, resume=True)


@pytest.mark.slow
def test_the_tables_and_pictures_of_both_experiments(zoo: Path, result: dict[str, Any]) -> None:
    other = measured(
        zoo, experiment="iterations", iterations=(1, 2, 3), lengths=(1, 2), rounds=1, sentences=4
    )
    assert list(lines_by_iterations(other, "bleu")) == ["1 length", "2 lengths"]
    assert list(lines_by_iterations(other, "bleu")["1 length"]) == [1, 2, 3]
    for one in (result, other):
        (grid,) = translation.tabulate_translation(one)
        assert grid.rows[0][0] == PLAIN
        assert all(len(row) == len(grid.header) for row in grid.rows)
        ElementTree.fromstring(draw_chart(chart_translation(one)))
    assert [len(panel.lines) for panel in chart_translation(other).panels] == [2, 2]  # type: ignore[union-attr]
    assert [len(panel.bars) for panel in chart_translation(result).panels] == 2 * [
        len(result["figures"])
    ]  # type: ignore[union-attr]


def test_an_autoregressive_student_is_no_teacher(zoo: Path) -> None:
    found = load_translators_by_role(names(zoo))
    assert (found["teacher"].name, found["shallow"].name) == ("teacher", "shallow")
    assert [role for role in found if role.startswith("sat")] == ["sat, K 3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_zoos", lambda: [zoo])
        assert models.name_for_method("plain", needs_own=False) == "teacher"


def test_wrong_input_is_one_line(zoo: Path) -> None:
    with pytest.raises(TinyspecError, match="no autoregressive teacher to compare with"):
        load_translators_by_role([str(zoo / "nat")])
    with pytest.raises(TinyspecError, match="both trained for nat: name one"):
        load_translators_by_role([str(zoo / "teacher"), str(zoo / "nat"), str(zoo / "nat")])
    with pytest.raises(TinyspecError, match="no model for mask_predict"):
        make_translator_arms(
            "iterations", load_translators_by_role([str(zoo / "teacher")]), (), (1,), (1,)
        )
    with pytest.raises(TinyspecError, match="there is no experiment tabel"):
        measured(zoo, experiment="tabel")


@pytest.mark.slow
def test_the_command_writes_all_three(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYSPEC_DATA", str(zoo / "data"))
    out, drawn, page = tmp_path / "r" / "t.json", tmp_path / "t.svg", tmp_path / "t.md"
    asked = [
        "bench",
        "translation",
        "--models",
        ",".join(names(zoo)),
        "--sentences",
        "3",
        "--samples",
        "2",
        "--lengths",
        "1",
    ]
    files = [
        "--out",
        str(out),
        "--svg",
        str(drawn),
        "--markdown",
        str(page),
        "--rounds",
        "1",
        "--batch",
        "2",
        "-q",
    ]
    done = CliRunner().invoke(main, [*asked, *files])
    assert done.exit_code == 0, done.stderr
    assert json.loads(out.read_text())["settings"]["sentences"] == 3
    assert drawn.read_text().startswith("<svg")
    assert "nrefs:1" in page.read_text()
    done = CliRunner().invoke(main, [*asked, "--iterations", "0"])
    assert done.exit_code == 2
    assert "numbers of iterations from 1 on" in done.stderr


def test_a_drafter_brings_two_rows_of_specdec(zoo: Path, tmp_path: Path) -> None:
    found = load_translators_by_role(names(zoo))
    config = Seq2SeqConfig(
        found["teacher"].config.vocab_size, d_model=16, n_heads=2, d_ff=24, encoder_layers=1,
        decoder_layers=1, max_positions=64,
        extra={"trained_for": "specdec", "teacher": "teacher", "k": 3},
    )  # fmt: skip
    tokenizer = found["teacher"].tokenizer
    drafter = Seq2Seq.create(config, torch.Generator().manual_seed(9), tokenizer=tokenizer)
    drafter.save(tmp_path / "drafter")
    found = load_translators_by_role([*names(zoo), str(tmp_path / "drafter")])
    arms = {arm.label: arm for arm in make_translator_arms("table", found, (3,), (1,), (2,))}
    exact, relaxed = arms["teacher, specdec exact"], arms["teacher, specdec relaxed"]
    assert exact.knobs == {"k": 3, "beta": 1, "tau": 3.0}
    assert relaxed.knobs == {"k": 3, "beta": 5, "tau": 3.0}
    for text in ENGLISH[:4]:
        plain, drafted = arms[PLAIN].one(text), exact.one(text)
        assert drafted.tokens == plain.tokens
        assert (plain.encoder, drafted.encoder, relaxed.one(text).encoder) == (1, 2, 2)
        assert drafted.decoder <= 2 * plain.decoder


def test_a_model_with_a_block_layer_brings_rows_of_its_own(zoo: Path, tmp_path: Path) -> None:
    found = load_translators_by_role(names(zoo))
    tokenizer, made = found["teacher"].tokenizer, list[str]()
    for extra in ({}, {"frozen": True}):
        config = Seq2SeqConfig(
            found["teacher"].config.vocab_size, d_model=16, n_heads=2, d_ff=24, encoder_layers=1,
            decoder_layers=1, max_positions=64, block=2,
            extra={"trained_for": "blockwise", "teacher": "teacher", **extra},
        )  # fmt: skip
        made.append(str(tmp_path / f"blocks{len(extra)}"))
        generator = torch.Generator().manual_seed(9)
        Seq2Seq.create(config, generator, tokenizer=tokenizer).save(made[-1])
    found = load_translators_by_role([*names(zoo), *made])
    arms = {arm.label: arm for arm in make_translator_arms("table", found, (3,), (1,), (2,))}
    rules = ("exact", "top 2", "blocks of 2")
    assert [label for label in arms if label.startswith("blockwise")] == [
        "blockwise, greedy",
        *(f"{role}, {rule}" for role in ("blockwise", "blockwise, frozen") for rule in rules),
    ]
    assert arms["blockwise, top 2"].knobs == {"k": 10, "slack": 1, "rule": "top"}
    for text in ENGLISH[:4]:
        plain, exact = arms["blockwise, greedy"].one(text), arms["blockwise, exact"].one(text)
        assert exact.tokens == plain.tokens and exact.decoder <= plain.decoder
