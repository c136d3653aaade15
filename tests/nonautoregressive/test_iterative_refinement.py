"""Iterative refinement: the first decoder writes, the refiner rewrites words with their states."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyspec.bench.experiments.dialects import REFINED, DialectSettings, DialectTrial
from tinyspec.decoding.refine import Pass, Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.nonautoregressive_laws import likeliest_lengths
from tinyspec.laws.traps.iterative_refinement import damaged_references, small_reviser
from tinyspec.laws.traps.parallel import small_translator
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.iterative_refinement import (
    DAMAGE,
    IterativeRefiner,
    corrupt_words,
    refine_translation,
    refinement_loss,
    translate_in_iterations,
)
from tinyspec.nonautoregressive.nat import copy_uniformly, forbid_special_tokens
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import Guarantee, RefineRequest, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.recipe import read_translation_recipe

SOURCES = [(4,), (6, 5), (4, 7, 5), (8, 7, 4, 6), (5, 4, 6, 7, 5)]
RECIPE = Path(__file__).parents[2] / "models/multi30k-refine/recipe.toml"


def run(model: Seq2Seq, source: Any, **knobs: Any) -> tuple[Refinement, list[Pass]]:
    request = RefineRequest(model, forward_log=[])
    refiner = find_technique("iterative_refinement").refiner(request, **knobs)
    running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    return running, list(running)


def decoders(model: Seq2Seq, source: Any, length: int) -> tuple[Any, Any]:
    """Return the two passes that `refine_translation` is made of, for one source alone."""
    memory = model.encode(torch.tensor([source]))
    places, _ = copy_uniformly(torch.tensor([len(source)]), torch.tensor([length]))
    copies = model.embed_words(torch.tensor([source]).gather(1, places))

    def write(vectors: torch.Tensor, stack: str) -> tuple[list[int], torch.Tensor]:
        states = model.decode(model.place(vectors), memory, stack=stack)
        logits = forbid_special_tokens(model, model.logits(states))
        return logits[0].argmax(dim=-1).tolist(), states

    def again(words: list[int], states: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        return write(model.embed_words(torch.tensor([words])) + states, "refiner")

    return lambda: write(copies, "decoder"), again


@pytest.mark.parametrize(("iterations", "adaptive"), [(1, False), (4, False), (6, True)])
def test_printed_algorithm_is_what_runs(iterations: int, adaptive: bool) -> None:
    for seed, source in product(range(4), SOURCES):
        model = small_reviser(seed)
        (length,) = likeliest_lengths(model, source, 1)
        written = refine_translation(*decoders(model, source, length), iterations, adaptive)
        _, passes = run(model, source, iterations=iterations, adaptive=adaptive)
        assert [step.after.text(0) for step in passes] == written


def test_one_iteration_is_the_first_decoder_alone() -> None:
    """The refiner's weights decide nothing."""
    for seed, source in product(range(3), SOURCES):
        model = small_reviser(seed)
        for name, weight in model.weights.items():
            if name.startswith("refiner"):
                weight.fill_(torch.nan)
        running, passes = run(model, source, iterations=1)
        (length,) = likeliest_lengths(model, source, 1)
        assert running.tokens == decoders(model, source, length)[0]()[0]
        assert len(passes) == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_batch_of_sources_is_translated_as_each_alone(adaptive: bool) -> None:
    for seed, lengths in product(range(4), (1, 3)):
        model = small_reviser(seed)
        knobs: dict[str, Any] = {"iterations": 5, "adaptive": adaptive, "lengths": lengths}
        padded, rngs = pad_sequences(SOURCES), [Seeded(0) for _ in SOURCES]
        together = translate_sources(model, padded, IterativeRefiner(model, **knobs), rngs)
        assert together == [run(model, source, **knobs)[0].tokens for source in SOURCES]
    assert translate_in_iterations(model, None, padded) == [
        run(model, source, iterations=4)[0].tokens for source in SOURCES
    ]


def test_adaptive_decoding_takes_no_more_passes_and_keeps_what_converged() -> None:
    fewer = 0
    for seed, source in product(range(6), SOURCES):
        model = small_reviser(seed)
        _, adaptive = run(model, source, iterations=8, adaptive=True)
        _, whole = run(model, source, iterations=8)
        assert len(adaptive) <= len(whole) == 8
        for one, other in zip(adaptive, whole, strict=False):
            assert one.after.text(0) == other.after.text(0)
        fewer += len(adaptive) < 8
    assert fewer


# ------------------------------------------------------------------ training


def test_a_reference_is_damaged_between_its_first_and_last_word() -> None:
    """The last position is only hit from the one before it."""
    found = damaged_references((4, 5), 1, range(4, 7))
    assert found == pytest.approx(
        {(4, 4): 1 / 3, (4, 5): 1 / 9, (5, 5): 1 / 9, (6, 5): 1 / 9, (5, 4): 1 / 3}
    )
    target = torch.tensor([[5, 6, 7, 8, 4, 5], [7, 0, 0, 0, 0, 0]])
    for share in DAMAGE:
        made = corrupt_words(
            target, target != 0, share, range(4, 9), torch.Generator().manual_seed(1)
        )
        assert made[1].tolist() == target[1].tolist() and not torch.equal(made[0], target[0])
    assert pytest.approx(DAMAGE, abs=0.004) == [0.9 - 0.8 * i / 3 for i in range(4)]


def test_gradients_flow_through_states_and_not_through_words() -> None:
    """The loss of later passes reaches the first decoder through its states."""
    model, source, target = small_reviser(1), torch.tensor([[4, 6, 5]]), torch.tensor([[5, 8]])
    weight = model.weights["decoder.0.out.weight"].requires_grad_()
    loss = refinement_loss(model, (source, target), torch.Generator().manual_seed(0), denoising=0)
    (slope,) = torch.autograd.grad(loss, weight)
    copies = model.embed(source[:, [0, 2]])
    logits = model.logits(model.decode(copies, model.encode(source)))
    first = torch.nn.functional.cross_entropy(logits[0], target[0]) / len(DAMAGE)
    (alone,) = torch.autograd.grad(first, weight)
    assert float(alone.abs().max()) > 1e-3 and not torch.allclose(slope, alone)


@pytest.mark.slow
def test_three_dialects_become_one_with_the_iterations_and_not_without_denoising(
    tmp_path: Path,
) -> None:
    """On the pairs as they are, where one pass mixes dialects. The ablation is the paper's idea."""
    given = DialectSettings(
        ("lex",), modes=3, words=6, shortest=3, longest=4, pairs=4000, tests=100, steps=300,
        width=48,
    )  # fmt: skip
    found = DialectTrial("lex", given, tmp_path).run_refinement((1, 4, 10))
    valid = {name: sum(int(mark) & 1 for mark in row["verdicts"]) for name, row in found.items()}
    print(valid)
    first, ablated = valid[f"{REFINED}, T 1"], valid[f"{REFINED} without denoising, T 10"]
    assert valid[f"{REFINED}, T 10"] >= 70 and valid[f"{REFINED}, T 4"] >= first + 30
    assert ablated <= valid[f"{REFINED}, T 10"] - 30


# ------------------------------------------------------------------ bad input, and the card


def test_bad_input_is_named() -> None:
    card = find_technique("iterative_refinement")
    with pytest.raises(TinyspecError, match=r"no second decoder: train .*multi30k-refine/recipe"):
        card.refiner(RefineRequest(small_translator(0)))
    bare = Seq2SeqConfig(9, 8, 2, 12, 1, 1, 12, stacks={"refiner": 1})
    model = Seq2Seq.create(bare, torch.Generator().manual_seed(0))
    with pytest.raises(TinyspecError, match="has no LENGTH token"):
        card.refiner(RefineRequest(model))
    with pytest.raises(TinyspecError, match="iterations is 0: it must be from 1 to 1024"):
        card.refiner(RefineRequest(small_reviser(0)), iterations=0)


def test_the_card_and_the_recipe() -> None:
    card = find_technique("iterative_refinement")
    assert (card.kind, card.guarantee) == ("refine", Guarantee.APPROX)
    plan = read_translation_recipe(RECIPE)
    config = plan.config(4800)
    assert config.stacks == {"refiner": 2} and config.parameters() < 4.5e6
    assert dict(plan.inherit)["refiner"] == "decoder"
