"""Medusa-2: its loss and schedule, a model that is tuned with its heads, and what it writes."""

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
from tinyspec.laws.traps import medusa2 as traps
from tinyspec.lm.heads import RANKED, RANKS, head_settings, head_weights
from tinyspec.speculative.drafting.medusa2 import Medusa2Settings, medusa2_loss, schedule_weight
from tinyspec.technique import TUNED, Guarantee, find_technique

CARD = find_technique("medusa2")

SMALL = {
    "texts.texts": 8, "texts.tokens": 16, "texts.prompt": 8, "texts.question": 6, "texts.batch": 4,
    "train.steps": 20, "train.lr": 1e-3, "train.warmup": 2, "batch": 4,
    "train.valid_every": 10, "train.log_every": 5, "head.heads": 2,
}  # fmt: skip
SETTINGS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]


def test_trap_the_loss_is_the_joint_loss() -> None:
    assert traps.loss_is_the_joint_loss(medusa2_loss).cases == 12


def test_trap_the_heads_come_first() -> None:
    assert traps.heads_come_first(medusa2_loss).cases == 8


@pytest.mark.parametrize(
    ("schedule", "rise", "expected"),
    [
        ("constant", 1.0, (1, 1, 1)),
        ("linear", 1.0, (0, 0.5, 1)),
        ("linear", 0.5, (0, 1, 1)),
        ("sine", 1.0, (0, 0.5**0.5, 1)),
        ("sine", 0.0, (1, 1, 1)),
    ],
)
def test_the_weight_of_the_heads_rises(schedule: str, rise: float, expected: Any) -> None:
    settings = Medusa2Settings(schedule=schedule, rise=rise)
    got = [schedule_weight(settings, progress) for progress in (0.0, 0.5, 1.0)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("distill", [True, False])
def test_a_batch_without_a_known_token_has_no_loss(distill: bool) -> None:
    tuning, batch = traps.make_tuning_case(0, 1.0, self_distill=distill)
    batch = batch._replace(is_answer=torch.zeros_like(batch.is_answer))
    loss = medusa2_loss(tuning, batch, torch.Generator())
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0


def test_the_original_model_has_no_divergence_from_itself() -> None:
    """With its own distributions, whole, L_0 is 0 at first: what is left are the heads."""
    tuning, batch = traps.make_tuning_case(1, 1.0, heads_weight=0.0)
    p = tuning.original.training_logits(batch.ids).softmax(-1).detach()
    batch = batch._replace(top_probs=p, top_ids=torch.arange(4).expand_as(p))
    loss = medusa2_loss(tuning, batch, torch.Generator())
    assert float(loss.detach()) == pytest.approx(0, abs=1e-5)


# ---------------------------------------------------------------------- the card


def test_it_promises_the_tuned_models_distribution() -> None:
    assert CARD.guarantee is Guarantee.EXACT and "tuned model" in CARD.keeps
    assert not CARD.has_own_target  # the user's model is the tuned one
    assert CARD.tuned is not None and CARD.tuned.rate == 4.0


def test_it_drafts_as_medusa_with_the_same_heads() -> None:
    model = add_random_head(small_network(3, 8), CARD, 3)
    trees = []
    for name in ("medusa", "medusa2"):
        decoder = begin_decoder(find_technique(name).make, [model], (0, 1, 2), nodes=9)
        sampling = decoder.sampling
        trees.append(decoder.drafter.propose(decoder.context, 4, sampling, Seeded(0)))
    assert trees[0] == trees[1] and trees[0].tokens


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"heads": 0}, "[head] heads is 0"),
        ({"draft_vocab": 5}, "[head] draft_vocab"),
        ({"heads_weight": -0.1}, "[head] heads_weight is -0.1"),
        ({"heads_weight": float("inf")}, "[head] heads_weight is inf"),
        ({"heads_weight": float("nan")}, "[head] heads_weight is nan"),
        ({"rise": 1.5}, "[head] rise is 1.5"),
        ({"heads_first": "0.3"}, "[head] heads_first is '0.3'"),
        ({"schedule": "cosine"}, "[head] schedule is 'cosine'"),
    ],
)
def test_settings_without_a_meaning_are_named_in_one_line(settings: Any, said: str) -> None:
    with pytest.raises(TinyspecError) as error:
        Medusa2Settings(**settings)
    assert said in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path).big


def train(big: str, out: Path, *more: str) -> Any:
    args = ["--for", big, "--method", "medusa2", "--out", str(out), "--quiet"]
    return run("train", "head", *args, *SETTINGS, *more)


def test_a_model_is_tuned_with_its_heads_and_writes_its_own_text(big: str, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    done = train(big, out)
    assert done.exit_code == 0, done.output
    assert {"config.json", "model.safetensors", "README.md", "recipe.toml"} <= {
        file.name for file in out.iterdir()
    }
    tuned, original = tinyspec.load(out), tinyspec.load(big)
    assert tuned.config.extra[TUNED]["method"] == "medusa2"
    weights = head_weights(tuned, "medusa")
    assert weights[RANKS].shape == (2, RANKED) and 0 <= float(weights[RANKS].sum(1).max()) <= 1
    assert head_settings(tuned, "medusa") == {
        "draft_vocab": 0, "heads": 2, "layers": 1, "shared_rows": False
    }  # fmt: skip
    assert any(
        not torch.equal(w, tuned.weights[name]) for name, w in original.weights.items()
    )  # it is another model
    for method in ("medusa2", "medusa", "typical_acceptance"):
        used = run("generate", "--model", str(out), "--method", method, "the cat", "-n", "12")
        plain = run("generate", "--model", str(out), "the cat", "-n", "12")
        assert used.exit_code == 0, used.output
        assert used.stdout == plain.stdout
    page = (out / "README.md").read_text(encoding="utf-8")
    assert "perplexity" in page and "medusa2" in page


def test_the_model_stays_as_it_is_while_the_heads_come_first(big: str, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    assert train(big, out, "--set", "head.heads_first=1.0").exit_code == 0
    tuned, original = tinyspec.load(out), tinyspec.load(big)
    for name, weight in original.weights.items():
        assert torch.equal(weight.bfloat16(), tuned.weights[name].bfloat16()), name
    heads = head_weights(tuned, "medusa")
    assert float(heads["blocks.0.layers.0.weight"].abs().max()) > 0  # they began as zero


def test_a_setting_without_a_meaning_stops_the_command(big: str, tmp_path: Path) -> None:
    said = failed(train(big, tmp_path / "tuned", "--set", 'head.schedule="cosine"'))
    assert "[head] schedule is 'cosine'" in said
    assert not (tmp_path / "tuned/model.safetensors").exists()


def test_a_model_without_heads_is_told_to_be_tuned(big: str) -> None:
    said = failed(run("generate", "--model", big, "--method", "medusa2", "the cat"))
    assert "big has no heads for medusa2" in said and "--method medusa2 --out FOLDER" in said


DAMAGES = {
    "no table of ranks": ({RANKS: None}, "ranks is missing"),
    "a missing tensor": ({"blocks.0.layers.0.bias": None}, "blocks.0.layers.0.bias is missing"),
    "another shape": ({"blocks.0.layers.0.bias": torch.zeros(3)}, "has the shape [3]"),
    "a number that is not finite": ({RANKS: torch.full((2, RANKED), torch.nan)}, "not finite"),
    "a tensor too many": ({"x": torch.zeros(1)}, "x is not a tensor of medusa"),
    "an unknown setting": ({"settings/nodes": torch.tensor(3)}, "settings nodes is not known"),
    "a setting without a meaning": ({"settings/heads": torch.tensor(-1)}, "[head] heads is -1"),
    "a setting that is no text": (
        {"settings/heads": torch.tensor([0.5, 300.0])},
        "settings of its head for medusa cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_heads_of_a_model_are_named_in_one_line(damage: str, big: str) -> None:
    change, said = DAMAGES[damage]
    headed = add_random_head(tinyspec.load(big), CARD, 0)
    extras = {**headed.extras, **{f"medusa/{name}": w for name, w in change.items()}}
    kept = {name: w for name, w in extras.items() if w is not None}
    for method in ("medusa", "medusa2"):
        with pytest.raises(TinyspecError) as error:
            tinyspec.generate(headed.with_extras(kept), [1, 2], method=method)
        assert said in str(error.value) and "\n" not in str(error.value)
