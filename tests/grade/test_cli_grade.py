"""`tinyspec grade` and `tinyspec assignment`: output, exit codes, files, and what they reject."""

import ast
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.grade.tiny import FAST, RIGHT, TINY, submit
from tests.zoo import failed, full_disk, run
from tinyspec.errors import TinyspecError
from tinyspec.grade import assignments, grading, starter
from tinyspec.grade.task import Assignment

WRONG = RIGHT.replace("max(0, x - y)", "abs(x - y)")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the tiny assignment as A0, with short limits."""

    def find(name: str) -> Assignment:
        if name != "A0":
            raise TinyspecError(f"no assignment {name!r}: there are A0")
        return TINY

    monkeypatch.setattr(assignments, "find_assignment", find)
    monkeypatch.setattr(grading, "Limits", lambda **named: FAST._replace(**named))


@pytest.mark.usefixtures("tiny")
def test_full_marks_end_with_0_and_are_no_promise(tmp_path: Path) -> None:
    result = run("grade", "A0", str(submit(tmp_path, RIGHT)))
    assert result.exit_code == 0, result.output
    assert "A0 Tiny: 100 of 100 points" in result.output
    assert "This run used the public cases (seed 0)." in result.output
    assert "other cases, and draws ten times as many" in result.output
    assert "all passed" not in result.output.lower()
    assert "\x1b" not in result.output


@pytest.mark.usefixtures("tiny")
def test_less_ends_with_1_and_shows_the_counterexample(tmp_path: Path) -> None:
    saved, scope = tmp_path / "report.json", tmp_path / "results.json"
    options = ("--json", str(saved), "--gradescope", str(scope), "--final", "--seed", "5")
    result = run("grade", "A0", str(submit(tmp_path, WRONG)), *options)
    assert result.exit_code == 1
    for line in (
        "A0 Tiny: 40 of 100 points",
        "  yours     [1/2, 1/2]",
        "  expected  [0, 1]",
        "  p         [0, 1]",
    ):
        assert line in result.output.splitlines()
    assert "Final run: seed 5, 10 times as many cases drawn" in result.output
    assert "run submissions that you do not trust in a container" in result.output
    told = json.loads(saved.read_text())
    assert (told["score"], told["max_score"], told["run"], told["seed"], told["times"]) == (
        40,
        100,
        "final",
        5,
        10,
    )
    for task in told["tasks"]:
        assert {"name", "score", "max_score", "law", "counterexample"} <= set(task)
    assert [task["counterexample"] is None for task in told["tasks"]] == [True, False]
    tests = json.loads(scope.read_text())["tests"]
    assert [(test["name"], test["score"], test["max_score"], test["status"]) for test in tests] == [
        ("A0.1 Accept (accept)", 40, 40, "passed"),
        ("A0.2 The residual (residual)", 0, 60, "failed"),
    ]
    assert "yours     [1/2, 1/2]" in tests[1]["output"]


@pytest.mark.usefixtures("tiny")
def test_a_final_run_draws_a_seed_and_prints_how_to_repeat_it(tmp_path: Path) -> None:
    folder = str(submit(tmp_path, WRONG))
    first = run("grade", "A0", folder, "--final")
    (seed,) = re.findall(r"--final --seed (\d+)\.", " ".join(first.output.split()))
    assert run("grade", "A0", folder, "--final", "--seed", seed).output == first.output


@pytest.mark.usefixtures("tiny")
def test_json_on_standard_output_and_one_task(tmp_path: Path) -> None:
    result = run(
        "grade",
        "A0",
        str(submit(tmp_path, WRONG)),
        "--json",
        "-",
        "--task",
        "residual",
        "--seconds",
        "9",
    )
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert [task["name"] for task in told["tasks"]] == ["residual"]
    assert told["max_score"] == 60


@pytest.mark.usefixtures("tiny")
def test_a_folder_without_a_submission_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    said = failed(run("grade", "A0", str(tmp_path / "begun")))
    assert "begun holds no submission.py: name the folder of yours" in said
    assert said.endswith(f"tinyspec assignment new A0 {tmp_path / 'begun'}")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("option", ["--json", "--gradescope"])
def test_a_report_that_is_asked_for_is_written_without_a_submission_too(
    tmp_path: Path, option: str
) -> None:
    (tmp_path / "begun").mkdir()
    report = tmp_path / "report.json"
    result = run("grade", "A0", str(tmp_path / "begun"), option, str(report))
    assert result.exit_code == 1
    assert "A0 Tiny: 0 of 100 points" in result.output
    assert "begun holds no submission.py" in report.read_text()


@pytest.mark.usefixtures("tiny")
def test_what_is_misspelt_is_an_error(tmp_path: Path) -> None:
    assert "A0 has no task 'nothing': accept, residual" in failed(
        run("grade", "A0", str(tmp_path), "--task", "nothing")
    )
    assert "no assignment 'A7'" in failed(run("grade", "A7", str(tmp_path)))
    submit(tmp_path, RIGHT)
    assert "tinyspec assignment new A0" in failed(run("grade", "A0", str(tmp_path / "nowhere")))
    assert "there is no folder /nowhere" in failed(
        run("grade", "A0", str(tmp_path), "--json", "/nowhere/report.json")
    )


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "0"])
def test_a_time_limit_is_from_a_second_to_a_day(tmp_path: Path, seconds: str) -> None:
    folder = str(submit(tmp_path, RIGHT))
    assert "give 1 to 86400" in failed(run("grade", "A0", folder, "--seconds", seconds))


@pytest.mark.usefixtures("tiny")
def test_gradescope_on_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gradescope -` prints results.json and nothing else, and writes no file called "-"."""
    monkeypatch.chdir(tmp_path)
    folder = str(submit(tmp_path / "mine", WRONG))
    result = run("grade", "A0", folder, "--gradescope", "-")
    assert result.exit_code == 1
    tests = json.loads(result.stdout)["tests"]
    assert [test["score"] for test in tests] == [40, 0]
    assert os.listdir(tmp_path) == ["mine"]
    both = failed(run("grade", "A0", folder, "--gradescope", "-", "--json", "-"))
    assert both == "tinyspec: --json - and --gradescope - both want standard output: name a file"


@pytest.mark.usefixtures("tiny")
def test_a_heading_stands_once_in_gradescope_s_output(tmp_path: Path) -> None:
    """Whether a law is broken, the function raises, or its file cannot be imported."""
    for source in (WRONG, f"{RIGHT}\ndef residual(p, q):\n    return 1 / 0\n", "import nothing"):
        result = run("grade", "A0", str(submit(tmp_path, source)), "--gradescope", "-")
        for test in json.loads(result.stdout)["tests"]:
            lines = test["output"].splitlines()
            assert lines and len(set(lines)) == len(lines)


@pytest.mark.usefixtures("tiny")
def test_the_message_about_a_folder_of_submissions_says_to_grade_one_by_one(tmp_path: Path) -> None:
    for name in ("anna", "ben"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "submission.py").write_text("")
    hint = "but anna, ben in it do: grade one of these at a time"
    assert hint in failed(run("grade", "A0", str(tmp_path)))


@pytest.mark.usefixtures("tiny")
def test_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    """`my-a1/submission.py` is accepted as `my-a1`. For `my-a1/a1.py` the message says how to
    rename it.
    """
    submit(tmp_path, RIGHT)
    assert run("grade", "A0", str(tmp_path / "submission.py")).exit_code == 0
    (tmp_path / "submission.py").rename(tmp_path / "a1.py")
    hint = f"rename it to submission.py: tinyspec grade A0 {tmp_path}"
    assert hint in failed(run("grade", "A0", str(tmp_path / "a1.py")))
    said = failed(run("grade", "A0", str(tmp_path)))
    assert "holds no submission.py, but a1.py: rename a1.py to" in said
    (tmp_path / "b.py").write_text("")
    words = "but a1.py, b.py: rename the one that holds your functions to submission.py"
    assert words in failed(run("grade", "A0", str(tmp_path)))
    for name in ("c.py", "d.py"):
        (tmp_path / name).write_text("")
    assert "but a1.py, b.py, c.py and 1 more: rename" in failed(run("grade", "A0", str(tmp_path)))


def test_help_says_what_it_is_not() -> None:
    for words in ("no security boundary", "container", "Exit status", "--final", "--gradescope"):
        assert words in " ".join(run("grade", "--help").output.split())


def test_the_list_shows_every_assignment_and_its_points() -> None:
    told = json.loads(run("assignment", "list", "--json").stdout)
    assert [one["name"] for one in told] == ["A1", "A2", "A3", "A4"]
    assert all(sum(task["max_score"] for task in one["tasks"]) == 100 for one in told)
    assert "A1 Speculative sampling: 100 points" in run("assignment", "list").output


def test_a_new_folder_has_all_that_is_needed(tmp_path: Path) -> None:
    result = run("assignment", "new", "a1", str(tmp_path / "mine"))
    assert result.exit_code == 0, result.output
    assert f"tinyspec grade A1 {tmp_path / 'mine'}" in result.output
    assert {"submission.py", "handout.md", "README.md"} <= set(os.listdir(tmp_path / "mine"))
    assert "tinyspec grade A1 ." in (tmp_path / "mine" / "README.md").read_text()
    assert "is there already" in failed(run("assignment", "new", "A1", str(tmp_path / "mine")))
    (tmp_path / "file").write_text("")
    assert "file" in failed(run("assignment", "new", "A1", str(tmp_path / "file")))


def test_the_files_are_found_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tinyspec"
    (package / "_assignments" / "A1").mkdir(parents=True)
    (package / "_assignments" / "A1" / "reference.py").write_text("")
    monkeypatch.setattr(starter, "__file__", str(package / "grade" / "starter.py"))
    assert starter.assignment_folder("A1") == package / "_assignments" / "A1"
    with pytest.raises(TinyspecError, match="the files of A2 are missing"):
        starter.assignment_folder("A2")


def test_a_bundle_draws_its_seed_prints_it_and_can_be_written_again(tmp_path: Path) -> None:
    texts, seeds = [], []
    for name in ("first.zip", "second.zip"):
        result = run("assignment", "bundle", "A3", str(tmp_path / name))
        seeds.append(re.findall(r"The final run has seed (\d+)\.", result.output)[0])
        with ZipFile(tmp_path / name) as bundle:
            texts.append({inner: bundle.read(inner).decode() for inner in bundle.namelist()})
    assert seeds[0] != seeds[1]
    assert [name for name in texts[0] if texts[0][name] != texts[1][name]] == ["run_autograder"]
    assert f"--final --seed {seeds[0]} " in texts[0]["run_autograder"]
    run("assignment", "bundle", "A3", str(tmp_path / "again.zip"), "--seed", seeds[0])
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "first.zip").read_bytes()


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, saved = str(submit(tmp_path / "mine", RIGHT)), tmp_path / "report.json"
    saved.write_text("mine")
    judged = grading.grade_folder(TINY, Path(folder), limits=FAST)
    monkeypatch.setattr(grading, "grade_folder", lambda *_: judged)
    with full_disk():
        assert "report.json: File too large" in failed(
            run("grade", "A0", folder, "--json", str(saved))
        )
    assert saved.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "report.json"}


def test_a_full_disk_leaves_the_old_bundle_and_no_half_of_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "a1.zip").write_text("mine")
    (tmp_path / "begun").mkdir()
    with full_disk():
        assert "a1.zip: File too large" in failed(
            run("assignment", "bundle", "A1", str(tmp_path / "a1.zip"))
        )
        for name in ("begun", "new"):
            said = failed(run("assignment", "new", "A1", str(tmp_path / name)))
            assert "submission.py: File too large" in said
    assert (tmp_path / "a1.zip").read_text() == "mine"
    assert {path.name for path in tmp_path.rglob("*")} == {"a1.zip", "begun"}


def unfinished() -> str:
    """A1 with `verify` alone."""
    source = starter.make_starter(assignments.find_assignment("A1"))
    body = starter.read_reference(assignments.find_assignment("A1"))
    written = next(
        node
        for node in ast.parse(body).body
        if isinstance(node, ast.FunctionDef) and node.name == "verify"
    )
    return f"{source}\n\n{ast.unparse(written)}\n"


@pytest.mark.slow
def test_a_bundle_grades_by_itself(tmp_path: Path) -> None:
    """Unpacked elsewhere it grades, by the scripts that Gradescope runs. A broken one reports
    that.
    """
    out = tmp_path / "a1.zip"
    result = run("assignment", "bundle", "A1", str(out), "--seed", "1848")
    assert result.exit_code == 0, result.output
    first = out.read_bytes()
    run("assignment", "bundle", "A1", str(out), "--seed", "1848")
    assert out.read_bytes() == first
    with ZipFile(out) as bundle:
        bundle.extractall(tmp_path / "autograder" / "source")
        files = {name: bundle.read(name).decode() for name in bundle.namelist()}
        assert not any("museum" in name for name in files)  # the mistakes and their answers
        assert [name for name in files if "assignments/" in name] == [
            "tinyspec/_assignments/A1/reference.py"
        ]
        assert "def generate(" not in files["tinyspec/_assignments/A1/reference.py"]
        modes = {
            name: bundle.getinfo(name).external_attr >> 16
            for name in ("setup.sh", "run_autograder")
        }
        assert all(mode & stat.S_IXUSR for mode in modes.values())
        assert b"torch" in bundle.read("requirements.txt")
        assert b"tinyspec" not in bundle.read("requirements.txt")
    root = tmp_path / "autograder"
    starter.write_folder(assignments.find_assignment("A1"), root / "submission")
    results = root / "results" / "results.json"
    script = ["bash", str(root / "source" / "run_autograder")]
    env = {"AUTOGRADER": str(root), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    for file in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", str(root / "source" / file)], check=True)
    ran = subprocess.run(
        script, env={**env, "PYTHON": sys.executable}, capture_output=True, text=True, cwd=tmp_path
    )
    told = json.loads(results.read_text())
    assert told["score"] == 0, ran.stderr
    assert told["output"].startswith("Final run, 10 times as many cases")
    assert told["extra_data"] == {"seed": 1848, "times": 10}
    assert {test["max_score"] for test in told["tests"]} == {20, 10, 15, 25, 30}
    assert all("is not written yet" in test["output"] for test in told["tests"])
    (root / "submission" / "submission.py").write_text(unfinished(), encoding="utf-8")
    subprocess.run(
        script, env={**env, "PYTHON": sys.executable}, check=True, cwd=tmp_path, capture_output=True
    )
    assert (
        json.loads(results.read_text())["score"] == 25
    )  # `verify` alone, judged with helpers out of the bundle
    # the score of the submission before is not kept
    subprocess.run(script, env={**env, "PYTHON": "false"}, check=True, cwd=tmp_path)
    assert json.loads(results.read_text())["score"] == 0
