"""`tinyspec bench clients`: the server, a process of its own, against decoding alone."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fakes import Hand
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments import client_runs as runs
from tinyspec.bench.experiments import clients
from tinyspec.bench.experiments.clients import ALONE, ClientSample
from tinyspec.bench.harness import dump_json
from tinyspec.bench.llamacpp import LlamaCppBatch
from tinyspec.bench.plan import BenchSettings
from tinyspec.bench.plot import draw_chart
from tinyspec.bench.settings import ClientSettings
from tinyspec.errors import TinyspecError
from tinyspec.generation import generate
from tinyspec.lm.model import Model
from tinyspec.models import load

pytestmark = pytest.mark.slow  # it measures in real time

for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed, reason="the server's extra: pip install -e '.[serve]'")

OVER_HTTP = ["1 client", "3 clients"]
QUICK = ("--clients", "2", "--tokens", "4", "--rounds", "1", "--quiet")
Processes = list[subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """The servers that a test starts."""
    found, start = Processes(), subprocess.Popen

    def record(command: Any, *args: Any, **more: Any) -> Any:
        process = start(command, *args, **more)
        if "serve" in command:
            found.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", record)
    return found


@pytest.fixture(scope="module")
def result(zoo: Zoo) -> Any:
    """Of a method with a knob and a draft, two rounds, and a soak of two seconds."""
    given = ClientSettings(
        zoo.big, "speculative_decoding:gamma=2", (1, 3), tokens=9, rounds=2, soak=2.0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYSPEC_API_KEY", "of another server")
        return json.loads(dump_json(clients.measure_clients(given, quiet=True)))


def samples_of(result: Any) -> list[ClientSample]:
    return [ClientSample(*row) for row in result["samples"]]


def test_every_arm_runs_in_every_round(result: Any) -> None:
    arms = [arm for arm in result["figures"] if not arm.startswith("llama.cpp")]
    assert arms == [ALONE, *OVER_HTTP]
    found = [(s.round, s.arm) for s in samples_of(result)]
    assert sorted(found) == sorted((n, arm) for n in (0, 1) for arm in result["figures"])
    assert result["settings"]["drafts"] and result["settings"]["prompt_tokens"] == 96 - 48


def test_every_text_over_http_is_the_text_alone(result: Any) -> None:
    for sample in samples_of(result):
        assert sample.texts == 8 and 8 <= sample.tokens <= 8 * 9
        if sample.arm in (ALONE, *OVER_HTTP):
            assert sample.same == 8
            assert sample.tokens == next(
                s.tokens for s in samples_of(result) if (s.round, s.arm) == (sample.round, ALONE)
            )
    assert "32 of 32 texts over HTTP" in clients.list_client_notes(result)[0]


def test_arms_take_turns_on_the_same_prompts_and_the_first_round_is_not_counted() -> None:
    hand, seen = Hand(), list[tuple[str, list[list[int]]]]()

    def write(arm: str, seconds: float, jobs: Sequence[runs.ClientJob]) -> list[runs.Completion]:
        seen.append((arm, [job.ids for job in jobs]))
        hand.wind(seconds)
        return [
            runs.Completion("other" if arm == "b" and job.ids == [0] else "", 3) for job in jobs
        ]

    arms = {arm: partial(write, arm, n) for n, arm in enumerate((ALONE, "a", "b"), 1)}
    given, prompts = ClientSettings("m", tokens=3, rounds=2), [[0], [1], [2]]
    samples = clients.run_rounds(arms, prompts, 2, given, quiet=True, clock=hand)
    assert [arm for arm, _ in seen] == [ALONE, "a", "b", ALONE, "a", "b", "a", "b", ALONE]
    assert [ids for _, ids in seen[::3]] == [[[1], [2]], [[0], [1]], [[2], [0]]]
    assert all(seen[n][1] == seen[n - n % 3][1] for n in range(9))
    assert samples == [
        ClientSample(round, arm, n, tokens=6, texts=2, same=2 - (arm == "b"))
        for round in (0, 1)
        for n, arm in enumerate(arms, 1)
    ]


def test_figures_follow_from_the_samples(result: Any) -> None:
    figures = clients.summarize_clients(samples_of(result))
    assert json.loads(dump_json(figures)) == result["figures"]


def test_figures_are_medians_of_the_rounds_ratios() -> None:
    """Tokens per second: alone 10, 20, 40; 1 client 5, 30, 20; 8 clients 30, 30, 50."""
    rates = {ALONE: (10, 20, 40), "1 client": (5, 30, 20), "8 clients": (30, 30, 50)}
    samples = [
        ClientSample(round, arm, 2.0, 2 * rate, 8, 8 - round)
        for arm, row in rates.items()
        for round, rate in enumerate(row)
    ]
    figures = clients.summarize_clients(samples)
    assert figures["1 client"] == {
        "tokens_per_second": 20, "against": {ALONE: 0.5, "1 client": 1.0}, "same": 21, "of": 24,
    }  # fmt: skip
    assert figures["8 clients"]["tokens_per_second"] == 30
    assert figures["8 clients"]["against"] == {ALONE: 1.5, "1 client": 2.5}


def test_what_is_slower_and_what_is_left_out_is_named(result: Any) -> None:
    samples = [
        ClientSample(0, arm, seconds, 8, 8, 8)
        for arm, seconds in ((ALONE, 1.0), ("1 client", 2.0), ("llama.cpp, 8 sequences", 0.5))
    ]
    shown = {
        **result, "figures": clients.summarize_clients(samples), "left_out": "why", "soak": None
    }  # fmt: skip
    notes = clients.list_client_notes(shown)
    assert "Slower over HTTP: 1 client 0.50 of alone, 1 client 0.25 of llama.cpp, 8" in notes[1]
    assert notes[2] == "Left out: why."
    (grid,) = clients.tabulate_clients(shown)
    assert grid.rows[1] == ["1 client", "4.0", "2.0x slower", "1.00", "4.0x slower", "8 of 8"]


def test_the_soak_has_no_error_and_no_other_text(result: Any) -> None:
    soak = result["soak"]
    assert (soak["clients"], soak["errors"], soak["unequal"]) == (64, 0, 0)
    assert soak["requests"] >= 64 and soak["seconds"] >= 2
    assert list(soak["memory"]) == ["10", "50", "100"]
    if Path("/proc/self/status").exists():
        assert all(held > 2**20 for held in soak["memory"].values())
    grid, note = clients.tabulate_clients(result)[1], clients.list_client_notes(result)[-1]
    assert dict(zip(grid.header, grid.rows[0], strict=True))["errors"] == "0"
    assert "0 errors, 0 texts unlike the one alone" in note


def test_the_soak_counts_wrong_texts_and_errors(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four jobs, the text of one is said to be another, and one is longer than the context."""
    model = load(zoo.big)

    def decode(job: runs.ClientJob) -> runs.Completion:
        if job is jobs[0]:
            return runs.Completion("another", 1)
        done: Any = generate(model, job.ids[:90], max_new_tokens=job.tokens)
        return runs.Completion(done.text, len(done.tokens))

    jobs = [runs.ClientJob([n] * (97 if n == 3 else 5), 2) for n in range(4)]
    monkeypatch.setattr(runs, "draw_soak_jobs", lambda prompts: jobs)
    with runs.run_server(["--model", zoo.big]) as server:
        soak = runs.soak_server(server, decode, [[1]], 1.0, quiet=True)
    assert 0 < soak["unequal"] < soak["requests"] and 0 < soak["errors"] < soak["requests"]
    assert "answered 400" in soak["first_error"] and "97 tokens" in soak["first_error"]


def test_the_command_writes_a_page_and_its_server_ends(
    zoo: Zoo, tmp_path: Path, started: Processes
) -> None:
    out, page, drawn = (tmp_path / f"clients.{kind}" for kind in ("json", "md", "svg"))
    files = ("--out", str(out), "--markdown", str(page), "--svg", str(drawn))
    done = run("bench", "clients", "--model", zoo.big, *QUICK, "--soak", "0.5", *files)
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert "times as fast" in text and "| 2 clients |" in text and "0 errors" in text
    assert "| alone |" in text and "8 of 8 texts over HTTP" in text
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["left_out"] is None) == (find_spec("llama_cpp") is not None)
    assert (found["left_out"] or "") in text
    assert "2 clients" in draw_chart(clients.chart_clients(found)) and drawn.exists()
    assert [process.returncode for process in started] == [0]


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt, 130), (TinyspecError("it broke"), 2)]
)
def test_the_server_ends_with_a_run_that_does_not(
    error: Any, code: int, zoo: Zoo, started: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(clients, "run_rounds", fail)
    assert run("bench", "clients", "--model", zoo.big, *QUICK).exit_code == code
    assert [process.returncode is None for process in started] == [False]


def test_a_server_that_ends_is_one_line(
    zoo: Zoo, started: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = runs.ask_server

    def kill_and_ask(server: runs.ServerProcess, *args: Any) -> Any:
        server.process.kill()
        server.process.wait()
        return ask(server, *args)

    monkeypatch.setattr(runs, "ask_server", kill_and_ask)
    told = failed(run("bench", "clients", "--model", zoo.big, *QUICK))
    assert "the server gave no reply" in told and len(started) == 1
    with runs.run_server(["--model", zoo.big]) as server:
        server.process.kill()
        server.process.wait()
        with pytest.raises(TinyspecError, match="the server ended with code -9: big is served at"):
            server.check_alive()


def test_clients_take_jobs_from_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, and a job that lasts: the other client does all that remain."""

    def post(connection: Any, job: runs.ClientJob) -> runs.Completion:
        if job.tokens == 0:
            deadline = time.monotonic() + 60
            while len(posted) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
        posted.append(job.tokens)
        return runs.Completion(str(job.tokens), job.tokens)

    posted = list[int]()
    monkeypatch.setattr(runs, "post_job", post)
    nowhere = runs.ServerProcess(None, Path())  # type: ignore[arg-type]
    texts = runs.ask_server(nowhere, 2, [runs.ClientJob([1], n) for n in range(5)])
    assert posted == [1, 2, 3, 4, 0] and [one.tokens for one in texts] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--clients", ""), "name --clients"),
        (("--clients", "0"), "write numbers of clients"),
        (("--method", "lmla"), "did you mean 'llma'"),
        (("--method", "llma:kk=3"), "no knob 'kk'"),
        (("--method", "sot"), "extend one text"),
        (("--tokens", "96"), "do not fit into the context"),
    ],
)
def test_wrong_input_is_one_line(zoo: Zoo, more: tuple[str, ...], says: str) -> None:
    assert says in failed(run("bench", "clients", "--model", zoo.big, *QUICK, *more))


def test_a_missing_extra_is_said_as_serve_says_it(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "raise ModuleNotFoundError('none here', name='starlette')\n"
    (tmp_path / "starlette.py").write_text(why, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(clients.__file__).parents[3]}")
    told = failed(run("bench", "clients", "--model", zoo.big, *QUICK))
    serve = [sys.executable, "-m", "tinyspec", "serve"]
    alone = subprocess.run(serve, capture_output=True, text=True)
    assert told == alone.stderr.strip()
    assert re.search(r"serve needs starlette: pip install 'tinyspec\[serve\]'", told)


def test_llama_cpp_writes_eight_texts_at_once(zoo: Zoo) -> None:
    """In float32 its texts are ours, also of prompts of unequal lengths, and up to an end."""
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: pip install 'tinyspec[peers]'"
    )
    model: Model = load(zoo.big, dtype="float32")
    prompts = [[5 + n, 7, 11, 13][: 1 + n % 4] for n in range(11)]
    alone = [generate(model, ids, max_new_tokens=12).tokens for ids in prompts]  # type: ignore[union-attr]
    batch = LlamaCppBatch(BenchSettings(zoo.big, dtype="float32"), model, 40, 8)
    assert batch.run(prompts, 12, model.config.eos) == alone
    last = alone[0][5]
    cut = batch.run(prompts, 12, (last,))
    for ids, whole in zip(cut, alone, strict=True):
        assert ids == whole[: whole.index(last) + 1 if last in whole else 12]
    long = [[3] * 90, [4] * 80] * 4  # more rows than it reads at once
    expected = [generate(model, ids, max_new_tokens=3).tokens for ids in long]  # type: ignore[union-attr]
    wide = LlamaCppBatch(BenchSettings(zoo.big, dtype="float32"), model, 96, 8)
    assert wide.run(long, 3, ()) == expected
    batch.close()
    wide.close()
