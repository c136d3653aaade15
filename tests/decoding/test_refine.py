"""The loop that rewrites a canvas: its events, the teacher that judges, and their laws."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.laws import hosted
from tinyspec.decoding.refine import (
    Canvas,
    Refinement,
    Refiner,
    best_candidate,
    blank_canvas,
    check_teacher,
    refine,
    score_candidates,
)
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws import rewriting_laws
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.rewriting_laws import (
    CANDIDATE_ALONE,
    CANVAS_ORDER,
    PADDING_DECIDES,
    REFINE_LAWS,
    REFINE_PASSES,
    SEED_DECIDES,
    hold_on_sources,
    random_reader,
)
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.technique import Card, RefineRequest, Request, find_technique
from tinyspec.tree import TokenTree

SOURCE = [4, 7, 5]


def canvas(*texts: Sequence[int]) -> Canvas:
    """Candidates with these tokens."""
    made = blank_canvas([len(text) for text in texts], 0)
    for row, text in enumerate(texts):
        made.tokens[row, : len(text)] = torch.tensor(text)
    return made


# ---------------------------------------------------------------------- the loop


def test_every_pass_is_an_event_and_the_source_is_encoded_once() -> None:
    forward_log = list[ForwardRecord]()
    request = RefineRequest(random_reader(0), forward_log=forward_log)
    running = refine(request.model, SOURCE, hosted.FillIn(request.model), Seeded(0), forward_log)
    passes = list(running)
    assert [step.iteration for step in passes] == [0, 1]
    assert [call.model for call in forward_log] == ["reader/encoder", "reader", "reader"]
    assert all(step.calls == (forward_log[1 + step.iteration],) for step in passes)
    assert (
        forward_log[1].rows == forward_log[1].head_rows == 6
    )  # two candidates of up to three slots
    assert torch.equal(passes[0].after.tokens, passes[1].before.tokens)
    assert running.canvas is passes[1].after
    assert running.tokens == running.canvas.text(int(running.canvas.means().argmax()))
    assert len(running.scores) == len(running.tokens)


def test_a_pass_is_reported_as_plain_data() -> None:
    request = RefineRequest(random_reader(0))
    step = next(iter(refine(request.model, SOURCE, hosted.FillIn(request.model), Seeded(0))))
    written = step.as_record()
    assert written.calls == 1
    assert [len(tokens) for tokens in written.tokens] == [3, 2]
    assert written.changed == [
        [slot for slot, token in enumerate(tokens) if token != request.model.config.mask]
        for tokens in written.tokens
    ]


def test_stopped_half_way_the_best_so_far_is_there() -> None:
    request = RefineRequest(random_reader(0))
    running = refine(request.model, SOURCE, hosted.FillIn(request.model), Seeded(0))
    assert running.tokens == [] == running.scores
    next(iter(running))
    assert running.canvas is not None
    assert running.chosen is None
    assert running.tokens == running.canvas.text(int(running.canvas.means().argmax()))


def test_a_candidate_without_slots_has_the_worst_mean() -> None:
    empty = blank_canvas([0, 2], 3)
    assert empty.tokens.shape == (2, 2)
    assert empty.means().tolist() == [-float("inf"), 0]
    assert empty.text(0) == []
    assert blank_canvas([0], 3).tokens.shape == (1, 1)


def test_a_source_is_needed_and_has_to_fit() -> None:
    request = RefineRequest(random_reader(0))
    with pytest.raises(TinyspecError, match="the source is empty"):
        refine(request.model, [], hosted.FillIn(request.model), Seeded(0))
    with pytest.raises(TinyspecError, match="the source has 13 tokens, reader has 12 positions"):
        list(refine(request.model, [4] * 13, hosted.FillIn(request.model), Seeded(0)))


def test_a_card_makes_what_its_kind_says() -> None:
    card = hosted.card(hosted.fill_in, kind="refine")
    assert isinstance(card.refiner(RefineRequest(random_reader(0))), hosted.FillIn)
    with pytest.raises(
        TinyspecError, match="rewrites a translation and extends no text: use `tinyspec translate"
    ):
        card.make(Request(random_reader(1, positional=False).condition_on(SOURCE).session()))
    with pytest.raises(TinyspecError, match="rewrites no text: give one that does"):
        find_technique("autoregressive").refiner(RefineRequest(random_reader(0)))


def test_the_forward_log_separates_model_and_teacher() -> None:
    request = RefineRequest(random_reader(0), random_reader(0))
    assert request.teacher is not None
    request.teacher.encode(torch.tensor([SOURCE]))
    assert [call.model for call in request.forward_log] == ["reader (teacher)/encoder"]


# ---------------------------------------------------------------------- a teacher's judgement


def token_logprobs(teacher: Seq2Seq, source: list[int], text: list[int]) -> list[float]:
    """log p of each token and of the end, one after the other through a session."""
    session, found = teacher.condition_on(source).session(), list[float]()
    for at, token in enumerate([*text, teacher.config.eos]):
        session.extend(([teacher.config.bos, *text])[at : at + 1])
        found.append(float(session.score(TokenTree()).logits[0].log_softmax(-1)[token]))
    return found


def test_one_pass_judges_all_candidates_as_the_teacher_would_one_by_one() -> None:
    texts, forward_log = [[4, 5, 6, 8], [7], [5, 5]], list[ForwardRecord]()
    teacher = random_reader(3, positional=False).with_log(forward_log)
    scores = score_candidates(teacher, SOURCE, canvas(*texts))
    assert [call.model for call in forward_log] == ["teacher/encoder", "teacher"]
    for row, text in enumerate(texts):
        expected = token_logprobs(teacher, SOURCE, text)
        assert scores[row].tolist() == pytest.approx(
            [*expected, *[0.0] * (4 - len(text))], abs=1e-12
        )
    sums = [sum(token_logprobs(teacher, SOURCE, text)) for text in texts]
    assert best_candidate(teacher, SOURCE, canvas(*texts)) == sums.index(max(sums))


def test_what_stands_in_padding_is_not_judged() -> None:
    teacher, made = random_reader(3, positional=False), canvas([4, 5, 6], [7])
    other = made._replace(tokens=torch.where(made.mask, made.tokens, 8))
    assert torch.equal(
        score_candidates(teacher, SOURCE, made), score_candidates(teacher, SOURCE, other)
    )


def test_a_teacher_that_cannot_judge_is_an_error() -> None:
    model = random_reader(0)
    with pytest.raises(TinyspecError, match="does not write from left to right"):
        check_teacher(model, random_reader(1))
    strange = random_reader(1, positional=False)
    strange = Seq2Seq(replace(strange.config, vocab_size=10), strange.weights, name="stranger")
    with pytest.raises(
        TinyspecError, match="the teacher stranger has another vocabulary than reader"
    ):
        check_teacher(model, strange)
    with pytest.raises(
        TinyspecError, match="the translation has 13 tokens, teacher has 12 positions"
    ):
        score_candidates(random_reader(1, positional=False), SOURCE, canvas([4] * 12))


@pytest.mark.parametrize(
    ("trained", "heads", "judges"),
    [
        ("teacher", {}, True),
        ("plain", {}, True),
        ("depth_adaptive", {"depth_adaptive/halt": (1,)}, True),  # it writes from left to right too
        ("mask_predict", {}, False),
        ("parallel", {}, False),
        ("nar_crf", {"crf_from": (9, 2)}, False),
        ("sat", {}, False),
        ("specdec", {}, False),
    ],
)
def test_only_a_model_that_writes_from_left_to_right_judges(
    trained: str, heads: dict[str, tuple[int, ...]], judges: bool
) -> None:
    config = replace(
        random_reader(1, positional=False).config, heads=heads, extra={"trained_for": trained}
    )
    teacher = Seq2Seq.create(config, torch.Generator().manual_seed(0))
    if judges:
        check_teacher(random_reader(0), teacher)
        return
    with pytest.raises(TinyspecError, match="does not write from left to right"):
        check_teacher(random_reader(0), teacher)


# ---------------------------------------------------------------------- what the laws see


class Encodes(hosted.FillIn):
    """Encodes the source anew in every pass."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        again = self.model.encode(torch.full((1, memory.mask.shape[1]), 4))
        return super().rewrite(canvas, memory._replace(mask=again.mask), iteration, rng)


class OneByOne(hosted.FillIn):
    """A decoder pass a candidate."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        rows = [
            super(OneByOne, self).rewrite(
                Canvas(*(part[row : row + 1] for part in canvas[:3])), memory, iteration, rng
            )
            for row in range(len(canvas.tokens))
        ]
        return Canvas(*(torch.cat(parts) for parts in zip(*(row[:3] for row in rows), strict=True)))


class SeesPadding(hosted.FillIn):
    """Attends to padding slots."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        states = self.model.decode(self.model.embed(canvas.tokens), memory)
        scores, tokens = self.model.logits(states).log_softmax(dim=-1).max(dim=-1)
        return Canvas(tokens, canvas.mask, scores)


class ByTheBatch(hosted.FillIn):
    """Scores are relative to the best of all candidates."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        after = super().rewrite(canvas, memory, iteration, rng)
        return after._replace(scores=after.scores - after.scores[after.mask].max())


class CountsPadding(hosted.FillIn):
    """Chooses by the sum of all scores, those of padding too."""

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return int(canvas.scores.sum(dim=1).argmax())


class Dices(hosted.FillIn):
    """Draws from the global state."""

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        return blank_canvas([int(torch.randint(1, 9, ())), 2], self.model.config.mask)


class Overwrites(hosted.FillIn):
    """Writes the second pass into the canvas of the first."""

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        after = super().rewrite(canvas, memory, iteration, rng)
        canvas.tokens.fill_(8)
        return after


class PaddedInFront(hosted.FillIn):
    """Slots stand at the end."""

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        made = super().start(source, memory, rng)
        return made._replace(mask=made.mask.flip(1))


class Endless(hosted.FillIn):
    """Never done."""

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return False


class TakesNone(hosted.FillIn):
    """Chooses a candidate that is not there."""

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 2


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (REFINE_PASSES, Encodes),
        (REFINE_PASSES, OneByOne),
        (CANDIDATE_ALONE, SeesPadding),
        (CANDIDATE_ALONE, ByTheBatch),
        (PADDING_DECIDES, SeesPadding),
        (PADDING_DECIDES, CountsPadding),
        (SEED_DECIDES, Dices),
        (CANVAS_ORDER, Overwrites),
        (CANVAS_ORDER, PaddedInFront),
        (CANVAS_ORDER, Endless),
        (CANVAS_ORDER, TakesNone),
    ],
)
def test_a_law_sees_the_defect_it_is_meant_for(law: str, wrong: type[hosted.FillIn]) -> None:
    with pytest.raises(LawViolated) as accused:
        hold_on_sources(law, _card(wrong), {})
    assert accused.value.counterexample.law == law


@pytest.mark.parametrize("law", REFINE_LAWS)
def test_nothing_correct_is_accused(law: str) -> None:
    assert hold_on_sources(law, _card(hosted.FillIn), {}, seed=3).cases == len(
        rewriting_laws.REFINE_SOURCES
    )


def _card(refiner: type[hosted.FillIn]) -> Card:
    def build(request: RefineRequest) -> Any:
        return refiner(request.model)

    return hosted.card(build, kind="refine")


def test_the_loop_asks_in_order_and_gives_each_pass_its_own_chance() -> None:
    asked = list[Any]()

    class Scripted(hosted.FillIn):
        def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
            asked.append(("start", tuple(source), rng.uniforms(2)))
            return super().start(source, memory, rng)

        def rewrite(
            self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
        ) -> Canvas:
            asked.append(("rewrite", iteration, rng.uniforms(2)))
            return super().rewrite(canvas, memory, iteration, rng)

        def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
            asked.append(("choose", canvas, None))
            return 1

    request = RefineRequest(random_reader(0))
    running: Refinement = refine(request.model, SOURCE, Scripted(request.model), Seeded(5))
    assert len(list(running)) == 2
    assert [entry[0] for entry in asked] == ["start", "rewrite", "rewrite", "choose"]
    assert [entry[1] for entry in asked[:3]] == [tuple(SOURCE), 0, 1]
    draws = {tuple(entry[2].tolist()) for entry in asked[:3]}
    assert len(draws) == 3
    assert asked[3][1] is running.canvas
    assert running.chosen == 1
    assert running.canvas is not None
    assert running.tokens == running.canvas.text(1)


def test_the_hosted_refiner_is_a_refiner() -> None:
    made: Callable[[RefineRequest], Refiner] = hosted.fill_in
    assert made(RefineRequest(random_reader(0))).finished(canvas([4]), 2)
