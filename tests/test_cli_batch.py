"""`tinyspec generate --prompts FILE`, and the message about a text that fills the context."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import TEXT, Zoo, failed, run, tiny_zoo
from tinyspec.cli import generate as command

PROMPTS = ["the cat", "the dog sat on", "the house", "and then the cat", "the log"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a text file of five prompts, with blank lines between them."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\r\n\n", encoding="utf-8")
    return file


def rows(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


@pytest.mark.parametrize("method", ["autoregressive", "speculative_decoding", "llma"])
def test_a_line_gets_the_text_that_it_gets_alone(
    zoo: Zoo, prompts: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(command, "ROWS", 2)
    call = ["generate", "--model", zoo.big, "--method", method, "-n", "9", "-t", "0.9", "--json"]
    result = run(*call, "--prompts", str(prompts), "--seed", "4")
    assert result.exit_code == 0, result.output
    found = rows(result.stdout)
    assert [row["line"] for row in found] == [1, 3, 5, 7, 9]
    for number, (prompt, row) in enumerate(zip(PROMPTS, found, strict=True)):
        alone = json.loads(run(*call, prompt, "--seed", str(4 + number)).stdout)
        assert row["prompt"] == prompt
        assert [row[name] for name in ("text", "tokens", "logprobs", "finish_reason")] == [
            alone[name] for name in ("text", "tokens", "logprobs", "finish_reason")
        ]


def test_ctrl_c_keeps_the_finished_batches_as_the_help_says(
    zoo: Zoo, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyspec import generation

    own, calls = generation.generate, [0]

    def interrupt(*given: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return own(*given, **options)

    monkeypatch.setattr(command, "ROWS", 2)
    monkeypatch.setattr(generation, "generate", interrupt)
    result = run("generate", "--model", zoo.big, "-n", "3", "--json", "--prompts", str(prompts))
    assert result.exit_code == 130
    assert [row["line"] for row in rows(result.stdout)] == [1, 3]
    told = " ".join(run("generate", "--help").output.split())
    assert "of --prompts the finished batches, and exits with 130" in told


def test_a_file_of_json_lines_is_the_same_batch(zoo: Zoo, prompts: Path, tmp_path: Path) -> None:
    other = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "id": number}) for number, prompt in enumerate(PROMPTS)]
    other.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    call = ["generate", "--model", zoo.big, "-n", "5", "--json", "--prompts"]
    texts = [
        [row["text"] for row in rows(run(*call, str(file)).stdout)] for file in (prompts, other)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == len(PROMPTS)


def test_without_json_each_text_has_a_header(zoo: Zoo, prompts: Path) -> None:
    result = run("generate", "--model", zoo.big, "-n", "5", "--prompts", str(prompts), "--stats")
    alone = run("generate", "--model", zoo.big, "-n", "5", PROMPTS[1]).stdout.rstrip("\n")
    assert f"== line 3: {PROMPTS[1]}\n{alone}\n" in result.stdout
    assert result.stderr.splitlines()[1].startswith("line 3: 5 tokens in 5 target calls")


def test_a_prompt_that_fails_loses_no_other(zoo: Zoo, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    wanted = ["the cat", "", TEXT, "the dog"]
    lines = [json.dumps({"prompt": prompt}) for prompt in wanted]
    file.write_text("\n".join(lines), encoding="utf-8")
    result = run("generate", "--model", zoo.big, "-n", "5", "--json", "--prompts", str(file))
    assert result.exit_code == 2
    found = rows(result.stdout)
    assert [row["line"] for row in found] == [1, 2, 3, 4]
    assert ["error" in row for row in found] == [False, True, True, False]
    errors = result.stderr.splitlines()
    assert errors[0].startswith(f"tinyspec: {file} line 2: the prompt is empty")
    assert errors[1].startswith(f"tinyspec: {file} line 3: the prompt has")


def test_the_only_prompt_that_fails_is_named_by_its_line(zoo: Zoo, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"\n{TEXT}\n", encoding="utf-8")
    result = run("generate", "--model", zoo.big, "-n", "5", "--prompts", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tinyspec: {file} line 2: the prompt has")


def test_what_is_wrong_with_all_prompts_is_reported_once(zoo: Zoo, prompts: Path) -> None:
    call = ["generate", "--model", zoo.big, "--prompts", str(prompts), "--temperature", "-1"]
    assert "temperature must be finite" in failed(run(*call))


@pytest.mark.parametrize("way", ["alone", "batch"])
def test_a_text_that_fills_the_context_says_how_much_fits(
    zoo: Zoo, tmp_path: Path, way: str
) -> None:
    file = tmp_path / "one.txt"
    file.write_text("the cat", encoding="utf-8")
    prompt = ["the cat"] if way == "alone" else ["--prompts", str(file)]
    call = ["generate", *prompt, "--model", zoo.big, "--json", "-n"]
    result = run(*call, "500")
    assert result.exit_code == 0
    made = len(json.loads(result.stdout)["tokens"])
    [note] = result.stderr.splitlines()
    assert f"the text ends after {made} of 500 tokens: the context of big holds 96" in note
    assert run(*call, str(made)).stderr == ""
    assert len(json.loads(run(*call, str(made)).stdout)["tokens"]) == made
