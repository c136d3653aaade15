"""The page of each committed model is the one that its recipe, its log and its config give."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyspec.lm import borrowed, checkpoint, seq2seq_file
from tinyspec.training.card import write_card
from tinyspec.training.recipe import Recipe, TranslationRecipe, read_recipe, read_translation_recipe
from tinyspec.training.train import TrainingResult

MODELS = Path(__file__).parent.parent.parent / "models"
LANGUAGE = ["storyteller", "apprentice", "exits-plain", "exits-loss", "exits-layerskip"]
TRANSLATION = [
    "multi30k-teacher",
    "multi30k-nat",
    "multi30k-cmlm",
    "multi30k-exits",
    "multi30k-parallel",
    "multi30k-crf",
    "multi30k-refine",
    "multi30k-sat",
]


def read_result(name: str) -> TrainingResult:
    lines = (MODELS / name / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    end = log[-1]
    return TrainingResult(True, end["step"], end["tokens"], end["seconds"], None, log)


def lines_of_page(
    name: str, page: str, recipe: Recipe | TranslationRecipe, out: Path, **values: Any
) -> tuple[set[str], set[str]]:
    """Return the lines of the page written now, and of the committed one."""
    result = read_result(name)
    curves = {
        "training loss": result.curve("loss"),
        "valid loss": result.curve("valid_loss"),
        "alpha, held out": result.curve("alpha"),
    }
    figures: dict[str, float] = defaultdict(float)
    device = torch.device("cpu")
    write_card(out, page, recipe, result, device, curves, figures=figures, **values)
    pages = ((folder / "README.md").read_text() for folder in (out, MODELS / name))
    new, committed = (set(text.splitlines()) for text in pages)
    return new, committed


def assert_lines_agree(new: set[str], committed: set[str], *kinds: str) -> None:
    """Each line of the new page that begins so stands in the committed page."""
    for kind in kinds:
        lines = {line for line in new if line.startswith(kind)}
        assert lines and lines <= committed, kind


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_page_of_a_language_model_follows_from_its_recipe(name: str, tmp_path: Path) -> None:
    config = checkpoint.read_checkpoint_config(MODELS / name)
    recipe = read_recipe(MODELS / name / "recipe.toml")
    values: dict[str, Any] = {"exits": range(1, config.n_layers + 1), "samples": []}
    new, committed = lines_of_page(
        name, "language_model", recipe, tmp_path, config=config, bytes_per_token=3.5, **values
    )
    kinds = ["# ", "- **shape**", "- **parameters**", "- **licence**", "    tinyspec", "## "]
    opening = "The draft of" if recipe.teacher else "A small language model"
    pair = ["- **draft"] if recipe.draft or recipe.teacher else []
    table = ["  By exit", "  | after layer", "  | ---"] if recipe.exits else []
    assert_lines_agree(new, committed, *kinds, opening, *pair, *table)


@pytest.mark.parametrize("name", TRANSLATION)
def test_the_page_of_a_translation_model_follows_from_its_recipe(name: str, tmp_path: Path) -> None:
    config = seq2seq_file.read_seq2seq_config(MODELS / name)
    recipe = read_translation_recipe(MODELS / name / "recipe.toml")
    new, committed = lines_of_page(
        name, "translator", recipe, tmp_path, config=config, judged=1014, examples=[]
    )
    kinds = ["# ", "English to German", "- **shape**", "- **parameters**", "- **data**", "- **text"]
    assert_lines_agree(new, committed, *kinds, "    tinyspec", "## ", "| English")
    assert (tmp_path / "loss.svg").read_bytes() == (MODELS / name / "loss.svg").read_bytes()


def test_the_page_of_a_draft_follows_from_its_recipe(tmp_path: Path) -> None:
    name = "smollm2-draft"
    config = replace(checkpoint.read_checkpoint_config(MODELS / name), head_ids=tuple(range(8192)))
    recipe = read_recipe(MODELS / name / "recipe.toml")
    values: dict[str, Any] = {"target": "smollm2", "lender": config.extra[borrowed.FROM]}
    values |= {"texts": 1904, "trained_weights": 7_080_768, "folder": f"models/{name}"}
    new, committed = lines_of_page(name, "draft", recipe, tmp_path, config=config, **values)
    kinds = ["# ", "A draft of", "- **shape**", "- **weights**", "- **data**", "    tinyspec"]
    assert_lines_agree(new, committed, *kinds)
    assert (tmp_path / "loss.svg").read_bytes() == (MODELS / name / "loss.svg").read_bytes()
