"""A head is trained on its target's own texts and states: caches, batches, figures, command."""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import tinyspec
from tests.training.interrupting import check_it_goes_on_to_the_same_weights
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.lm.heads import (
    RANKS,
    TOKEN_MAP,
    FrozenTarget,
    freeze_target,
    head_weights,
    mean_cross_entropy,
    read_head,
    restore_bytes,
    store_in_bytes,
)
from tinyspec.lm.model import Model
from tinyspec.lm.stack import UnrolledLayer
from tinyspec.technique import Guarantee, TrainingBatch, find_technique, load_techniques
from tinyspec.training import features, heads, outputs
from tinyspec.training.imitation import most_frequent_tokens
from tinyspec.training.outputs import OutputSettings, TargetOutput
from tinyspec.training.text_cache import write_part

SMALL = {
    "texts.texts": 8, "texts.tokens": 16, "texts.prompt": 8, "texts.question": 6, "texts.batch": 4,
    "train.steps": 20, "train.lr": 1e-2, "train.warmup": 2, "batch": 4,
    "train.valid_every": 10, "train.log_every": 5,
}  # fmt: skip
SETTINGS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path)


METHODS = [
    name
    for name, card in load_techniques().items()
    if card.trained is not None and not card.head_of and card.tuned is None  # a head of its own
]


def train(zoo: Zoo, out: Path, *more: str, method: str = "medusa") -> Any:
    args = ["--for", zoo.big, "--method", method, "--out", str(out), "--quiet"]
    trained = load_techniques()[method].trained if method in METHODS else None
    small = {} if trained is None else vars(trained.small)
    toml = {name: json.dumps(value) for name, value in small.items()}
    own = [word for name, text in toml.items() for word in ("--set", f"head.{name}={text}")]
    return run("train", "head", *args, *own, *SETTINGS, *more)


def write_texts(model: Model) -> list[TargetOutput]:
    asking = OutputSettings(texts=4, tokens=10, prompt=8, question=5, batch=4)
    return outputs.sample_outputs(model, outputs.make_prompts(model, asking), asking, 0)


# ---------------------------------------------------------------------- states and batches


def test_the_states_are_those_of_the_text(zoo: Zoo, tmp_path: Path) -> None:
    """Layer 0 is the embedding, the last one comes after the final norm."""
    model = tinyspec.load(zoo.big)
    texts = write_texts(model)
    states = features.write_states(model, texts, (0, 2), 4, tmp_path)
    for text, own in zip(texts, states, strict=True):
        dense = model.torch_blocks().hidden_states(text.ids[None].long(), (0, 2))[0]
        assert own.shape == (2, len(text.ids) - 1, 32)
        assert torch.allclose(own.float(), dense[:, :-1].float(), atol=0.05, rtol=0.02)


def test_states_are_computed_once(zoo: Zoo, tmp_path: Path, monkeypatch: Any) -> None:
    model = tinyspec.load(zoo.big)
    texts = write_texts(model)
    first = features.write_states(model, texts, (2,), 4, tmp_path)
    monkeypatch.setattr(model, "session", None)
    again = features.write_states(model, texts, (2,), 4, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_states_of_other_texts_are_computed_anew(zoo: Zoo, tmp_path: Path) -> None:
    """The prompts may have changed since: then the texts have, and with them the states."""
    model = tinyspec.load(zoo.big)
    texts = write_texts(model)
    features.write_states(model, texts, (2,), 4, tmp_path)
    longer = [text._replace(ids=torch.cat([text.ids, text.ids[:1]])) for text in texts]
    states = features.write_states(model, longer, (2,), 4, tmp_path)
    assert [own.shape[1] for own in states] == [len(text.ids) - 1 for text in longer]


def test_the_draft_vocabulary_is_counted_without_the_held_out_texts(
    zoo: Zoo, tmp_path: Path, monkeypatch: Any
) -> None:
    """Else the figures on held-out texts would know their tokens."""
    counted = list[int]()

    def count(texts: Any, *rest: Any) -> Any:
        counted.append(len(texts))
        return most_frequent_tokens(texts, *rest)

    monkeypatch.setattr(heads, "most_frequent_tokens", count)
    done = train(zoo, tmp_path / "out", "--set", "head.draft_vocab=40", "--set", "train.steps=1")
    assert done.exit_code == 0, done.output
    assert counted == [7]  # of 8 texts the first is held out


def test_a_disk_too_small_is_found_before_anything_is_computed(
    zoo: Zoo, tmp_path: Path, monkeypatch: Any
) -> None:
    model = tinyspec.load(zoo.big)
    texts = write_texts(model)
    usage = features.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(tinyspec.errors.TinyspecError, match="GB left: train on fewer texts"):
        features.write_states(model, texts, (2,), 4, tmp_path)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_batch_holds_the_end_of_a_long_text_and_all_of_a_short_one(zoo: Zoo) -> None:
    short, long = (
        TargetOutput(
            torch.arange(n).int(),
            torch.arange(2, n - 1),
            torch.full((n - 3, 2), n).int(),
            torch.full((n - 3, 2), 0.5).half(),
        )
        for n in (5, 9)
    )
    states = [torch.arange(n - 1.0).view(1, -1, 1).bfloat16() for n in (5, 9)]
    collate = features.make_feature_collate([short, long], states)
    batch = collate([0, 1], 6, torch.device("cpu"))
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4, 0], [3, 4, 5, 6, 7, 8]]
    assert batch.is_answer.int().tolist() == [[0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert batch.states[:, 0, :, 0].tolist() == [[0, 1, 2, 3, 0, 0], [3, 4, 5, 6, 7, 0]]
    assert batch.top_ids[:, :, 0].tolist() == [[0, 0, 5, 5, 0, 0], [9, 9, 9, 9, 9, 0]]


def test_a_guess_is_known_where_the_target_wrote_that_token() -> None:
    """Row t of depth i is of the token t + 2 + i; tokens of the prompt are not known."""
    model = Model.random(tinyspec.lm.config.Config(9, 4, 1, 1, 1, 4, 4, 16))
    target = freeze_target(model, torch.tensor([4, 5, 6, 8]))
    ids = torch.arange(3, 9)[None]
    is_answer = torch.tensor([[False, True, True, True, True, False]])
    nothing = torch.empty(0)
    batch = TrainingBatch(ids, is_answer, nothing, nothing, nothing)
    is_known, rows = batch.known_tokens(target, 0)
    assert is_known.tolist() == [[True, True, False, True]]  # 5, 6, and 8, but 7 has no row
    assert rows[is_known].tolist() == [1, 2, 3]
    assert batch.known_tokens(target, 2)[0].tolist() == [[False, True]]


# ---------------------------------------------------------------------- figures


def test_ranks_chain_and_alpha_are_counted_where_all_guesses_are_known() -> None:
    """A head that copies: at depth i it says what the state names, which is right or wrong."""
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    config = Model.random(tinyspec.lm.config.Config(12, 4, 1, 1, 1, 4, 4, 16)).config
    target = FrozenTarget(config, torch.empty(12, 4), torch.empty(12, 4))
    nothing = torch.empty(0)
    batch = TrainingBatch(ids, torch.ones(1, 8, dtype=torch.bool), nothing, nothing, nothing)

    def predict(weights: Any, target: Any, ids: Any, states: Any, depth: int) -> Any:
        right = (ids + 2 + depth) % 4
        logits = torch.nn.functional.one_hot(right, 12).float()
        logits[0, 1] = torch.arange(12, 0, -1.0)  # there it says 0, then 1, then 2 ...
        return logits

    trained = find_technique("medusa").trained
    assert trained is not None
    trained = trained._replace(predict=predict, depths=lambda weights: 2)
    ranks, in_a_row = heads.measure_ranks(trained, {}, target, [batch])
    # Row 1 guesses the tokens 3 and 0, which have the ranks 3 and 0 there. There are five rows.
    assert ranks[0, :4].tolist() == pytest.approx([0.8, 0, 0, 0.2])
    assert ranks[1, :4].tolist() == pytest.approx([1, 0, 0, 0])
    assert in_a_row.tolist() == pytest.approx([4 / 5, 4 / 5])  # row 1 is wrong at once
    figures, _ = heads.measure_head(trained, {}, target, [batch])
    expected = {"top1": 4 / 5, "chain": 2 * 4 / 5, "alpha_1": 4 / 5, "alpha_2": 1.0}
    assert figures == pytest.approx(expected)


def test_of_equal_logits_the_lowest_token_is_first() -> None:
    """As when a draft is made from them."""
    target = freeze_target(small_network(1))
    ids = torch.tensor([[0, 1, 2, 3, 1, 0]])
    nothing, written = torch.empty(0), torch.ones(1, 6, dtype=torch.bool)
    batch = TrainingBatch(ids, written, nothing, nothing, nothing)
    trained = find_technique("medusa").trained
    assert trained is not None
    trained = trained._replace(
        predict=lambda weights, target, ids, states, depth: torch.zeros(*ids.shape, 4),
        depths=lambda weights: 1,
    )
    ranks, _ = heads.measure_ranks(trained, {}, target, [batch])
    assert ranks[0, :4].tolist() == pytest.approx([0.25, 0.25, 0.25, 0.25])  # of 2, 3, 1, 0


def test_the_cross_entropy_is_its_closed_form_and_0_where_nothing_is_known() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).log()
    of_rows = mean_cross_entropy(logits, torch.tensor([0, 1]))
    assert float(of_rows) == pytest.approx((math.log(2) + math.log(4)) / 2)
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    of_distributions = mean_cross_entropy(logits, p)
    assert float(of_distributions) == pytest.approx((1.5 * math.log(2) + math.log(2)) / 2)
    assert float(mean_cross_entropy(logits[:0], torch.tensor([], dtype=torch.long))) == 0


@pytest.mark.parametrize("method", ["eagle", "eagle3", "redrafter"])
def test_ranks_are_measured_without_running_a_step_twice(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A depth that goes on from the one before it has the ranks that `predict` gives."""
    card = find_technique(method)
    model, trained = add_random_head(small_network(1), card, 1), card.trained
    assert trained is not None and trained.unroll is not None
    weights = head_weights(model, method)
    target = freeze_target(model, weights.get(TOKEN_MAP))
    ids = torch.randint(4, (2, 14), generator=torch.Generator().manual_seed(0))
    states = model.torch_blocks().hidden_states(ids, trained.layers(model.config, trained.small))
    nothing = torch.empty(0)
    batch = TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool), states, nothing, nothing)
    alone = trained._replace(unroll=None)
    expected = heads.measure_ranks(alone, weights, target, [batch])
    runs, real = [0], UnrolledLayer.run

    def count(*args: Any) -> Any:
        runs[0] += 1
        return real(*args)

    monkeypatch.setattr(UnrolledLayer, "run", count)
    got = heads.measure_ranks(trained, weights, target, [batch])
    assert all(map(torch.equal, got, expected))
    assert 0 < got[1].sum() < trained.depths(weights)
    assert runs[0] == (0 if method == "redrafter" else trained.depths(weights))


def test_texts_too_short_to_measure_a_head_are_named() -> None:
    trained = find_technique("medusa").trained
    assert trained is not None
    nothing = torch.empty(0)
    batch = TrainingBatch(torch.zeros(1, 3, dtype=torch.long), *[nothing] * 4)
    target = FrozenTarget(None, nothing, nothing)  # type: ignore[arg-type]
    deep = trained._replace(depths=lambda weights: 4)
    with pytest.raises(tinyspec.errors.TinyspecError, match="too short to measure"):
        heads.measure_ranks(deep, {}, target, [batch])


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_a_known_token_has_no_loss(method: str) -> None:
    """No number of it is NaN, which would end the training."""
    trained = load_techniques()[method].trained
    assert trained is not None
    model = Model.random(tinyspec.lm.config.Config(9, 8, 3, 2, 1, 4, 12, 16))
    target = freeze_target(model)._replace(settings=trained.small)
    begun = trained.initialize(target, trained.small, 0)
    ids = torch.arange(8)[None]
    states = model.torch_blocks().hidden_states(ids, trained.layers(model.config, trained.small))
    nothing = torch.zeros(1, 8, dtype=torch.bool)
    batch = TrainingBatch(ids, nothing, states, torch.zeros(1, 8, 2).long(), torch.zeros(1, 8, 2))
    assert float(trained.loss(begun, target, batch)) == 0


@pytest.mark.parametrize("method", ["eagle", "eagle3", "hydra", "redrafter", "medusa"])
def test_a_text_shorter_than_its_draft_can_be_trained_on(method: str) -> None:
    trained = load_techniques()[method].trained
    assert trained is not None
    model, ids = small_network(1), torch.arange(2)[None]
    target = freeze_target(model)._replace(settings=trained.small)
    begun = trained.initialize(target, trained.small, 0)
    states = model.torch_blocks().hidden_states(ids, trained.layers(model.config, trained.small))
    written, nothing = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, 2)
    batch = TrainingBatch(ids, written, states, nothing.long(), nothing)
    assert math.isfinite(float(trained.loss(begun, target, batch)))


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize("method", METHODS)
def test_a_head_is_trained_and_used(method: str, zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "head"
    done = train(zoo, out, method=method)
    assert done.exit_code == 0, done.output
    assert {file.name for file in out.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "log.jsonl", "loss.svg", "recipe.toml"
    }  # fmt: skip
    head, card = read_head(out), load_techniques()[method]
    assert (head.method, head.target) == (method, "big")
    assert card.trained is not None
    if card.trained.predict is None:
        assert RANKS not in head.weights
        assert "**quality**" in (out / "README.md").read_text()
    else:
        assert head.weights[RANKS].shape == (card.trained.depths(head.weights), 10)
    told = ["--model", zoo.big, "--method", method, "--head", str(out), "the cat", "-n", "12"]
    used = run("generate", *told, "--stats")
    if card.promise() is Guarantee.LOSSY:
        assert used.exit_code == 0, used.output
        assert card.lossy is not None
        used = run("generate", *told, f"--{card.lossy[0]}", str(card.lossy[1]), "--stats")
    plain = run("generate", "--model", zoo.big, "the cat", "-n", "12")
    assert used.exit_code == 0, used.output
    assert used.stdout == plain.stdout


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss(method: str, zoo: Zoo, tmp_path: Path) -> None:
    assert train(zoo, tmp_path / "head", method=method).exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "head/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]


def test_a_vocabulary_of_the_heads_own_is_kept_in_its_file(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "head"
    done = train(zoo, out, "--set", "head.draft_vocab=40", "--set", "head.shared_rows=true")
    assert done.exit_code == 0, done.output
    weights = read_head(out).weights
    assert len(weights["token_map"]) == 40
    assert not any(name.startswith("lm_heads") for name in weights)
    used = run("generate", "--model", zoo.big, "--method", "medusa", "--head", str(out), "the cat")
    assert used.exit_code == 0, used.output


def test_a_head_in_bytes_takes_half_the_file_and_nearly_the_same_weights(
    zoo: Zoo, tmp_path: Path
) -> None:
    wide, bytes_ = tmp_path / "wide", tmp_path / "bytes"
    for out, stored in ((wide, "bfloat16"), (bytes_, "int8")):
        done = train(zoo, out, "--set", f"stored='{stored}'")
        assert done.exit_code == 0, done.output
        assert f"stored in {stored};" in (out / "README.md").read_text()
    sizes = [(out / "model.safetensors").stat().st_size for out in (wide, bytes_)]
    assert 0.5 < sizes[1] / sizes[0] < 0.6
    two, one = read_head(wide).weights, read_head(bytes_).weights
    assert one.keys() == two.keys()
    for name, w in two.items():
        if w.is_floating_point():
            largest = w.float().abs().amax(-1, keepdim=True)
            allowed = largest * (0.5 / 127 + 2**-8 if w.ndim > 1 else 2**-8)
            assert bool(((one[name] - w).abs() <= allowed).all()), name
    used = run("generate", "--model", zoo.big, "--method", "medusa", "--head", str(bytes_), "a")
    assert used.exit_code == 0, used.output


def test_whole_numbers_and_a_row_of_zeros_come_back_from_bytes() -> None:
    rows = torch.tensor([[127.0, -127.0, 3.0], [0.0, 0.0, 0.0], [-254.0, 2.0, 0.0]])
    weights = {"a": rows, "bias": torch.tensor([0.3])}
    stored = store_in_bytes(weights)
    assert {name: w.dtype for name, w in stored.items()} == {
        "a": torch.int8, "a_scale": torch.float32, "bias": torch.float32
    }  # fmt: skip
    again = restore_bytes(stored)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], w) for name, w in weights.items())


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda scale: [], " has numbers of the type int8"),
        (lambda scale: [scale.T], "_scale is not a tensor of medusa"),
        (lambda scale: [scale * math.nan], " has numbers that are not finite"),
    ],
)
def test_bytes_whose_scales_are_wrong_are_one_line(
    damage: Callable[[Tensor], list[Tensor]], wrong: str, zoo: Zoo, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    assert train(zoo, out, "--set", "stored='int8'").exit_code == 0
    file = out / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    name = next(name for name, w in stored.items() if w.dtype == torch.int8)
    for scale in damage(stored.pop(f"{name}_scale")):
        stored[f"{name}_scale"] = scale.contiguous()
    safetensors.torch.save_file(stored, file)
    told = ["--model", zoo.big, "--method", "medusa", "--head", str(out), "a"]
    assert f"{name}{wrong}" in failed(run("generate", *told))


def test_an_interrupted_training_ends_with_the_same_weights(
    zoo: Zoo, tmp_path: Path, monkeypatch: Any
) -> None:
    check_it_goes_on_to_the_same_weights(
        lambda out: train(zoo, out), lambda out: read_head(out).weights, tmp_path, monkeypatch
    )


# ---------------------------------------------------------------------- what is wrong is one line


BAD = {
    "a method that trains nothing": (["--method", "llma"], "method llma trains nothing"),
    "a method whose own draft is trained": (
        ["--method", "distillspec"],
        "method distillspec trains no head; its draft is trained from a recipe with a section "
        "[distill] and extra.draft_for = 'distillspec': tinyspec train lm --recipe FILE",
    ),
    "a method with a draft": (
        ["--method", "osd"],
        "its draft is trained from a recipe with a section [distill]: tinyspec train lm",
    ),
    "a method with a translation model": (
        ["--method", "specdec"],
        "is trained from a recipe with method = 'specdec': tinyspec train mt --recipe FILE",
    ),
    "a method with a model whose layers repeat": (
        ["--method", "speed"],
        "is trained by: tinyspec train lm --recipe models/storyteller-speed/recipe.toml",
    ),
    "a method that makes its draft": (
        ["--method", "quantized_draft"],
        "method quantized_draft trains nothing",
    ),
    "an unknown method": (["--method", "nowhere"], "there is no method 'nowhere'"),
    "an unknown key": (["--set", "head.nodes=3"], "[head] nodes is not known"),
    "no heads": (["--set", "head.heads=0"], "[head] heads is 0"),
    "a flag for a number": (
        ["--set", "head.heads=true"],
        "[head] heads is True: it must be a whole number from 1 to 64",
    ),
    "a number for a flag": (
        ["--set", "head.shared_rows=1"],
        "[head] shared_rows is 1: it must be true or false",
    ),
    "a negative vocabulary": (["--set", "head.draft_vocab=-1"], "draft_vocab is -1"),
    "a vocabulary beyond the target's": (["--set", "head.draft_vocab=999"], "draft_vocab is 999"),
    "no texts": (["--set", "texts.texts=0"], "texts is 0"),
    "a flag for texts": (["--set", "texts.texts=true"], "texts is True"),
    "less than no steps": (["--set", "train.steps=-1"], "[train] steps is -1"),
    "an unknown optimizer": (
        ["--set", 'train.optimizer="x"'],
        "[train] optimizer 'x' is not known; known: adamw, muon",
    ),
    "one beta": (["--set", "train.betas=5"], "[train] betas is 5: it must be a list"),
    "a rate that is no number": (["--set", "train.lr=nan"], "it must be a finite number"),
    "no texts in a step": (["--set", "batch=0"], "batch is 0: it must be at least 1"),
    "a number for a name": (["--set", "name=5"], "name is 5: it must be a text"),
    "a number for a table": (["--set", "extra=5"], "extra is 5: it must be a table"),
    "a seed without an end": (["--seed", "99999999999999999999"], "[train] seed is 9999"),
    "an unknown device": (["--device", "foo"], "unknown device 'foo'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_recipe_is_said_in_one_line(
    case: str, zoo: Zoo, tmp_path: Path
) -> None:
    more, message = BAD[case]
    method = more[1] if more[0] == "--method" else "medusa"
    rest = [] if more[0] == "--method" else more
    assert message in failed(train(zoo, tmp_path / "head", *rest, method=method))
    left = [path.name for path in tmp_path.glob("head/**/*") if path.is_file()]
    assert set(left) <= {"recipe.toml"}


def test_a_trained_head_is_not_overwritten(zoo: Zoo, tmp_path: Path) -> None:
    assert train(zoo, tmp_path / "head").exit_code == 0
    assert "already holds a trained model" in failed(train(zoo, tmp_path / "head"))
    assert train(zoo, tmp_path / "head", "--restart").exit_code == 0


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_a_folder_that_holds_another_model_is_left_alone(
    name: str, zoo: Zoo, tmp_path: Path
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / name).write_text("mine")
    assert "already holds a trained model" in failed(train(zoo, tmp_path / "head"))
    assert [path.name for path in (tmp_path / "head").iterdir()] == [name]


def test_a_folder_may_have_any_name(zoo: Zoo, tmp_path: Path) -> None:
    assert train(zoo, tmp_path / 'a"b\\c').exit_code == 0


def test_a_damaged_state_is_named(zoo: Zoo, tmp_path: Path) -> None:
    state = tmp_path / "head/.tinyspec/state.pt"
    state.parent.mkdir(parents=True)
    for junk in (b"junk", pickle.dumps({"a": 1})):
        state.write_bytes(junk)
        assert "damaged" in failed(train(zoo, tmp_path / "head"))


def test_a_wrong_setting_loses_nothing_of_a_begun_training(zoo: Zoo, tmp_path: Path) -> None:
    kept = tmp_path / "head/.tinyspec"
    kept.mkdir(parents=True)
    for name in ("state.pt", "recipe.toml"):
        (kept / name).write_text("mine")
    assert "steps is -1" in failed(train(zoo, tmp_path / "head", "--set", "train.steps=-1"))
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "state.pt": "mine",
        "recipe.toml": "mine",
    }


def test_an_unknown_model_leaves_no_folder(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    call = ["train", "head", "--method", "medusa", "--out", str(tmp_path / "head"), "--for"]
    assert "unknown model 'nosuch'" in failed(run(*call, "nosuch"))
    assert "config.json: missing" in failed(run(*call, str(tmp_path / "empty")))
    assert not (tmp_path / "head").exists()


def test_what_a_full_disk_cuts_off_is_removed(tmp_path: Path) -> None:
    def write() -> None:
        with write_part(tmp_path / "a") as part:
            part.write_text("half")
            raise RuntimeError("iostream error")

    with pytest.raises(TinyspecError, match="is the disk full"):
        write()
    assert not [*tmp_path.iterdir()]


def test_for_and_method_go_together(zoo: Zoo, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "head")]
    assert "go together" in failed(run("train", "head", "--for", zoo.big, *out))
    assert "give --recipe FILE" in failed(run("train", "head", *out))


@pytest.mark.parametrize(
    ("recipe", "command", "right"),
    [
        ("storyteller-distillspec", "head", "train lm"),
        ("multi30k-sat", "head", "train mt"),
        ("storyteller-medusa", "lm", "train head"),
        ("multi30k-sat", "lm", "train mt"),
        ("apprentice", "mt", "train lm"),
    ],
)
def test_a_recipe_of_another_command_names_it(
    recipe: str, command: str, right: str, tmp_path: Path
) -> None:
    file = Path(__file__).parents[2] / "models" / recipe / "recipe.toml"
    message = failed(run("train", command, "--recipe", str(file), "--out", str(tmp_path / "out")))
    assert f"this is a recipe for `tinyspec {right}`" in message
    assert not (tmp_path / "out").exists()
