"""Medusa: its heads, its tree, the sampling settings at each node, and what a wrong head says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import tiny_zoo
from tinyspec import models
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import medusa as traps
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.config import Config
from tinyspec.lm.heads import (
    RANKS,
    TOKEN_MAP,
    FrozenTarget,
    HeadFile,
    HeadMatrix,
    OutputMatrix,
    add_head,
    freeze_target,
    head_weights,
    read_head,
    write_head,
)
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.medusa import (
    MedusaHeads,
    MedusaSettings,
    count_heads,
    head_shapes,
    initialize_heads,
    predict_by_head,
)
from tinyspec.technique import Card, Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("medusa")


def test_trap_fitted_heads_draft_the_whole_text() -> None:
    assert traps.fitted_heads_draft_the_text(CARD.make).cases == 46


def test_trap_a_candidate_is_what_the_training_forward_says() -> None:
    assert traps.check_medusa_drafts(CARD.make).branches > 150


def test_trap_no_tree_of_its_size_is_worth_more() -> None:
    assert traps.tree_follows_the_ranks(CARD.make).cases == 12


def test_an_untrained_head_says_what_the_targets_head_says() -> None:
    model = small_network(1)
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    states = model.torch_blocks().hidden_states(ids, (3,))
    target = freeze_target(model)
    weights = initialize_heads(target, MedusaSettings(heads=3, layers=2), 0)
    for depth in range(3):
        said = predict_by_head(weights, target, ids, states, depth)
        assert torch.allclose(said, model.training_logits(ids))


def test_twelve_blocks_of_a_head_run_in_the_order_of_their_numbers() -> None:
    """A file has block 10 before block 2, and so have the tensors that are read from it."""
    deep = CARD.trained._replace(small=MedusaSettings(heads=1, layers=12))  # type: ignore[union-attr]
    card = replace(CARD, trained=deep)
    model = add_random_head(small_network(1), card, 0)
    in_order = sorted(head_weights(model, "medusa").items())
    model = add_head(model, "medusa", dict(in_order))
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    states = model.torch_blocks().hidden_states(ids, (3,))
    weights = head_weights(model, "medusa")
    expected = predict_by_head(weights, freeze_target(model), ids, states, 0)[0, -1]
    got = MedusaHeads(model).logits(states[0, 0, -1], 1)[0]
    assert torch.allclose(torch.as_tensor(got), expected)


@pytest.mark.parametrize("shared", [False, True])
def test_the_file_has_the_names_and_shapes_that_vllm_reads(shared: bool) -> None:
    settings = MedusaSettings(draft_vocab=20, heads=2, layers=2, shared_rows=shared)
    shapes = head_shapes(Config(99, 8, 3, 2, 1, 4, 12, 64), settings)
    layer = {"weight": (8, 8), "bias": (8,)}
    blocks = {
        f"blocks.{i}.layers.{j}.{part}": shape
        for i in range(2)
        for j in range(2)
        for part, shape in layer.items()
    }
    own = {} if shared else {f"lm_heads.{i}.weight": (20, 8) for i in range(2)}
    assert shapes == blocks | own
    assert count_heads({name: torch.empty(0) for name in shapes}) == 2


def propose(model: Model, text: list[int], sampling: SamplingParams, **knobs: Any) -> TokenTree:
    decoder = CARD.make(Request(model.session(), sampling=sampling), **knobs)
    decoder.extend(text)
    return decoder.drafter.propose(decoder.context, 4, sampling, Seeded(0))


def test_the_states_of_rejected_nodes_do_not_stay_in_memory() -> None:
    """A row that is a view keeps the states of its whole pass."""
    model = add_random_head(small_network(2, 8), CARD, 0)
    request = Request(model.session(), sampling=SamplingParams(0.0))
    request.stop = StoppingCriteria(max_new_tokens=6)
    decoder = CARD.make(request, nodes=7)
    decoder.extend([1, 2])
    decoder.step(Seeded(0))
    states = decoder.drafter.states[1:]
    of_all = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in states}
    assert states and sum(of_all.values()) == sum(s.nbytes for s in states)


def test_a_text_of_one_token_has_no_draft() -> None:
    model = add_random_head(small_network(2), CARD, 0)
    assert propose(model, [1], SamplingParams(0.0)) == TokenTree()


def test_candidates_after_a_penalty_are_ranked_with_the_nodes_own_history() -> None:
    model = add_random_head(small_network(2, 8), CARD, 0)
    text, sampling = [1, 2], SamplingParams(0.0, repetition_penalty=1.5)
    tree, moved = propose(model, text, sampling, nodes=12), 0
    for parent in {*tree.parents}:
        path = list(tree.tokens_on(tree.path(parent)))
        row = feature_laws.trained_forward(CARD, model, text, path)
        assert row is not None
        children = [t for t, up in zip(tree.tokens, tree.parents, strict=True) if up == parent]
        ranked = rank_tokens(sampling, row.numpy(), [*text, *path], 8)
        assert children == ranked[: len(children)]
        moved += ranked != rank_tokens(sampling, row.numpy(), text, 8)
    assert moved > 0  # the path itself changes the order


def test_nothing_follows_the_end_of_a_text() -> None:
    model = add_random_head(small_network(2), CARD, 0)
    everything = frozenset(range(4))
    request = Request(model.session(), sampling=SamplingParams(0.0))
    request.stop = replace(request.stop, eos=everything)
    decoder = CARD.make(request, nodes=12)
    decoder.extend((0, 1))
    tree = decoder.drafter.propose(decoder.context, 4, decoder.sampling, Seeded(0))
    assert set(tree.parents) == {ROOT}


@pytest.mark.slow
def test_a_head_proposes_only_tokens_of_its_vocabulary() -> None:
    """Its rows are not ids: the vocabulary leaves out token 1."""
    small = CARD.trained._replace(small=MedusaSettings(draft_vocab=3, heads=2))  # type: ignore[union-attr]
    card: Card = replace(CARD, trained=small)

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), card, seed)

    model = network(5, 4)
    assert head_weights(model, "medusa")[TOKEN_MAP].tolist() == [0, 2, 3]
    for nodes in (5, 20):  # the larger tree is wider than the vocabulary
        tree = propose(model, [1, 2], SamplingParams(0.0), nodes=nodes)
        assert tree.tokens and 1 not in tree.tokens

    def forward(model: Model, text: Any, drafted: Any) -> Any:
        return feature_laws.trained_forward(card, model, text, drafted)

    def make(request: Request) -> Any:
        return CARD.make(request, nodes=3)

    assert feature_laws.draft_is_training_forward(make, forward, network).branches > 150


def test_two_heads_of_one_target_share_its_weights() -> None:
    model = small_network(3)
    one, two = (add_random_head(model, CARD, seed) for seed in (1, 2))
    assert one is not two and one._path is two._path is model._path
    assert not model.extras
    assert propose(one, [0, 1, 2], SamplingParams(0.0)) != propose(
        two, [0, 1, 2], SamplingParams(0.0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiled_product_is_the_product(dtype: torch.dtype) -> None:
    config = Config(40, 16, 1, 2, 1, 8, 24, 32)
    model = Model.random(config, dtype=dtype, scale=0.3)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 16, generator=generator).to(dtype)
    bias, x = torch.randn(37, generator=generator), torch.randn(3, 16, generator=generator)
    got = HeadMatrix(model, weight, bias)(x)
    expected = x.double() @ weight.double().T + bias
    assert torch.allclose(got.double(), expected, atol=1e-1 if dtype == torch.bfloat16 else 1e-4)
    assert got.shape == (3, 37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_shares_the_output_matrix_of_its_target(is_tied: bool, dtype: torch.dtype) -> None:
    config = Config(40, 16, 1, 2, 1, 8, 24, 32, tied=is_tied)
    model = Model.random(config, dtype=dtype, scale=0.3)
    shared, own = OutputMatrix(model), HeadMatrix(model, freeze_target(model, layers=False).head)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    assert shared.out == own.out == 40
    assert torch.equal(shared(x), own(x))
    ids = torch.tensor([1, 7, 30])
    assert torch.allclose(OutputMatrix(model, ids)(x), own(x)[:, ids], atol=1e-5)
    if model.engine is not None:
        packed = model.engine.matrices["embed" if is_tied else "head"]
        assert shared._packed is packed
        assert OutputMatrix(model, ids)._packed is not packed


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    model = Model.random(Config(40, 16, 1, 2, 1, 8, 24, 32), scale=0.3)
    if model.engine is None:
        pytest.skip("nothing was compiled here")
    matrix = HeadMatrix(model, torch.randn(37, 16, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    together = matrix(x)
    assert all(torch.equal(matrix(x[i : i + 1])[0], together[i]) for i in range(5))


# ---------------------------------------------------------------------- files


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    return tinyspec.load(tiny_zoo(tmp_path).big)


def random_file(target: Model, **more: Any) -> HeadFile:
    settings = {"draft_vocab": 0, "heads": 2, "layers": 1, "shared_rows": True}
    shapes = CARD.trained.all_shapes(target.config, MedusaSettings(**settings))  # type: ignore[union-attr]
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    check = embedding_checksum(target.weights["embed"])
    file = HeadFile("medusa", target.name, check, settings, {}, weights)
    return file._replace(**more)


def test_a_head_that_is_written_is_read_back(target: Model, tmp_path: Path) -> None:
    file = random_file(target)
    write_head(tmp_path / "head", file)
    again = read_head(tmp_path / "head")
    assert again[:4] == file[:4]
    assert all(torch.equal(again.weights[name], w) for name, w in file.weights.items())


def lacking(weights: Any, name: str) -> dict[str, torch.Tensor]:
    return {key: w for key, w in weights.items() if key != name}


BLOCK = "blocks.0.layers.0.weight"
DAMAGES = {
    "another target": (lambda f: {"check": 1}, "was trained on"),
    "another method": (lambda f: {"method": "llma"}, "a head for llma, not for medusa"),
    "a missing tensor": (lambda f: {"weights": lacking(f.weights, BLOCK)}, f"{BLOCK} is missing"),
    "an extra tensor": (
        lambda f: {"weights": {**f.weights, "x": torch.zeros(1)}},
        "x is not a tensor of medusa",
    ),
    "another shape": (
        lambda f: {"weights": {**f.weights, BLOCK: torch.zeros(3, 3)}},
        f"{BLOCK} has the shape [3, 3], expected [32, 32]",
    ),
    "numbers that are whole": (
        lambda f: {"weights": {**f.weights, BLOCK: torch.ones(32, 32, dtype=torch.int8)}},
        f"{BLOCK} has numbers of the type int8",
    ),
    "a number that is not finite": (
        lambda f: {"weights": {**f.weights, BLOCK: torch.full((32, 32), torch.nan)}},
        "not finite",
    ),
    "an unknown setting": (lambda f: {"settings": {"nodes": 1}}, "settings nodes is not known"),
    "a setting without a meaning": (lambda f: {"settings": {"heads": -1}}, "[head] heads is -1"),
    "more heads than any": (lambda f: {"settings": {"heads": 10**9}}, "from 1 to 64"),
    "a token map that does not rise": (
        lambda f: {
            "settings": {**f.settings, "draft_vocab": 2},
            "weights": {**f.weights, TOKEN_MAP: torch.tensor([5, 4])},
        },
        "token_map must be rising ids",
    ),
    "a token beyond the vocabulary": (
        lambda f: {
            "settings": {**f.settings, "draft_vocab": 2},
            "weights": {**f.weights, TOKEN_MAP: torch.tensor([5, 999])},
        },
        "token_map must be rising ids from 0 to",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_named_in_one_line(damage: str, target: Model, tmp_path: Path) -> None:
    change, said = DAMAGES[damage]
    file = random_file(target)
    write_head(tmp_path / "head", file._replace(**change(file)))
    with pytest.raises(TinyspecError) as error:
        tinyspec.generate(target, [1, 2], method="medusa", head=tmp_path / "head")
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tinyspec": 3}', '{"tinyspec": {}}'])
def test_a_damaged_config_is_named_in_one_line(text: str, target: Model, tmp_path: Path) -> None:
    write_head(tmp_path / "head", random_file(target))
    (tmp_path / "head" / "config.json").write_text(text)
    with pytest.raises(TinyspecError, match="not the config of a head"):
        tinyspec.generate(target, [1, 2], method="medusa", head=tmp_path / "head")


def test_a_damaged_file_of_weights_is_named(target: Model, tmp_path: Path) -> None:
    write_head(tmp_path / "head", random_file(target))
    (tmp_path / "head" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(TinyspecError, match="cannot be read"):
        tinyspec.generate(target, [1, 2], method="medusa", head=tmp_path / "head")


def test_a_model_without_a_head_says_how_to_train_one(target: Model) -> None:
    with pytest.raises(TinyspecError, match="tinyspec train head --for big --method medusa"):
        tinyspec.generate(target, [1, 2], method="medusa")


def test_a_head_is_no_model(target: Model, tmp_path: Path) -> None:
    write_head(tmp_path / "head", random_file(target))
    with pytest.raises(TinyspecError, match="is no model but a head of big: use --model big"):
        tinyspec.load(tmp_path / "head")


def test_a_method_without_heads_takes_none(target: Model) -> None:
    with pytest.raises(TinyspecError, match="uses no trained head"):
        tinyspec.generate(target, [1, 2], method="llma", head="somewhere")


def test_a_head_of_the_zoo_that_is_not_trained_says_how(
    target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = "tinyspec train head --recipe models/far/recipe.toml --out models/far"
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "recipe.toml").write_text(f"# Far.\n# {train}\n", encoding="utf-8")
    monkeypatch.setattr(models, "_zoos", lambda: [tmp_path])
    for head in ("far", tmp_path / "far"):
        with pytest.raises(TinyspecError, match=f"far is not trained yet: {train}$"):
            tinyspec.generate(target, [1, 2], method="medusa", head=head)
    with pytest.raises(TinyspecError, match="no such head"):  # another far, which is not there
        tinyspec.generate(target, [1, 2], method="medusa", head="elsewhere/far")


def test_a_folder_that_is_not_there_is_named(target: Model) -> None:
    with pytest.raises(TinyspecError, match="no such head"):
        tinyspec.generate(target, [1, 2], method="medusa", head="nowhere/at/all")
    with pytest.raises(TinyspecError, match="head is 5"):
        tinyspec.generate(target, [1, 2], method="medusa", head=5)  # type: ignore[arg-type]


def test_a_head_stays_with_a_model_that_is_moved_or_copied() -> None:
    model = add_random_head(small_network(2), CARD, 0)
    moved = model.to(dtype=torch.float32)
    assert head_weights(moved, "medusa").keys() == head_weights(model, "medusa").keys()
    other = add_head(model, "medusa", {RANKS: torch.zeros(0, 10)})
    assert list(head_weights(other, "medusa")) == [RANKS]


def test_a_draft_with_a_vocabulary_of_its_own_is_no_target() -> None:
    config = Config(5, 8, 1, 2, 1, 4, 12, 64, head_ids=(1, 3), tied=False)
    with pytest.raises(TinyspecError, match="take the model that it drafts for"):
        freeze_target(Model.random(config))


def test_a_frozen_target_knows_the_row_of_each_token() -> None:
    config = Config(5, 8, 1, 2, 1, 4, 12, 64)
    embed = torch.zeros(5, 8)
    assert FrozenTarget(config, embed, embed).row_of.tolist() == [0, 1, 2, 3, 4]
    some = FrozenTarget(config, embed, embed[[1, 4]], torch.tensor([1, 4]))
    assert some.row_of.tolist() == [-1, 0, -1, -1, 1]
