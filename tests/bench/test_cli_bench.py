"""`tinyspec bench` on tiny models: a file, --resume, and bad input."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import Zoo, failed, full_disk, run, tiny_zoo
from tinyspec.bench.book import Sample
from tinyspec.bench.plan import PLAIN
from tinyspec.cli.measuring import write_text
from tinyspec.errors import TinyspecError
from tinyspec.technique import find_technique

QUICK = (
    "--no-curve",
    "--no-memory",
    "--quiet",
    "--dtype",
    "float32",
    "--tokens",
    "6",
    "--prompts",
    "2",
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_run_writes_everything_that_it_is_recomputed_from(zoo: Zoo, tmp_path: Path) -> None:
    out, page, drawn = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "svg"
    methods = "llma:k=4,speculative_decoding:gamma=2"
    call = [
        "bench",
        "--model",
        zoo.big,
        "--methods",
        methods,
        "--tasks",
        "edits,books",
        "--rounds",
        "2",
        *QUICK,
    ]
    result = run(*call, "--out", str(out), "--markdown", str(page), "--svg", str(drawn))
    assert result.exit_code == 0, result.output
    assert "llma:k=4" in result.stdout
    found = loaded(out)
    assert {
        "command",
        "commit",
        "date",
        "machine",
        "settings",
        "samples",
        "columns",
        "references",
        "figures",
    } <= set(found)
    samples = [Sample(*row) for row in found["samples"]]
    assert len({s.key for s in samples}) == len(samples) == 3 * 4 * 2
    assert {s.tokens for s in samples} == {6}
    assert found["figures"]["overall"]["llma:k=4"]["identical"] == 4
    assert found["figures"]["overall"]["speculative_decoding:gamma=2"]["identical"] == 4
    assert {arm: found["knobs"][arm] for arm in (PLAIN, "speculative_decoding:gamma=2")} == {
        PLAIN: {},
        "speculative_decoding:gamma=2": {"gamma": 2, "lenience": 1.0},
    }
    assert found["knobs"]["llma:k=4"] == find_technique("llma").settings({"k": 4})
    assert page.read_text(encoding="utf-8").startswith("`tinyspec ")
    assert (drawn / "r-speedups.svg").exists()

    grown = run(
        "bench",
        "--resume",
        str(out),
        "--rounds",
        "3",
        "--quiet",
        "--no-curve",
        "--no-memory",
        "--json",
    )
    assert grown.exit_code == 0, grown.output
    again = loaded(out)
    assert again["samples"][: len(samples)] == found["samples"]
    assert len(again["samples"]) == 3 * 4 * 3
    assert json.loads(grown.stdout)["samples"] == again["samples"]
    assert len(again["sittings"]) == 2
    assert "tokens 6, not 7" in failed(run("bench", "--resume", str(out), "--tokens", "7"))
    assert "--out" in failed(run("bench", "--resume", str(out), "--out", str(tmp_path / "x.json")))


def test_a_run_records_every_knob_and_goes_on_only_with_the_same(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    call = ["bench", "--model", zoo.big, "--methods", "llma", "--tasks", "edits", "--rounds", "1"]
    assert run(*call, *QUICK, "--out", str(out)).exit_code == 0
    found = loaded(out)
    assert found["knobs"]["llma"]["price"] == 0 and found["knobs"]["llma"]["k"] == 15
    again = ("bench", "--resume", str(out), "--rounds", "2", "--quiet", "--no-curve", "--no-memory")
    found["knobs"]["llma"]["price"] = 0.25
    out.write_text(json.dumps(found), encoding="utf-8")
    assert "ran with other knobs" in failed(run(*again))
    del found["knobs"]
    out.write_text(json.dumps(found), encoding="utf-8")
    assert "does not tell the knobs" in failed(run(*again))


def test_ctrl_c_leaves_a_file_that_the_hint_goes_on_with(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyspec.bench import arms

    out = tmp_path / "r.json"
    own, count = arms.TechniqueArm.run, [0]

    def interrupted(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 9:
            raise KeyboardInterrupt
        return own(self, *args)

    monkeypatch.setattr(arms.TechniqueArm, "run", interrupted)
    result = run(
        "bench", "--model", zoo.big, "--tasks", "edits", "--rounds", "2", *QUICK, "--out", str(out)
    )
    assert result.exit_code == 130
    assert f"tinyspec bench --resume {out}" in result.stderr
    kept = loaded(out)["samples"]
    assert 0 < len(kept) < 2 * 2 * 2
    assert run("bench", "--resume", str(out), "--quiet", "--no-curve", "--no-memory").exit_code == 0
    assert loaded(out)["samples"][: len(kept)] == kept
    assert len(loaded(out)["samples"]) == 2 * 2 * 2


def test_sampling_compares_speeds_and_not_texts(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    call = [
        "bench",
        "--model",
        zoo.big,
        "--tasks",
        "books",
        "--rounds",
        "1",
        "-t",
        "0.8",
        "--top-p",
        "0.9",
        *QUICK,
    ]
    assert run(*call, "--out", str(out)).exit_code == 0
    assert {Sample(*row).same for row in loaded(out)["samples"]} == {None}
    assert loaded(out)["figures"]["overall"]["llma"]["identical"] is None


@pytest.mark.slow
def test_a_chapter_lists_what_it_ran_and_what_it_left_out(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    call = [
        "bench",
        "--model",
        zoo.small,
        "--chapter",
        "speculative",
        "--tasks",
        "books",
        "--rounds",
        "1",
        *QUICK,
    ]
    result = run(*call, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "llma" in loaded(out)["settings"]["methods"]
    assert "left out: speculative_decoding" in result.stdout
    assert set(loaded(out)["figures"]["overall"]) == {PLAIN, *loaded(out)["settings"]["methods"]}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--methods", "lmla"], "did you mean 'llma'"),
        (["--methods", "llma:kk=3"], "no knob 'kk'"),
        (["--methods", "llma:k"], "knob=value"),
        (["--peers", "llamacpp"], "did you mean 'llama.cpp'"),
        (["--peers", "transformers:lokup=3"], "did you mean 'lookup'"),
        (["--tasks", "edit"], "did you mean 'edits'"),
        (["--chapter", "speculativ"], "did you mean 'speculative'"),
        (["--tasks", ","], "--tasks"),
        (["--tokens", "999"], "--tokens"),
        (["--methods", "speculative_decoding", "--model", "SMALL"], "draft"),
        (["--dtype", "float31"], "float32"),
    ],
)
def test_bad_input_is_one_line(zoo: Zoo, args: list[str], says: str) -> None:
    args = [zoo.small if arg == "SMALL" else arg for arg in args]
    model = [] if "--model" in args else ["--model", zoo.big]
    tasks = [] if "--tasks" in args else ["--tasks", "edits"]
    assert says in failed(run("bench", "--rounds", "1", *QUICK, *model, *tasks, *args))


def test_a_mistyped_knob_leaves_the_file_of_out_as_it_is(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "keep.json"
    out.write_text("mine")
    call = ["bench", "--model", zoo.big, "--tasks", "edits", *QUICK, "--out", str(out)]
    assert "k is 'abc'" in failed(run(*call, "--methods", "llma:k=abc"))
    assert out.read_text() == "mine"


def test_an_unknown_chapter_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinyspec.bench import arms

    monkeypatch.setattr(arms, "load_arm_models", lambda *_, **__: pytest.fail("it was loaded"))
    assert "there is no chapter 'nosuch'" in failed(run("bench", "--chapter", "nosuch"))


def test_a_full_disk_leaves_the_old_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("mine")
    with full_disk(), pytest.raises(TinyspecError, match=r"cannot write .*page\.md"):
        write_text(tmp_path / "page.md", "new" * 100)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_that_is_no_result_and_options_in_the_wrong_place(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert "not a result file" in failed(run("bench", "--resume", str(tmp_path / "x.json")))
    assert run("bench", "--resume", str(tmp_path / "none.json")).exit_code == 2
    assert run("bench", "--rounds", "2", "race").exit_code == 2
    assert (
        run("bench", "--resume", str(tmp_path / "x.json"), "--chapter", "speculative").exit_code
        == 2
    )
    assert "there is no command 'rce'" in run("bench", "rce").stderr


def test_plan_draft_measures_recommends_and_advises_again_from_its_numbers(
    zoo: Zoo, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    call = [
        "bench",
        "plan-draft",
        "--model",
        zoo.big,
        "--prompts",
        "2",
        "--tokens",
        "16",
        "--longest",
        "2",
        "--quiet",
    ]
    result = run(*call, "--drafts", f"{zoo.small},{zoo.big}", "--out", str(out))
    assert result.exit_code == 0, result.output
    found = loaded(out)
    assert {a["draft"] for a in found["advice"]} == {zoo.small, zoo.big, None}
    assert set(found["checked"]) == {zoo.small, zoo.big, "plain"}
    assert "recommended: " in result.stdout
    assert found["profile"]["drafts"][1]["reach"] == [1.0, 1.0]  # the model itself as its draft
    again = json.loads(run("bench", "plan-draft", "--numbers", str(out), "--json").stdout)
    assert again["advice"] == found["advice"]


def test_wrong_input_of_plan_draft_is_one_line(zoo: Zoo, tmp_path: Path) -> None:
    assert "names no draft" in failed(run("bench", "plan-draft", "--model", zoo.small, "--quiet"))
    assert "another vocabulary" in failed(
        run("bench", "plan-draft", "--model", zoo.big, "--drafts", zoo.other)
    )
    numbers = tmp_path / "n.json"
    for text, says in (
        ("{}", "expected"),
        ("nonsense", "no measured numbers"),
        (
            '{"verify": [1, 1], "drafts": [{"name": "a", "step": 0.1, "reach": [0.5, 0.7]}]}',
            "shares that fall",
        ),
    ):
        numbers.write_text(text)
        assert says in failed(run("bench", "plan-draft", "--numbers", str(numbers)))


@pytest.mark.slow
def test_a_failed_memory_probe_loses_no_table(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyspec.bench import memory

    def ends_badly(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", "ImportError: no tinyspec here")

    out = tmp_path / "r.json"
    call = ["bench", "--model", zoo.big, "--methods", "llma", "--tasks", "edits", "--rounds", "1"]
    quick = [word for word in QUICK if word != "--no-memory"]
    with monkeypatch.context() as broken:
        broken.setattr(memory.subprocess, "run", ends_badly)
        result = run(*call, *quick, "--out", str(out))
    assert result.exit_code == 0, result.output
    [row] = [line for line in result.stdout.splitlines() if line.split()[:1] == ["llma"]][-1:]
    assert row.split()[-1] == "-"
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "the memory of llma was not measured: its process ended with ImportError" in warnings[1]

    again = run("bench", "--resume", str(out), "--quiet", "--no-curve")
    assert again.exit_code == 0, again.output
    assert loaded(out)["memory"].keys() == {PLAIN, "llma"}
