"""A draft learns from its teacher's own texts, under the repetition penalty of its users."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.test_train_lm import RECIPE, run, zoo
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.generation import generate
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training.own_texts import (
    OwnTexts,
    OwnTextSettings,
    apply_repetition_penalty,
    write_own_texts,
)
from tinyspec.training.recipe import read_recipe
from tinyspec.training.train_lm import distillation_loss

__all__ = ["zoo"]  # the fixture

CONFIG = Config(
    vocab_size=20,
    d_model=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=32,
    max_positions=64,
)
BOOKS = torch.arange(1, 200) % 20
OWN = OwnTextSettings(texts=8, tokens=24, prompt=10, batch=2)


def teacher(seed: int = 0) -> Model:
    return Model.random(CONFIG, seed, scale=0.4)


def test_the_penalty_is_the_one_of_decoding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, inputs = (
        torch.randn(3, 6, 7, generator=generator),
        torch.randint(7, (3, 6), generator=generator),
    )
    strengths = torch.tensor([1.0, 1.2, 2.0])
    rows = apply_repetition_penalty(logits, inputs, strengths).softmax(-1)
    for row, strength in enumerate(strengths.tolist()):
        sampling = SamplingParams(repetition_penalty=strength)
        for at in range(6):
            expected = sampling.probs(logits[row, at], inputs[row, : at + 1].tolist())
            np.testing.assert_allclose(rows[row, at].numpy(), expected, atol=1e-6)


def test_models_with_equal_distributions_differ_under_a_penalty() -> None:
    logits, inputs = (
        torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1)),
        torch.zeros(2, 5, dtype=torch.long),
    )
    strengths = torch.full((2,), 1.3)
    assert float(distillation_loss(logits, logits + 4)) == pytest.approx(0, abs=1e-6)
    assert (
        float(
            distillation_loss(
                *(apply_repetition_penalty(x, inputs, strengths) for x in (logits, logits + 4))
            )
        )
        > 0.01
    )


def test_texts_open_with_the_books_and_go_on_as_the_teacher_does(tmp_path: Path) -> None:
    texts, penalties = write_own_texts(teacher(), BOOKS, OWN, tmp_path)
    assert texts.shape == (8, 25)
    assert penalties.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2])
    for text, penalty in zip(
        texts[::4].tolist(), penalties[::4].tolist(), strict=True
    ):  # of the greedy batches
        assert text[:8] == [(text[0] + i) % 20 for i in range(8)]
        made = generate(
            teacher(), text[:10], max_new_tokens=15, temperature=0.0, repetition_penalty=penalty
        )
        assert made.tokens == text[10:]


def test_an_interrupted_writing_goes_on(tmp_path: Path) -> None:
    texts, _ = write_own_texts(teacher(), BOOKS, OWN, tmp_path)
    (tmp_path / "00002.pt").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again, _ = write_own_texts(teacher(), BOOKS, OWN, tmp_path)
    assert torch.equal(texts, again)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in kept} == kept


def test_batches_are_of_both_kinds_and_held_out_texts_are_not_among_them(tmp_path: Path) -> None:
    texts, penalties = torch.arange(40 * 25).reshape(40, 25), torch.full((40,), 1.2)
    written = OwnTexts(texts, penalties, OWN)
    books = torch.full((3, 24), -1)
    draw = written.mix_batches(lambda generator: (books, books), 4)
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(generator) for _ in range(200)]
    own = [batch for batch in drawn if int(batch[0][0, 0]) >= 0]
    assert 70 < len(own) < 130
    assert all(
        (batch[1] == batch[0] + 1).all() and batch[2].tolist() == pytest.approx([1.2] * 4)
        for batch in own
    )
    first = {int(batch[0][row, 0]) for batch in own for row in range(4)}
    assert first == {int(text[0]) for text in texts} - {0, 500}
    assert {round(float(x), 1) for batch in drawn if int(batch[0][0, 0]) < 0 for x in batch[2]} == {
        1.0,
        1.2,
    }


def test_alpha_is_that_of_the_penalized_distributions() -> None:
    target, draft = teacher(0), teacher(1)
    texts = torch.randint(20, (1, 9), generator=torch.Generator().manual_seed(2))
    strength = 1.5
    alpha = OwnTexts(texts, torch.tensor([strength]), OWN).measure_acceptance(
        target.training_logits, draft.training_logits
    )
    overlaps = []
    for at in range(1, 9):
        ids = texts[0, :at].tolist()
        p, q = (
            SamplingParams(repetition_penalty=strength).probs(m.logits(ids)[-1], ids)
            for m in (target, draft)
        )
        overlaps.append(float(np.minimum(p, q).sum()))
    assert alpha == pytest.approx(sum(overlaps) / 8, abs=1e-5)


SECTION = "\n[own]\ntexts = 8\ntokens = 16\nprompt = 8\nbatch = 4\n"


def test_a_recipe_with_own_texts_is_followed_and_an_interruption_costs_nothing(
    zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(zoo, "teller")
    recipe = zoo / "helper/recipe.toml"
    recipe.write_text(recipe.read_text() + SECTION)
    assert run(zoo, "helper")
    log = (zoo / "helper/log.jsonl").read_text()
    assert "alpha_own" in log
    whole = checkpoint.read_checkpoint(zoo / "helper").weights
    (zoo / "helper/model.safetensors").unlink()
    among = OwnTexts.mix_batches

    def stopping(written: OwnTexts, *args):
        draw, drawn = among(written, *args), iter(range(100))

        def interrupted(generator):
            if next(drawn) == 7:
                os.kill(os.getpid(), signal.SIGINT)
            return draw(generator)

        return interrupted

    with monkeypatch.context() as patch:
        patch.setattr(OwnTexts, "mix_batches", stopping)
        assert not run(zoo, "helper")
    assert run(zoo, "helper")
    for name, weight in checkpoint.read_checkpoint(zoo / "helper").weights.items():
        assert torch.equal(weight, whole[name])


def test_what_cannot_be_trained_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for text, complaint in (
        (RECIPE + SECTION, "teacher = NAME is missing"),
        (
            RECIPE.replace("[shape]", 'teacher = "x"\n[shape]') + SECTION.replace("texts", "text"),
            "did you mean 'texts'",
        ),
        (
            RECIPE.replace("[shape]", 'teacher = "x"\n[shape]') + SECTION + "share = 2\n",
            "share is 2",
        ),
        (
            RECIPE.replace("[shape]", 'teacher = "x"\n[shape]') + SECTION + "penalties = []\n",
            "at least one of each",
        ),
        (RECIPE.replace("[shape]", 'teacher = "x"\n[shape]') + SECTION + "tokens = 4\n", "."),
    ):
        path.write_text(text)
        with pytest.raises(TinyspecError, match=complaint):
            read_recipe(path)
