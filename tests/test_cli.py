"""The command line: help without torch, errors in one line with code 2, plain output in a pipe."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.zoo import TEXT, Zoo, failed, run, tiny_zoo
from tinyspec.cli import main
from tinyspec.cli.methods import list_measurements


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def all_commands(group: click.Group = main, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, command in group.commands.items():
        inner = (*path, name)
        found += all_commands(command, inner) if isinstance(command, click.Group) else [inner]
    return found


# ---------------------------------------------------------------------- help


@pytest.mark.parametrize("path", all_commands(), ids=" ".join)
def test_every_help_shows_examples(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output or "Example:" in result.output
    assert "tinyspec" in result.output


def test_help_imports_no_torch() -> None:
    paths = [list(path) for path in all_commands()]
    code = (
        "import sys\nfrom tinyspec.cli import main\n"
        f"for path in {paths!r}:\n"
        "    try: main([*path, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'tokenizers', 'rich.console'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_module_runs_and_knows_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinyspec", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("tinyspec")


# ---------------------------------------------------------------------- generate


def test_generate_prints_what_the_library_generates(zoo: Zoo) -> None:
    import tinyspec

    options = [
        "--model",
        zoo.big,
        "--max-new-tokens",
        "20",
        "--temperature",
        "0.9",
        "--top-k",
        "50",
        "--seed",
        "3",
    ]
    result = run("generate", "the cat", *options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    model = tinyspec.load(zoo.big)
    want: Any = tinyspec.generate(
        model, "the cat", max_new_tokens=20, temperature=0.9, top_k=50, seed=3
    )
    assert report["tokens"] == want.tokens
    assert report["text"] == want.text
    assert len(report["logprobs"]) == 20
    assert report["stats"]["target_calls"] == 20
    assert run("generate", "the cat", *options).stdout == want.text + "\n"
    assert run("generate", "-", *options, stdin="the cat\n").stdout == want.text + "\n"
    assert run("generate", *options, stdin="the cat\n").stdout == want.text + "\n"


@pytest.mark.parametrize(
    "knob", [["--gamma", "2"], ["--gamma=2"], ["--knob", "gamma=2"], ["-k", "gamma=2"]]
)
def test_knobs_are_options(zoo: Zoo, knob: list[str]) -> None:
    call = ["generate", "--model", zoo.big, "-n", "9", "--method", "speculative_decoding"]
    stats = [
        json.loads(run(*call, *extra, "the cat", "--json").stdout)["stats"] for extra in (knob, [])
    ]
    assert stats[0]["drafted"] != stats[1]["drafted"]


def test_a_knob_may_be_all_that_stands_before_a_piped_prompt(zoo: Zoo) -> None:
    """Of an unknown option click's parser would make the prompt."""
    call = ["generate", "--model", zoo.big, "-n", "4", "--method", "speculative_decoding"]
    assert run(*call, "--gamma=2", stdin="the cat").exit_code == 0
    assert run(*call, "--lenience", "1", "the cat").exit_code == 0


def test_help_shows_the_knobs_of_a_method() -> None:
    """Each with its default; of two methods, a knob that both have stands there once."""
    help_text = run("generate", "--method", "speculative_decoding", "--help").stdout
    assert "Knobs of the method:\n  --gamma VALUE" in help_text
    assert "[default: 3, or what the draft model's card advises]" in " ".join(help_text.split())
    assert "Knobs of the method" not in run("generate", "--help").stdout
    both = run("race", "--method", "sequoia", "--method", "speculative_decoding", "--help").stdout
    assert both.count("\n  --gamma VALUE") == 1


def test_a_knob_may_be_written_with_an_underscore(zoo: Zoo) -> None:
    call = ["generate", "--model", zoo.big, "-n", "4", "--method", "calm", "the cat"]
    assert run(*call, "--min_exit", "1").stdout == run(*call, "--min-exit", "1").stdout
    assert "min_exit is 'x'" in failed(run(*call, "--min_exit", "x"))


@pytest.mark.parametrize("given", [["A,B"], ["A", "B"]], ids=str)
def test_several_drafts_stand_in_one_option_or_in_several(zoo: Zoo, given: list[str]) -> None:
    from tinyspec.cli import base

    @click.command()
    @base.draft_option
    def show(draft: list[str]) -> None:
        click.echo(repr(draft))

    words = [word for one in given for word in ("--draft", one)]
    assert CliRunner().invoke(show, words).output == "['A', 'B']\n"
    call = [
        "generate",
        "--model",
        zoo.big,
        "the cat",
        "-n",
        "5",
        "--method",
        "speculative_decoding",
    ]
    assert run(*call, "--draft", f"{zoo.small},{zoo.small}").exit_code == 0


def test_statistics_go_to_standard_error(zoo: Zoo) -> None:
    result = run("generate", "--model", zoo.big, "the cat", "-n", "5", "--stats")
    assert "5 tokens in 5 target calls" in result.stderr
    assert "target calls" not in result.stdout


def test_references_are_for_methods_that_copy(zoo: Zoo, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(TEXT, encoding="utf-8")
    call = ["generate", "--model", zoo.big, "the cat", "-n", "5", "--reference", str(text)]
    assert run(*call, "--method", "llma").exit_code == 0
    assert "copies from no references" in failed(run(*call))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--method", "lmla"], "did you mean 'llma'"),
        (["--method", "speculative_decoding", "--gama", "4"], "--gamma"),
        (["--max-new-token", "4"], "--max-new-tokens"),
        (["--method", "speculative_decoding", "--gamma", "0"], "gamma is 0"),
        (["--method", "speculative_decoding", "--gamma", "2.5"], "whole number"),
        (["--temperature", "-1"], "temperature"),
        (["--device", "cuda:99"], "cuda"),
        (["--dtype", "float31"], "float32"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--method", "speculative_decoding", "--draft", "OTHER"], "vocabulary"),
    ],
)
def test_errors_are_one_line(zoo: Zoo, args: list[str], says: str) -> None:
    args = [zoo.other if arg == "OTHER" else arg for arg in args]
    model = [] if "--model" in args else ["--model", zoo.big]
    assert says in failed(run("generate", "the cat", *model, *args))


def test_empty_and_long_prompts_are_errors(zoo: Zoo) -> None:
    assert "empty" in failed(run("generate", "", "--model", zoo.big))
    assert "context" in failed(run("generate", TEXT, "--model", zoo.big))


def test_usage_errors_exit_with_2_and_suggest() -> None:
    assert run("generate", "a", "b").exit_code == 2
    result = run("genrate")
    assert result.exit_code == 2
    assert "generate" in result.stderr
    assert run("generate", "a", "--seed", "x").exit_code == 2
    assert run("generate", "a", "--knob", "gamma").exit_code == 2


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["generate", "a", "--method", "lmla"]
    assert type(run(*call, "--debug").exception).__name__ == "TinyspecError"
    assert type(run("--debug", *call).exception).__name__ == "TinyspecError"
    monkeypatch.setenv("TINYSPEC_DEBUG", "1")
    assert type(run(*call).exception).__name__ == "TinyspecError"


def test_errors_from_below_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import tinyspec

    class OutOfMemoryError(RuntimeError):
        """As torch names it."""

    for error, says in (
        (OutOfMemoryError("x"), "out of memory"),
        (ValueError("a\nb"), "ValueError: a b"),
    ):

        def load(*_: Any, _error: Exception = error, **__: Any) -> None:
            raise _error

        monkeypatch.setattr(tinyspec, "load", load)
        assert says in failed(run("generate", "a"))


def test_a_full_disk_under_the_output_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyspec import models

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "list_known", fail)
    said = failed(run("models", "list"))
    assert said == "tinyspec: the output cannot be written: No space left on device"


def test_interruption_keeps_the_text_and_exits_130(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyspec.decoding.decode import Decoder

    step = Decoder.step

    def interrupted(self: Decoder, rng: Any) -> Any:
        if self.rounds == 4:
            raise KeyboardInterrupt
        return step(self, rng)

    whole = run("generate", "the cat", "--model", zoo.big).stdout
    monkeypatch.setattr(Decoder, "step", interrupted)
    result = run("generate", "the cat", "--model", zoo.big)
    assert result.exit_code == 130
    assert "ended by interrupted" in result.stderr
    assert result.stdout.rstrip("\n")
    assert whole.startswith(result.stdout.rstrip("\n"))


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tinyspec", "models", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(60)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_while_waiting_is_quiet() -> None:
    code = "import signal, time\nfrom tinyspec import models\n"
    # Whoever started the tests may ignore the signal.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "models.list_known = lambda: (print('in', flush=True), time.sleep(60))\n"
    code += "from tinyspec.cli import main\nmain(['models', 'list'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


# ---------------------------------------------------------------------- the others


@pytest.mark.slow
def test_techniques_stand_in_the_books_order_whatever_was_imported_first() -> None:
    code = "import tinyspec.nonautoregressive.nat, tinyspec.early_exit.ppd; "
    code += "from tinyspec.technique import load_techniques"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*load_techniques())"],
        capture_output=True,
        text=True,
        check=True,
    )
    from tinyspec.technique import load_techniques

    assert done.stdout.split() == list(load_techniques())
    assert (
        done.stdout.split()[:2] == ["auto", "autoregressive"] and done.stdout.split()[-1] == "synst"
    )


def test_the_readme_shows_the_registry() -> None:
    """`tinyspec methods --markdown` made its table."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert run("methods", "--markdown").stdout in readme


def test_methods_lists_the_registry() -> None:
    listed = json.loads(run("methods", "--json").stdout)
    names = {entry["name"] for entry in listed}
    assert {"autoregressive", "speculative_decoding", "llma"} <= names
    assert {"name", "family", "paper", "guarantee", "knobs"} <= set(listed[0])
    needs = {entry["name"]: entry for entry in listed}
    assert (
        needs["auto"]["optional_draft"] and needs["auto"]["copies"] and not needs["auto"]["drafts"]
    )
    assert needs["specinfer"]["several_drafts"] and needs["token_recycling"]["persistent"]
    table = run("methods").output
    assert all(name in table for name in names)
    assert "gamma=3" in table
    described = run("methods", "speculative_decoding").output
    assert "Leviathan" in described
    assert "--gamma 3" in described
    assert "did you mean 'llma'" in failed(run("methods", "lmla"))


def test_a_method_names_the_result_pages_that_have_a_row_of_it(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("| llma | 1.2 |\n| llma:k=2 | 1.1 |\n")
    (tmp_path / "two.md").write_text("| llma:k=2 | 1.1 |\n")
    (tmp_path / "other.md").write_text("llma | \n| llma2 | 1.1 |\n")
    (tmp_path / "README.md").write_text("| llma | all |\n")
    assert list_measurements("llma", tmp_path) == ["one.md", "two.md"]
    assert list_measurements("llma", tmp_path / "nowhere") == []
    (tmp_path / "mpee.md").write_text("| at 30% | 1.2 |\n")
    (tmp_path / "words.md").write_text("| mask-predict, T 2 | 8.0 |\n| teacher, jacobi | 36 |\n")
    for name, page in (("mpee", "mpee"), ("mask_predict", "words"), ("jacobi", "words")):
        assert list_measurements(name, tmp_path) == [f"{page}.md"]
    assert "measured in tutorials/results: serve" in run("methods", "sarathi").output


def test_chat_keeps_a_conversation(zoo: Zoo) -> None:
    call = ["chat", "--model", zoo.big, "--method", "llma", "-n", "6"]
    result = run(
        *call, stdin="the cat\n/stats\n/reset\n/bogus\n" + TEXT + "\nthe dog\n/quit\nnever\n"
    )
    assert result.exit_code == 0, result.output
    assert "6 tokens in" in result.stderr
    assert "a new conversation" in result.stderr
    assert "there is no /bogus" in result.stderr
    assert "/reset forgets it" in result.stderr
    assert "never" not in result.output
    assert run(*call, stdin="the cat\n").exit_code == 0  # the end of the input is a way out


def test_a_message_that_is_no_text_does_not_end_the_conversation(zoo: Zoo) -> None:
    call = ["chat", "--model", zoo.big, "-n", "4"]
    result = CliRunner().invoke(main, call, input=b"the \xff cat\nthe dog\n/stats\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("(this text is no valid Unicode: save it as UTF-8")
    assert "4 tokens in" in result.stderr
    alone = run(*call, stdin="the dog\n")
    assert result.stdout == alone.stdout


def test_chat_needs_a_template(zoo: Zoo) -> None:
    assert "chat template" in failed(run("chat", "--model", zoo.small, stdin="hello\n"))


def test_models_are_listed_and_described(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path))
    assert "smollm2" in {
        entry["name"] for entry in json.loads(run("models", "list", "--json").stdout)
    }
    assert "smollm2" in run("models", "list").output
    assert "models fetch smollm2" in run("models", "card", "smollm2").output
    assert "cannot fetch" in failed(run("models", "fetch", "smollm"))


def test_fetching_a_model_that_is_here_says_where_and_what_next(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinyspec.hub import smollm2

    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "fetch_smollm2", lambda *_: pytest.fail("it was fetched again"))
    shutil.copytree(zoo.big, tmp_path / "models" / "smollm2")
    result = run("models", "fetch", "smollm2")
    assert result.stdout == f"{tmp_path / 'models' / 'smollm2'}\n"
    assert "smollm2 was here already; next: tinyspec generate --model smollm2" in result.stderr
    assert run("models", "fetch", "smollm2", "--quiet").stderr == ""
    bundled = run("models", "fetch", "storyteller")
    assert bundled.stdout.rstrip().endswith("storyteller")
    assert "storyteller was here already; next: tinyspec models card storyteller" in bundled.stderr


def test_training_errors_are_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("name = 'x'\n", encoding="utf-8")
    call = ["train", "lm", "--recipe", str(recipe), "--out", str(tmp_path / "out")]
    assert "[shape]" in failed(run(*call))
    assert "KEY=VALUE" in failed(run(*call, "--set", "lr"))
    assert run("train", "lm", "--recipe", str(tmp_path / "none.toml"), "--out", "x").exit_code == 2


def test_every_technique_says_in_a_few_words_what_it_does() -> None:
    from tinyspec.technique import load_techniques

    for card in load_techniques().values():
        assert 3 <= len(card.summary.split()) <= 7, card.name
