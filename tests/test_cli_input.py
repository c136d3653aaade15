"""Bad input to the command line: one line on standard error, exit code 2, before any work."""

import os
import shlex
from pathlib import Path

import pytest

from tests.test_cli import all_commands
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.cli.base import check_output


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with a text file, an empty file and an empty folder in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    for name, line in BATCHES.items():
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "x"}}\n{line}\n', encoding="utf-8")
    return tmp_path


BATCHES = {"number": '{"prompt": 3}', "list": '["x"]', "bare": "x", "other": '{"text": "x"}'}
"""The second line of a file of prompts, by the file's name."""

MISTAKES = [
    # commands
    ("genrate x", "there is no command 'genrate': did you mean 'generate'?"),
    ("generat", "did you mean 'generate'?"),
    ("bench rase", "there is no command 'rase': did you mean 'race'?"),
    ("models lst", "did you mean 'list'?"),
    ("hello", "there is no command 'hello': known: assignment, bench"),
    # options
    ("generate a b", "Got unexpected extra argument (b)"),
    ("generate x --max-new-token 4", "did you mean --max-new-tokens?"),
    ("generate x --temprature 1", "did you mean --temperature?"),
    ("generate x --seed y", "Invalid value for '--seed': 'y' is not a valid integer"),
    ("generate x --json=1", "does not take a value"),
    ("generate x --knob gamma", "'gamma' is not NAME=VALUE"),
    ("models fetch", "Missing argument 'NAME'"),
    ("train lm", "Missing option '--out'"),
    # methods and their knobs
    ("generate x --method lmla", "there is no method 'lmla': did you mean 'llma'?"),
    ("race --method autoregressive", "would race against itself"),
    ("generate x --method speculative_decoding --gama 4", "did you mean --gamma?"),
    ("generate x --gamma 4", "no knob of autoregressive"),
    ("generate x --method speculative_decoding --gamma 0", "gamma is 0"),
    ("generate x --method speculative_decoding --gamma 2.5",
     "gamma is 2.5: it must be a whole number"),
    ("generate x --method speculative_decoding --gamma many", "gamma is 'many'"),
    ("generate x --reference text.txt", "copies from no references"),
    # models
    ("generate x --model storyteler", "unknown model 'storyteler': did you mean 'storyteller'?"),
    ("generate x --model ./nowhere", "no such folder or .gguf file"),
    ("generate x --model folder", "config.json: missing"),
    ("models fetch storytelr", "cannot fetch 'storytelr'"),
    ("generate x --dtype float31", "dtype 'float31': did you mean 'float32'?"),
    ("generate x --device gpu", "unknown device 'gpu': expected cpu, cuda, or cuda:0"),
    # numbers
    ("generate x -n -3", "max_new_tokens is -3: it must be 0 or more"),
    ("generate x --temperature -1", "temperature must be finite and at least 0"),
    ("generate x --top-p 2", "top_p must be above 0 and at most 1"),
    ("race --repeat 0", "0 is not in the range x>=1"),
    # prompts and files
    ("generate ''", "the prompt is empty"),
    ("generate x --reference missing.txt", "File 'missing.txt' does not exist"),
    ("generate x --method llma --reference bytes.txt", "bytes.txt: not UTF-8 text"),
    ("replay missing.json", "missing.json: No such file or directory"),
    ("replay empty.txt", "empty.txt is no JSON"),
    ("generate --prompts missing.txt", "File 'missing.txt' does not exist"),
    ("generate --prompts empty.txt", "empty.txt: no prompts; write one a line"),
    ("generate --prompts text.txt x", "give PROMPT or --prompts FILE, not both"),
    ("generate --prompts text.txt --replay x.html", "give --replay or --prompts FILE, not both"),
    ("generate --prompts number.jsonl",
     """number.jsonl line 2: its "prompt" is no text but of type int"""),
    ("generate --prompts list.jsonl", """list.jsonl line 2: no "prompt" in it"""),
    ("generate --prompts bare.jsonl", "bare.jsonl line 2: no JSON (Expecting value"),
    ("generate --prompts other.jsonl", """other.jsonl line 2: no "prompt" in it"""),
    # found before the work, where they used to be found after it
    ("generate x --replay missing/x.html",
     "cannot write missing/x.html: there is no folder missing"),
    ("translate x --replay missing/x.html", "cannot write missing/x.html"),
    ("race --svg missing/x.svg", "cannot write missing/x.svg"),
    ("bench --markdown missing/x.md", "cannot write missing/x.md"),
    ("bench race --out text.txt/x.json", "cannot write text.txt/x.json: text.txt is a file"),
    ("bench race --out folder", "File 'folder' is a directory"),
    ("grade A1 folder --json missing/x.json", "cannot write missing/x.json"),
    ("grade A1 missing", "there is no folder 'missing': begin one with: tinyspec assignment new"),
    ("grade A1 text.txt", "text.txt is a file, no folder"),
    ("grade A1 folder", "folder holds no submission.py: name the folder of yours, or begin one"),
    ("grade A1 folder --task 7",
     "A1 has no task '7': warp, acceptance, residual, verify, generate"),
    ("grade A1 folder --json - --gradescope -", "both want standard output"),
    ("grade A9 folder", "no assignment 'A9'"),
    ("assignment bundle A1 missing/a1.zip", "cannot write missing/a1.zip"),
    ("train lm --out text.txt/model", "cannot write text.txt/model: text.txt is a file"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_an_error_of_one_line(zoo: Zoo, here: Path, words: str, says: str) -> None:
    args = shlex.split(words)
    if args[0] in ("generate", "race") and "--model" not in args:
        args += ["--model", zoo.big]
    assert says in failed(run(*args))


def test_chat_checks_its_options_before_the_first_message(zoo: Zoo) -> None:
    done = run("chat", "--model", zoo.big, "--top-k", "0", stdin="/stats\nhello\n")
    assert "top_k must be a whole number of at least 1" in failed(done)


def test_a_path_is_checked_before_a_model_is_loaded(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tinyspec

    monkeypatch.setattr(tinyspec, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    failed(run("generate", "x", "--replay", "missing/x.html"))
    failed(run("race", "--svg", "missing/x.svg"))


def test_a_place_without_permission_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    message = failed(run("generate", "x", "--replay", "folder/x.html"))
    assert "cannot write folder/x.html: no permission in folder" in message


def test_checking_a_path_makes_and_changes_nothing(here: Path) -> None:
    check_output(here / "new.txt")
    check_output(here / "text.txt")
    check_output(here / "deep" / "er" / "new.txt", parents=True)
    assert not (here / "new.txt").exists()
    assert not (here / "deep").exists()
    assert (here / "text.txt").read_text() == "the cat sat\n"


@pytest.mark.parametrize("path", [path for path in all_commands() if path], ids=" ".join)
def test_a_mistyped_command_suggests_the_nearest(path: tuple[str, ...]) -> None:
    *groups, name = path
    assert f"did you mean '{name}'?" in failed(run(*groups, name + "x"))


def test_a_group_alone_shows_its_help() -> None:
    assert "Examples:" in run().output
    assert "Examples:" in run("models").output
