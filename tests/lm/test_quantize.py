"""`tinyspec quantize`: a folder whose quantised weights are loaded with the bits of the others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.lm.small import GPT2, LLAMA, model
from tests.zoo import failed, run
from tinyspec import models
from tinyspec.cli.models import QUANTISED_KINDS
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.gguf_export import quantise_model
from tinyspec.lm.quantised import SCALE_BYTES, QuantisedWeights, quantise_matrix

WIDE = replace(LLAMA, d_model=64, head_dim=16, d_ff=96)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_the_folder_holds_each_matrix_rounded_as_llama_cpp_rounds_it(
    tmp_path: Path, kind: str
) -> None:
    before = model(WIDE, 3)
    kept = quantise_model(before, kind, tmp_path / "small")
    assert isinstance(kept.weights, QuantisedWeights)
    whole = models.load(tmp_path / "small", dtype="bfloat16").weights
    for name, shape in before.config.shapes().items():
        due = before.weights[name].to(torch.bfloat16)
        if len(shape) == 2 and name != "positions":
            due = quantise_matrix(before.weights[name], kind.upper()).expand()
        assert torch.equal(whole[name], due), name
        assert torch.equal(kept.weights[name], due), name
    assert models.load(tmp_path / "small").logits([1, 2, 3]).isfinite().all()


def test_the_command_offers_every_kind_that_is_multiplied() -> None:
    assert set(QUANTISED_KINDS) == {kind.lower() for kind in SCALE_BYTES}


@pytest.mark.slow
def test_the_command_says_what_it_cost(tmp_path: Path) -> None:
    out = tmp_path / "q8"
    done = run("quantize", "storyteller", "--to", "q8_0", "--out", str(out))
    assert done.exit_code == 0 and done.stdout.strip() == str(out)
    assert "perplexity" in done.stderr
    assert checkpoint.read_checkpoint(out).extras == {}


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path) -> None:
    said = failed(run("quantize", "storyteller", "--to", "q4_0", "--out", str(tmp_path)))
    assert "give a new folder" in said and not list(tmp_path.iterdir())


def test_what_cannot_be_quantised_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    model(replace(WIDE, d_ff=48), 0).save(tmp_path / "odd")
    out = tmp_path / "out"
    said = failed(run("quantize", str(tmp_path / "odd"), "--to", "q4_0", "--out", str(out)))
    assert "works on blocks of 32" in said and not out.exists()
    assert "q5_0" in failed(run("quantize", "storyteller", "--to", "q5_0", "--out", str(out)))


def test_weights_beyond_the_scales_are_named(tmp_path: Path) -> None:
    big = model(WIDE, 0)
    big.weights["0.up.weight"][0, 0] = 3e7
    big.save(tmp_path / "big")
    out = tmp_path / "out"
    said = failed(run("quantize", str(tmp_path / "big"), "--to", "q8_0", "--out", str(out)))
    assert "numbers that q8_0 cannot hold" in said and not out.exists()


def test_learned_positions_stay_as_they_are(tmp_path: Path) -> None:
    """As in llama.cpp: they are looked up, never multiplied."""
    before = model(replace(GPT2, d_model=64, head_dim=16, d_ff=96), 3)
    kept = quantise_model(before, "q4_0", tmp_path / "small")
    assert torch.equal(kept.weights["positions"], before.weights["positions"].bfloat16())


def test_a_place_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TinyspecError, match="cannot be written"):
        quantise_model(model(WIDE, 0), "q8_0", tmp_path / "file" / "out")
