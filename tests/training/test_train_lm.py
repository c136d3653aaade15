"""A recipe becomes a checkpoint with a card, and its draft is distilled from it."""

import json
import lzma
import os
import random
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.model import Model
from tinyspec.training import corpus
from tinyspec.training.recipe import read_recipe, read_translation_recipe, set_recipe_values
from tinyspec.training.train_lm import distillation_loss, train_lm

RECIPE = """
name = "teller"
draft = "helper"
vocab_size = 300
batch = 4
context = 32
dropout = 0.1
valid_characters = 200
prompts = ["the cat", "a dog", "the"]
[shape]
n_layers = 2
d_model = 16
n_heads = 2
n_kv_heads = 1
head_dim = 8
d_ff = 32
[train]
steps = 20
lr = 1e-2
warmup = 4
log_every = 5
valid_every = 10
"""


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A zoo of two recipes, and a library of made-up books."""
    words = ["the", "a", "cat", "dog", "river", "saw", "met", "and", "then", "came", "home"]
    chance = random.Random(0)
    (tmp_path / "data/text").mkdir(parents=True)
    for split in ("train", "valid"):
        books = [
            {
                "author": "A",
                "title": f"T{i}",
                "text": f"# Title: T{i}\n\n-------\n" + " ".join(chance.choices(words, k=300)),
            }
            for i in range(3)
        ]
        lines = "".join(json.dumps(book) + "\n" for book in books)
        (tmp_path / f"data/text/classics.{split}.jsonl.xz").write_bytes(
            lzma.compress(lines.encode())
        )
    for name, text in (
        ("teller", RECIPE),
        (
            "helper",
            RECIPE.replace("teller", "helper").replace('draft = "helper"', 'teacher = "../teller"'),
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(text)
    return tmp_path


def run(zoo: Path, name: str, **options: Any) -> bool:
    options = {"data_folder": zoo / "data", "device": "cpu", **options}
    return train_lm(zoo / name / "recipe.toml", zoo / name, **options).finished


def test_a_pair_is_trained_and_finds_each_other(zoo: Path) -> None:
    assert run(zoo, "teller")
    assert run(zoo, "helper")
    for name, extra in (("teller", {"draft": "helper"}), ("helper", {"draft_of": "teller"})):
        parts = checkpoint.read_checkpoint(zoo / name)
        assert parts.weights["embed"].dtype == torch.bfloat16
        assert extra.items() <= parts.config.extra.items()
        assert (parts.config.bos, parts.config.eos) == (None, (0,))
        card = (zoo / name / "README.md").read_text()
        assert card.count("Seed ") == 3
        assert "bits per UTF-8 byte" in card
        assert "<polyline" in (zoo / name / "loss.svg").read_text()
        assert not (zoo / name / ".tinyspec").exists()
        last = [json.loads(line) for line in (zoo / name / "log.jsonl").read_text().splitlines()][
            -1
        ]
        assert last["valid_bits_per_byte"] < 8
    assert 0 < last["alpha"] <= 1
    assert (zoo / "teller/tokenizer.json").read_bytes() == (
        zoo / "helper/tokenizer.json"
    ).read_bytes()
    with pytest.raises(TinyspecError, match="already holds a trained model; --restart"):
        run(zoo, "teller")


def test_the_saved_recipe_has_the_values_of_the_call(zoo: Path) -> None:
    made, given = zoo / "made", {"train.seed": "7", "draft": '"none"'}
    assert train_lm(
        zoo / "teller/recipe.toml",
        made,
        data_folder=zoo / "data",
        device="cpu",
        minutes=5,
        overrides=given,
    ).finished
    saved = read_recipe(made / "recipe.toml")
    assert (saved.settings.seed, saved.settings.minutes, saved.draft) == (7, 5.0, "none")
    assert saved == read_recipe(zoo / "teller/recipe.toml", {**given, "train.minutes": "5.0"})


def test_a_value_is_found_however_it_is_written() -> None:
    text = "a=1\n\n[train]  # how long\n  lr  =  1e-3   # high\n"
    want = "a = 2\n\n[train]  # how long\nlr = 2e-3\n"
    assert set_recipe_values(text, {"a": "2", "train.lr": "2e-3"}) == want
    added = set_recipe_values("a = 1", {"train.seed": "4"})
    assert tomllib.loads(added) == {"a": 1, "train": {"seed": 4}}


def test_a_value_that_the_recipe_could_not_be_written_with_is_refused(tmp_path: Path) -> None:
    """TOML lets nobody add to a table in braces; the training would end without its recipe."""
    path = tmp_path / "recipe.toml"
    path.write_text("extra = {gamma = 3}\n\n[train]\nsteps = 1\n")
    with pytest.raises(TinyspecError, match=r"recipe.toml: .*extra"):
        read_recipe(path, {"extra.gamma": "5"})


def test_a_value_replaces_a_list_of_several_lines() -> None:
    text = 'prompts = [\n  "a",\n  "b",\n]\n\n[train]\nlr = 1e-3\n'
    assert set_recipe_values(text, {"prompts": '["c"]'}) == (
        'prompts = ["c"]\n\n[train]\nlr = 1e-3\n'
    )


def test_an_interrupted_training_leaves_no_model_and_goes_on_to_the_same_one(
    zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(zoo, "teller")
    whole = checkpoint.read_checkpoint(zoo / "teller").weights
    (zoo / "teller/model.safetensors").unlink()

    def with_a_ctrl_c(*shape: Any) -> Any:
        draw, drawn = corpus.make_crop_sampler(*shape), iter(range(100))

        def interrupted(generator: torch.Generator) -> Any:
            if next(drawn) == 7:
                os.kill(os.getpid(), signal.SIGINT)
            return draw(generator)

        return interrupted

    with monkeypatch.context() as patch:
        patch.setattr(
            "tinyspec.training.train_lm.corpus",
            SimpleNamespace(**{**vars(corpus), "make_crop_sampler": with_a_ctrl_c}),
        )
        assert not run(zoo, "teller")
    assert not (zoo / "teller/model.safetensors").exists()
    assert run(zoo, "teller")
    for name, weight in checkpoint.read_checkpoint(zoo / "teller").weights.items():
        assert torch.equal(weight, whole[name])


def test_distillation_is_zero_for_equal_distributions_and_moves_the_student() -> None:
    p = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert float(distillation_loss(p, p)) == pytest.approx(0, abs=1e-6)
    q = torch.zeros(5, 7, requires_grad=True)
    optimizer = torch.optim.Adam([q], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        distillation_loss(p, q).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(torch.minimum(p.softmax(-1), q.detach().softmax(-1)).sum(-1).mean()) > 0.97


def test_recipes_name_what_is_wrong_with_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    with pytest.raises(TinyspecError, match=r"recipe\.toml: no such recipe"):
        read_recipe(path)
    for text, complaint in (
        (RECIPE.replace("[train]", "[trian]"), r"section \[train\] is missing"),
        (RECIPE.replace("batch", "bathc"), "bathc is not known; did you mean 'batch'"),
        (RECIPE.replace("steps", "stpes"), r"\[train\] stpes is not known; did you mean 'steps'"),
        (RECIPE.replace("name =", "name"), "recipe.toml: "),
    ):
        path.write_text(text)
        with pytest.raises(TinyspecError, match=complaint):
            read_recipe(path)
    path.write_text(RECIPE.replace("d_ff", "width"))
    with pytest.raises(TinyspecError, match=r"section \[shape\]: .*width"):
        read_recipe(path).config()


def test_single_values_of_a_recipe_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    recipe = read_recipe(path, {"train.lr": "5e-4", "dropout": "0.2", "shape.n_layers": "1"})
    assert (recipe.settings.lr, recipe.dropout, recipe.config().n_layers) == (5e-4, 0.2, 1)


def test_missing_data_is_an_error_before_anything_is_written(zoo: Path) -> None:
    with pytest.raises(TinyspecError, match="tinyspec data fetch"):
        run(zoo, "teller", data_folder=zoo / "nowhere")
    assert sorted(p.name for p in (zoo / "teller").iterdir()) == ["recipe.toml"]


def test_a_restart_without_its_data_keeps_the_saved_training(zoo: Path) -> None:
    state = zoo / "teller/.tinyspec/state.pt"
    state.parent.mkdir()
    state.write_text("mine")
    with pytest.raises(TinyspecError, match="tinyspec data fetch"):
        run(zoo, "teller", data_folder=zoo / "nowhere", restart=True)
    assert state.read_text() == "mine"
    assert run(zoo, "teller", restart=True)  # it does not read that state


@pytest.mark.parametrize("name", ["storyteller", "apprentice"])
def test_the_zoo_fits_its_budget(name: str) -> None:
    recipe = read_recipe(Path(__file__).parents[2] / "models" / name / "recipe.toml")
    limit = {"storyteller": 18e6, "apprentice": 6e6}[name]
    assert 2 * recipe.config().parameters() < limit, "bytes in bfloat16; together at most 24 MB"
    assert Model.random(recipe.config()).config.max_positions == 512


@pytest.mark.parametrize(
    "text",
    ["[", "\xff", "seed = " + "9" * 5000, "a = " + "[" * 5000, "[train]\nsteps = []", "a = 1"],
)
def test_a_recipe_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.toml").write_text(text, encoding="latin-1")
    for read in (read_recipe, read_translation_recipe):
        with pytest.raises(TinyspecError, match=r"recipe\.toml: ") as error:
            read(tmp_path / "recipe.toml")
        assert "\n" not in str(error.value)
