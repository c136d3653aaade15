"""A chapter's table: every technique or the reason why not, drafts, builds, a table a task."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tinyspec
from tests.bench.fakes import Hand, arms, jobs, settings
from tests.bench.test_arms import ENDING, job
from tests.lm.small import model
from tests.zoo import Zoo, run, tiny_zoo
from tinyspec import data, models
from tinyspec.bench import chapters, measure, report, stores, tally, tasks
from tinyspec.bench.arms import TechniqueArm
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.stores import PreparedArm
from tinyspec.errors import TinyspecError
from tinyspec.technique import load_techniques


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a chapter of three techniques, one with two rows; no rule depends on their number."""
    monkeypatch.setattr(
        chapters, "list_decoders", lambda name: ["llma", "speculative_decoding", "auto"]
    )


@pytest.mark.usefixtures("few")
def test_a_technique_is_an_arm_or_has_a_reason() -> None:
    m = model(ENDING)
    found, cannot, _ = chapters.select_techniques(
        "speculative", BenchSettings(model="alone"), m, model(ENDING, seed=1), job()
    )
    assert found.methods == (PLAIN, "llma", "llma:price=0.25", "speculative_decoding", "auto")
    assert found.draft == ""
    alone, left, _ = chapters.select_techniques(
        "speculative", BenchSettings(model="alone"), m, None, job()
    )
    assert alone.methods == (PLAIN, "llma", "llma:price=0.25", "auto") and alone.draft is None
    assert left[0].startswith("speculative_decoding: ") and "draft" in left[0]
    assert any(line.startswith("planner: an analysis") for line in [*cannot, *left])


@pytest.mark.usefixtures("few")
def test_what_a_technique_needs_is_built_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        stores.PREPARE, "llma", ("k", lambda *_: PreparedArm({"k": 3}, "three tokens"))
    )
    found, _, built = chapters.select_techniques(
        "speculative", BenchSettings(), model(ENDING), None, job()
    )
    assert "llma" in found.methods
    assert built == {"llma": "three tokens"}
    own = [
        TechniqueArm(ArmSpec.parse(label), model(ENDING), BenchSettings())
        for label in ("llma", "llma:k=5")
    ]
    assert [arm.options["k"] for arm in own] == [3, 5]

    def fails(*_: Any) -> PreparedArm:
        raise OSError("the disk is\nfull")

    monkeypatch.setitem(stores.PREPARE, "llma", ("k", fails))
    found, cannot, _ = chapters.select_techniques(
        "speculative", BenchSettings(), model(ENDING), None, job()
    )
    assert "llma: OSError: the disk is full" in cannot and "llma" not in found.methods


def test_the_datastore_is_of_the_texts_at_hand_and_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    chat, plain = (
        tinyspec.load(folder) for folder in (tiny_zoo(tmp_path).big, tiny_zoo(tmp_path).small)
    )
    with pytest.raises(TinyspecError, match="tinyspec data fetch"):
        stores.prepare_datastore(plain)
    books = [data.Book("A", f"T{i}", "the cat sat on the mat") for i in range(3)]
    monkeypatch.setattr(data, "read_books", lambda split: books if split == "train" else [])
    monkeypatch.setattr(
        data,
        "read_gsm8k",
        lambda split: [data.Sum("one and one?", "two")] if split == "train" else [],
    )
    made = stores.prepare_datastore(plain)
    assert made.built.endswith("3 training books") and "GSM8K" not in made.built
    assert "3 training books, 1 questions of GSM8K's" in stores.prepare_datastore(chat).built
    before = Path(made.knobs["datastore"]).stat().st_mtime_ns
    assert (
        stores.prepare_datastore(plain) == made
        and Path(made.knobs["datastore"]).stat().st_mtime_ns == before
    )
    arm = TechniqueArm(ArmSpec("rest"), plain, BenchSettings())
    assert len(arm.run(job(), 0, time.perf_counter).ids) == 9


def test_sequoia_measures_its_acceptance_vector_before_it_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "read_datastore_texts", lambda _: (["the cat sat"] * 3, "3 texts"))
    zoo = tiny_zoo(tmp_path)
    target, draft = tinyspec.load(zoo.big), tinyspec.load(zoo.small)
    need = stores.prepare_arm(ArmSpec("sequoia"), target, draft, BenchSettings(temperature=0))
    first, *others = map(float, need.knobs["accepts"].split(","))
    assert 0 < first <= 1 and sum(others) <= 1 - first
    assert "measured on 3 texts out of 3 texts" in need.built
    again, sampled = (
        stores.prepare_arm(ArmSpec("sequoia"), target, draft, BenchSettings(temperature=heat))
        for heat in (0, 1)
    )
    assert again is need and sampled is not need  # each sampling has a vector of its own
    paper, ours = (
        TechniqueArm(spec, target, BenchSettings(temperature=0), draft)
        for spec in chapters.list_rows("sequoia")
    )
    assert paper.options["accepts"] == need.knobs["accepts"]
    assert ours.label == "sequoia:accepts=learnt" and ours.options["accepts"] == "learnt"
    assert paper.run(job(), 0, time.perf_counter).ids == ours.run(job(), 0, time.perf_counter).ids


def test_a_method_that_tunes_the_model_has_a_row_only_on_a_model_tuned_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chapters, "list_decoders", lambda name: ["llma", "medusa2"])
    found, cannot, _ = chapters.select_techniques(
        "speculative", BenchSettings(model="alone"), model(ENDING), None, job()
    )
    assert "medusa2" not in found.methods and "llma" in found.methods
    assert any(reason.startswith("medusa2: ") and "was not tuned" in reason for reason in cannot)


def test_every_decoder_of_the_chapter_is_asked() -> None:
    asked = set(chapters.list_decoders("speculative"))
    here = {
        n
        for n, card in load_techniques().items()
        if card.build.__module__.startswith("tinyspec.speculative")
    }
    assert asked | set(chapters.list_without_text("speculative")) | {PLAIN} == here
    with pytest.raises(TinyspecError, match="did you mean 'speculative'"):
        chapters.list_decoders("speculativ")


def test_a_plain_model_continues_sixty_openings_of_the_valid_books() -> None:
    assert chapters.default_tasks(model(ENDING)) == ("books:60",)
    found = tasks.load_items("books", 60)
    assert len({item.turns for item in found}) == 60
    assert not any(item.chat for item in found)


def test_a_draft_of_the_zoo_is_found_by_what_it_was_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path))
    for name, section in (
        ("mine", {}),
        ("small", {"draft_of": "mine"}),
        ("odd", {"draft_of": "other"}),
    ):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({"tinyspec": section}))
    assert models.find_drafts_of("mine") == ["small"]
    assert models.find_drafts_of("storyteller") == ["apprentice"]


def test_the_tables_have_a_row_for_every_arm_of_every_task() -> None:
    hand = Hand()
    book = SampleBook(
        replace(settings(), tokens=8),
        None,
        {"command": "tinyspec bench", "commit": "c", "date": "d"},
    )
    book.stamps[0]["machine"] = {
        "cpu": "a cpu",
        "cores": 2,
        "threads": 2,
        "units": [],
        "torch": "2",
    }
    book.check_prompts(jobs())
    book.references = {j.key: list(range(j.tokens)) for j in jobs()}
    measure.run_turns(book, jobs(), arms(hand), hand)
    told = [s._replace(stopped=s.accepted, state=900, held=90) for s in book.samples]
    labels = [PLAIN, "llma", "transformers"]
    book.rest = {
        "figures": tally.summarize_samples(told, labels),
        "chapter": "speculative",
        "built": {"llma": "a store of books"},
    }
    result = json.loads(dump_json(book.as_dict()))
    grids = {grid.title.split(":")[0]: grid for grid in report.list_tables(result)}
    for task in ("QA", "edits"):
        assert [row[0] for row in grids[task].rows] == labels
        assert {row[3] for row in grids[task].rows} == {
            "0.50"
        }  # alpha: as often stopped as accepted
        assert {row[-1] for row in grids[task].rows} == {"10"}
    page = report.write_markdown(result)
    assert "built for llma: a store of books" in page and "draft model: none" in page


def test_alpha_and_state_are_unknown_where_a_count_is() -> None:
    blank = Sample("qa", "0", 0, PLAIN, 0, 1.0, 1.0, 10, 10, 5, 0, 5, 5, 0, 0, 20.0, 10)
    assert (
        tally.count_samples([blank])["alpha"] is None
        and tally.count_samples([blank])["state_per_token"] is None
    )
    counted = blank._replace(stopped=5, state=100, held=50)
    assert (
        tally.count_samples([counted])["alpha"],
        tally.count_samples([counted])["state_per_token"],
    ) == (
        0.5,
        2.0,
    )
    assert tally.count_samples([blank._replace(accepted=0, stopped=0)])["alpha"] is None


@pytest.mark.usefixtures("few")
def test_one_command_writes_samples_tables_and_pictures_and_goes_on(tmp_path: Path) -> None:
    zoo: Zoo = tiny_zoo(tmp_path)
    out, page, drawn = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "svg"
    call = [
        "bench",
        "--chapter",
        "speculative",
        "--model",
        zoo.big,
        "--dtype",
        "float32",
        "--tokens",
        "6",
        "--rounds",
        "1",
    ]
    asked = ["--tasks", "books:2", "--quiet"]
    result = run(*call, *asked, "--out", str(out), "--markdown", str(page), "--svg", str(drawn))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["chapter"] == "speculative" and found["settings"]["draft"] == zoo.small
    assert "curve" not in found and "memory" not in found
    assert all(of["identical"] == of["jobs"] for of in found["figures"]["overall"].values())
    assert "draft passes/token" in page.read_text(encoding="utf-8")
    assert (drawn / f"{out.stem}-speedups.svg").exists()
    grown = run(
        "bench", "--resume", str(out), "--rounds", "2", "--quiet", "--no-curve", "--no-memory"
    )
    assert grown.exit_code == 0, grown.output
    again = json.loads(out.read_text(encoding="utf-8"))
    assert len(again["samples"]) == 2 * len(found["samples"]) and again["chapter"] == "speculative"
