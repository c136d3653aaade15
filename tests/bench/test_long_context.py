"""`tinyspec bench long-context`: every level is counted, a passage is read once, runs go on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import TEXT, failed, run, tiny_zoo
from tinyspec.bench import summary
from tinyspec.bench.experiments import long_context
from tinyspec.bench.experiments.long_context import FULL, PLAIN, LongSample
from tinyspec.bench.harness import dump_json
from tinyspec.bench.report import write_page
from tinyspec.errors import TinyspecError
from tinyspec.lm.session import Session

pytestmark = pytest.mark.slow  # it measures in real time

ARMS = [PLAIN, "8", "16", FULL]
RESULTS = Path(__file__).parent.parent.parent / "tutorials" / "results"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_zoo(tmp_path_factory.mktemp("zoo")).big


def measure(model: str, out: Path | None = None, resume: bool = False, **more: Any) -> Any:
    """Two contexts, two budgets and two passages of a text; a clock that ticks when it is read."""
    given = {"contexts": (24, 48), "budgets": (16, 8), "prompts": 2, "tokens": 12, **more}
    given = {"texts": (TEXT,), **given}
    settings = long_context.LongContextSettings(model, gamma2=3, **given)
    ticks = iter(range(1 << 30))
    clock = lambda: float(next(ticks))  # noqa: E731
    result = long_context.measure_long_contexts(settings, out, resume, quiet=True, clock=clock)
    return json.loads(dump_json(result))


@pytest.fixture(scope="module")
def result(model: str) -> Any:
    return measure(model)


def samples_of(result: Any) -> list[LongSample]:
    return [LongSample(*row) for row in result["samples"]]


def test_every_arm_continues_every_passage_at_every_context(result: Any) -> None:
    found = {(s.context, s.passage, s.round, s.arm) for s in samples_of(result)}
    assert found == {(c, p, 0, arm) for c in (24, 48) for p in (0, 1) for arm in ARMS}
    assert len(found) == len(result["samples"])


def test_figures_follow_from_the_samples(result: Any) -> None:
    figures = long_context.summarize_long_contexts(samples_of(result))
    assert json.loads(dump_json(figures)) == result["figures"]
    assert list(result["figures"]) == ["24", "48"]
    assert all(list(of) == ARMS for of in result["figures"].values())


def test_counts_of_a_sample_add_up(result: Any) -> None:
    """A pass of the target adds its accepted tokens and at most one more; so does the middle's."""
    for sample in samples_of(result):
        assert sample.tokens == 12 and 0 <= sample.accepted <= sample.tested
        assert sample.accepted <= sample.tokens <= sample.accepted + sample.calls
        assert sample.tested <= sample.accepted + sample.calls  # at most one is rejected in a pass
        if sample.arm == PLAIN:
            assert (sample.calls, sample.middle, sample.tested_1) == (12, 0, 0)
        else:
            assert sample.calls < 12 and sample.accepted_1 <= sample.tested_1 <= sample.middle


def test_full_cache_agrees_with_the_target_and_stands_apart(result: Any) -> None:
    for arms in result["figures"].values():
        assert arms[FULL]["alpha_2"] == 1
        assert arms[PLAIN]["alpha_1"] is arms[PLAIN]["alpha_2"] is None
        assert all(of["identical"] == of["of"] == 2 for of in arms.values())
    parts, whole = long_context.tabulate_long_contexts(result)
    assert [row[0] for row in parts.rows] == ["24 / 8", "24 / 16", "48 / 8", "48 / 16"]
    assert [row[0] for row in whole.rows] == [
        f"{context}, {arm}" for context in (24, 48) for arm in ("plain decoding", "triforce")
    ]


def test_speed_is_a_ratio_to_plain_decoding_in_the_same_turn() -> None:
    """Plain decoding takes 4 and 9 seconds, the budget 2 and 3."""
    rows = [(0, PLAIN, 4.0), (0, "8", 2.0), (1, PLAIN, 9.0), (1, "8", 3.0)]
    samples = [
        LongSample(24, passage, 0, arm, seconds, 12, 6, 7, 6, 8, 1, 4, 12)
        for passage, arm, seconds in rows
    ]
    of = long_context.summarize_long_contexts(samples)["24"]["8"]
    assert (of["speedup"]["min"], of["speedup"]["median"], of["speedup"]["max"]) == (2, 2.5, 3)
    assert (of["alpha_1"], of["alpha_2"], of["tau"]) == (0.25, 0.75, 2)
    assert of["milliseconds"] == pytest.approx(5000 / 24)


def test_a_passage_is_read_once_for_all_arms(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    extend = Session.extend

    def counted(self: Session, tokens: Any, hidden_layers: Any = ()) -> Any:
        reads.append(len(tokens))
        return extend(self, tokens, hidden_layers)

    monkeypatch.setattr(Session, "extend", counted)
    measure(model, contexts=(24,), prompts=1, rounds=2)
    assert [n for n in reads if n] == [24]


def test_contexts_end_at_the_same_place(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    read = long_context.LongArms.read

    def noted(self: Any, prompt: list[int]) -> None:
        prompts.append(prompt)
        read(self, prompt)

    monkeypatch.setattr(long_context.LongArms, "read", noted)
    measure(model, prompts=1)
    short, long = prompts
    assert len(long) == 48 and long[-24:] == short


def test_an_interrupted_run_goes_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, read, reads = tmp_path / "long.json", long_context.LongArms.read, []

    def interrupted(self: Any, prompt: list[int]) -> None:
        if len(reads) == 2:
            raise KeyboardInterrupt
        reads.append(prompt)
        read(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(long_context.LongArms, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(model, out)
    kept = json.loads(out.read_text(encoding="utf-8"))["samples"]
    assert len(kept) == 2 * len(ARMS)
    whole = measure(model, out, resume=True)
    assert whole["samples"][: len(kept)] == kept
    assert len(whole["samples"]) == 4 * len(ARMS)
    assert measure(model, out, resume=True)["samples"] == whole["samples"]
    with pytest.raises(TinyspecError, match="was made with inputs"):
        measure(model, out, resume=True, texts=(TEXT[::-1],))


def test_the_command_writes_both(model: str, tmp_path: Path) -> None:
    out, page, book = tmp_path / "r" / "long.json", tmp_path / "long.md", tmp_path / "book.txt"
    book.write_text(TEXT, encoding="utf-8")
    done = run(
        "bench", "long-context", "--model", model, "--contexts", "24", "--budgets", "8",
        "--prompts", "1", "--tokens", "8", "--texts", str(book), "--quiet",
        "--out", str(out), "--markdown", str(page),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"command", "commit", "machine", "samples", "figures", "knobs"} <= set(found)
    assert found["knobs"]["8"]["budget"] == 8
    text = page.read_text(encoding="utf-8")
    assert "| 24 / 8 |" in text and "Times as fast as plain decoding on the full cache" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--contexts", "24", "--budgets", "8,24"), "holds the whole context of 24"),
        (("--contexts", "95"), "95 tokens and 8 new ones do not fit into the context"),
        (("--contexts", "24", "--budgets", "4"), "holds no chunk of 8"),
    ],
    ids=["budget", "context", "chunk"],
)
def test_what_does_not_fit_is_an_error(
    model: str, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    given = {"--budgets": "8", **dict(zip(options[::2], options[1::2], strict=True))}
    flat = [part for pair in given.items() for part in pair]
    texts = ("--texts", str(tmp_path / "book.txt"), "--tokens", "8", "--quiet")
    assert message in failed(run("bench", "long-context", "--model", model, *flat, *texts))


def test_page_of_results_shows_the_table_once_it_is_measured(result: Any, tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    measured = tmp_path / "long_context.json"
    measured.unlink(missing_ok=True)
    heading = "### A long context"
    assert heading not in summary.write_readme(tmp_path)
    measured.write_text(dump_json(result), encoding="utf-8")
    (tmp_path / "long_context.md").touch()
    pages = summary.render_pages(tmp_path)
    assert heading in pages["README.md"] and "| 48 / 16 |" in pages["README.md"]
    notes = long_context.list_long_context_notes(result)
    grids = long_context.tabulate_long_contexts(result)
    assert pages["long_context.md"] == write_page(result, grids, notes)
