"""Blockwise decoding, fine-tuned: its loss, a model that is tuned with its layer, and its text."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import begin_decoder
from tinyspec.laws.traps import blockwise_tuned as traps
from tinyspec.lm.heads import RANKS, head_weights
from tinyspec.speculative.drafting.blockwise_tuned import BlockwiseTunedSettings, tuned_block_loss
from tinyspec.technique import TUNED, Guarantee, find_technique
from tinyspec.training.recipe import read_head_recipe

CARD = find_technique("blockwise_tuned")
RECIPE = Path(__file__).parents[2] / "models/storyteller-blockwise-tuned/recipe.toml"


def test_trap_every_predictor_is_drawn() -> None:
    assert traps.every_predictor_is_drawn(tuned_block_loss).cases == 3


def test_trap_the_whole_model_is_trained() -> None:
    assert traps.the_whole_model_is_trained(tuned_block_loss).cases == 24


def test_a_batch_without_a_known_token_has_no_loss() -> None:
    for number in range(6):
        tuning, batch = traps.make_block_tuning(0)
        batch = batch._replace(is_answer=torch.zeros_like(batch.is_answer))
        loss = tuned_block_loss(tuning, batch, torch.Generator().manual_seed(number))
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(loss.detach()) == 0


def test_it_promises_the_tuned_models_distribution() -> None:
    assert CARD.guarantee is Guarantee.EXACT and "tuned model" in CARD.keeps
    assert CARD.promise(slack=1) is Guarantee.LOSSY
    assert not CARD.has_own_target  # the user's model is the tuned one


def test_it_drafts_as_blockwise_with_the_same_layer() -> None:
    model = add_random_head(small_network(3, 8), CARD, 3)
    trees = []
    for name in ("blockwise", "blockwise_tuned"):
        decoder = begin_decoder(find_technique(name).make, [model], (0, 1, 2), k=3)
        sampling = decoder.sampling
        trees.append(decoder.drafter.propose(decoder.context, 4, sampling, Seeded(0)))
    assert trees[0] == trees[1] and len(trees[0].tokens) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"heads": 0}, "[head] heads is 0"), ({"draft_vocab": 5}, "[head] draft_vocab: the layer")],
)
def test_settings_without_a_meaning_are_named_in_one_line(settings: Any, said: str) -> None:
    with pytest.raises(TinyspecError) as error:
        BlockwiseTunedSettings(**settings)
    assert said in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path).big


def test_the_committed_recipe_tunes_a_model_with_its_layer(big: str, tmp_path: Path) -> None:
    """A few steps of it, on a tiny target: the model writes its own text, in fewer passes."""
    assert read_head_recipe(RECIPE).target == "storyteller"
    out, changes = (
        tmp_path / "tuned",
        {
            "target": f'"{big}"',
            "texts.texts": 8, "texts.tokens": 16, "texts.prompt": 8, "texts.question": 6,
            "texts.batch": 4, "train.steps": 20, "train.lr": 1e-3, "train.warmup": 2, "batch": 4,
            "train.valid_every": 10, "train.log_every": 5,
        },
    )  # fmt: skip
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    done = run("train", "head", "--recipe", str(RECIPE), "--out", str(out), "--quiet", *words)
    assert done.exit_code == 0, done.output
    tuned, original = tinyspec.load(out), tinyspec.load(big)
    assert tuned.config.extra[TUNED]["method"] == "blockwise_tuned"
    heads = read_head_recipe(RECIPE).head["heads"]
    weights = head_weights(tuned, "blockwise")
    assert len(weights[RANKS]) == heads and float(weights["out.weight"].float().abs().max()) > 0
    assert any(not torch.equal(w, tuned.weights[name]) for name, w in original.weights.items())
    plain = run("generate", "--model", str(out), "the cat", "-n", "12")
    for method in ("blockwise_tuned", "blockwise"):
        used = run("generate", "--model", str(out), "--method", method, "the cat", "-n", "12")
        assert used.exit_code == 0, used.output
        assert used.stdout == plain.stdout
    relaxed = tinyspec.generate(
        tuned, "the cat", method="blockwise_tuned", rule="block", slack=2, max_new_tokens=12
    )
    assert relaxed.stats.tokens_per_call >= 2.4  # type: ignore[union-attr]
    assert "perplexity" in (out / "README.md").read_text(encoding="utf-8")


def test_a_model_without_a_layer_is_told_to_be_tuned(big: str) -> None:
    said = failed(run("generate", "--model", big, "--method", "blockwise_tuned", "the cat"))
    assert "--method blockwise_tuned --out FOLDER" in said
