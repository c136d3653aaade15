"""Hydra: what a head reads, one pass for each depth, the layer of Hydra++, and both losses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.zoo import run, tiny_zoo
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.prove import Profile, prove_technique
from tinyspec.laws.traps import begin_decoder, run_all_rounds
from tinyspec.laws.traps import hydra as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import RANKS, TOKEN_MAP, add_head, freeze_target, head_weights, read_head
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting import hydra
from tinyspec.speculative.drafting.hydra import HydraSettings
from tinyspec.technique import Request, TrainingBatch, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("hydra")
GREEDY = SamplingParams(0.0)
CONFIG = Config(99, 8, 3, 2, 1, 4, 12, 64)


def test_trap_fitted_heads_draft_the_whole_text() -> None:
    assert traps.fitted_hydra_drafts_the_text(CARD.make).cases == 46


def test_trap_a_candidate_is_what_the_training_forward_says() -> None:
    assert traps.check_hydra_drafts(CARD.make).branches > 1000


def test_trap_the_draft_is_a_function_of_the_text() -> None:
    assert traps.check_hydra_text(CARD.make).branches > 500


def test_trap_children_depend_on_their_parents() -> None:
    assert traps.children_depend_on_their_parents(CARD.make).cases == 2


@pytest.mark.slow
def test_hydra_plus_plus_keeps_every_law() -> None:
    card = traps.hydra_of(traps.PLUS)
    assert sum(found.cases for found in prove_technique(card, Profile("once", (0,), None))) > 100


# ---------------------------------------------------------------------- what a head reads


def test_a_head_is_the_papers_formula() -> None:
    """Head 1 reads the state, the newest token and the first draft token."""
    model = add_random_head(small_network(1), traps.hydra_of(HydraSettings(heads=2, layers=2)), 1)
    w, embed = head_weights(model, "hydra"), model.weights["embed"]
    text, drafted = [0, 1, 2], [3]
    h = model.torch_blocks().hidden_states(torch.tensor([text]), (3,))[0, 0, 1]
    x = torch.cat((h, embed[2], embed[3]))

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    z = apply("hydra_mlp.1.0.res_connection", x) + F.silu(apply("hydra_mlp.1.0.linear", x))
    z = z + F.silu(apply("hydra_mlp.1.1.linear", z))
    got = feature_laws.trained_forward(CARD, model, text, drafted)
    assert got is not None and torch.allclose(got, apply("hydra_lm_head.1", z))


@pytest.mark.parametrize("shared", [False, True])
def test_an_untrained_head_says_what_the_targets_head_says(shared: bool) -> None:
    model = small_network(2)
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    states = model.torch_blocks().hidden_states(ids, (3,))
    target = freeze_target(model)
    settings = HydraSettings(heads=3, layers=2, shared_rows=shared)
    weights = hydra.initialize_hydra(target, settings, 0)
    for depth in range(3):
        said = hydra.predict_by_hydra(weights, target, ids, states, depth)
        assert torch.allclose(said, model.training_logits(ids))


def test_the_file_has_the_names_of_the_authors_code() -> None:
    shapes = hydra.hydra_shapes(CONFIG, HydraSettings(draft_vocab=20, heads=2, layers=2))
    expected: dict[str, tuple[int, ...]] = {}
    for i, width in enumerate((16, 24)):
        for part in ("linear", "res_connection"):
            expected[f"hydra_mlp.{i}.0.{part}.weight"] = (8, width)
            expected[f"hydra_mlp.{i}.0.{part}.bias"] = (8,)
        expected |= {f"hydra_mlp.{i}.1.linear.weight": (8, 8), f"hydra_mlp.{i}.1.linear.bias": (8,)}
        expected |= {f"hydra_lm_head.{i}.weight": (20, 8), f"hydra_lm_head.{i}.bias": (20,)}
    assert shapes == expected
    assert hydra.count_hydra_heads({name: torch.empty(0) for name in shapes}) == 2
    plus = hydra.hydra_shapes(CONFIG, HydraSettings(heads=2, prefix=True, shared_rows=True))
    layer = {name for name in plus if not name.startswith("hydra_mlp")}
    assert {name.removeprefix("prefix_embeding_layer.") for name in layer} == {
        "norm.weight",
        *(f"layers.0.{part}.weight" for part in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )),
    }  # fmt: skip


# ---------------------------------------------------------------------- both losses


def training_batch(model: Model) -> TrainingBatch:
    ids = torch.tensor([[0, 1, 2, 3, 1, 0, 2, 3]])
    states = model.torch_blocks().hidden_states(ids, (3,))
    nothing = torch.empty(0)
    return TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool), states, nothing, nothing)


def test_plain_heads_learn_the_tokens() -> None:
    model = traps.random_hydra(HydraSettings(heads=2), 3, 4)
    weights, target, batch = (
        head_weights(model, "hydra"),
        freeze_target(model),
        training_batch(model),
    )
    expected = 0.0
    for depth in range(2):
        logits = hydra.predict_by_hydra(weights, target, batch.ids, batch.states, depth)[0]
        chances = logits.log_softmax(-1)[range(6 - depth), batch.ids[0, 2 + depth :]]
        expected -= float(chances.mean())
    assert float(hydra.hydra_loss(weights, target, batch)) == pytest.approx(expected)


def test_hydra_plus_plus_learns_the_targets_distribution() -> None:
    model = traps.random_hydra(HydraSettings(heads=2, prefix=True), 3, 4)
    weights, target, batch = (
        head_weights(model, "hydra"),
        freeze_target(model),
        training_batch(model),
    )
    p, expected = model.training_logits(batch.ids)[0].softmax(-1), 0.0
    for depth in range(2):
        logits = hydra.predict_by_hydra(weights, target, batch.ids, batch.states, depth)[0]
        of_target = p[1 + depth : -1]  # of the tokens 2 + depth and later
        rows = logits[: len(of_target)].log_softmax(-1)
        expected -= float((of_target * rows).sum(-1).mean())
    assert float(hydra.hydra_loss(weights, target, batch)) == pytest.approx(expected)


# ---------------------------------------------------------------------- the draft


def write_greedy_text(model: Model, n: int) -> list[int]:
    text = [0, 1]
    while len(text) < n:
        text.append(int(model.logits(text)[-1].argmax()))
    return text


def test_all_of_a_draft_is_accepted_once_the_heads_are_fitted() -> None:
    model = Model.random(Config(6, 32, 3, 2, 1, 16, 48, 64), 1, torch.float64, scale=0.5)
    text = write_greedy_text(model, 28)
    fitted = feature_laws.fit_head(traps.hydra_of(HydraSettings(heads=3)), model, text)
    decoder = begin_decoder(CARD.make, [fitted], (0, 1), max_new_tokens=16)
    assert [len(round.tokens) for round in run_all_rounds(decoder)] == [4] * 4
    assert decoder.context == text[:18]


def propose(model: Model, text: list[int], ends: Any = (), **knobs: Any) -> TokenTree:
    request = Request(model.session(), sampling=GREEDY)
    request.stop = replace(request.stop, eos=frozenset(ends))
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder.drafter.propose(decoder.context, 4, GREEDY, Seeded(0))


@pytest.mark.parametrize("settings", [traps.PLAIN, traps.PLUS])
def test_a_text_of_one_token_has_no_draft(settings: HydraSettings) -> None:
    assert not propose(traps.random_hydra(settings, 0, 4), [1]).tokens


def test_nothing_follows_the_end_of_a_text() -> None:
    tree = propose(traps.random_hydra(traps.PLAIN, 0, 4), [0, 1], range(4), nodes=12)
    assert set(tree.parents) == {ROOT}


def test_heads_whose_candidates_were_never_right_draft_nothing() -> None:
    model = traps.random_hydra(traps.PLAIN, 0, 4)
    weights = {**head_weights(model, "hydra"), RANKS: torch.zeros(3, 10)}
    assert not propose(add_head(model, "hydra", weights), [0, 1]).tokens


def test_the_nodes_of_a_depth_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last depth has no children, so it is no head's input."""
    model = traps.random_hydra(traps.PLAIN, 0, 4)
    passes, real = list[tuple[int, int]](), hydra.HydraHeads.logits

    def count(heads: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        passes.append((depth, len(x)))
        return real(heads, x, depth)

    monkeypatch.setattr(hydra.HydraHeads, "logits", count)
    tree = propose(model, [0, 1], nodes=12)
    inner = [len(tree.path(node)) for node in {*tree.parents} - {ROOT}]
    assert passes == [(0, 1), *((depth, inner.count(depth)) for depth in sorted({*inner}))]


def test_only_tokens_of_its_vocabulary_are_proposed() -> None:
    model = traps.random_hydra(HydraSettings(draft_vocab=3, heads=2), 5, 4)
    assert head_weights(model, "hydra")[TOKEN_MAP].tolist() == [0, 2, 3]
    tree = propose(model, [1, 2], nodes=12)
    assert tree.tokens and 1 not in tree.tokens


def test_the_layer_runs_each_state_once() -> None:
    """The forward log has the prompt but for its last state, then what each round has added."""
    model = traps.random_hydra(traps.PLUS, 1, 4)
    decoder = begin_decoder(CARD.make, [model], (0, 1, 2, 3), max_new_tokens=12, nodes=6)
    rounds = run_all_rounds(decoder)
    drafted = [round for round in rounds if round.tree.tokens]
    ran = [sum(call.rows for call in round.draft_calls) for round in drafted]
    assert ran == [1, *(len(round.tokens) for round in drafted[:-1])]


def test_hydra_plus_plus_is_trained_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    zoo, out = tiny_zoo(tmp_path), str(tmp_path / "head")
    values = (
        "head.prefix=true", "head.heads=2", "head.shared_rows=true", "head.draft_vocab=40",
        "texts.texts=8", "texts.tokens=16", "texts.prompt=8", "texts.question=6", "texts.batch=4",
        "train.steps=8", "batch=4",
    )  # fmt: skip
    settings = [word for value in values for word in ("--set", value)]
    done = run("train", "head", "--for", zoo.big, "--method", "hydra", "--out", out, "--quiet",
               *settings)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert read_head(out).settings["prefix"] is True
    plain = run("generate", "--model", zoo.big, "the cat", "-n", "12")
    used = run("generate", "--model", zoo.big, "--method", "hydra", "--head", out, "the cat", "-n",
               "12")  # fmt: skip
    assert used.exit_code == 0 and used.stdout == plain.stdout
