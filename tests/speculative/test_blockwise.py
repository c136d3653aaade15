"""Blockwise decoding: the paper's step, the count of passes, the layer's loss, relaxed acceptance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import run
from tinyspec import models
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import begin_decoder, run_all_rounds
from tinyspec.laws.traps import blockwise as traps
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.heads import freeze_target, head_weights
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.speculative.drafting import blockwise
from tinyspec.technique import Request, TrainingBatch, TranslatorTraining, find_technique
from tinyspec.training.bitext import train_joint_tokenizer
from tinyspec.tree import TokenTree

CARD = find_technique("blockwise")
GREEDY = SamplingParams(0.0)


def test_trap_a_fitted_layer_drafts_the_text() -> None:
    assert traps.fitted_layer_drafts_the_text(CARD.make).cases == 46


def test_trap_a_guess_is_what_the_training_forward_says() -> None:
    assert traps.check_blockwise_drafts(CARD.make).branches > 150


def test_trap_an_untrained_predictor_says_what_the_targets_head_says() -> None:
    assert traps.untrained_layer_repeats_the_head(CARD.make).cases == 18


def test_trap_right_guesses_save_passes() -> None:
    assert traps.right_guesses_save_passes(CARD.make).cases == 6


def test_trap_each_rule_accepts_what_it_allows() -> None:
    assert traps.rules_accept_what_they_allow(CARD.make).cases == 36


def test_trap_translations_are_drafted_by_blocks() -> None:
    assert traps.translations_are_drafted_by_blocks(CARD.make).branches > 60


def test_trap_predictors_are_trained_on_translations() -> None:
    assert traps.predictors_are_trained_on_translations(blockwise.translation_loss).cases == 4


# ---------------------------------------------------------------------- the paper's step


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_runs_is_the_papers_step(seed: int, k: int) -> None:
    """The decoder is one token ahead: the paper's p_1 has written it in the pass before."""
    model = add_random_head(small_network(seed), CARD, seed)

    def predict(text: list[int]) -> list[int]:
        block = [int(model.logits(text)[-1].argmax())]
        for i in range(k - 1):
            row = feature_laws.trained_forward(CARD, model, [*text, block[0]], block[1 : 1 + i])
            block.append(int(row.argmax()))  # type: ignore[union-attr]
        return block

    text = [0, 1, 2]
    decoder = begin_decoder(CARD.make, [model], [*text, *predict(text)[:1]], k=k)
    for number in range(8):
        text = blockwise.extend_by_block(predict, text)
        decoder.step(Seeded(number))
        assert decoder.context[:-1] == text


def test_a_block_of_one_token_is_plain_decoding() -> None:
    model = add_random_head(small_network(1), CARD, 1)
    decoder = begin_decoder(CARD.make, [model], (0, 1), max_new_tokens=9, k=1)
    assert [round.tree for round in run_all_rounds(decoder)] == [TokenTree()] * 9


def propose(model: Model, text: list[int], sampling: SamplingParams = GREEDY) -> TokenTree:
    decoder = CARD.make(Request(model.session(), sampling=sampling))
    decoder.extend(text)
    return decoder.drafter.propose(decoder.context, 4, sampling, Seeded(0))


def test_a_text_of_one_token_has_no_draft() -> None:
    assert propose(add_random_head(small_network(2), CARD, 0), [1]) == TokenTree()


def test_nothing_follows_the_end_of_a_text() -> None:
    model = add_random_head(small_network(2), CARD, 0)
    request = Request(model.session(), sampling=GREEDY)
    request.stop = replace(request.stop, eos=frozenset(range(4)))
    decoder = CARD.make(request)
    decoder.extend((0, 1))
    tree = decoder.drafter.propose(decoder.context, 4, GREEDY, Seeded(0))
    assert len(tree.tokens) == 1


def test_a_penalty_sees_the_guesses_before() -> None:
    """Untrained predictors all say the same token; with a penalty the second one says another."""
    model = small_network(3, 8)
    begun = blockwise.initialize_block(
        freeze_target(model), blockwise.BlockwiseSettings(heads=2), 0
    )
    weights = {**head_weights(add_random_head(model, CARD, 0), "blockwise"), **begun}
    headed = model.with_extras({f"blockwise/{name}": w for name, w in weights.items()})
    first, second = propose(headed, [1, 2]).tokens
    assert first == second
    first, second = propose(headed, [1, 2], SamplingParams(0.0, repetition_penalty=9.0)).tokens
    assert first != second


# ---------------------------------------------------------------------- what is trained


def test_each_part_reads_all_hidden_units() -> None:
    shapes = blockwise.block_shapes(Config(99, 8, 3, 2, 1, 4, 12, 64), CARD.trained.small)  # type: ignore
    assert shapes == {
        "hidden.weight": (24, 8), "hidden.bias": (24,),
        "out.weight": (16, 24), "out.bias": (16,),
    }  # fmt: skip
    assert blockwise.count_parts({name: torch.empty(shape) for name, shape in shapes.items()}) == 2


def training_batch(model: Model) -> TrainingBatch:
    ids = torch.tensor([[0, 1, 2, 3, 1, 0, 2]])
    states = model.torch_blocks().hidden_states(ids, (3,))
    nothing = torch.empty(0)
    return TrainingBatch(ids, torch.ones_like(ids, dtype=torch.bool), states, nothing, nothing)


def test_a_step_trains_one_random_predictor() -> None:
    model = add_random_head(small_network(4), CARD, 4)
    weights = {name: w.requires_grad_() for name, w in head_weights(model, "blockwise").items()}
    target, batch, trained = freeze_target(model), training_batch(model), set[int]()
    for seed in range(8):
        torch.manual_seed(seed)
        loss = blockwise.block_loss(weights, target, batch)
        (gradient,) = torch.autograd.grad(loss, weights["out.bias"])
        parts = gradient.view(2, -1).abs().sum(1) > 0
        assert parts.sum() == 1
        trained.add(int(parts.int().argmax()))
    assert trained == {0, 1}


def test_the_held_out_loss_is_the_mean_over_predictors() -> None:
    model = add_random_head(small_network(4), CARD, 4)
    weights, target = head_weights(model, "blockwise"), freeze_target(model)
    batch, losses = training_batch(model), set[float]()
    for seed in range(8):
        torch.manual_seed(seed)
        losses.add(float(blockwise.block_loss(weights, target, batch)))
    with torch.no_grad():
        mean = float(blockwise.block_loss(weights, target, batch))
    assert len(losses) == 2 and mean == pytest.approx(sum(losses) / 2)


# ---------------------------------------------------------------------- relaxed acceptance


def test_a_least_block_is_kept_whatever_is_guessed() -> None:
    model = add_random_head(small_network(5), CARD, 5)
    decoder = begin_decoder(
        CARD.make, [model], (0, 1), max_new_tokens=30, k=3, rule="block", slack=2
    )
    rounds = run_all_rounds(decoder)
    assert {len(round.tokens) for round in rounds} == {3}


def test_a_least_block_ends_with_the_text() -> None:
    model = add_random_head(small_network(5), CARD, 5)
    decoder = begin_decoder(
        CARD.make, [model], (0, 1), max_new_tokens=7, k=3, rule="block", slack=2
    )
    assert [len(round.tokens) for round in run_all_rounds(decoder)] == [3, 3, 1]


def test_a_rule_without_slack_is_exact() -> None:
    model = add_random_head(small_network(6), CARD, 6)
    texts = []
    for knobs in ({"k": 1}, *({"rule": rule, "k": 3} for rule in traps.RULES)):
        chosen: dict[str, Any] = knobs
        decoder = begin_decoder(CARD.make, [model], (0, 1), max_new_tokens=20, **chosen)
        run_all_rounds(decoder)
        texts.append(decoder.new)
    assert texts == texts[:1] * 4


# ---------------------------------------------------------------------- on translators

LINES = ["a dog runs in the snow and sleeps", "ein hund läuft durch den schnee und schläft"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, and the same weights with a random block layer for three guesses."""
    root = tmp_path_factory.mktemp("zoo")
    tokenizer = train_joint_tokenizer(LINES * 4, 300, root / "tokenizer")
    plain = Seq2SeqConfig(300, 16, 2, 24, 1, 2, 40, extra={"trained_for": "teacher"})
    made = Seq2Seq.create(plain, torch.Generator().manual_seed(0), tokenizer=tokenizer)
    weights = {key: 3 * w if w.ndim == 2 else w for key, w in made.weights.items()}
    Seq2Seq(plain, weights, tokenizer).save(root / "teacher")
    headed = replace(plain, block=3, extra={"trained_for": "blockwise", "teacher": "teacher"})
    generator = torch.Generator().manual_seed(1)
    for name, shape in headed.shapes().items():
        if name.startswith("block."):
            weights[name] = 0.02 * torch.randn(shape, generator=generator)
    Seq2Seq(headed, weights, tokenizer).save(root / "blocks")
    return root


@pytest.fixture
def at_home(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(models, "_zoos", lambda: [zoo])
    return zoo


def translate(model: Any, text: Any = "a dog runs", **options: Any) -> Any:
    return tinyspec.translate(model, text, **options)


def test_a_block_layer_has_the_shapes_of_a_head() -> None:
    config = Seq2SeqConfig(9, 8, 2, 12, 1, 1, 24, block=3)
    own = {name[6:]: shape for name, shape in config.shapes().items() if name[:6] == "block."}
    assert own == blockwise.block_shapes(
        config.stack_config(1), blockwise.BlockwiseSettings(heads=3)
    )


def test_a_new_translators_layer_adds_nothing() -> None:
    config = Seq2SeqConfig(9, 8, 2, 12, 1, 1, 24, block=3)
    model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
    states = torch.randn(1, 4, 8)
    own, *guesses = [blockwise.translation_logits(model, states, i) for i in range(4)]
    assert all(torch.equal(own, rows) for rows in guesses)
    assert float(model.weights["block.hidden.weight"].std()) > 0


def test_the_layer_is_kept_in_the_folder(at_home: Path) -> None:
    model = tinyspec.load_translator("blocks")
    assert model.config.block == 3
    assert model.weights["block.out.weight"].shape == (3 * 16, 3 * 24)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_a_translation_is_that_of_plain_decoding_in_fewer_passes(
    at_home: Path, options: dict[str, Any]
) -> None:
    plain = translate("blocks", method="plain", **options)
    for knobs in ({}, {"k": 2}, {"rule": "distance"}):
        done = translate("blocks", method="blockwise", **knobs, **options)
        assert done.tokens == plain.tokens
        assert done.stats.target_calls <= plain.stats.target_calls
        assert done.stats.encoder_calls == 1
    assert plain.tokens == translate("teacher", method="plain", **options).tokens


def test_a_model_with_a_layer_drafts_by_it_unless_another_method_is_named(at_home: Path) -> None:
    assert max(len(round.tokens) for round in translate("blocks").trace.rounds) == 3
    plain = translate("blocks", method="plain")
    assert translate("blocks", method="jacobi").tokens == plain.tokens


def test_relaxed_rules_take_fewer_passes_on_translations(at_home: Path) -> None:
    exact = translate("blocks", method="blockwise", max_new_tokens=24)
    for rule in traps.RULES:
        loose = translate("blocks", method="blockwise", max_new_tokens=24, rule=rule, slack=64)
        assert len(loose.trace.rounds[1].emitted) == 4  # whatever is guessed is accepted
        assert loose.stats.tokens_per_call >= exact.stats.tokens_per_call
    blocks = translate("blocks", method="blockwise", max_new_tokens=24, rule="block", slack=1)
    assert all(len(round.emitted) >= 2 for round in blocks.trace.rounds[1:-1])


def test_all_sources_share_the_packed_layer(at_home: Path) -> None:
    model = tinyspec.load_translator("blocks")
    first = translate(model, method="blockwise")
    prepared = model.compiled.get("prepared")
    if prepared is not None:  # where the kernels are compiled
        layer = prepared["blockwise"]
        translate(model, "two dogs", method="blockwise")
        assert model.compiled["prepared"]["blockwise"] is layer
        with torch.no_grad():
            model.weights["block.out.bias"] += 1.0  # written to: it is packed anew
        translate(model, method="blockwise")
        assert model.compiled["prepared"]["blockwise"] is not layer
    assert first.tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"model": "teacher"},
            "teacher has no head for blockwise: train a model from a recipe with method",
        ),
        ({"method": "medusa"}, "blocks has no head for medusa"),
        ({"method": "nat"}, "blocks was trained for blockwise, and nat needs a model trained for"),
        ({"slack": 65}, "slack is 65"),
        ({"draft": "teacher"}, "blockwise takes no draft model here"),
    ],
    ids=str,
)
def test_what_cannot_run_is_an_error_of_one_line(
    at_home: Path, options: dict[str, Any], says: str
) -> None:
    asked = {"model": "blocks", "method": "blockwise", **options}
    with pytest.raises(TinyspecError) as error:
        translate(asked.pop("model"), **asked)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_command_finds_the_model_with_a_layer(at_home: Path) -> None:
    done = run("translate", "--method", "blockwise", "a dog runs", "--stats")
    assert done.exit_code == 0, done.output
    plain = run("translate", "--model", "blocks", "--method", "plain", "a dog runs")
    assert done.stdout == plain.stdout
    assert "decoder passes" in done.stderr


def test_a_damaged_layer_is_named_in_one_line(at_home: Path, tmp_path: Path) -> None:
    import json
    import shutil

    for change, says in ((0, "not in the architecture"), (2, "block."), (65, "block")):
        folder = tmp_path / f"damaged-{change}"
        shutil.copytree(at_home / "blocks", folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "block": change}))
        with pytest.raises(TinyspecError) as error:
            tinyspec.load_translator(folder)
        assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_recipe_smooths_labels_and_drops_out_only_what_it_trains(frozen: bool) -> None:
    model, settings = (
        traps.random_block_translator(0),
        blockwise.BlockwiseTranslatorSettings(3, frozen),
    )
    batch = tuple(torch.tensor([list(ids)]) for ids in traps.PAIR)

    def loss(dropout: float, smoothing: float) -> float:
        training = TranslatorTraining(model, None, settings, dropout, smoothing, 0.0)
        torch.manual_seed(0)
        return float(
            blockwise.blockwise_batch_loss(
                training, batch, torch.Generator().manual_seed(1)
            ).detach()
        )

    half, none, full = loss(0, 0.5), loss(0, 0), loss(0, 1)
    assert half == pytest.approx((none + full) / 2) and abs(none - full) > 1e-3
    assert (loss(0.5, 0) == none) == frozen
