"""A replay: one self-contained page whose pictures are those of the trace, in a real browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import tinyspec
from tinyspec import replay
from tinyspec.cli import main
from tinyspec.decoding.trace import Trace
from tinyspec.errors import TinyspecError
from tinyspec.generation import start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page was not looked at")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
QUIET += ["--disable-background-networking", "--disable-component-update"]


def recorded(method: str, tokens: int = 24, **options: object) -> replay.Record:
    """A detailed record of the storyteller."""
    model = tinyspec.load("storyteller")
    running = start(model, "Once upon a time", method=method, max_new_tokens=tokens, **options)
    running.trace.detailed = True
    for _ in running:
        pass
    return replay.record(model, method, running.result())


@pytest.fixture(scope="module")
def tree() -> replay.Record:
    """Trees of guesses, drawn at temperature 0.8."""
    knobs = {"accepts": "0.6,0.2,0.1", "costs": "0.1,1,1.02,1.03,1.04,1.05,1.06,1.07,1.08"}
    return recorded("sequoia", temperature=0.8, **knobs)


def seen(record: replay.Record, folder: Path, at: int | str = "", script: str = "") -> str:
    """The page as a browser has built it, at a step; `script` runs behind the page's own."""
    page = folder / "page.html"
    page.write_text(replay.page(record).replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{page}#{at}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "data-error" not in dom, re.findall('data-error="[^"]*"', dom)
    return re.sub(r"<script.*?</script>", "", dom, flags=re.S)


def text_of(dom: str) -> str:
    """What stands in the text panel."""
    panel = re.search(r'<div id="text">(.*?)</div>', dom, re.S)
    assert panel
    return html.unescape(re.sub(r"<del.*?</del>|<[^>]*>", "", panel[1]))


# ---------------------------------------------------------------------- the record


def test_the_pieces_joined_are_the_text(tree: replay.Record) -> None:
    model = tinyspec.load("storyteller")
    tokens = [token for round in tree["rounds"] for token in round["emitted"]]
    assert "".join(piece for round in tree["rounds"] for piece in round["pieces"]) == model.tokenizer.decode(tokens)


def test_every_guess_has_its_probabilities(tree: replay.Record) -> None:
    guesses = 0
    for round in tree["rounds"]:
        assert len(round["tokens"]) == len(round["p"]) == len(round["q"]) == len(round["node_pieces"])
        assert all(0 <= p <= 1 for p in round["p"]) and all(q is None or 0 < q <= 1 for q in round["q"])
        assert len(round["ran"]) == len(round["said"]) == len(round["emitted"])
        guesses += len(round["tokens"])
    assert guesses > 20


@pytest.mark.parametrize("detailed", [True, False])
def test_a_round_without_guesses_has_no_probabilities_of_guesses(detailed: bool) -> None:
    model = tinyspec.load("storyteller")
    running = start(model, "The sea", method="autoregressive", max_new_tokens=2)
    running.trace.detailed = detailed
    for _ in running:
        pass
    for round in replay.record(model, "autoregressive", running.result())["rounds"]:
        assert round["p"] == round["q"] == round["tokens"] == [] and len(round["said"]) == 1


def test_what_was_said_is_what_logprobs_say() -> None:
    model = tinyspec.load("storyteller")
    running = start(model, "The sea", method="speculative_decoding", max_new_tokens=12, seed=3, temperature=0.9)
    running.trace.detailed = True
    for _ in running:
        pass
    said = [p for round in running.trace.rounds for p in round.said]
    assert said == pytest.approx([2.718281828459045**x for x in running.logprobs], rel=1e-4)


def test_a_trace_survives_json_with_its_probabilities() -> None:
    running = start(tinyspec.load("storyteller"), "The sea", method="speculative_decoding", max_new_tokens=6)
    running.trace.detailed = True
    for _ in running:
        pass
    assert Trace.from_json(running.trace.to_json()) == running.trace


def test_without_being_asked_no_probability_is_computed() -> None:
    out = tinyspec.generate(tinyspec.load("storyteller"), "The sea", method="speculative_decoding", max_new_tokens=6)
    assert all(round.p == [] and round.said == [] and round.ran for round in out.trace.rounds)


def test_a_page_fetches_nothing(tree: replay.Record) -> None:
    page = replay.page(tree)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched


def test_text_that_ends_a_script_element_is_harmless(tree: replay.Record) -> None:
    hostile = tree | {"prompt": "</script><script>alert(1)</script><!--"}
    page = replay.page(hostile)
    assert page.count("</script>") == replay.page(tree).count("</script>") and "<script>alert" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data and json.loads(data[1]) == hostile


def test_a_saved_record_is_read_back(tree: replay.Record, tmp_path: Path) -> None:
    replay.save(tree, tmp_path / "trace.json")
    assert replay.read(tmp_path / "trace.json") == tree


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"kind": "text"}', "\u0000"])
def test_what_is_no_trace_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TinyspecError, match=r"save one with tinyspec generate --replay FILE\.json"):
        replay.read(tmp_path / "t.json")


def test_a_place_that_cannot_be_written_is_named(tree: replay.Record, tmp_path: Path) -> None:
    with pytest.raises(TinyspecError, match="cannot write"):
        replay.save(tree, tmp_path / "no" / "page.html")


def test_generate_writes_a_page_and_a_trace_and_a_trace_becomes_a_page(tmp_path: Path) -> None:
    runner, trace, page = CliRunner(), tmp_path / "t.json", tmp_path / "p.html"
    given = ["generate", "Once upon a time", "--method", "speculative_decoding", "-n", "8", "--replay", str(trace)]
    assert runner.invoke(main, given).exit_code == 0
    assert runner.invoke(main, ["replay", str(trace), "--out", str(page)]).exit_code == 0
    assert "speculative_decoding" in page.read_text(encoding="utf-8")


# ---------------------------------------------------------------------- in a browser


@browser
def test_the_last_step_shows_the_whole_text(tree: replay.Record, tmp_path: Path) -> None:
    whole = tree["prompt"] + "".join(piece for round in tree["rounds"] for piece in round["pieces"])
    assert text_of(seen(tree, tmp_path)).rstrip("\n") == whole.rstrip("\n")


@browser
def test_a_step_in_the_middle_shows_the_text_until_then_and_its_tree(tree: replay.Record, tmp_path: Path) -> None:
    at = next(i for i, round in enumerate(tree["rounds"], 1) if len(round["tokens"]) > 2 and round["refused"])
    dom, round = seen(tree, tmp_path, at), tree["rounds"][at - 1]
    until = tree["prompt"] + "".join(piece for entry in tree["rounds"][:at] for piece in entry["pieces"])
    assert text_of(dom) == until
    assert dom.count('class="n-accepted" tabindex') == len(round["path"])
    assert dom.count('class="n-refused" tabindex') == len(round["refused"])
    assert dom.count("the draft's q") + dom.count("judged as a point mass") >= len(round["tokens"])
    assert dom.count("<del") >= 1 + len(round["refused"])  # ghosts, and the legend's


@browser
@pytest.mark.parametrize(
    ("key", "step"), [("Home", 0), ("End", 3), ("ArrowLeft", 1), ("ArrowRight", 3)], ids=lambda x: str(x)
)
def test_the_keyboard_moves(key: str, step: int, tmp_path: Path) -> None:
    record = recorded("autoregressive", tokens=3)
    dom = seen(record, tmp_path, 2, f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
    assert f"round {step} of 3" in dom


@browser
def test_space_plays_to_the_end(tmp_path: Path) -> None:
    record = recorded("autoregressive", tokens=2)
    script = "document.dispatchEvent(new KeyboardEvent('keydown', {key: ' '}))"
    assert '<button id="play" aria-keyshortcuts="Space">Pause</button>' in seen(record, tmp_path, 1, script)


@browser
def test_layers_are_a_picture_only_where_tokens_leave_early(tmp_path: Path) -> None:
    early = seen(recorded("calm", threshold=0.3), tmp_path)
    assert "Layers run for each token, of 12" in early and "of 12 layers" in early
    assert "Layers run" not in seen(recorded("autoregressive", tokens=3), tmp_path)


@browser
def test_chains_are_shown_by_position(tmp_path: Path) -> None:
    record = recorded("jacobi")
    dom = seen(record, tmp_path)
    assert "Guesses by position" in dom
    assert dom.count('class="next"') == len(record["rounds"][-12:])  # each round's own token


@browser
def test_a_canvas_is_shown_pass_by_pass(tmp_path: Path) -> None:
    passes = [
        {"pieces": ["ein", " hund", " hund"], "fresh": [True, True, True], "sure": [0.9, 0.5, 0.4]},
        {"pieces": ["ein", " hund", " rennt"], "fresh": [False, False, True], "sure": [0.9, 0.5, 0.8]},
    ]
    record = {
        "kind": "canvas",
        "model": "m",
        "method": "mask_predict",
        "summary": "",
        "n_layers": 3,
        "prompt": "a dog runs",
    }
    dom = seen(record | {"passes": passes}, tmp_path)
    assert dom.count('class="fresh"') == 4 and dom.count("% sure") == 6
    assert text_of(dom) == "a dog runs\nein hund rennt"
