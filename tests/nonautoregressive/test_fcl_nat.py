"""FCL-NAT: inputs become copies by a schedule, the mask is opened after them, and nothing leaks."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nonautoregressive.test_nat import fit
from tinyspec.decoding.refine import refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.rewriting_laws import random_reader
from tinyspec.laws.traps.fcl_nat import SOURCE, TARGET, TRAPS, no_answer_is_read
from tinyspec.laws.traps.parallel import small_translator
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.fcl_nat import (
    PACINGS,
    FclNatSettings,
    fcl_nat_batch_loss,
    fcl_nat_loss,
    mix_batch,
    mix_inputs,
    plan_step,
)
from tinyspec.nonautoregressive.parallel import (
    length_nll,
    parallel_loss,
    translate_likeliest_length,
)
from tinyspec.technique import Guarantee, RefineRequest, TranslatorTraining, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.distilled import BeamSettings, write_translations
from tinyspec.training.recipe import read_translation_recipe
from tinyspec.training.translation_tasks import teacher_forcing_loss

RECIPE = Path(__file__).parents[2] / "models/multi30k-fcl/recipe.toml"
PUBLISHED = FclNatSettings(flip=0.45)


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_printed_algorithm_is_what_runs() -> None:
    slots = TARGET != 0
    before, copies = torch.arange(10, 20).view(2, 5), torch.arange(30, 40).view(2, 5)
    replaced = 0
    for seed, alpha in product(range(20), (0.0, 0.3, 0.5, 0.8, 1.0)):
        generator = torch.Generator().manual_seed(seed)
        coins = torch.rand(2, 1, generator=generator)[:, 0].tolist()
        ranks = torch.rand(2, 5, generator=generator)
        got = mix_batch(before, copies, slots, alpha, torch.Generator().manual_seed(seed))
        for row, length in enumerate(slots.sum(dim=1).tolist()):
            order = ranks[row, :length].argsort().tolist()
            sides = copies[row, :length].tolist(), before[row, :length].tolist()
            expected = mix_inputs(*sides, alpha, coins[row], order)
            assert got[row, :length].tolist() == expected
            assert got[row, length:].tolist() == before[row, length:].tolist()
            replaced += expected != sides[1]
    assert replaced > 40


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.law)
def test_it_passes_its_traps(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- both ends, and the leak


def test_without_a_curriculum_the_loss_is_that_of_parallel() -> None:
    """Every bit of it, and of its gradient."""
    for seed, dropout in product(range(3), (0.0, 0.1)):
        made = list[tuple[torch.Tensor, torch.Tensor]]()
        for curriculum in (True, False):
            model = small_translator(seed)
            weight = model.weights["embed"].clone().requires_grad_()
            model = Seq2Seq(model.config, {**model.weights, "embed": weight})
            torch.manual_seed(1)
            if curriculum:
                settings = FclNatSettings(curriculum=0)
                training = TranslatorTraining(model, None, settings, dropout, 0.1, 0.0)
                loss = fcl_nat_batch_loss(training, (SOURCE, TARGET), draws())
            else:
                loss = parallel_loss(model, (SOURCE, TARGET), dropout, 0.1)
            made.append((loss, torch.autograd.grad(loss, weight)[0]))
        assert all(torch.equal(*both) for both in zip(*made, strict=True))


def test_at_the_beginning_the_loss_is_the_teachers_and_the_lengths() -> None:
    for seed in range(3):
        model = small_translator(seed)
        got = fcl_nat_loss(model, (SOURCE, TARGET), draws(), (0.0, False))
        length = length_nll(model, TARGET, model.encode(SOURCE)) / 10
        teacher = teacher_forcing_loss(model, SOURCE, TARGET)  # in float32
        assert float(got) == pytest.approx(float(teacher + length), abs=1e-6)


def test_the_published_schedule_leaks_and_ours_does_not() -> None:
    """The released settings open the mask after a twentieth of the curriculum."""
    assert no_answer_is_read(plan_step).cases
    with pytest.raises(LawViolated, match=r"open.*True"):
        no_answer_is_read(lambda settings, progress: plan_step(PUBLISHED, progress))
    opened = next(step / 1000 for step in range(1000) if plan_step(PUBLISHED, step / 1000)[1])
    assert opened == pytest.approx(0.5 * (200**0.45 - 1) / 199, abs=1e-3)  # at 2.5 % of a training
    assert 0.45 <= plan_step(PUBLISHED, opened)[0] < 0.46
    assert not plan_step(FclNatSettings(), 0.499)[1] and plan_step(FclNatSettings(), 0.5)[1]


@pytest.mark.parametrize("pacing", PACINGS)
def test_alpha_never_falls(pacing: str) -> None:
    steps = [plan_step(FclNatSettings(0.7, pacing), step / 100) for step in range(101)]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == ((0.0, False), (1.0, True))


def test_the_share_of_copies_is_alpha_squared() -> None:
    """A sentence is drawn with chance alpha, and then alpha of its positions are copies."""
    slots = torch.ones(4000, 10, dtype=torch.bool)
    for alpha in (0.3, 0.5, 0.9):
        read = mix_batch(slots.long() * 0, slots.long(), slots, alpha, draws())
        assert float(read.float().mean()) == pytest.approx(alpha**2, abs=0.02)


def test_padding_does_not_change_the_loss() -> None:
    model = small_translator(0)
    wider = torch.nn.functional.pad(SOURCE, (0, 2)), torch.nn.functional.pad(TARGET, (0, 3))
    for plan in ((0.0, False), (1.0, False), (1.0, True)):
        losses = [fcl_nat_loss(model, pairs, draws(), plan) for pairs in ((SOURCE, TARGET), wider)]
        assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-9)


def test_one_word_is_written_and_learnt() -> None:
    source, target = torch.tensor([[4]]), torch.tensor([[7]])
    for plan in ((0.0, False), (0.4, False), (1.0, False), (1.0, True)):
        loss = fcl_nat_loss(small_translator(0), (source, target), draws(), plan)
        assert torch.isfinite(loss)


# ---------------------------------------------------------------------- decoding


def test_it_decodes_as_parallel_does() -> None:
    judge = random_reader(50, False, 48)
    for seed, source in product(range(3), ((4,), (6, 5), (8, 7, 4, 6))):
        for knobs in (
            {"lengths": 1},
            {"lengths": 4},
            {"lengths": 4, "judge": "self"},
            {"lengths": 4, "around": True},
        ):
            texts = []
            for method in ("fcl_nat", "parallel"):
                request = RefineRequest(small_translator(seed), judge)
                refiner = find_technique(method).refiner(request, **knobs)
                running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
                assert len(list(running)) == 1
                texts.append((running.tokens, running.scores))
            assert texts[0] == texts[1]


# ---------------------------------------------------------------------- on dialects


@pytest.mark.slow
def test_what_an_autoregressive_model_knows_outlasts_the_curriculum() -> None:
    """Two dialects, as the teacher translates them; 60 steps of each training.

    Right translations of 100: 38 after the curriculum, 52 without one from the same weights, 10
    from random weights. So the weights are what helps here, and the curriculum costs steps. The
    gain that the paper reports does not appear on so small a task: the curriculum is worse here.
    """
    task = Dialects(("lex",), modes=2, words=10, shortest=2, longest=4)
    train = task.sample_pairs(2000, 1)
    held = [p.source for p in task.sample_pairs(200, 2, {p.source for p in train})]
    config = Seq2SeqConfig(task.vocab_size, 32, 4, 64, 1, 1, 24, lengths=9)
    teacher = fit(
        lambda model, batch, _: teacher_forcing_loss(model, *batch),
        Seq2Seq.create(config, draws()),
        [(p.source, p.target) for p in train],
        250,
    )
    sources, pairs = [p.source for p in train], list[Any]()
    for at in range(0, len(sources), 250):
        part = sources[at : at + 250]
        written = write_translations(teacher, part, BeamSettings(beam=1))
        pairs += [(x, y[:8]) for x, y in zip(part, written, strict=True) if y]
    valid = dict[str, float]()
    for name, settings in (
        ("curriculum", FclNatSettings()),
        ("direct", FclNatSettings(curriculum=0)),
        ("random", FclNatSettings(curriculum=0)),
    ):
        model = Seq2Seq.create(config, torch.Generator().manual_seed(1))
        if name != "random":
            weights = {key: weight.clone() for key, weight in teacher.weights.items()}
            model = Seq2Seq(config, weights)
        steps = iter(range(60))

        def loss(model: Any, batch: Any, generator: Any, s: Any = settings, at: Any = steps) -> Any:
            return fcl_nat_loss(model, batch, generator, plan_step(s, next(at) / 60))

        fit(loss, model, pairs, 60)
        outputs = translate_likeliest_length(model, settings, pad_sequences(held))
        valid[name] = task.measure_quality(held, outputs).valid
    print(valid)
    assert valid["curriculum"] > valid["random"] + 0.15


# ---------------------------------------------------------------------- bad input, and the card


def test_bad_input_is_named() -> None:
    card = find_technique("fcl_nat")
    with pytest.raises(TinyspecError, match="4 lengths need a teacher to choose among them"):
        card.refiner(RefineRequest(small_translator(0)), lengths=4)
    bare = Seq2Seq.create(Seq2SeqConfig(9, 8, 2, 12, 1, 2), draws())
    with pytest.raises(TinyspecError, match=r"has no LENGTH token.*multi30k-fcl/recipe"):
        card.refiner(RefineRequest(bare))
    for settings, message in (
        ({"curriculum": 1.5}, "curriculum is 1.5: it must be from 0 to 1"),
        ({"curriculum": "half"}, "curriculum is half"),
        ({"pacing": "fast"}, "pacing is 'fast': it must be one of log, linear, ladder, invlog"),
        ({"flip": -0.1}, "flip is -0.1: it must be from 0 to 1"),
    ):
        with pytest.raises(TinyspecError, match=message):
            FclNatSettings(**settings)  # type: ignore[arg-type]


def test_the_card_and_the_recipe() -> None:
    card = find_technique("fcl_nat")
    assert (card.kind, card.guarantee, card.teacher) == ("refine", Guarantee.APPROX, True)
    defaults = {"lengths": 1, "judge": "teacher", "around": False}
    assert {knob.name: knob.default for knob in card.knobs} == defaults
    plan = read_translation_recipe(RECIPE)
    assert plan.settings_of_translator() == FclNatSettings()
    assert plan.config(4800).parameters() < 4.5e6 and plan.inherit == (
        "embed",
        "encoder",
        "decoder",
    )
    published = read_translation_recipe(RECIPE, {"translator.flip": "0.45"})
    assert published.settings_of_translator() == PUBLISHED
    with pytest.raises(TinyspecError, match=r"recipe.toml: flip is 2: it must be"):
        read_translation_recipe(RECIPE, {"translator.flip": "2"})
