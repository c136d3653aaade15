"""Parallel: even copies of the source, one pass, and the best of the likeliest lengths."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyspec.decoding.refine import Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.nonautoregressive_laws import likeliest_lengths, teacher_score
from tinyspec.laws.plain_lists import copy_evenly
from tinyspec.laws.rewriting_laws import random_reader, reader_of
from tinyspec.laws.traps.parallel import small_translator
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.nat import copy_uniformly, decode_parallel, forbid_special_tokens
from tinyspec.nonautoregressive.parallel import (
    ParallelRefiner,
    fits_length_token,
    parallel_loss,
    translate_from_copies,
    translate_likeliest_length,
)
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import Guarantee, RefineRequest, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.recipe import read_translation_recipe

SOURCES = [(4,), (6, 5), (4, 7, 5), (8, 7, 4, 6), (5, 4, 6, 7, 5)]
MODELS = Path(__file__).parents[2] / "models"


def reader(seed: int = 0) -> Seq2Seq:
    return small_translator(seed)


def judge(seed: int = 0) -> Seq2Seq:
    return random_reader(50 + seed, False, 48)


def run(model: Seq2Seq, teacher: Seq2Seq | None, source: Any, **knobs: Any) -> Refinement:
    request = RefineRequest(model, teacher, [])
    refiner = find_technique("parallel").refiner(request, **knobs)
    running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    assert len(list(running)) == 1
    return running


@pytest.mark.parametrize("lengths", [1, 3, 6])
def test_printed_algorithm_is_what_runs(lengths: int) -> None:
    for source, seed in product(SOURCES, range(3)):
        model, teacher = reader(seed), judge(seed)

        def predict(copies: list[int], model: Seq2Seq = model, source: Any = source) -> list[int]:
            read, slots = torch.tensor([copies]), torch.ones(1, len(copies), dtype=torch.bool)
            states = decode_parallel(model, read, slots, model.encode(torch.tensor([source])))
            return forbid_special_tokens(model, model.logits(states))[0].argmax(dim=-1).tolist()

        tried = likeliest_lengths(model, source, lengths)
        score = lambda text, t=teacher, x=source: teacher_score(t, x, text)  # noqa: E731
        expected = translate_from_copies(source, tried, predict, score)
        assert run(model, teacher, source, lengths=lengths).tokens == expected


def test_the_copies_are_those_of_the_oracle() -> None:
    for source, target in product(range(1, 9), repeat=2):
        words = list(range(source))
        places, _ = copy_uniformly(torch.tensor([source]), torch.tensor([target]))
        assert places[0].tolist() == copy_evenly(words, target)


def test_a_batch_of_sources_is_translated_as_each_alone() -> None:
    for seed, (teacher, lengths) in product(range(3), ((None, 1), (judge(), 4), (None, 4))):
        model = reader(seed)
        refiner = ParallelRefiner(model, teacher, lengths)
        together = translate_sources(
            model, pad_sequences(SOURCES), refiner, [Seeded(0) for _ in SOURCES]
        )
        who = "self" if teacher is None else "teacher"
        assert together == [
            run(model, teacher, source, lengths=lengths, judge=who).tokens for source in SOURCES
        ]
        if lengths == 1:
            assert translate_likeliest_length(model, None, pad_sequences(SOURCES)) == together


def test_passes_are_counted() -> None:
    made = run(reader(), judge(), SOURCES[2], lengths=4)
    names = [call.model for call in made.forward_log]
    assert names == ["reader/encoder", "reader", "teacher/encoder", "teacher"]
    assert len(run(reader(), None, SOURCES[2]).forward_log) == 2


def test_lengths_leave_a_place_for_the_teachers_beginning() -> None:
    model = reader_of(find_technique("parallel").translator, 0, 4)
    for teacher, longest in ((judge(), 3), (None, 4)):
        refiner = ParallelRefiner(model, teacher, 99)
        canvas = list(refine(model, (4, 5), refiner, Seeded(0), []))[-1].after
        assert sorted(canvas.mask.sum(dim=1).tolist()) == list(range(1, longest + 1))


def test_the_loss_depends_on_the_target_and_not_on_its_padding() -> None:
    model, source = reader(), torch.tensor([[4, 7, 5]])
    losses = {
        float(parallel_loss(model, (source, torch.tensor([target]))))
        for target in ([4, 5], [6, 7, 8], [4, 5, 0])
    }
    assert len(losses) == 2


def test_special_tokens_are_never_written() -> None:
    for seed, source in product(range(6), SOURCES):
        assert min(run(reader(seed), None, source, lengths=5, judge="self").tokens) >= 4


def test_pairs_that_the_length_token_cannot_tell_are_left_out() -> None:
    config = reader().config
    assert [fits_length_token(config, None, 5, n) for n in (0, 1, 8, 9)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_bad_input_is_named() -> None:
    card, model = find_technique("parallel"), reader()
    with pytest.raises(TinyspecError, match="4 lengths need a teacher to choose among them"):
        card.refiner(RefineRequest(model), lengths=4)
    with pytest.raises(TinyspecError, match="has 12 positions, fewer than"):
        card.refiner(RefineRequest(reader_of(card.translator, 0, 20), reader(1)), lengths=2)
    bare = Seq2Seq.create(Seq2SeqConfig(9, 8, 2, 12, 1, 2), torch.Generator().manual_seed(0))
    with pytest.raises(TinyspecError, match=r"has no LENGTH token.*multi30k-parallel/recipe"):
        card.refiner(RefineRequest(bare))


def test_the_card_and_the_recipes() -> None:
    card = find_technique("parallel")
    assert (card.kind, card.guarantee) == ("refine", Guarantee.APPROX)
    for name, method in (("multi30k-parallel", "parallel"), ("multi30k-shallow", "teacher")):
        plan = read_translation_recipe(MODELS / name / "recipe.toml")
        assert (plan.name, plan.method, plan.teacher) == (name, method, "../multi30k-teacher")
        assert plan.config(4800).parameters() < 4.5e6  # 9 MB in bfloat16
