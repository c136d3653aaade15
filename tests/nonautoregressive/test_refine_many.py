"""A batch of sources is refined as each source alone, with the passes of one."""

import pytest
import torch

from tinyspec.decoding.refine import Refiner, blank_canvas, refine, score_candidates, token_logprobs
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.mask_predict import MaskPredictRefiner
from tinyspec.nonautoregressive.nat import NatRefiner
from tinyspec.nonautoregressive.refine_many import refine_many, select_source, translate_sources
from tinyspec.training.bitext import pad_sequences

SOURCES = [[4, 5, 6, 7, 9], [8], [9, 4, 9], [5, 5, 10]]
SHAPE = {
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "max_positions": 40,
}


def model(seed: int, **more: int) -> Seq2Seq:
    config = Seq2SeqConfig(11, **SHAPE, **more)  # type: ignore[arg-type]
    made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
    for name in (
        "lengths",
        "fertility.weight",
    ):  # fresh heads are as good as uniform: let them be of many minds
        if name in made.weights:
            made.weights[name].mul_(8)
    return made


def mask_predict() -> tuple[Seq2Seq, Refiner]:
    one = model(1, lengths=12)
    return one, MaskPredictRefiner(one, iterations=4, lengths=3)


def nat() -> tuple[Seq2Seq, Refiner]:
    one = model(2, positional=True, fertilities=4)
    return one, NatRefiner(one, model(3), "argmax", 5, 1.0)


@pytest.mark.parametrize("make", [mask_predict, nat])
def test_sources_refined_together_equal_those_refined_one_by_one(make: object) -> None:
    one, refiner = make()  # type: ignore[operator]
    single, canvases = [], []
    for i, source in enumerate(SOURCES):
        running = refine(one, source, refiner, Seeded(i))
        for _ in running:
            pass
        single.append(running.tokens)
        canvases.append(running.canvas)
    assert (
        translate_sources(one, pad_sequences(SOURCES), refiner, [Seeded(i) for i in range(4)])
        == single
    )
    many = refine_many(one, pad_sequences(SOURCES), refiner, [Seeded(i) for i in range(4)])
    for i, canvas in enumerate(canvases):
        of = many.canvas_of(i)
        assert torch.equal(of.mask, canvas.mask)
        assert [of.text(row) for row in range(len(of.mask))] == [
            canvas.text(row) for row in range(len(of.mask))
        ]
        torch.testing.assert_close(of.means(), canvas.means(), rtol=0, atol=1e-9)


def test_a_batch_takes_the_passes_of_one_source() -> None:
    one, _ = mask_predict()
    forward_log: list[ForwardRecord] = []
    counted = one.with_log(forward_log)
    refine_many(
        counted,
        pad_sequences(SOURCES),
        MaskPredictRefiner(counted, 4, 3),
        [Seeded(i) for i in range(4)],
    )
    assert [call.model for call in forward_log] == ["translator/encoder"] + 4 * ["translator"]


def test_a_teacher_judges_candidates_of_many_sources_as_of_one() -> None:
    teacher = model(5)
    canvases = [blank_canvas([2, 3], 6), blank_canvas([1, 4], 7)]
    memory = teacher.encode(pad_sequences(SOURCES[:2]))
    for i, canvas in enumerate(canvases):
        torch.testing.assert_close(
            token_logprobs(teacher, memory.select_rows([i, i]), canvas),
            score_candidates(teacher, SOURCES[i], canvas),
        )
        torch.testing.assert_close(
            token_logprobs(teacher, select_source(memory, i), canvas),
            score_candidates(teacher, SOURCES[i], canvas),
        )


def test_a_technique_that_draws_while_it_rewrites_raises_an_error() -> None:
    one, _ = mask_predict()

    class Drawing(MaskPredictRefiner):
        def rewrite(self, canvas, memory, iteration, rng):  # type: ignore[no-untyped-def]
            rng.split("noise", 0)

    with pytest.raises(TinyspecError, match="call `refine` for each source"):
        refine_many(one, pad_sequences(SOURCES), Drawing(one, 2, 2), [Seeded(i) for i in range(4)])
