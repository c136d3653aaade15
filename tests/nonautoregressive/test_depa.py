"""DePA: both directions first, then all words at once from mixtures of target embeddings."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.nonautoregressive.test_nat import fit
from tinyspec.decoding.refine import Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.rewriting_laws import random_reader
from tinyspec.laws.traps.depa import SOURCE, SOURCES, TARGET, TARGET_SIDE, TRAPS, small_mixer
from tinyspec.laws.traps.parallel import small_translator
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.depa import (
    COPY,
    QUERY,
    QUERY_BIAS,
    TARGET_WORDS,
    DepaRefiner,
    DepaSettings,
    add_depa_weights,
    depa_batch_loss,
    depa_loss,
    find_phase,
    find_target_words,
    initialize_as_identities,
    list_target_words,
    reverse_words,
    transform_inputs,
    transform_position,
    translate_transformed,
)
from tinyspec.nonautoregressive.parallel import ParallelRefiner, length_nll, parallel_loss
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import Guarantee, RefineRequest, TranslatorTraining, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.recipe import read_translation_recipe
from tinyspec.training.translation_tasks import teacher_forcing_loss

RECIPE = Path(__file__).parents[2] / "models/multi30k-depa/recipe.toml"


def run(model: Seq2Seq, teacher: Seq2Seq | None, source: Any, **knobs: Any) -> Refinement:
    request = RefineRequest(model, teacher, [])
    refiner = find_technique("depa").refiner(request, **knobs)
    running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    assert len(list(running)) == 1
    return running


def test_printed_algorithm_is_what_runs() -> None:
    for seed, source in product(range(3), SOURCES):
        model = small_mixer(seed)
        w, root = model.weights, model.config.d_model**0.5
        memory = model.encode(torch.tensor([source]))
        got = transform_inputs(model, memory, 6)[0]
        words = model.embed_words(torch.tensor(source)).tolist()
        places, table = model.positions.tolist(), model.embedding[TARGET_SIDE].tolist()
        matrices = w[COPY].tolist(), w[QUERY].tolist(), w[QUERY_BIAS].tolist()
        for i in range(6):
            read = transform_position(places[i], words, places[: len(words)], table, *matrices)
            assert torch.allclose(got[i], torch.tensor(read, dtype=got.dtype) * root, atol=1e-10)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.law)
def test_it_passes_its_traps(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the input transformation


def test_attention_to_a_single_word_reads_its_embedding() -> None:
    """With W_q = 0 and a bias along one embedding, a is one-hot, and the input is that embedding."""
    model = small_mixer(1)
    memory = model.encode(SOURCE)
    for word in TARGET_SIDE:
        vector = model.embedding[word]
        others = [other for other in TARGET_SIDE if other != word]
        away = vector - model.embedding[others].mean(dim=0)
        if min(float(away @ (vector - model.embedding[other])) for other in others) <= 0:
            continue
        model.weights[QUERY].zero_()
        model.weights[QUERY_BIAS].copy_(1e4 * away)
        made = transform_inputs(model, memory, 3)
        assert torch.allclose(made, model.embed_words(torch.tensor(word)).expand_as(made))


def test_all_inputs_lie_between_the_target_embeddings() -> None:
    """The weights of a mixture are from 0 to 1 and have sum 1."""
    model = small_mixer(0)
    made = transform_inputs(model, model.encode(SOURCE), 5) / model.config.d_model**0.5
    table = model.embedding[TARGET_SIDE]
    for direction in torch.randn(50, table.shape[1], dtype=table.dtype, generator=draws()):
        ends = table @ direction
        found = made @ direction
        assert ends.min() - 1e-9 <= found.min() and found.max() <= ends.max() + 1e-9


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_padding_of_a_source_is_not_read() -> None:
    model = small_mixer(0)
    together = transform_inputs(model, model.encode(SOURCE), 4)
    alone = transform_inputs(model, model.encode(SOURCE[1:, :2]), 4)
    assert torch.allclose(together[1:], alone, atol=1e-12)


def test_target_words_are_those_of_the_training_targets() -> None:
    pairs = [([4, 5], [9, 7, 9]), ([6], [8])]
    align = lambda sources, targets: pytest.fail("nothing is aligned")  # noqa: E731
    assert list_target_words(DepaSettings(), pairs, align) == {TARGET_WORDS: "7 8 9"}
    assert list_target_words(DepaSettings(transform=False), pairs, align) == {}
    assert find_target_words(small_mixer(0)) == tuple(TARGET_SIDE)


def test_it_begins_as_identities() -> None:
    config = find_technique("depa").translator.equip(small_translator(0).config, DepaSettings())  # type: ignore[union-attr]
    model = Seq2Seq.create(config, draws())
    initialize_as_identities(model.weights)
    assert torch.equal(model.weights[COPY], torch.eye(8))
    assert torch.equal(model.weights[QUERY], torch.eye(8))
    assert not model.weights[QUERY_BIAS].any()
    initialize_as_identities(small_translator(0).weights)  # which has none


# ---------------------------------------------------------------------- training


def test_reversing_twice_is_the_identity_with_padding() -> None:
    assert torch.equal(reverse_words(reverse_words(TARGET, 0), 0), TARGET)
    assert reverse_words(TARGET, 0).tolist() == [[6, 8, 5, 0, 0], [8, 5, 7, 4, 4]]


def test_without_both_parts_the_loss_is_that_of_parallel() -> None:
    """Every bit of it, and of its gradient."""
    for seed, dropout in product(range(3), (0.0, 0.1)):
        made = list[tuple[torch.Tensor, torch.Tensor]]()
        for method in ("depa", "parallel"):
            model = small_translator(seed)
            weight = model.weights["embed"].clone().requires_grad_()
            model = Seq2Seq(model.config, {**model.weights, "embed": weight})
            torch.manual_seed(1)
            if method == "depa":
                settings = DepaSettings(0.0, 0.0, False)
                training = TranslatorTraining(model, None, settings, dropout, 0.1, 0.0)
                loss = depa_batch_loss(training, (SOURCE, TARGET), draws())
            else:
                loss = parallel_loss(model, (SOURCE, TARGET), dropout, 0.1)
            made.append((loss, torch.autograd.grad(loss, weight)[0]))
        assert all(torch.equal(*both) for both in zip(*made, strict=True))


def test_the_first_phases_are_the_teachers_training_in_either_direction() -> None:
    for seed in range(3):
        model = small_mixer(seed)
        length = length_nll(model, TARGET, model.encode(SOURCE)) / 10
        for phase, text in (("forward", TARGET), ("backward", reverse_words(TARGET, 0))):
            got = depa_loss(model, (SOURCE, TARGET), phase, True)
            teacher = teacher_forcing_loss(model, SOURCE, text)  # in float32
            assert float(got) == pytest.approx(float(teacher + length), abs=1e-6)


def test_the_progress_decides_the_phase_that_is_trained() -> None:
    settings = DepaSettings(0.2, 0.3)
    for progress, phase in ((0.0, "forward"), (0.2, "backward"), (0.49, "backward"), (0.5, "")):
        model = small_mixer(0)
        training = TranslatorTraining(model, None, settings, 0.0, 0.0, progress)
        got = float(depa_batch_loss(training, (SOURCE, TARGET), draws()))
        assert got == float(depa_loss(model, (SOURCE, TARGET), phase or "parallel", True))
        assert find_phase(settings, progress) == (phase or "parallel")


def test_every_own_weight_is_trained_in_the_last_phase_alone() -> None:
    for phase in ("forward", "backward", "parallel"):
        model = small_mixer(0)
        names = (COPY, QUERY, QUERY_BIAS)
        weights = {name: w.clone() for name, w in model.weights.items()}
        for name in names:
            weights[name].requires_grad_()
        model = Seq2Seq(model.config, weights)
        loss = depa_loss(model, (SOURCE, TARGET), phase, True, 0.1, 0.1)
        own = [weights[name] for name in names]
        if phase != "parallel":
            assert not loss.requires_grad
            continue
        slopes = torch.autograd.grad(loss, own)
        assert all(float(slope.abs().max()) > 0 for slope in slopes)


def test_padding_does_not_change_the_loss() -> None:
    model = small_mixer(0)
    wider = F.pad(SOURCE, (0, 2)), F.pad(TARGET, (0, 3))
    for phase in ("forward", "backward", "parallel"):
        losses = [depa_loss(model, pairs, phase, True) for pairs in ((SOURCE, TARGET), wider)]
        assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-9)


# ---------------------------------------------------------------------- decoding


def test_without_transformation_it_decodes_as_parallel_does() -> None:
    for seed, source in product(range(3), SOURCES):
        model = small_mixer(seed, transform=False)
        refiner = ParallelRefiner(model)
        running = refine(model, source, refiner, Seeded(0), [])
        list(running)
        assert run(model, None, source).tokens == running.tokens


def test_a_batch_of_sources_is_translated_as_each_alone() -> None:
    judge, padded = random_reader(50, False, 48), pad_sequences(SOURCES)
    for seed, (teacher, lengths) in product(range(3), ((None, 1), (judge, 4), (None, 4))):
        model = small_mixer(seed)
        together = translate_sources(model, padded, DepaRefiner(model, True, teacher, lengths))
        who = "self" if teacher is None else "teacher"
        assert together == [
            run(model, teacher, source, lengths=lengths, judge=who).tokens for source in SOURCES
        ]
        if lengths == 1:
            assert translate_transformed(model, DepaSettings(), padded) == together


def test_one_encoder_pass_and_one_decoder_pass() -> None:
    made = run(small_mixer(0), random_reader(50, False, 48), SOURCES[2], lengths=4)
    names = [call.model for call in made.forward_log]
    assert names == ["reader/encoder", "reader", "teacher/encoder", "teacher"]
    assert len(run(small_mixer(0), None, SOURCES[2]).forward_log) == 2


# ---------------------------------------------------------------------- on dialects


@pytest.mark.slow
def test_a_decoder_that_reads_target_embeddings_needs_them() -> None:
    """The input transformation, and its ablation on the same weights: copies in its place.

    One language of 12 words, 200 steps from random weights. A model that is trained on copies is as
    good: the task is too small for the gain that the paper reports.
    """
    task = Dialects(("lex",), modes=1, words=12, shortest=3, longest=5)
    train = task.sample_pairs(2000, 1)
    held = [p.source for p in task.sample_pairs(200, 2, {p.source for p in train})]
    pairs = [(p.source, p.target) for p in train]
    config = Seq2SeqConfig(task.vocab_size, 32, 4, 64, 1, 1, 24, lengths=11)
    settings = DepaSettings(0.0, 0.0)
    counted = list_target_words(settings, pairs, lambda *sides: [])
    config = replace(add_depa_weights(config, settings), extra=counted)
    trained = dict[bool, Seq2Seq]()
    for mixed in (True, False):
        trained[mixed] = model = Seq2Seq.create(config, torch.Generator().manual_seed(1))
        initialize_as_identities(model.weights)
        fit(lambda m, batch, _, on=mixed: depa_loss(m, batch, "parallel", on), model, pairs, 200)
    valid = dict[str, float]()
    for name, mixed, read in (
        ("DePA", True, True),
        ("copies", True, False),
        ("base", False, False),
    ):
        refiner = DepaRefiner(trained[mixed], read)
        outputs = translate_sources(trained[mixed], pad_sequences(held), refiner)
        valid[name] = task.measure_quality(held, outputs).valid
    print(valid)
    assert valid["DePA"] > valid["copies"] + 0.3
    assert abs(valid["DePA"] - valid["base"]) < 0.1


# ---------------------------------------------------------------------- bad input, and the card


def test_bad_input_is_named() -> None:
    card, model = find_technique("depa"), small_mixer(0)
    with pytest.raises(TinyspecError, match="4 lengths need a teacher to choose among them"):
        card.refiner(RefineRequest(model), lengths=4)
    with pytest.raises(TinyspecError, match=r"was not trained for depa: .*multi30k-depa/recipe"):
        card.refiner(RefineRequest(small_translator(0)))
    silent = replace(model.config, lengths=0)
    with pytest.raises(TinyspecError, match=r"has no LENGTH token.*multi30k-depa/recipe"):
        card.refiner(RefineRequest(Seq2Seq.create(silent, draws())))
    for damaged in (None, "", "4 x", "4 9", "-1", [4, 5]):
        model.config = replace(model.config, extra={"transform": True, TARGET_WORDS: damaged})
        with pytest.raises(TinyspecError, match=r"config.json: target_words: .*multi30k-depa") as e:
            card.refiner(RefineRequest(model))
        assert "\n" not in str(e.value)
    for settings, message in (
        ({"backward": 1.5}, "backward is 1.5: it must be from 0 to 1"),
        ({"forward": "x"}, "forward is x: it must be from 0 to 1"),
        ({"forward": 0.6, "backward": 0.5}, "forward . backward is 1.1: it must be at most 1"),
        ({"transform": 1}, "transform is 1: it must be true or false"),
    ):
        with pytest.raises(TinyspecError, match=message):
            DepaSettings(**settings)  # type: ignore[arg-type]


def test_the_card_and_the_recipe() -> None:
    card = find_technique("depa")
    assert (card.kind, card.guarantee, card.teacher) == ("refine", Guarantee.APPROX, True)
    plan = read_translation_recipe(RECIPE)
    assert plan.settings_of_translator() == DepaSettings()
    config = plan.config(4800)
    assert list(config.heads) == [COPY, QUERY, QUERY_BIAS] and config.parameters() < 4.5e6
    bare = read_translation_recipe(RECIPE, {"translator.transform": "false"})
    assert not bare.config(4800).heads
    with pytest.raises(TinyspecError, match=r"recipe.toml: backward is 2: it must be"):
        read_translation_recipe(RECIPE, {"translator.backward": "2"})
