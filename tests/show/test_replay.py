"""A replay: one self-contained page whose pictures are those of the trace, in a real browser.

`SHOWN` holds the commands whose pictures the README shows. Each is run here, and its picture is
held to be one.
"""

import functools
import html
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

import tinyspec
from tests.zoo import full_disk
from tinyspec.cli import main
from tinyspec.decoding.trace import Trace
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.show import replay

CALM = (
    'tinyspec generate "The old sailor said" --model exits-loss --method calm --measure '
    "classifier --threshold 0.7 "
    "--repetition-penalty 1.2 -n 60 --stats"
)
TREE = (
    'tinyspec generate "The dragon opened one eye and" --method specinfer --expansion 3x2x1x1 '
    "--temperature 0.8 "
    "--seed 7 -n 60 --replay tree.html"
)
JACOBI = (
    'tinyspec translate "A man is grilling out in his backyard." --method jacobi --replay '
    "jacobi.html"
)
MASK_PREDICT = (
    'tinyspec translate "A boy in midair trying to kick a soccer ball" --method mask_predict '
    "--iterations 4 "
    "--replay passes.html"
)
SHOWN = (CALM, TREE, JACOBI, MASK_PREDICT)

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: the page was not looked at"
)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
QUIET += ["--disable-background-networking", "--disable-component-update"]


def recorded(method: str, tokens: int = 24, **options: object) -> replay.Record:
    """A detailed record of the storyteller."""
    model = tinyspec.load("storyteller")
    running = start_generation(
        model, "Once upon a time", method=method, max_new_tokens=tokens, **options
    )
    running.trace.detailed = True
    for _ in running:
        pass
    return replay.record_rounds(model, method, running.result())


class Ran(NamedTuple):
    """What a command wrote: on standard output, on standard error, and the record of its replay."""

    out: str
    error: str
    record: replay.Record


@pytest.fixture(scope="module")
def run_shown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Run a command of `SHOWN`, once for all tests; its replay is saved as a record."""
    folder = tmp_path_factory.mktemp("shown")

    @functools.cache
    def run(command: str) -> Ran:
        words, trace = shlex.split(command)[1:], folder / f"{SHOWN.index(command)}.json"
        if "--replay" in words:
            del words[words.index("--replay") :]
        done = CliRunner().invoke(main, [*words, "--replay", str(trace)])
        assert done.exit_code == 0, done.output
        return Ran(done.stdout, done.stderr, replay.read_record(trace))

    return run


@pytest.fixture(scope="module")
def tree() -> replay.Record:
    """Trees of draft tokens, drawn at temperature 0.8."""
    knobs = {"accepts": "0.6,0.2,0.1", "costs": "0.1,1,1.02,1.03,1.04,1.05,1.06,1.07,1.08"}
    return recorded("sequoia", temperature=0.8, **knobs)


def seen(record: replay.Record, folder: Path, at: int | str = "", script: str = "") -> str:
    """The page as a browser has built it, at a step; `script` runs after the page's own."""
    page = folder / "page.html"
    page.write_text(
        replay.render_page(record).replace("</body>", f"<script>{script}</script></body>"),
        encoding="utf-8",
    )
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *QUIET,
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        f"file://{page}#{at}",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "data-error" not in dom, re.findall('data-error="[^"]*"', dom)
    return re.sub(r"<script.*?</script>", "", dom, flags=re.S)


def text_of(dom: str) -> str:
    """What stands in the text panel."""
    panel = re.search(r'<div id="text">(.*?)</div>', dom, re.S)
    assert panel
    return html.unescape(re.sub(r"<del.*?</del>|<[^>]*>", "", panel[1]))


# --------------------------------------------------------------- the commands that the README shows


@pytest.mark.parametrize("command", SHOWN)
def test_a_shown_text_reads_as_text(command: str, run_shown: Callable[[str], Ran]) -> None:
    out = run_shown(command).out
    assert len(re.findall(r"[A-Za-zäöüß']{2,}", out)) >= 5 and "\n\n\n" not in out


def test_calm_runs_other_numbers_of_layers_for_other_tokens(
    run_shown: Callable[[str], Ran],
) -> None:
    ran = run_shown(CALM)
    layers = [count for round in ran.record["rounds"] for count in round["ran"]]
    assert len(set(layers)) >= 4 and min(layers) <= 2 and max(layers) == 10
    assert f", {sum(layers) / len(layers):.1f} of 10 layers per token, " in ran.error


def test_specinfer_draws_trees_that_branch(run_shown: Callable[[str], Ran]) -> None:
    rounds = run_shown(TREE).record["rounds"]
    different = [
        len({tok for tok, up in zip(r["tokens"], r["parents"], strict=True) if up < 0})
        for r in rounds
    ]
    assert sum(count > 1 for count in different) > len(rounds) / 2
    assert len({len(round["path"]) for round in rounds}) > 2 and any(
        round["refused"] for round in rounds
    )


def test_jacobi_accepts_draft_tokens(run_shown: Callable[[str], Ran]) -> None:
    rounds = run_shown(JACOBI).record["rounds"]
    assert sum(len(round["path"]) for round in rounds) >= 2 and len(rounds) < sum(
        len(r["pieces"]) for r in rounds
    )


def test_mask_predict_changes_tokens_after_the_first_pass(run_shown: Callable[[str], Ran]) -> None:
    passes = run_shown(MASK_PREDICT).record["passes"]
    assert len(passes) == 4 and sum(any(later["fresh"]) for later in passes[1:]) >= 2
    assert "".join(passes[0]["pieces"]) != "".join(passes[-1]["pieces"])


@pytest.mark.parametrize(
    ("model", "noted"),
    [
        *(("storyteller", True), ("exits-loss", False)),
        *(("multi30k-teacher", True), ("multi30k-exits", False)),
    ],
)
def test_a_model_without_trained_exits_is_named(model: str, noted: bool) -> None:
    command = "translate" if model.startswith("multi30k") else "generate"
    how = ("--method", "calm", "--threshold", "0.05", "-n", "6")
    done = CliRunner().invoke(main, [command, "The sea", "--model", model, *how])
    assert done.exit_code == 0
    assert (f"note: nothing says that the early layers of {model}" in done.stderr) == noted


def test_where_no_token_leaves_early_no_layers_are_shown() -> None:
    done = CliRunner().invoke(
        main,
        ["generate", "The sea", "--method", "calm", "--threshold", "inf", "-n", "4", "--stats"],
    )
    assert done.exit_code == 0 and "layers" not in done.stderr


# --------------------------------------------------------------------- what to see, in one sentence

PICTURES = (
    (CALM, "Each bar is a token"),
    (TREE, "Each round has a tree"),
    (JACOBI, "Each row is a forward pass"),
    (MASK_PREDICT, "Each row is a pass over the whole text"),
)


@pytest.mark.parametrize(("command", "start"), PICTURES)
def test_a_shown_picture_is_explained_by_its_kind(
    command: str, start: str, run_shown: Callable[[str], Ran]
) -> None:
    sentence = replay.describe_picture(run_shown(command).record)
    assert sentence.startswith(start) and sentence.count(". ") == 0 and sentence.endswith(".")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("autoregressive", "without draft tokens"),
        ("llma", "a chain of draft tokens found without a draft model"),
        ("speculative_decoding", "a chain of draft tokens, of which"),
    ],
)
def test_a_picture_is_explained_by_where_drafts_come_from(method: str, expected: str) -> None:
    record = recorded(
        method, references=["Once upon a time there was a little girl"] if method == "llma" else ()
    )
    assert expected in replay.describe_picture(record)


# ---------------------------------------------------------------------- the record


def test_the_pieces_joined_are_the_text(tree: replay.Record) -> None:
    model = tinyspec.load("storyteller")
    tokens = [token for round in tree["rounds"] for token in round["emitted"]]
    assert "".join(
        piece for round in tree["rounds"] for piece in round["pieces"]
    ) == model.tokenizer.decode(tokens)


def test_every_draft_token_has_its_probabilities(tree: replay.Record) -> None:
    n_drafted = 0
    for round in tree["rounds"]:
        assert (
            len(round["tokens"]) == len(round["p"]) == len(round["q"]) == len(round["node_pieces"])
        )
        assert all(0 <= p <= 1 for p in round["p"]) and all(
            q is None or 0 < q <= 1 for q in round["q"]
        )
        assert len(round["ran"]) == len(round["said"]) == len(round["emitted"])
        n_drafted += len(round["tokens"])
    assert n_drafted > 20


@pytest.mark.parametrize("detailed", [True, False])
def test_a_round_without_draft_tokens_has_no_draft_probabilities(detailed: bool) -> None:
    model = tinyspec.load("storyteller")
    running = start_generation(model, "The sea", method="autoregressive", max_new_tokens=2)
    running.trace.detailed = detailed
    for _ in running:
        pass
    for round in replay.record_rounds(model, "autoregressive", running.result())["rounds"]:
        assert round["p"] == round["q"] == round["tokens"] == [] and len(round["said"]) == 1


def test_the_shown_probabilities_are_those_of_logprobs() -> None:
    model = tinyspec.load("storyteller")
    running = start_generation(
        model, "The sea", method="speculative_decoding", max_new_tokens=12, seed=3, temperature=0.9
    )
    running.trace.detailed = True
    for _ in running:
        pass
    shown = [p for round in running.trace.rounds for p in round.said]
    assert shown == pytest.approx([2.718281828459045**x for x in running.logprobs], rel=1e-4)


def test_a_trace_survives_json_with_its_probabilities() -> None:
    running = start_generation(
        tinyspec.load("storyteller"), "The sea", method="speculative_decoding", max_new_tokens=6
    )
    running.trace.detailed = True
    for _ in running:
        pass
    assert Trace.from_json(running.trace.to_json()) == running.trace


def test_without_being_asked_no_probability_is_computed() -> None:
    out = tinyspec.generate(
        tinyspec.load("storyteller"), "The sea", method="speculative_decoding", max_new_tokens=6
    )
    assert all(round.p == [] and round.said == [] and round.ran for round in out.trace.rounds)


def test_a_page_fetches_nothing(tree: replay.Record) -> None:
    page = replay.render_page(tree)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched


def test_text_that_ends_a_script_element_is_harmless(tree: replay.Record) -> None:
    hostile = tree | {"prompt": "</script><script>alert(1)</script><!--"}
    page = replay.render_page(hostile)
    assert (
        page.count("</script>") == replay.render_page(tree).count("</script>")
        and "<script>alert" not in page
    )
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data and json.loads(data[1]) == hostile


def test_a_saved_record_is_read_back(tree: replay.Record, tmp_path: Path) -> None:
    replay.save_page(tree, tmp_path / "trace.json")
    assert replay.read_record(tmp_path / "trace.json") == tree


BROKEN = (
    '{"kind": "text", "model": "m", "method": "x", "summary": "", "n_layers": 1, "prompt": "", '
    '"rounds": [{}]}'
)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"kind": "text"}', BROKEN, "\u0000"])
def test_what_is_no_trace_is_an_error_of_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TinyspecError, match=r"save one with tinyspec generate --replay FILE\.json"):
        replay.read_record(tmp_path / "t.json")


def test_a_place_that_cannot_be_written_is_named(tree: replay.Record, tmp_path: Path) -> None:
    with pytest.raises(TinyspecError, match="cannot write"):
        replay.save_page(tree, tmp_path / "no" / "page.html")


def test_a_full_disk_leaves_the_old_page_whole(tree: replay.Record, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    with full_disk(), pytest.raises(TinyspecError, match=r"cannot write .*page\.html"):
        replay.save_page(tree, tmp_path / "page.html")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_generate_writes_a_page_and_a_trace_and_a_trace_becomes_a_page(tmp_path: Path) -> None:
    runner, trace, page = CliRunner(), tmp_path / "t.json", tmp_path / "p.html"
    given = [
        "generate",
        "Once upon a time",
        "--method",
        "speculative_decoding",
        "-n",
        "8",
        "--replay",
        str(trace),
    ]
    assert runner.invoke(main, given).exit_code == 0
    assert runner.invoke(main, ["replay", str(trace), "--out", str(page)]).exit_code == 0
    assert "speculative_decoding" in page.read_text(encoding="utf-8")


# ---------------------------------------------------------------------- in a browser


@browser
def test_the_last_step_shows_the_whole_text(tree: replay.Record, tmp_path: Path) -> None:
    whole = tree["prompt"] + "".join(piece for round in tree["rounds"] for piece in round["pieces"])
    assert text_of(seen(tree, tmp_path, len(tree["rounds"]))).rstrip("\n") == whole.rstrip("\n")


@browser
def test_a_step_in_the_middle_shows_the_text_until_then_and_its_tree(
    tree: replay.Record, tmp_path: Path
) -> None:
    at = next(
        i
        for i, round in enumerate(tree["rounds"], 1)
        if len(round["tokens"]) > 2 and round["refused"]
    )
    dom, round = seen(tree, tmp_path, at), tree["rounds"][at - 1]
    until = tree["prompt"] + "".join(
        piece for entry in tree["rounds"][:at] for piece in entry["pieces"]
    )
    assert text_of(dom) == until
    assert dom.count('class="n-accepted" tabindex') == len(round["path"])
    assert dom.count('class="n-refused" tabindex') == len(round["refused"])
    assert dom.count("the draft's q") + dom.count("verified as a point mass") >= len(
        round["tokens"]
    )
    assert dom.count("<del") >= 1 + len(round["refused"])  # ghosts, and the legend's


@browser
@pytest.mark.parametrize(
    ("key", "step"),
    [("Home", 0), ("End", 3), ("ArrowLeft", 1), ("ArrowRight", 3)],
    ids=lambda x: str(x),
)
def test_the_keyboard_moves(key: str, step: int, tmp_path: Path) -> None:
    record = recorded("autoregressive", tokens=3)
    dom = seen(
        record,
        tmp_path,
        2,
        f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))",
    )
    assert f"round {step} of 3" in dom


@browser
def test_space_plays_to_the_end(tmp_path: Path) -> None:
    record = recorded("autoregressive", tokens=2)
    script = "document.dispatchEvent(new KeyboardEvent('keydown', {key: ' '}))"
    assert '<button id="play" aria-keyshortcuts="Space">Pause</button>' in seen(
        record, tmp_path, 1, script
    )


@browser
def test_a_page_opens_at_the_first_round_and_plays(tree: replay.Record, tmp_path: Path) -> None:
    dom = seen(tree, tmp_path)
    assert f"round 1 of {len(tree['rounds'])}" in dom
    assert '<button id="play" aria-keyshortcuts="Space">Pause</button>' in dom
    assert html.escape(replay.describe_picture(tree), quote=False) in dom


@browser
def test_a_run_of_line_feeds_is_one_mark(tmp_path: Path) -> None:
    record = recorded("autoregressive", tokens=5)
    pieces = ["\n\n", "\nBut", "\n\n", "so.\n", "\n\n\n"]
    rounds = [
        round | {"pieces": [piece]} for round, piece in zip(record["rounds"], pieces, strict=True)
    ]
    dom = seen(record | {"prompt": "It was", "rounds": rounds}, tmp_path, 5)
    assert text_of(dom) == "It was\n⏎ × 3\nBut\n\nso.\n⏎ × 4\n"
    assert (
        text_of(seen(record | {"prompt": "It was", "rounds": rounds}, tmp_path, 1)) == "It was\n\n"
    )


@browser
def test_a_token_drafted_twice_is_drawn_once(
    tmp_path: Path, run_shown: Callable[[str], Ran]
) -> None:
    record = run_shown(TREE).record
    repeated = [
        len(r["tokens"]) - len(set(zip(r["parents"], r["tokens"], strict=True)))
        for r in record["rounds"]
    ]
    at = max(range(len(repeated)), key=repeated.__getitem__)
    dom, round = seen(record, tmp_path, at + 1), record["rounds"][at]
    assert repeated[at] > 2 and "drafted 3 times" in dom
    assert (
        dom.count('class="edge kept"')
        == len(round["path"]) + 1
        == dom.count('class="n-accepted" tabindex') + 1
    )


@browser
def test_layers_are_a_picture_only_where_tokens_leave_early(tmp_path: Path) -> None:
    early = seen(recorded("calm", threshold=0.3), tmp_path, 24)
    assert "Layers run for each token, of 12" in early and "of 12 layers" in early
    assert "Layers run" not in seen(recorded("autoregressive", tokens=3), tmp_path)


@browser
def test_chains_are_shown_by_position(tmp_path: Path) -> None:
    record = recorded("jacobi")
    dom = seen(record, tmp_path, len(record["rounds"]))
    assert "Draft tokens by position" in dom
    assert dom.count('class="next"') == len(record["rounds"][-12:])  # each round's own token


@browser
def test_a_canvas_is_shown_pass_by_pass(tmp_path: Path) -> None:
    passes = [
        {"pieces": ["ein", " hund", " hund"], "fresh": [True, True, True], "sure": [0.9, 0.5, 0.4]},
        {
            "pieces": ["ein", " hund", " rennt"],
            "fresh": [False, False, True],
            "sure": [0.9, 0.5, 0.8],
        },
    ]
    record = {
        "kind": "canvas",
        "model": "m",
        "method": "mask_predict",
        "summary": "",
        "n_layers": 3,
        "prompt": "a dog runs",
    }
    dom = seen(record | {"passes": passes}, tmp_path, 2)
    assert dom.count('class="fresh"') == 4 and dom.count("% sure") == 6
    assert text_of(dom) == "a dog runs\nein hund rennt"
