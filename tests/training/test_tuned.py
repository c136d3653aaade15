"""A model is tuned on its own texts: the loss, the folder, what tuning cost and gave, the command."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.training.interrupting import check_it_goes_on_to_the_same_weights
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec import technique
from tinyspec.errors import TinyspecError
from tinyspec.generation import generate
from tinyspec.lm.checkpoint import read_checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.technique import (
    TUNED,
    TrainingBatch,
    Tuning,
    load_techniques,
    tuned_settings,
)
from tinyspec.training import heads, outputs, tuned
from tinyspec.training.corpus import Document
from tinyspec.training.outputs import TargetOutput
from tinyspec.training.recipe import read_head_recipe
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import train as train_weights

SMALL = {
    "texts.texts": 24, "texts.tokens": 16, "texts.prompt": 8, "texts.question": 6, "texts.batch": 8,
    "train.steps": 20, "train.lr": 3e-3, "train.warmup": 2, "batch": 4,
    "train.valid_every": 10, "train.log_every": 5,
}  # fmt: skip
SETTINGS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
FILES = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "README.md", "log.jsonl", "loss.svg",
    "recipe.toml",
}  # fmt: skip
METHODS = [
    name
    for name, card in load_techniques().items()
    if card.tuned is not None and card.kind == "decoder"
]


WITH_TABLES = {"hash_ee"}
"""Methods that count a table on the texts."""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path)


def tune(zoo: Zoo, out: Path, *more: str, method: str = "space") -> Any:
    args = ["--for", zoo.big, "--method", method, "--out", str(out), "--quiet"]
    made = load_techniques()[method].tuned if method in METHODS else None
    toml = {} if made is None else {name: json.dumps(x) for name, x in vars(made.small).items()}
    own = [word for name, text in toml.items() for word in ("--set", f"head.{name}={text}")]
    return run("train", "head", *args, *own, *SETTINGS, *more)


def read_log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_tuned_and_used(method: str, zoo: Zoo, tmp_path: Path) -> None:
    """Its output is plain decoding's of the tuned model, which is another model than before."""
    out = tmp_path / "mine"
    done = tune(zoo, out, method=method)
    assert done.exit_code == 0, done.output
    card = load_techniques()[method]
    brings_extras = card.trained is not None or method in WITH_TABLES
    expected = FILES | ({"extras.safetensors"} if brings_extras else set())
    assert {file.name for file in out.iterdir()} == expected
    before, after = read_checkpoint(Path(zoo.big)), read_checkpoint(out)
    assert after.config.extra[TUNED]["method"] == method
    assert after.config.extra[TUNED]["from"] == "big"
    assert replace(after.config, extra={}) == replace(before.config, extra={})
    assert not any(torch.equal(after.weights[name], before.weights[name]) for name in ("embed",))
    assert all(w.dtype == torch.bfloat16 for w in after.weights.values())
    told = ["the cat", "-n", "12"]
    neutral = [] if card.lossy is None else [f"--{card.lossy[0]}", str(card.lossy[1])]
    used = run("generate", "--model", str(out), "--method", method, *neutral, *told)
    plain = run("generate", "--model", str(out), *told)
    assert used.exit_code == 0, used.output
    assert used.stdout == plain.stdout
    assert "was not tuned" not in used.stderr


@pytest.mark.parametrize("method", METHODS)
def test_tuning_lowers_the_loss(method: str, zoo: Zoo, tmp_path: Path) -> None:
    """The mean of several steps, as that of one may be the loss of one part, drawn at random."""
    every_step = ("--set", "train.log_every=1")
    assert tune(zoo, tmp_path / "mine", *every_step, method=method).exit_code == 0
    losses = [line["loss"] for line in read_log(tmp_path / "mine") if "loss" in line]
    assert len(losses) == 20 and sum(losses[10:]) < sum(losses[:10])


@pytest.mark.parametrize("method", METHODS)
def test_the_settings_that_decide_are_kept_in_the_folder(
    method: str, zoo: Zoo, tmp_path: Path
) -> None:
    assert tune(zoo, tmp_path / "mine", method=method).exit_code == 0
    made = load_techniques()[method].tuned
    assert made is not None
    model = tinyspec.load(tmp_path / "mine")
    assert tuned_settings(model, method, made.settings) == made.small


@pytest.mark.parametrize(
    "method", [name for name in METHODS if load_techniques()[name].trained is None]
)
def test_a_model_that_was_not_tuned_is_told_so(method: str, zoo: Zoo) -> None:
    used = run("generate", "--model", zoo.big, "--method", method, "the cat", "-n", "4")
    assert used.exit_code == 0
    assert f"big was not tuned for {method}" in used.stderr
    if load_techniques()[method].lossy is None:
        assert used.stdout == run("generate", "--model", zoo.big, "the cat", "-n", "4").stdout


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_an_interrupted_tuning_ends_with_the_same_weights(
    method: str, zoo: Zoo, tmp_path: Path, monkeypatch: Any
) -> None:
    check_it_goes_on_to_the_same_weights(
        lambda out: tune(zoo, out, method=method),
        lambda out: read_checkpoint(out).weights,
        tmp_path,
        monkeypatch,
    )


def test_a_recipe_is_followed_without_for(zoo: Zoo, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(heads.head_recipe(zoo.big, "space", "mine", 20, is_tuned=True))
    plan = read_head_recipe(recipe)
    assert (plan.settings.lr, plan.batch, plan.settings.minutes) == (1e-4, 8, 20)
    small = ["--set", "head.masks=2", *SETTINGS]
    done = run("train", "head", "--recipe", str(recipe), "--out", str(tmp_path / "mine"), *small)
    assert done.exit_code == 0, done.output


def test_a_tuned_model_is_not_overwritten(zoo: Zoo, tmp_path: Path) -> None:
    assert tune(zoo, tmp_path / "mine").exit_code == 0
    assert "already holds a trained model" in failed(tune(zoo, tmp_path / "mine"))
    assert tune(zoo, tmp_path / "mine", "--restart").exit_code == 0


BAD = {
    "an unknown key": (["--set", "head.nodes=3"], "[head] nodes is not known"),
    "no masks": (["--set", "head.masks=0"], "[head] masks is 0"),
    "a share beyond 1": (["--set", "head.mask_prob=2"], "[head] mask_prob is 2"),
    "a mask beyond the vocabulary": (["--set", "head.mask_id=999"], "mask_id is 999, but the"),
    "no texts": (["--set", "texts.texts=0"], "texts is 0"),
    "an unknown target": (["--set", 'target="nowhere"'], "unknown model 'nowhere'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_recipe_is_said_in_one_line(
    case: str, zoo: Zoo, tmp_path: Path
) -> None:
    more, said = BAD[case]
    assert said in failed(tune(zoo, tmp_path / "mine", *more))
    assert not (tmp_path / "mine/model.safetensors").exists()
    assert not (tmp_path / "cache/outputs").exists()  # it is found before texts are written


def test_a_tuned_model_is_no_head(zoo: Zoo, tmp_path: Path) -> None:
    assert tune(zoo, tmp_path / "mine").exit_code == 0
    out = str(tmp_path / "mine")
    said = failed(run("generate", "--model", zoo.big, "--method", "space", "--head", out, "a"))
    assert "not the config of a head" in said


def test_a_tuned_model_is_not_stored_in_bytes(zoo: Zoo, tmp_path: Path) -> None:
    said = failed(tune(zoo, tmp_path / "model", "--set", "stored='int8'"))
    assert "stored is 'int8': space tunes the model itself, which is stored in 'bfloat16'" in said


@pytest.mark.parametrize(("trainer", "method"), [(heads.train_head, "space"),
                                                 (tuned.train_tuned, "medusa")])  # fmt: skip
def test_a_trainer_names_a_method_of_the_other_kind(
    trainer: Any, method: str, zoo: Zoo, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(heads.head_recipe(zoo.big, method, "mine"))
    with pytest.raises(TinyspecError, match=f"method {method} t"):
        trainer(recipe, tmp_path / "mine")


# ---------------------------------------------------------------------- tensors beside the model


def loss_of_both(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Any:
    """A loss of the model and of a vector beside it, which grows as the training goes on."""
    logits = tuning.blocks.training_logits(batch.ids)
    return logits.square().mean() + (1 + tuning.progress) * tuning.beside["row"].square().sum()


@pytest.fixture
def with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPACE trains a vector too, under the name of another method."""
    card = load_techniques()["space"]
    assert card.tuned is not None
    beside = card.tuned._replace(
        loss=loss_of_both,
        initialize=lambda target, settings, seed: {"row": torch.ones(target.config.d_model)},
        rate=4.0,
    )
    changed = replace(card, tuned=beside, head_of="medusa")
    monkeypatch.setitem(technique._cards, "space", changed)


def test_tensors_beside_the_model_become_its_extras(
    with_a_row: None, zoo: Zoo, tmp_path: Path
) -> None:
    assert tune(zoo, tmp_path / "mine").exit_code == 0
    extras = tinyspec.load(tmp_path / "mine").extras
    assert float(extras["medusa/row"].float().mean()) < 1
    assert int(extras["medusa/settings/masks"]) == 2


def test_tensors_beside_the_model_have_the_methods_learning_rate(
    with_a_row: None, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rate that the fixture has moves the row about half as far from its 1."""
    moved = list[float]()
    card = load_techniques()["space"]
    assert card.tuned is not None
    for rate in (4.0, 2.0):
        changed = replace(card, tuned=card.tuned._replace(rate=rate))
        monkeypatch.setitem(technique._cards, "space", changed)
        assert tune(zoo, tmp_path / str(rate)).exit_code == 0
        row = tinyspec.load(tmp_path / str(rate)).extras["medusa/row"]
        moved.append(1 - float(row.float().mean()))
    assert moved[0] > 1.5 * moved[1] > 0


def test_a_table_is_counted_on_the_texts_and_stored_as_it_is(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no weight: the loss reads it, and nothing trains it."""
    seen = list[torch.Tensor]()

    def count(config: Config, settings: Any, texts: Any, seed: int) -> dict[str, torch.Tensor]:
        seen.append(torch.bincount(torch.cat(list(texts)), minlength=config.vocab_size))
        return {"counts": seen[-1]}

    def loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Any:
        assert torch.equal(tuning.beside["counts"], seen[-1])
        return tuning.blocks.training_logits(batch.ids).square().mean()

    card = load_techniques()["space"]
    assert card.tuned is not None
    changed = replace(card, tuned=card.tuned._replace(loss=loss, tables=count))
    monkeypatch.setitem(technique._cards, "space", changed)
    assert tune(zoo, tmp_path / "mine").exit_code == 0
    stored = tinyspec.load(tmp_path / "mine").extras["space/counts"]
    assert stored.dtype == torch.long and torch.equal(stored, seen[0])
    assert int(stored.sum()) > 100


def test_a_loss_is_measured_as_at_the_end_of_the_training(
    with_a_row: None, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training the progress rises from 0; where the loss is measured it is 1."""
    seen = list[tuple[bool, float]]()

    def record(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Any:
        seen.append((torch.is_grad_enabled(), tuning.progress))
        return loss_of_both(tuning, batch, generator)

    card = load_techniques()["space"]
    assert card.tuned is not None
    changed = replace(card, tuned=card.tuned._replace(loss=record))
    monkeypatch.setitem(technique._cards, "space", changed)
    assert tune(zoo, tmp_path / "mine").exit_code == 0
    assert [p for in_training, p in seen if in_training] == [i / 20 for i in range(20)]
    assert {p for in_training, p in seen if not in_training} == {1.0}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_weight_may_have_a_learning_rate_of_its_own(optimizer: Any, tmp_path: Path) -> None:
    weights = {name: torch.eye(4) for name in ("slow", "a.slow", "fast", "a.fast")}
    settings = TrainSettings(1, 1e-3, optimizer, warmup=0, weight_decay=0.0, clip=1e9)
    train_weights(
        weights,
        lambda generator: (torch.ones(1),),
        lambda batch: torch.stack([w.sum() for w in weights.values()]).sum(),
        settings,
        tmp_path,
        rates={"fast": 4.0, "a.fast": 4.0},
    )
    step = {name: (torch.eye(4) - w.detach()).norm() for name, w in weights.items()}
    assert float(step["fast"] / step["slow"]) == pytest.approx(4, rel=1e-3)
    assert float(step["a.fast"] / step["a.slow"]) == pytest.approx(4, rel=1e-3)


# ---------------------------------------------------------------------- figures


MODEL = Model.random(Config(12, 8, 2, 2, 1, 4, 12, 16), scale=0.5)


def test_perplexity_is_the_mean_over_all_tokens() -> None:
    texts = [[1, 2, 3, 4, 5], [6, 7]]
    nats = [
        -float(MODEL.logits(text[:at])[-1].log_softmax(-1)[text[at]])
        for text in texts
        for at in range(1, len(text))
    ]
    documents = [Document(text, 0) for text in texts]
    expected = math.exp(sum(nats) / len(nats))
    assert tuned.measure_perplexity(MODEL, documents) == pytest.approx(expected, rel=1e-5)


def test_the_pace_is_that_of_the_method_on_the_texts_prompts() -> None:
    text = TargetOutput(
        torch.tensor([1, 2, 3, 4]).int(), torch.tensor([1, 2]), torch.empty(0), torch.empty(0)
    )
    made = generate(MODEL, [1, 2], method="jacobi", max_new_tokens=tuned.TIMED_TOKENS)
    assert not isinstance(made, list)
    assert tuned.measure_pace(MODEL, "jacobi", [text]) == made.stats.tokens_per_call
    assert tuned.measure_pace(MODEL, "autoregressive", [text, text]) == 1


def test_without_books_the_held_out_text_is_the_targets(zoo: Zoo, tmp_path: Path) -> None:
    model = tinyspec.load(zoo.big)
    asking = outputs.OutputSettings(texts=2, tokens=6, prompt=8, question=5, batch=2)
    texts = outputs.sample_outputs(model, outputs.make_prompts(model, asking), asking, 0)
    documents, name = tuned.read_held_out_text(model, texts, None)
    assert name == "held-out texts of the target"
    assert [document.tokens for document in documents] == [text.ids.tolist() for text in texts]


def test_the_page_has_the_figures_before_and_after(zoo: Zoo, tmp_path: Path) -> None:
    done = tune(zoo, tmp_path / "mine")
    page = (tmp_path / "mine/README.md").read_text()
    figures = dict(zip(*[iter(done.stdout.split("\n")[0].split())] * 2, strict=True))
    assert figures.keys() == {
        "perplexity_before", "tokens_per_pass_before", "perplexity_after", "tokens_per_pass_after"
    }  # fmt: skip
    for name in ("perplexity", "tokens_per_pass"):
        row = [f"{float(figures[f'{name}_{when}']):.2f}" for when in ("before", "after")]
        assert f"| {row[0]} | {row[1]} |" in page
    assert "keeps its distribution, not that of `big`" in page
