"""FlowSeq reads all words off latent vectors, which a flow makes from noise."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nonautoregressive.test_nat import fit
from tinyspec.decoding.refine import Refinement, refine
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.museum.patching import Patch, apply_patches
from tinyspec.laws.nonautoregressive_laws import teacher_score
from tinyspec.laws.traps.flowseq import (
    EOS,
    SHAPES,
    SOURCES,
    TOYS,
    TRAPS,
    WIDTH,
    latents_by_hand,
    lengths_by_hand,
    random_flower,
    rows_of_latents,
)
from tinyspec.laws.traps.latent_transformer import random_rescorer
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.flowseq import (
    BEGUN,
    DIFFERENCE,
    POSTERIOR,
    FlowSeqRefiner,
    FlowSeqSettings,
    fill_up,
    find_lengths,
    fits_difference,
    flowseq_batch_loss,
    flowseq_config,
    flowseq_terms,
    initialize_flowseq,
    make_flow,
    normal_noise,
    posterior_of,
    read_latents,
    translate_by_flow,
    translate_without_noise,
)
from tinyspec.nonautoregressive.nat import write_until_end
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import Guarantee, RefineRequest, TranslatorTraining, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.recipe import read_translation_recipe

RECIPE = Path(__file__).parents[2] / "models/multi30k-flowseq/recipe.toml"
NOISY: dict[str, Any] = {"lengths": 2, "samples": 2, "temperature": 0.9}


def run(model: Seq2Seq, source: Any, critic: Seq2Seq | None = None, **knobs: Any) -> Refinement:
    request = RefineRequest(model, critic)
    refiner = find_technique("flowseq").refiner(request, **knobs)
    made = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    assert list(made)
    return made


def test_printed_algorithm_is_what_runs() -> None:
    """With two lengths, two samples of each, and a teacher that ranks them."""
    for seed, settings, source in product(range(2), SHAPES[:3], SOURCES[:3]):
        model, judge = random_flower(seed, settings), random_rescorer(seed)
        lengths = [n for n, _ in lengths_by_hand(model, settings, source, 2, 12)]
        stream = Seeded(0).split("rewrite", 0)

        def noise(length: int, number: int, lengths: Any = lengths, stream: Any = stream) -> Any:
            if number == 0:
                return [[0.0] * WIDTH] * length
            own = stream.split("noise", 2 * lengths.index(length) + number)
            return (0.9 * normal_noise(own, length, WIDTH)).tolist()

        def invert(rows: Any, model: Any = model, source: Any = source, s: Any = settings) -> Any:
            return latents_by_hand(model, source, s, rows)

        def read(latents: Any, model: Any = model, source: Any = source) -> list[int]:
            rows = torch.tensor(rows_of_latents(model, source, latents))
            rows[:, [0, 1, 3]] = -torch.inf
            rows[0, EOS] = -torch.inf
            return rows.argmax(dim=-1).tolist()

        def rank(text: list[int], n: int, judge: Any = judge, source: Any = source) -> float:
            return teacher_score(judge, source, text)

        expected = translate_by_flow(lengths, noise, invert, read, rank, 2, EOS)
        assert run(model, source, judge, **NOISY).tokens == expected


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.law)
def test_it_passes_its_traps(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


def test_many_sources_in_one_batch_are_each_as_alone() -> None:
    padded = pad_sequences(SOURCES)
    for seed, settings in product(range(3), SHAPES):
        model = random_flower(seed, settings)
        expected = [run(model, source).tokens for source in SOURCES]
        assert translate_without_noise(model, settings, padded) == expected
        judge = random_rescorer(seed)
        refiner = FlowSeqRefiner(model, settings, judge, 3)
        expected = [run(model, source, judge, lengths=3).tokens for source in SOURCES]
        assert translate_sources(model, padded, refiner) == expected
    for drawn in (
        FlowSeqRefiner(model, settings, None, 1, 1, 0.5),
        FlowSeqRefiner(model, settings, judge, 1, 2, 0.5),
        FlowSeqRefiner(model, settings, None, 2, 1, 0.0, 1),
    ):
        with pytest.raises(TinyspecError, match="call `refine` for each source"):
            translate_sources(model, padded, drawn)


def test_lengths_are_multiples_that_the_levels_divide() -> None:
    for seed, settings, source in product(range(3), SHAPES, SOURCES):
        model = random_flower(seed, settings)
        memory = model.encode(torch.tensor([source]))
        expected = lengths_by_hand(model, settings, source, 3, 13)
        lengths, logprobs = find_lengths(model, settings, memory, 3, 13)
        assert lengths == [n for n, _ in expected]
        assert all(n % settings.multiple == 0 for n in lengths)
        assert logprobs.tolist() == pytest.approx([x for _, x in expected])
    lengths, _ = find_lengths(model, replace(settings, longest=4), memory, 99, 4)
    assert lengths == [4]


def test_a_source_that_is_longer_than_all_lengths_has_the_longest() -> None:
    settings = FlowSeqSettings(1, 1, 2)
    model = random_flower(0, settings)
    memory = model.encode(torch.tensor([[4] * 12]))
    assert find_lengths(model, settings, memory, 2, 5)[0] == [5]


def test_the_length_is_told_among_those_that_the_levels_divide() -> None:
    """No probability is lost to others: those of all lengths that may be told add up to 1."""
    for settings in SHAPES:
        model = random_flower(0, settings)
        _, logprobs = find_lengths(model, settings, model.encode(torch.tensor([[5, 6, 7]])), 99, 99)
        assert float(logprobs.exp().sum()) == pytest.approx(1)


def test_draws_begin_near_the_mean_and_couplings_as_constants() -> None:
    """When latent vectors are drawn first, noise must not hide the posterior's mean."""
    settings, target = SHAPES[2], torch.tensor([[5, 6, 7, 8]])
    found = random_flower(0, settings)
    model = Seq2Seq(found.config, {name: w.clone() for name, w in found.weights.items()})
    initialize_flowseq(model.weights)
    memory, slots = model.encode(target), target > 0
    assert float(posterior_of(model, target, slots, memory)[1].abs().max()) < 0.5
    one, other = torch.randn(2, 1, 4, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    flow = make_flow(model, settings, memory)
    determinants = [float(flow.to_noise(z, slots)[1]) for z in (one, other)]
    assert determinants[0] == pytest.approx(determinants[1], abs=1e-9)


def test_targets_are_filled_up_with_ends() -> None:
    target = torch.tensor([[5, 6, 7], [4, 0, 0]])
    for multiple, expected in (
        (1, [[5, 6, 7], [4, 0, 0]]),
        (2, [[5, 6, 7, 2], [4, 2, 0, 0]]),
        (4, [[5, 6, 7, 2], [4, 2, 2, 2]]),
    ):
        filled, slots = fill_up(target, 0, EOS, multiple)
        assert filled.tolist() == expected
        assert torch.equal(slots, filled > 0)


def test_what_fits_has_a_length_that_can_be_told() -> None:
    config, settings = random_flower(0, SHAPES[2]).config, SHAPES[2]  # two levels, up to 4 apart
    assert fits_difference(config, settings, 2, 6) and not fits_difference(config, settings, 2, 7)
    assert not fits_difference(config, settings, 2, 0)
    assert fits_difference(config, settings, 12, 12)
    assert not fits_difference(config, settings, 12, 13)  # 14 places, and 13 positions


def test_noise_is_standard_normal_and_is_not_walked() -> None:
    drawn = normal_noise(Seeded(0), 200, 100)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03)
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
    with pytest.raises(TinyspecError, match="use a seeded source"):
        for _ in Exhaustive.walk(lambda rng: normal_noise(rng, 1, 2)):
            pass


def test_layers_of_the_flow_are_counted_in_the_pass() -> None:
    model = random_flower(0, SHAPES[2])  # eight couplings, one decoder layer, one of the posterior
    made = run(model, SOURCES[2], lengths=2, judge="importance", estimates=2)
    assert made.canvas is not None
    rows = len(made.canvas.tokens) * made.canvas.tokens.shape[1]
    flow = 4 * rows + 4 * rows // 2
    passes = [call for call in made.forward_log if call.model == "flower"]
    assert [call.rows for call in passes] == [rows] * 3
    assert [call.row_layers for call in passes] == [flow + rows, flow + 2 * rows, flow + 2 * rows]


@pytest.mark.slow
def test_the_bound_rises_with_the_latent_vectors_of_an_estimate() -> None:
    """In expectation (Burda et al. 2016): more draws from the posterior, a tighter bound."""
    settings, model = SHAPES[0], random_flower(1, SHAPES[0])
    means = []
    for estimates in (1, 2, 4, 8):
        refiner = FlowSeqRefiner(model, settings, None, 1, 1, 0.0, estimates)
        ranks = []
        for seed in range(60):
            made = refine(model, SOURCES[1], refiner, Seeded(seed), [])
            assert list(made) and made.canvas is not None
            ranks.append(float(made.canvas.extra[0]))
        means.append(sum(ranks) / len(ranks))
    assert means == sorted(means) and means[0] < means[-1]


# ---------------------------------------------------------------------- training


def test_the_cost_of_latent_vectors_weighs_more_and_more() -> None:
    settings = replace(SHAPES[0], startup=0.2, warmup=0.4)
    model = random_flower(0, SHAPES[0])
    batch = torch.tensor([[4, 5]]), torch.tensor([[5, 6]])

    def loss(progress: float) -> tuple[float, float]:
        training = TranslatorTraining(model, None, settings, 0.0, 0.0, progress)
        with torch.no_grad():
            got = float(flowseq_batch_loss(training, batch, torch.Generator().manual_seed(0)))
            generator = torch.Generator().manual_seed(0)
            terms = flowseq_terms(model, batch, settings, generator, progress)
        weight = max(0.0, min(1.0, (progress - 0.2) / 0.4))
        expected = (terms.words + weight * terms.latents + terms.length) / terms.places
        assert got == pytest.approx(float(expected))
        return float(terms.words), float(terms.latents)

    early, first, late = loss(0.1), loss(0.3), loss(1.0)
    assert early[1] == 0 != first[1] and first == late and early[0] != late[0]
    assert replace(settings, warmup=0).latent_weight(0.2) == 1
    assert replace(settings, warmup=0).latent_weight(0.1) == 0


def test_the_first_step_with_latent_costs_begins_the_flow_and_no_later_one_does() -> None:
    batch = torch.tensor([[4, 5], [6, 4]]), torch.tensor([[5, 6], [4, 4]])
    found = random_flower(0, SHAPES[0])
    weights = {name: w.clone() for name, w in found.weights.items()}
    weights[BEGUN].zero_()
    model, seen = Seq2Seq(found.config, weights), []
    for progress in (0.0, 0.1, 0.2, 0.3):
        before = weights["flow_scale_0"].clone()
        training = TranslatorTraining(model, None, SHAPES[0], 0.0, 0.0, progress)
        if progress == 0.2:
            with torch.no_grad():  # a validation begins nothing
                flowseq_batch_loss(training, batch, torch.Generator().manual_seed(0))
            assert torch.equal(before, weights["flow_scale_0"])
        flowseq_batch_loss(training, batch, torch.Generator().manual_seed(0))
        seen.append(not torch.equal(before, weights["flow_scale_0"]))
    assert seen == [False, False, True, False] and float(weights[BEGUN]) == 1


def test_gradients_reach_every_weight() -> None:
    found = random_flower(0, SHAPES[2])
    weights = {name: w.clone().requires_grad_() for name, w in found.weights.items()}
    model = Seq2Seq(found.config, weights)
    batch = pad_sequences(SOURCES), pad_sequences(SOURCES)
    terms = flowseq_terms(model, batch, SHAPES[2], torch.Generator().manual_seed(0))
    (terms.words + terms.latents + terms.length).backward()
    without = [name for name, w in weights.items() if w.grad is None or not w.grad.any()]
    assert without == [BEGUN]


# ---------------------------------------------------------------------- bad input, and the card


def test_bad_input_is_named() -> None:
    card, model = find_technique("flowseq"), random_flower(0, SHAPES[0])
    plain = Seq2Seq.create(Seq2SeqConfig(9, 8, 2, 12, 1, 1), torch.Generator().manual_seed(0))
    with pytest.raises(
        TinyspecError, match=r"has no flow of latent vectors: train .*multi30k-flow"
    ):
        card.refiner(RefineRequest(plain))
    for extra, message in (
        ({}, "config.json: 'levels'"),
        ({**model.config.extra, "steps": 2}, "heads and stacks are not those of its flow"),
        ({**model.config.extra, "warmup": "x"}, "warmup is x: it must be from 0 to 1"),
    ):
        other = Seq2Seq(replace(model.config, extra=extra), model.weights, name="flower")
        with pytest.raises(TinyspecError, match=message):
            card.refiner(RefineRequest(other))
    for knobs, message in (
        ({"lengths": 3}, "3 lengths and 1 samples need a teacher to choose among them"),
        ({"samples": 2}, "2 samples without noise are equal: set temperature above 0"),
        ({"temperature": -1}, "temperature is -1: it must be from 0.0 to 10.0"),
        ({"estimates": 0}, "estimates is 0: it must be from 1 to 64"),
    ):
        with pytest.raises(TinyspecError, match=message):
            card.refiner(RefineRequest(model), **knobs)


def test_bad_settings_are_named() -> None:
    config = Seq2SeqConfig(9, 8, 2, 12, 1, 1, 4)
    for given, message in (
        ({"levels": 0}, "levels is 0: it must be a whole number from 1 to 4"),
        ({"steps": True}, "steps is True: it must be a whole number from 1 to 16"),
        ({"startup": -1}, "startup is -1: it must be from 0 to 1"),
        ({"warmup": 2}, "warmup is 2: it must be from 0 to 1"),
        ({"levels": 3, "longest": 2}, "longest is 2: with 3 levels it must be at least 4"),
        ({"levels": 3}, "3 levels need more than 4 positions: lower levels"),
    ):
        with pytest.raises(TinyspecError, match=message):
            flowseq_config(config, FlowSeqSettings(**given))


def test_the_card_and_the_recipe() -> None:
    card = find_technique("flowseq")
    assert (card.kind, card.guarantee, card.teacher) == ("refine", Guarantee.APPROX, True)
    plan = read_translation_recipe(RECIPE)
    config = plan.config(4800)
    assert config.heads[DIFFERENCE] == (41, 128) and config.stacks[POSTERIOR] == 1
    assert len(config.stacks) == 9 and 2 * config.parameters() < 9e6
    with pytest.raises(TinyspecError, match=r"method flowseq: \[shape\] stacks is missing"):
        read_translation_recipe(RECIPE, {"shape.stacks": "{}"})
    with pytest.raises(TinyspecError, match="levels is 9: it must be a whole number from 1 to 4"):
        read_translation_recipe(RECIPE, {"translator.levels": "9"})


# ---------------------------------------------------------------------- the paper's idea


def train_on_dialects(steps: int) -> tuple[Dialects, Seq2Seq, FlowSeqSettings, Any]:
    """Return a task whose sources have two translations, a trained model, and held-out sources."""
    task = Dialects(("lex",), modes=2, words=10, shortest=3, longest=4)
    pairs = task.sample_pairs(4000, 1)
    held = [p.source for p in task.sample_pairs(100, 2, {p.source for p in pairs})]
    settings = FlowSeqSettings(2, 1, 4, 0.1, 0.2)
    config = Seq2SeqConfig(task.vocab_size, 48, 4, 96, 1, 1, 24, stacks={POSTERIOR: 1})
    config = flowseq_config(config, settings)
    model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
    initialize_flowseq(model.weights)
    done = iter(range(steps))

    def loss(model: Seq2Seq, batch: Any, generator: torch.Generator) -> torch.Tensor:
        training = TranslatorTraining(model, None, settings, 0.0, 0.0, next(done) / steps)
        return flowseq_batch_loss(training, batch, generator)

    fit(loss, model, [(p.source, p.target) for p in pairs], steps, 4e-3)
    return task, model, settings, held


def share_of_valid(task: Dialects, held: Any, refiner: FlowSeqRefiner) -> float:
    """Return how many of 100 held-out sources are rightly translated."""
    outputs = []
    for seed, source in enumerate(held):
        made = refine(refiner.model, source, refiner, Seeded(seed), [])
        assert list(made)
        outputs.append(made.tokens)
    return 100 * task.measure_quality(held, outputs).valid


@pytest.mark.slow
def test_latent_vectors_decide_between_two_dialects_and_those_of_others_do_not() -> None:
    """The paper's idea. Raw data: no teacher has chosen.

    Right translations of 100: 98 without noise, 99 with half of the prior's, 92 with all of it, 100
    for the highest rank of eight. The mean of a target's own latent vectors gives it back in all,
    that of the next sentence's in none. A minute of one core.
    """
    task, model, settings, held = train_on_dialects(1000)
    valid = {
        name: share_of_valid(task, held, FlowSeqRefiner(model, settings, None, 1, *knobs))
        for name, knobs in {
            "no noise": (1, 0.0),
            "half of the noise": (1, 0.5),
            "the noise": (1, 1.0),
            "eight, ranked": (8, 1.0, 1),
        }.items()
    }
    memory = model.encode(pad_sequences(held))
    right = [task.translate(x, number % 2).target for number, x in enumerate(held)]
    words, slots = fill_up(pad_sequences(right), 0, EOS, settings.multiple)
    mean, _ = posterior_of(model, words, slots, memory)
    for name, z in (("own", mean), ("of the next sentence", mean.roll(1, dims=0))):
        logits = model.logits(read_latents(model, z, slots, memory))
        canvas = write_until_end(model, logits, slots)
        valid[name] = sum(canvas.text(row) == list(y) for row, y in enumerate(right))
    print(valid)
    assert valid["half of the noise"] >= 90 and valid["eight, ranked"] >= 90
    assert valid["the noise"] >= 80
    assert valid["no noise"] >= 90 and valid["own"] >= 90 and valid["of the next sentence"] <= 10


@pytest.mark.slow
def test_without_latent_vectors_the_dialects_are_mixed_and_without_couplings_they_are_not() -> None:
    """Two ablations. The decoder reads all latent vectors, so independent ones can decide too.

    Right translations of 100, at half of the noise: 28 and 93. Twenty seconds for each.
    """
    (diagonal,) = [toy for toy in TOYS if "diagonal" in toy.name]
    without = Patch(read_latents, "linear(z, model.weights[LATENT])", "0 * z")
    valid = []
    for patches in ((without,), ()):
        with diagonal.applied(), apply_patches(patches):
            task, model, settings, held = train_on_dialects(1000)
            refiner = FlowSeqRefiner(model, settings, None, 1, 1, 0.5)
            valid.append(share_of_valid(task, held, refiner))
    print(valid)
    assert valid[0] <= 50 and valid[1] >= valid[0] + 30
