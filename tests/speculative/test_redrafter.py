"""ReDrafter: the search and its tree, both forms of the head, and the names in their files."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.zoo import run, tiny_zoo
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import begin_decoder, run_all_rounds
from tinyspec.laws.traps import redrafter as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import TOKEN_MAP, freeze_target, head_weights, read_head
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting import redrafter
from tinyspec.speculative.drafting.redrafter import RedrafterSettings
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("redrafter")
GREEDY = SamplingParams(0.0)
FORMS = {
    "rnn": RedrafterSettings(),
    "rnn of another width": RedrafterSettings(inner=6, layers=2),
    "mlp": RedrafterSettings(form="mlp", inner=12),
    "mlp, untied": RedrafterSettings(form="mlp", tied=False),
}


def test_trap_a_fitted_redrafter_drafts_the_text() -> None:
    assert traps.fitted_redrafter_drafts_the_text(CARD.make).cases == 46


def test_trap_a_draft_is_what_the_training_forward_says() -> None:
    assert traps.check_redrafter_drafts(CARD.make).branches > 450


def test_trap_the_draft_is_a_function_of_the_text() -> None:
    assert traps.check_redrafter_text(CARD.make).branches > 450


def test_trap_the_draft_is_the_merged_beams() -> None:
    assert traps.draft_is_the_merged_beams(CARD.make).cases == 36


# ---------------------------------------------------------------------- the forms


@pytest.mark.parametrize("form", FORMS)
def test_each_form_drafts_what_its_training_forward_says(form: str) -> None:
    make = partial(CARD.make, beams=1)
    assert feature_laws.check_random_heads(traps.card_of(FORMS[form]), make).branches > 150


def write_greedy_text(model: Model, n: int) -> list[int]:
    text = [0, 1]
    while len(text) < n:
        text.append(int(model.logits(text)[-1].argmax()))
    return text


@pytest.mark.parametrize("form", FORMS)
def test_all_of_a_draft_is_accepted_once_the_head_is_fitted(form: str) -> None:
    config = Config(6, 32, 3, 2, 1, 16, 48, 64)
    model = Model.random(config, 1, torch.float64, scale=0.5)
    text = write_greedy_text(model, 28)
    fitted = feature_laws.fit_head(traps.card_of(FORMS[form]), model, text)
    decoder = begin_decoder(CARD.make, [fitted], (0, 1), max_new_tokens=16, beams=1, length=3)
    assert [len(round.tokens) for round in run_all_rounds(decoder)] == [4] * 4
    assert decoder.context == text[:18]


def test_form_rnn_is_the_papers_formula() -> None:
    model = add_random_head(small_network(1), traps.card_of(RedrafterSettings(layers=2)), 1)
    w, embed = head_weights(model, "redrafter"), model.weights["embed"]
    text, drafted = [0, 1, 2], [3, 0]
    h = model.torch_blocks().hidden_states(torch.tensor([text]), (3,))[0, 0, 1]
    s = torch.zeros(8, dtype=torch.float64)
    for token in [text[2], *drafted]:
        s = F.silu(w["rnn_w.weight"] @ embed[token] + w["rnn_u.weight"] @ s + w["rnn_u.bias"])
    x = torch.cat((h, s))
    for j in range(2):
        x = x + F.silu(w[f"lm_head.{j}.linear.weight"] @ x + w[f"lm_head.{j}.linear.bias"])
    got = feature_laws.trained_forward(CARD, model, text, drafted)
    assert got is not None and torch.allclose(got, w["lm_head.2.weight"] @ x)


def test_form_mlp_mixes_states_and_tokens_in_equal_shares() -> None:
    """Over all steps the share of the first state, squared, is a half."""
    model = add_random_head(small_network(2), traps.card_of(RedrafterSettings(form="mlp")), 2)
    w = {name[11:]: one for name, one in head_weights(model, "redrafter").items()}
    text, drafted = [0, 1, 2], [3, 0]
    s = model.torch_blocks().hidden_states(torch.tensor([text]), (3,))[0, 0, 1]
    kept = 0.5 ** (0.5 / 5)
    for k, token in enumerate([text[2], *drafted]):
        entered = math.sqrt((1 - kept**2) * 8 / 2) * w["emb.0.weight"][token]
        mixed = w[f"proj.{min(k, 1)}.weight"] @ s + entered / kept
        normed = mixed / (mixed.square().mean() + 1e-6).sqrt()
        s = F.gelu(normed * w["ln.0.weight"] + w["ln.0.bias"])
    got = feature_laws.trained_forward(CARD, model, text, drafted)
    assert got is not None and torch.allclose(got, w["head.0.weight"] @ s)


def test_an_untrained_rnn_says_what_the_targets_head_says() -> None:
    model = small_network(3)
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    states = model.torch_blocks().hidden_states(ids, (3,))
    target = freeze_target(model)
    weights = redrafter.initialize_redrafter(target, RedrafterSettings(), 0)
    for depth in range(3):
        said = redrafter.predict_by_recurrence(weights, target, ids, states, depth)
        assert torch.allclose(said, model.training_logits(ids))


CONFIG = Config(99, 8, 3, 2, 1, 4, 12, 64)


def test_form_rnn_has_the_names_of_the_authors_code() -> None:
    own = {"rnn_w.weight": (8, 8), "rnn_u.weight": (8, 8), "rnn_u.bias": (8,)}
    block = {"lm_head.0.linear.weight": (16, 16), "lm_head.0.linear.bias": (16,)}
    settings = RedrafterSettings(draft_vocab=20)
    shapes = redrafter.redrafter_shapes(CONFIG, settings)
    assert shapes == own | block | {"lm_head.1.weight": (20, 16)}
    wide = redrafter.redrafter_shapes(CONFIG, replace(settings, inner=6, layers=2))
    assert wide["input_proj.weight"] == (6, 16) and wide["lm_head.2.weight"] == (20, 6)


@pytest.mark.parametrize("tied", [True, False])
def test_form_mlp_has_the_names_that_vllm_reads(tied: bool) -> None:
    settings = RedrafterSettings(draft_vocab=20, form="mlp", inner=6, tied=tied)
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(1 if tied else 5):
        expected |= {f"speculator.emb.{i}.weight": (99, 6), f"speculator.head.{i}.weight": (20, 6)}
        expected |= {f"speculator.ln.{i}.weight": (6,), f"speculator.ln.{i}.bias": (6,)}
    for i in range(2 if tied else 5):
        expected[f"speculator.proj.{i}.weight"] = (6, 6 if i else 8)
    assert redrafter.redrafter_shapes(CONFIG, settings) == expected


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(TinyspecError, match="form is 'lstm': it must be one of rnn, mlp"):
        RedrafterSettings(form="lstm")
    with pytest.raises(TinyspecError, match="layers is 0"):
        RedrafterSettings(layers=0)


# ---------------------------------------------------------------------- the draft


def propose(model: Model, ends: frozenset[int] = frozenset(), **knobs: Any) -> TokenTree:
    request = Request(model.session(), sampling=GREEDY)
    request.stop = replace(request.stop, eos=ends)
    decoder = CARD.make(request, **knobs)
    decoder.extend((0, 1))
    return decoder.drafter.propose(decoder.context, 4, GREEDY, Seeded(0))


def test_a_text_of_one_token_has_no_draft() -> None:
    model = add_random_head(small_network(2), CARD, 0)
    decoder = CARD.make(Request(model.session(), sampling=GREEDY))
    decoder.extend((1,))
    assert decoder.drafter.propose(decoder.context, 4, GREEDY, Seeded(0)) == TokenTree()


def test_a_text_that_has_ended_stays_among_the_beams() -> None:
    """It is as likely as before, while the others get less likely with each token."""
    model = add_random_head(small_network(2, 6), CARD, 0)
    first = propose(model, beams=1, length=1).tokens[0]
    tree = propose(model, frozenset({first}), beams=4, length=3)
    ended = [node for node, token in enumerate(tree.tokens) if token == first]
    assert ended and not set(ended) & set(tree.parents)
    assert propose(model, frozenset(range(6)), beams=4, length=3).parents == [-1] * 4


def test_only_tokens_of_its_vocabulary_are_proposed() -> None:
    model = add_random_head(small_network(5), traps.card_of(RedrafterSettings(draft_vocab=3)), 5)
    assert head_weights(model, "redrafter")[TOKEN_MAP].tolist() == [0, 2, 3]
    tree = propose(model, beams=9, length=2)
    assert len(tree.tokens) > 3 and 1 not in tree.tokens


def test_form_mlp_is_trained_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    zoo, out = tiny_zoo(tmp_path), str(tmp_path / "head")
    values = (
        'head.form="mlp"', "head.inner=16", "head.draft_vocab=40", "texts.texts=8",
        "texts.tokens=16", "texts.prompt=8", "texts.question=6", "texts.batch=4",
        "train.steps=8", "batch=4",
    )  # fmt: skip
    settings = [word for value in values for word in ("--set", value)]
    of_target = ("--for", zoo.big, "--method", "redrafter")
    done = run("train", "head", *of_target, "--out", out, "--quiet", *settings)
    assert done.exit_code == 0, done.output
    assert read_head(out).settings["form"] == "mlp"
    plain = run("generate", "--model", zoo.big, "the cat", "-n", "12")
    used = run("generate", "--model", zoo.big, "--method", "redrafter", "--head", out, "the cat",
               "-n", "12")  # fmt: skip
    assert used.exit_code == 0 and used.stdout == plain.stdout
