"""`tinyspec bench mpee`: the passages, what a budget buys, the tables, one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo import TEXT, failed, run, tiny_zoo
from tinyspec import data, models
from tinyspec.bench.experiments import mpee
from tinyspec.bench.experiments.mpee import (
    Answers,
    choose_within,
    make_authorship_task,
    tabulate_mpee,
)
from tinyspec.bench.settings import MpeeSettings
from tinyspec.errors import TinyspecError

QUICK = (
    "--steps", "2", "--batch", "4", "--tests", "6", "--passage", "8", "--layers", "2", "--width",
    "32", "--rhos", "1,0.5", "--taus", "1,0.5", "--budgets", "0.1,0.9", "--quiet",
)  # fmt: skip
BOOKS = [
    data.Book(author, f"{author} {number}", " ".join([word, *TEXT.split()] * 12))
    for author, word in (("Ann", "cat"), ("Bob", "dog"), ("Cy", "mat"))
    for number in range(3 if author != "Cy" else 2)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(tiny_zoo(tmp_path_factory.mktemp("zoo")).big).tokenizer


def test_one_book_of_each_author_is_held_out(tokenizer: Any) -> None:
    """Cy has two books, too few to take part."""
    task = make_authorship_task(MpeeSettings(passage=8, tests=6), BOOKS, tokenizer)
    assert task.authors == ["Ann", "Bob"]
    assert task.held.ids.shape == (12, 8) and task.held.labels.tolist() == [0] * 6 + [1] * 6
    last = torch.tensor(tokenizer.encode(BOOKS[2].text))
    assert torch.equal(task.held.ids[0], last[:8])
    assert len(task.training[0]) == 2 * (len(tokenizer.encode(BOOKS[0].text)) // 8)
    with pytest.raises(TinyspecError, match="fewer --tests"):
        make_authorship_task(MpeeSettings(passage=8, tests=10**4), BOOKS, tokenizer)
    with pytest.raises(TinyspecError, match="two authors must have 3 books"):
        make_authorship_task(MpeeSettings(), BOOKS[:3], tokenizer)


def test_a_text_leaves_at_the_first_layer_that_is_sure() -> None:
    sure = torch.tensor([[0.9, 0.4, 0.6], [0.5, 0.8, 0.6], [0.6, 0.6, 0.6]])
    right = torch.tensor([[True, False, False], [False, True, False], [False, False, True]])
    answers = Answers(sure, right, [10, 20, 30])
    found = answers.judge(0.7, slice(None))
    assert found == {"accuracy": 1.0, "layers": 2.0, "operations": 20.0}
    assert answers.judge(1.0, slice(None))["operations"] == 30
    assert answers.judge(0.0, slice(None))["layers"] == 1


def test_a_setting_is_chosen_on_other_passages_than_it_is_judged_on() -> None:
    """On the passages that choose, leaving at once is right; on the others it is wrong."""
    sure = torch.tensor([[0.9, 0.9], [0.9, 0.9]])
    right = torch.tensor([[True, False], [False, True]])
    answers = {1.0: Answers(sure, right, [10, 20])}
    chosen = choose_within(answers, [(1.0, 1.0), (1.0, 0.5)], 20)
    assert chosen == {"rho": 1.0, "tau": 0.5, "accuracy": 0.0, "layers": 1.0, "operations": 10}
    assert choose_within(answers, [(1.0, 1.0)], 19) == {"accuracy": None}


def test_the_command_trains_and_shows_a_table_for_each_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = tiny_zoo(tmp_path).big
    monkeypatch.setattr(data, "read_books", lambda split: BOOKS)
    files = ("--out", str(tmp_path / "m.json"), "--markdown", str(tmp_path / "m.md"))
    done = run("bench", "mpee", "--tokenizer", big, *QUICK, *files)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    assert list(result["trainings"]) == list(mpee.TRAININGS)
    for found in result["trainings"].values():
        for way in mpee.WAYS:
            assert list(found[way]) == ["0.1", "0.9"] and found[way]["0.1"]["accuracy"] is None
            assert found[way]["0.9"]["operations"] <= 0.9 * result["settings"]["operations"]
    cuts = result["cuts"]
    assert len({row["1.0"] for row in cuts.values()}) == 1  # nothing is cut
    grids = tabulate_mpee(result)
    assert len(grids) == len(mpee.TRAININGS) + 1
    assert "by both" in (tmp_path / "m.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--width", "40"), "--width is 40: it must be a multiple of 32"),
        (("--rhos", "0.5"), "--rhos must be numbers from 0 to 1, with 1 among them"),
        (("--taus", "1,2"), "--taus must be numbers from 0 to 1, with 1 among them"),
        (("--tokenizer", "nobody"), "unknown model 'nobody'"),
    ],
)
def test_wrong_input_is_one_line(more: tuple[str, ...], said: str) -> None:
    assert said in failed(run("bench", "mpee", *QUICK, *more))
