"""What is asked: the groups, the turns of a conversation, and that every arm gets the same ids."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.zoo import tiny_zoo
from tinyspec import data, models
from tinyspec.bench import tasks
from tinyspec.bench.tasks import Item, Job
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return models.load(tiny_zoo(tmp_path_factory.mktemp("zoo")).big)


def answer_sevens(job: Job) -> Sequence[int]:
    return [7] * job.tokens


def test_there_are_twenty_edits_of_several_kinds_that_mostly_copy() -> None:
    edits = tasks.read_edits()
    assert len(edits) == len({e["id"] for e in edits}) == len({e["text"] for e in edits}) == 20
    assert len({e["kind"] for e in edits}) >= 8
    assert max(Counter(e["kind"] for e in edits).values()) <= 4
    for edit in edits:
        assert set(edit) == {"id", "kind", "instruction", "text"}
        assert 250 <= len(edit["text"]) <= 900  # most of an answer is this text again
        assert len(edit["instruction"]) < len(edit["text"]) / 2


def test_names_of_several_tasks_expand_in_the_order_of_the_book() -> None:
    assert tasks.expand_tasks(["all"]) == tasks.TASKS
    assert tasks.expand_tasks(["edits", "spec_bench", "qa"]) == (*tasks.SPEC_BENCH, "edits")
    assert len(tasks.SPEC_BENCH) == 6
    assert tasks.expand_tasks(["spec_bench:3", "qa:5"])[3:5] == ("qa:5", "math_reasoning:3")
    assert [item.task for item in tasks.choose_items(["edits:3", "books"], 2)] == ["edits"] * 3 + [
        "books"
    ] * 2
    with pytest.raises(TinyspecError, match="did you mean 'edits'"):
        tasks.expand_tasks(["edit"])
    for wrong in ("edits:", "edits:0", "edits:x"):
        with pytest.raises(TinyspecError, match="edits:20"):
            tasks.expand_tasks([wrong])


def test_prompts_are_spread_over_a_task_and_the_same_every_time() -> None:
    assert tasks.spread_evenly(range(240), 10) == list(range(0, 240, 24))
    assert tasks.spread_evenly("abc", 9) == ["a", "b", "c"]
    assert tasks.load_items("edits", 7) == tasks.load_items("edits", 7)


def test_every_task_has_prompts() -> None:
    try:
        data.read_spec_bench()
        data.read_human_eval()
        data.read_gsm8k()
    except TinyspecError as missing:
        pytest.skip(str(missing))
    for task in tasks.TASKS:
        found = tasks.load_items(task, 10)
        assert len(found) == len({item.id for item in found}) == 10
        assert all(item.task == task and all(item.turns) for item in found)
        assert all(item.chat for item in found) == (task != "books")
    assert sum(len(tasks.load_items(task, 999)) for task in tasks.SPEC_BENCH) == len(
        data.read_spec_bench()
    )
    assert {len(item.turns) for item in tasks.load_items("mt_bench", 10)} == {2}


def test_missing_data_names_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path))
    with pytest.raises(TinyspecError, match="tinyspec data fetch"):
        tasks.load_items("qa", 1)
    assert len(tasks.load_items("edits", 99)) == 20  # ours are in the package


def test_a_second_turn_looks_back_on_plain_greedy_decodings_answer(chatty: Model) -> None:
    letters = chatty.tokenizer.encode("cat")
    item = Item("mt_bench", "1", ("the cat", "the dog"))
    first, second = tasks.list_jobs(chatty, [item], 8, lambda job: letters * 2)
    assert chatty.tokenizer.decode(first.ids) == "u: the cat\na:".replace("u:", "user:")
    assert (
        chatty.tokenizer.decode(second.ids) == "user: the cat\nassistant: catcat\nuser: the dog\na:"
    )
    assert (first.key, second.key) == ("mt_bench/1/0", "mt_bench/1/1")
    assert second.tokens == 8


def test_an_answer_in_a_conversation_ends_where_its_text_does(chatty: Model) -> None:
    ended = Model(replace(chatty.config, eos=(7,)), dict(chatty.weights), chatty.tokenizer)
    said = [*chatty.tokenizer.encode("cat"), 7, *chatty.tokenizer.encode("dog")]
    second = tasks.list_jobs(ended, [Item("mt_bench", "1", ("a", "b"))], 8, lambda job: said)[1]
    assert "dog" not in chatty.tokenizer.decode(second.ids)
    short = tasks.list_jobs(ended, [Item("qa", "1", ("a",))], 8, lambda job: said, until_eos=True)[
        0
    ]
    assert short.tokens == len(chatty.tokenizer.encode("cat")) + 1


def test_a_prompt_that_is_too_long_keeps_its_end(chatty: Model) -> None:
    job = tasks.list_jobs(
        chatty, [Item("books", "1", ("the cat " * 90,), chat=False)], 16, answer_sevens
    )[0]
    assert len(job.ids) + job.tokens == chatty.config.max_positions
    assert job.cropped > 0
    with pytest.raises(TinyspecError, match="--tokens"):
        tasks.list_jobs(chatty, [Item("books", "1", ("a",), chat=False)], 999, answer_sevens)


def test_a_model_without_a_template_continues_the_text(chatty: Model) -> None:
    plain = Model(chatty.config, dict(chatty.weights), chatty.tokenizer)
    plain.tokenizer.chat_template, kept = None, plain.tokenizer.chat_template
    try:
        job = tasks.list_jobs(plain, [Item("qa", "1", ("the cat",))], 4, answer_sevens)[0]
        assert plain.tokenizer.decode(job.ids) == "the cat"
    finally:
        plain.tokenizer.chat_template = kept
