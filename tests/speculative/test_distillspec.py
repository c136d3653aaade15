"""DistillSpec: its divergences, who writes the texts, and which draft it takes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import distillspec as traps
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.distillspec import (
    DIVERGENCES,
    append_rest,
    js_divergence,
    total_variation,
)
from tinyspec.technique import find_technique
from tinyspec.training import imitation, outputs
from tinyspec.training.on_policy import DraftTexts, add_target_probs
from tinyspec.training.outputs import OutputSettings, TargetPrompt

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
KL = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
RKL = sum(q * math.log(q / p) for p, q in zip(P, Q, strict=True))
M = [(p + q) / 2 for p, q in zip(P, Q, strict=True)]
JSD = sum(0.5 * x * math.log(x / m) for row in (P, Q) for x, m in zip(row, M, strict=True))
CLOSED = {"kl": KL, "rkl": RKL, "jsd": JSD, "tv": 0.4}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_has_its_closed_form_on_three_tokens(name: str) -> None:
    got = DIVERGENCES[name](
        torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    )
    assert float(got) == pytest.approx(CLOSED[name], abs=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_0_only_where_both_are_equal(name: str) -> None:
    assert float(DIVERGENCES[name](torch.tensor(P), torch.tensor(P))) == pytest.approx(0, abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        p, q = torch.rand(2, 4, generator=generator).softmax(-1)
        assert float(DIVERGENCES[name](p, q)) > 1e-5


def test_total_variation_is_the_chance_of_a_rejection() -> None:
    p, q = torch.rand(2, 50, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert torch.allclose(total_variation(p, q), 1 - torch.minimum(p, q).sum(-1), atol=1e-6)


def test_jensen_shannon_weighs_its_two_sides() -> None:
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.8])
    assert float(js_divergence(p, q, 0.9)) != pytest.approx(float(js_divergence(p, q, 0.1)))
    assert float(js_divergence(p, q, 0.9)) == pytest.approx(float(js_divergence(q, p, 0.1)))
    m = (0.9 * 0.9 + 0.1 * 0.2, 0.9 * 0.1 + 0.1 * 0.8)
    of_p = 0.9 * math.log(0.9 / m[0]) + 0.1 * math.log(0.1 / m[1])
    of_q = 0.2 * math.log(0.2 / m[0]) + 0.8 * math.log(0.8 / m[1])
    assert float(js_divergence(p, q, 0.9)) == pytest.approx(0.9 * of_p + 0.1 * of_q, abs=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_token_of_no_probability_gives_a_finite_gradient(name: str) -> None:
    logits = torch.tensor([0.0, 1.0, -200.0], requires_grad=True)
    DIVERGENCES[name](torch.tensor([0.0, 1.0, 0.0]), logits.softmax(-1)).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_the_rest_of_the_vocabulary_is_one_token_more() -> None:
    assert append_rest(torch.tensor([[0.5, 0.25], [0.5, 0.5]])).tolist() == [
        [0.5, 0.25, 0.25], [0.5, 0.5, 0.0]
    ]  # fmt: skip


def test_trap_the_loss_of_a_draft_is_the_named_divergence() -> None:
    assert traps.loss_is_the_divergence(imitation.imitation_loss).cases == 12


def test_trap_the_current_draft_writes_the_texts() -> None:
    assert traps.draft_writes_its_texts(DraftTexts).cases == 3


# ---------------------------------------------------------------------- texts of the draft


def small_model(seed: int) -> Model:
    return Model.random(Config(40, 16, 1, 2, 1, 8, 24, 64), seed, scale=0.5)


def test_a_text_of_the_draft_has_the_targets_probabilities() -> None:
    target, draft = small_model(0), small_model(1)
    asking = OutputSettings(texts=1, tokens=12, top=5, batch=1)
    text = outputs.sample_outputs(draft, [TargetPrompt([1, 2, 3])], asking, 0)[0]
    given = add_target_probs(target, text, 5)
    rows = target.logits(text.ids.tolist())[text.positions].softmax(-1)
    assert torch.equal(given.ids, text.ids)
    assert torch.equal(given.top_ids.long(), rows.topk(5).indices)
    assert torch.allclose(given.top_probs.float(), rows.topk(5).values, atol=1e-3)


def test_each_refresh_chooses_its_own_prompts(tmp_path: Path) -> None:
    prompts = [TargetPrompt([number, 1, 2]) for number in range(40)]
    asking = OutputSettings(texts=4, tokens=4, top=5, batch=4)
    own = DraftTexts(small_model(0), lambda: small_model(1), prompts, asking, 10, 4, tmp_path)
    chosen = []
    for step in (0, 10, 20):
        own.refresh(step)
        chosen.append([int(text.ids[0]) for text in own.texts])
    assert chosen[0] != chosen[1] != chosen[2] != chosen[0]


# ---------------------------------------------------------------------- which draft


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path)


def test_a_draft_for_another_method_is_not_taken(zoo: Zoo, tmp_path: Path) -> None:
    """The draft that the model's card names was trained for no method in particular."""
    model = tinyspec.load(zoo.big)
    with pytest.raises(TinyspecError, match="draft_for = 'distillspec'"):
        tinyspec.generate(model, [1, 2], method="distillspec")
    assert tinyspec.generate(model, [1, 2], method="distillspec", draft=zoo.small).tokens


def test_a_draft_that_was_trained_for_the_method_is_found(zoo: Zoo, tmp_path: Path) -> None:
    model, small = tinyspec.load(zoo.big), tinyspec.load(zoo.small)
    extra = {"draft_of": "big", "draft_for": "distillspec"}
    config = replace(small.config, extra=extra)
    Model(config, small.weights, small.tokenizer).save(tmp_path / "cache" / "models" / "tuned")
    assert tinyspec.models.find_drafts_of("big", "distillspec") == ["tuned"]
    assert "tuned" not in tinyspec.models.find_drafts_of("big")
    assert tinyspec.generate(model, [1, 2], method="distillspec").tokens


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('distill.loss="l1"', "loss is 'l1'"),
        ('distill.source="books"', "source is 'books'"),
        ("distill.refresh=0", "refresh is 0"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_line(
    setting: str, said: str, zoo: Zoo, tmp_path: Path
) -> None:
    out = str(tmp_path / "draft")
    args: list[Any] = ["--distill", zoo.big, "--out", out, "--quiet", "--set", setting]
    assert said in failed(run("train", "lm", *args))


def test_the_card_names_its_own_draft() -> None:
    card = find_technique("distillspec")
    assert card.own_draft and json.dumps(card.as_dict())
