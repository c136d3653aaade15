"""A draft that borrows its embeddings is saved without them and loaded with its target's.

The logits of tokens that it does not have are minus infinity.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import tinyspec
from tests.zoo import tiny_zoo
from tinyspec import generation, models
from tinyspec.errors import TinyspecError
from tinyspec.lm import borrowed, checkpoint
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.tree import TokenTree

SAYS = (0, 5, 7, 40, 250, 285)


def draft_of(target: Model, name: str, tied: bool = True) -> Model:
    """A draft of one layer that can say six tokens."""
    c = target.config
    config = Config(
        vocab_size=c.vocab_size, d_model=c.d_model, n_layers=1, n_heads=2, n_kv_heads=1,
        head_dim=16, d_ff=24,
        max_positions=96, tied=False, head_ids=SAYS, extra={borrowed.FROM: name, "draft_of": name},
    )  # fmt: skip
    own = Model.random(config, seed=3, scale=0.3).weights
    return Model(
        config,
        {**own, **borrowed.shared_weights(target.weights, SAYS)},
        target.tokenizer,
        "borrower",
    )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a target and of its draft, beside each other."""
    zoo = tiny_zoo(tmp_path)
    draft_of(tinyspec.load(zoo.big), "../big").save(tmp_path / "draft")
    return Path(zoo.big), tmp_path / "draft"


def test_what_is_saved_holds_no_embedding_and_loads_with_the_targets(
    pair: tuple[Path, Path],
) -> None:
    target, folder = tinyspec.load(pair[0]), pair[1]
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert not any("embed" in name or "head" in name for name in stored)
    assert stored[borrowed.SAYS].tolist() == list(SAYS)
    draft = tinyspec.load(folder)
    assert draft.config.head_ids == SAYS
    assert torch.equal(draft.weights["embed"], target.weights["embed"])
    assert torch.equal(draft.weights["head"], target.weights["embed"][list(SAYS)])
    made = draft_of(target, "../big")
    assert torch.equal(draft.logits([1, 2, 3]), made.logits([1, 2, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_logits_live_in_the_targets_vocabulary_and_are_minus_infinity_outside(
    pair: tuple[Path, Path], dtype: torch.dtype
) -> None:
    draft = tinyspec.load(pair[1], dtype=dtype)
    ids = [1, 2, 3, 284]  # ids that it cannot say may be read
    logits = draft.logits(ids)
    assert logits.shape == (4, 286)
    in_vocabulary = torch.zeros(286, dtype=torch.bool)
    in_vocabulary[list(SAYS)] = True
    assert (logits[:, ~in_vocabulary] == -torch.inf).all() and logits[
        :, in_vocabulary
    ].isfinite().all()
    blocks = Blocks(draft.config, dict(draft.weights))
    dense = blocks.training_logits(torch.tensor([ids]))[0]
    close = 0.1 if dtype == torch.bfloat16 else 1e-4
    assert torch.allclose(
        dense[:, in_vocabulary].float(), logits[:, in_vocabulary].float(), atol=close, rtol=close
    )
    assert torch.equal(blocks.head_logits(torch.tensor([ids]))[0], dense[:, in_vocabulary])
    session = draft.session()
    session.extend(ids)
    assert torch.allclose(session.score(TokenTree()).logits[0], logits[-1], atol=close)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_drafts_for_its_target_and_changes_no_greedy_token(
    pair: tuple[Path, Path], temperature: float
) -> None:
    target, draft = (tinyspec.load(folder, dtype="float64") for folder in pair)
    options = {"max_new_tokens": 24, "temperature": temperature}
    found = generation.generate(
        target, [1, 2, 3], method="speculative_decoding", draft=draft, **options
    )
    if temperature == 0:
        assert found.tokens == generation.generate(target, [1, 2, 3], **options).tokens  # type: ignore[union-attr]
    assert len(found.tokens) == 24  # type: ignore[union-attr]


def test_an_untied_target_lends_the_rows_of_its_head(tmp_path: Path) -> None:
    zoo = tiny_zoo(tmp_path)
    tied = tinyspec.load(zoo.big)
    config = checkpoint.replace(tied.config, tied=False)
    weights = {
        **tied.weights,
        "head": torch.randn(286, 32, generator=torch.Generator().manual_seed(1)),
    }
    Model(config, weights, tied.tokenizer).save(tmp_path / "untied")
    draft_of(tinyspec.load(tmp_path / "untied"), "../untied").save(tmp_path / "draft")
    assert torch.equal(
        tinyspec.load(tmp_path / "draft").weights["head"], weights["head"][list(SAYS)]
    )


def test_a_target_by_name_is_found_where_models_are(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_of(tinyspec.load(pair[0]), "mine").save(tmp_path / "other" / "draft")
    with pytest.raises(TinyspecError, match="tinyspec models fetch mine"):
        tinyspec.load(tmp_path / "other" / "draft")
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    tinyspec.load(pair[0]).save(models.models_folder() / "mine")
    assert tinyspec.load(tmp_path / "other" / "draft").config.head_ids == SAYS


def test_another_target_and_damage_are_an_error_of_one_line(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, folder = pair
    good = (
        (target / "config.json").read_bytes(),
        safetensors.torch.load_file(target / "model.safetensors"),
    )
    changed = {name: w + 1 if "embed" in name else w for name, w in good[1].items()}
    safetensors.torch.save_file(changed, target / "model.safetensors")
    with pytest.raises(TinyspecError, match="are not those that this draft was made with"):
        tinyspec.load(folder)
    safetensors.torch.save_file(good[1], target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for change, says in (
        ({"hidden_size": 48}, "d_model is 48"),
        ({"tinyspec": {borrowed.FROM: 7}}, "expected the name of a model"),
        ({"tinyspec": {borrowed.FROM: "../draft"}}, "borrows its own"),
        ({"tinyspec": {borrowed.FROM: "../nowhere"}}, "not on this machine"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(TinyspecError, match=says):
            tinyspec.load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    for ids in ([5, 5], [7, 286], [-1, 3], []):
        safetensors.torch.save_file(
            stored | {borrowed.SAYS: torch.tensor(ids, dtype=torch.int32)},
            folder / "model.safetensors",
        )
        with pytest.raises(TinyspecError, match="rising ids from 0 to 285"):
            tinyspec.load(folder)
    safetensors.torch.save_file(
        {k: v for k, v in stored.items() if k != borrowed.SAYS}, folder / "model.safetensors"
    )
    with pytest.raises(TinyspecError, match="the ids that the draft may say"):
        tinyspec.load(folder)


@pytest.mark.parametrize("shape", [(), (286,), (10, 32)])
def test_a_targets_matrix_of_another_shape_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tied = tinyspec.load(tiny_zoo(tmp_path).big)
    weights = {**tied.weights, "head": tied.weights["embed"] + 1}
    target = Model(checkpoint.replace(tied.config, tied=False), weights, tied.tokenizer)
    target.save(tmp_path / "untied")
    draft_of(target, "../untied").save(tmp_path / "draft")
    file = tmp_path / "untied" / "model.safetensors"
    good = safetensors.torch.load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        safetensors.torch.save_file(good | {name: torch.zeros(shape)}, file)
        with pytest.raises(TinyspecError, match=rf"untied: {name} has shape"):
            tinyspec.load(tmp_path / "draft")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64])
def test_ids_of_another_type_are_refused(pair: tuple[Path, Path], dtype: torch.dtype) -> None:
    file = pair[1] / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    stored[borrowed.SAYS] = torch.tensor([0, 1]).to(dtype)
    safetensors.torch.save_file(stored, file)
    with pytest.raises(TinyspecError, match="rising ids from 0 to 285"):
        tinyspec.load(pair[1])


def test_a_target_whose_name_is_too_long_for_a_file_is_not_there(pair: tuple[Path, Path]) -> None:
    file = pair[1] / "config.json"
    config = json.loads(file.read_text())
    config["tinyspec"][borrowed.FROM] = "a" * 300
    file.write_text(json.dumps(config))
    with pytest.raises(TinyspecError, match="not on this machine"):
        checkpoint.read_checkpoint(pair[1])


def test_a_config_that_says_only_some_ids_cannot_be_stored_without_a_lender(
    pair: tuple[Path, Path],
) -> None:
    draft = tinyspec.load(pair[1])
    with pytest.raises(TinyspecError, match="cannot express this Config's head_ids"):
        checkpoint.write_checkpoint(
            pair[1], checkpoint.replace(draft.config, extra={}), dict(draft.weights)
        )
