"""Skeleton-of-Thought: points, routers, the algorithm against what runs, and the texts of users."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import run
from tinyspec.errors import TinyspecError
from tinyspec.generation import generate, start_generation, stream
from tinyspec.laws.stream_laws import TEXT_END, text_network, write_script
from tinyspec.laws.traps import sot as traps
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive import sot
from tinyspec.nonautoregressive.sot import (
    LISTS,
    NO_LISTS,
    SkeletonDecoder,
    answer_by_skeleton,
    fit_word_router,
    parse_points,
)
from tinyspec.technique import Guarantee, StreamRequest, find_technique

CARD = find_technique("sot")
ASKED = "Why is it red?"
OUTLINE = "Why is it red?\nOutline:\n1."
SCRIPT = {
    OUTLINE: " Iron\n2. Light in air\n3. Paint",
    "point 1:\n1. Iron": " rusts. It turns brown.",
    "point 2:\n2. Light in air": ": short.",
    "point 3:\n3. Paint": " is a longer text than all the others here.",
}
ANSWER = (
    "1. Iron rusts. It turns brown.\n2. Light in air: short.\n"
    "3. Paint is a longer text than all the others here."
)


def test_trap_points_are_independent_given_the_skeleton() -> None:
    assert traps.points_are_independent(SkeletonDecoder).branches > 100


def test_trap_a_point_is_plain_decoding_of_its_own_prompt() -> None:
    assert traps.points_are_plain_texts(SkeletonDecoder).cases == 12


def test_trap_points_share_passes_and_their_prefix() -> None:
    assert traps.points_share_their_passes(SkeletonDecoder).cases == 6


def test_trap_no_points_are_plain_decoding() -> None:
    assert traps.no_points_are_plain_decoding(SkeletonDecoder).cases == 4


def test_trap_a_point_reads_the_question_and_the_whole_skeleton() -> None:
    assert traps.points_read_the_skeleton(SkeletonDecoder).cases == 3


def test_trap_the_router_decides() -> None:
    assert traps.router_decides(SkeletonDecoder).cases == 6


# ---------------------------------------------------------------------- points and routers


@pytest.mark.parametrize(
    ("skeleton", "heads"),
    [
        ("1. Red\n2. Green", ["1. Red", "2. Green"]),
        ("1.Red\r\n 2.  Green  ", ["1. Red", "2. Green"]),
        ("1. Red\nIt is red.\n3. Blue", ["1. Red", "3. Blue"]),
        ("2. Green\n1. Red\n2. Again", ["2. Green", "1. Red"]),
        ("1.\n2. Green", ["2. Green"]),
        ("- Red\n* Green\n1) Blue\nabout 3.5 things", []),
        ("", []),
    ],
)
def test_points_are_numbered_lines(skeleton: str, heads: list[str]) -> None:
    assert [point.head for point in parse_points(skeleton)] == heads


def test_the_words_router_learns_its_questions_and_a_few_others() -> None:
    route = fit_word_router(LISTS, NO_LISTS)
    assert all(route(question) > 0.5 for question in LISTS)
    assert all(route(question) < 0.5 for question in NO_LISTS)
    assert route("What are the advantages of a good night's sleep?") > 0.5
    assert route("What is 12 times 12?") < 0.5
    assert route("") < 0.5  # a false yes costs more


def test_a_false_yes_costs_more_than_a_false_no() -> None:
    route = fit_word_router(["red"] * 5, ["red"] * 5)
    assert route("red") < 0.5


def test_the_words_router_is_fitted_where_gradients_are_off_too() -> None:
    expected = fit_word_router(LISTS, NO_LISTS)(ASKED)
    with torch.inference_mode():
        assert fit_word_router(LISTS, NO_LISTS)(ASKED) == expected
    with torch.no_grad():
        assert fit_word_router(LISTS, NO_LISTS)(ASKED) == expected


# ---------------------------------------------------------------------- the algorithm


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """Return a function that makes a model which writes by a script, for this technique."""

    def make(script: dict[str, str] = SCRIPT) -> Model:
        model = text_network(1)
        wrap = write_script(model, script)
        monkeypatch.setattr(SkeletonDecoder, "wrap_target", lambda self, session: wrap(session))
        return model

    return make


def test_what_runs_is_the_algorithm_of_the_paper(scripted: Callable[..., Model]) -> None:
    """Point by point, one after the other, each with a session of its own."""
    model = scripted()
    wrap, asked = write_script(model, SCRIPT), list[int]()

    def write(prompts: Sequence[tuple[str, str]]) -> list[str]:
        asked.append(len(prompts))
        texts = []
        for prompt, beginning in prompts:
            request = StreamRequest(model, prompt)
            decoder = SkeletonDecoder(request, "never", 10)
            ids = decoder.encode_prompt(prompt, beginning)
            target, new = wrap(model.session()), list[int]()
            target.extend(ids)
            while len(new) < 99 and TEXT_END not in new:
                new.append(int(target.score(tinyspec.tree.TokenTree()).logits[0].argmax()))
                target.commit((), new[-1])
            texts.append(model.tokenizer.decode(new))
        return texts

    got = generate(model, ASKED, method="sot", max_new_tokens=99)
    assert got.text == answer_by_skeleton(write, ASKED) == ANSWER  # type: ignore[union-attr]
    assert asked == [1, 3]


def test_an_outline_without_points_is_answered_plainly_by_the_algorithm() -> None:
    def write(prompts: Sequence[tuple[str, str]]) -> list[str]:
        return ["\nnothing" if beginning == "1." else "Because." for _, beginning in prompts]

    assert answer_by_skeleton(write, ASKED) == "Because."


def test_the_answer_grows_in_the_order_of_its_points(scripted: Callable[..., Model]) -> None:
    pieces = list(stream(scripted(), ASKED, method="sot", max_new_tokens=99))
    assert "".join(pieces) == ANSWER and len(pieces) > 20
    # No stream writes this stop: it stands between two.
    parts = stream(scripted(), ASKED, method="sot", max_new_tokens=99, stop=".\n")
    assert "".join(parts) == ANSWER
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert ANSWER.startswith(so_far)


def test_figures_count_the_outline_and_each_shared_pass_once(
    scripted: Callable[..., Model],
) -> None:
    model = scripted()
    running = start_generation(model, ASKED, method="sot", max_new_tokens=99)
    rounds = list(running)
    got = running.result()
    outline, *points = (len(text) + 1 for text in SCRIPT.values())  # bytes, and the end of text
    assert len(got.tokens) == len(got.logprobs) == got.stats.emitted == outline + sum(points)
    assert got.stats.target_calls == outline + max(points)
    assert len(rounds) == len(got.tokens)
    assert got.finish_reason == "eos"
    assert [token for round in rounds for token in round.tokens] == got.tokens


def test_streams_end_at_a_stop_each(scripted: Callable[..., Model]) -> None:
    got: Any = generate(scripted(), ASKED, method="sot", max_new_tokens=99, stop=".", seed=3)
    assert got.text.splitlines()[0] == "1. Iron rusts"
    assert got.finish_reason == "stop"


def test_an_outline_ends_before_its_stop(scripted: Callable[..., Model]) -> None:
    got: Any = generate(scripted(), ASKED, method="sot", max_new_tokens=99, stop="Paint")
    assert got.text == "\n".join(ANSWER.splitlines()[:2])


def test_max_new_tokens_bounds_each_stream(scripted: Callable[..., Model]) -> None:
    got: Any = generate(scripted(), ASKED, method="sot", max_new_tokens=33)
    lines = got.text.splitlines()
    assert lines[0] == "1. Iron rusts. It turns brown."
    assert lines[2] == "3. Paint is a longer text than all the ot"
    assert got.finish_reason == "length"


def test_more_points_than_allowed_are_left_out(scripted: Callable[..., Model]) -> None:
    got: Any = generate(scripted(), ASKED, method="sot", max_new_tokens=99, points=2)
    assert got.text == "\n".join(ANSWER.splitlines()[:2])


def test_chat_messages_keep_the_earlier_turns(scripted: Callable[..., Model]) -> None:
    begins = re.compile(r":\n(?=\d\.)")  # the answer begins after the template's last words
    script = {begins.sub(":\n[assistant] ", cue): text for cue, text in SCRIPT.items()}
    model, seen = scripted(script), list[str]()
    extend = tinyspec.lm.session.Session.extend

    def note(self: Any, tokens: Sequence[int], *more: Any) -> Any:
        seen.append(model.tokenizer.decode(tokens))
        return extend(self, tokens, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinyspec.lm.session.Session, "extend", note)
        earlier = [{"role": "system", "content": "Be brief."}]
        messages = [*earlier, {"role": "user", "content": ASKED}]
        got: Any = generate(model, messages, method="sot", max_new_tokens=99)
        alone: Any = generate(model, ASKED, chat=True, method="sot", max_new_tokens=99)
    assert got.text == alone.text == ANSWER
    assert seen[0].startswith("[system] Be brief.\n[user] Plan an answer.")
    assert seen[-1].startswith("[user] Write one part")


# ---------------------------------------------------------------------- the neutral value


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}])
def test_router_never_is_plain_decoding(options: dict[str, Any]) -> None:
    model = text_network(2)
    plain: Any = generate(model, ASKED, max_new_tokens=12, **options)
    got: Any = generate(model, ASKED, method="sot", router="never", max_new_tokens=12, **options)
    assert (got.tokens, got.text, got.logprobs) == (plain.tokens, plain.text, plain.logprobs)
    assert (got.finish_reason, got.stats.target_calls) == ("length", 12)


@pytest.mark.parametrize("router", ["always", "prompt"])
def test_a_context_without_room_for_the_prompts_is_answered_plainly(router: str) -> None:
    model = text_network(2, positions=60)
    plain: Any = generate(model, ASKED, max_new_tokens=9)
    got: Any = generate(model, ASKED, method="sot", router=router, max_new_tokens=9)
    assert got.tokens == plain.tokens


def test_a_seed_gives_one_answer_however_many_points_run_at_once(
    scripted: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"method": "sot", "temperature": 1.0, "seed": 8, "max_new_tokens": 50}
    model, texts = scripted({OUTLINE: SCRIPT[OUTLINE]}), list[Any]()
    for most in (1, 2, 99):
        monkeypatch.setattr(SkeletonDecoder, "most", most)
        texts.append(generate(model, ASKED, **options).tokens)  # type: ignore[arg-type,union-attr]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > 3 * 24  # the outline, and three points of random bytes


def test_a_batch_gives_each_question_its_own_answer() -> None:
    model = text_network(5)
    options: Any = {"method": "sot", "temperature": 1.0, "max_new_tokens": 12}
    rows: Any = generate(model, ["Why?", "How so?"], seed=2, **options)
    for at, question in enumerate(("Why?", "How so?")):
        alone: Any = generate(model, question, seed=2 + at, **options)
        assert alone.tokens == rows[at].tokens


# ---------------------------------------------------------------------- what a user sees


def test_the_card() -> None:
    assert CARD.kind == "streams" and CARD.promise(router="never") is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    with pytest.raises(TinyspecError, match="generate --method sot"):
        CARD.make(None)  # type: ignore[arg-type]
    with pytest.raises(TinyspecError, match="one stream"):
        find_technique("jacobi").stream_decoder(None)  # type: ignore[arg-type]


def test_the_last_message_must_be_the_users() -> None:
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "Because"}]
    with pytest.raises(TinyspecError, match="the last message must be the user's"):
        generate(text_network(1), messages, method="sot", max_new_tokens=4)


def test_token_ids_are_a_question_too(scripted: Callable[..., Model]) -> None:
    model = scripted()
    ids = model.tokenizer.encode(ASKED)
    assert generate(model, ids, method="sot", max_new_tokens=99).text == ANSWER  # type: ignore[union-attr]


def test_the_command_prints_the_answer(
    tmp_path: Path, scripted: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted().save(tmp_path / "m")
    asked = ["generate", ASKED, "--model", str(tmp_path / "m"), "--method", "sot"]
    monkeypatch.setattr(sot.SkeletonDecoder, "wrap_target", _follow_script)
    done = run(*asked, "--max-new-tokens", "99", "--stats")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == ANSWER and "target calls" in done.stderr
    told = json.loads(run(*asked, "--max-new-tokens", "99", "--json").stdout)
    assert told["text"] == ANSWER and told["method"] == "sot"
    shown = run("methods", "sot")
    assert "guarantee: lossy at router never" in shown.output


def _follow_script(decoder: SkeletonDecoder, session: Any) -> Any:
    return write_script(decoder.model, SCRIPT)(session)


def test_dropping_the_answer_half_way_ends_its_streams(scripted: Callable[..., Model]) -> None:
    before = threading.active_count()
    pieces: Iterator[str] = stream(scripted(), ASKED, method="sot", max_new_tokens=99)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    del pieces
    assert threading.active_count() == before
