"""What translation stands on: a session that has read a source, the loop that rewrites, a teacher
that judges.

The dense decoder is the oracle here; it is itself held to a version written out token by token
(tests/lm/test_seq2seq.py).
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from tinyspec.decoding.refine import Canvas, blank
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.laws.refine_laws import REFINE_SOURCES, random_reader
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.tree import ROOT, TokenTree

LISTENS_TO_SOURCE = "a session that has read a source"
REFINE_LOOP = "the loop of rewriting"
TEACHER_JUDGES = "a teacher's judgement"

TRANSLATION_TOLERANCE = 1e-9
LISTEN_TEXT = (1, 4, 8, 8, 5)
LISTEN_TREE = TokenTree((4, 6, 7, 5), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
LISTEN_PATHS = ((), (4,), (6,), (4, 7), (4, 7, 5))  # what the root and its nodes spell
JUDGED_TEXTS = (((4, 5, 6, 8), (7,), (5, 5)), ((8,), (8, 8)), ((6, 7, 4),))


def random_writer(seed: int) -> Seq2Seq:
    """A random encoder-decoder that writes from left to right."""
    return random_reader(seed, positional=False)


def dense_logits(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Logits behind every token of a text, [n, V], in one causal pass."""
    causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    memory = model.encode(torch.tensor([list(source)]))
    return model.logits(model.decode(model.embed(torch.tensor([list(text)])), memory, causal))[0]


# ---------------------------------------------------------------------- the session


def listens_to_source(parts: Parts) -> Evidence:
    """Rows of trees, of trees grown by layers, after commits and rewinds, are those of the dense
    decoder.
    """
    begun, seen = perf_counter(), 0
    for seed, source in enumerate(REFINE_SOURCES):
        model = random_writer(seed)
        session = parts.given(model, source).session()
        for length in range(1, len(LISTEN_TEXT) + 1):
            session.extend(LISTEN_TEXT[length - 1 : length])
            if length % 2:
                session.advance(LISTEN_TREE, 1)
            rows = session.score(LISTEN_TREE).logits
            for row, path in zip(rows, LISTEN_PATHS, strict=True):
                seen += _expect_row(
                    model, source, (*LISTEN_TEXT[:length], *path), row, "a tree below the text"
                )
        session.rewind(2)
        session.score(LISTEN_TREE)
        session.commit((0, 2), 6)
        seen += _expect_row(
            model,
            source,
            (*LISTEN_TEXT[:2], 4, 7, 6),
            session.score(TokenTree()).logits[0],
            "a committed path",
        )
        session.rewind(3)
        seen += _expect_row(
            model, source, (*LISTEN_TEXT[:2], 4), session.score(TokenTree()).logits[0], "taken back"
        )
    return Evidence(LISTENS_TO_SOURCE, seen, 0, perf_counter() - begun)


def _expect_row(
    model: Seq2Seq, source: Sequence[int], text: tuple[int, ...], row: torch.Tensor, where: str
) -> int:
    expected = dense_logits(model, source, text)[-1]
    if not torch.allclose(row, expected, rtol=0, atol=TRANSLATION_TOLERANCE):
        accuse(LISTENS_TO_SOURCE, expected, row, source=tuple(source), text=text, after=where)
    return 1


# ---------------------------------------------------------------------- the loop


class ScriptedRefiner:
    """A refiner that notes what it is asked; its second candidate is the one to keep."""

    def __init__(self, model: Seq2Seq, passes: int):
        self.model, self.passes, self.log = model, passes, list[Any]()

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        self._note("start", rng, tuple(source), memory)
        return blank([2, 2], self.model.config.mask)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        self._note("rewrite", rng, iteration, memory, canvas)
        self.model.logits(self.model.decode(self.model.embed(canvas.tokens), memory))
        return canvas._replace(tokens=canvas.tokens + 1)

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration >= self.passes

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        self.log.append(("choose", tuple(source), int(canvas.tokens[0, 0])))
        return 1

    def _note(
        self,
        what: str,
        rng: RandomSource,
        number: Any,
        memory: EncoderOutput,
        canvas: Canvas | None = None,
    ) -> None:
        uniforms = rng.uniforms(1)
        drawn = None if uniforms is None else round(float(uniforms[0]), 6)
        where = None if canvas is None else int(canvas.tokens[0, 0])
        self.log.append((what, number, where, float(memory.states.sum()), drawn))


def refines_in_order(parts: Parts) -> Evidence:
    """start, as many passes as are wanted, choose: each on what the one before left, with its own
    chance and the one memory.
    """
    begun, seen = perf_counter(), 0
    for seed, source in enumerate(REFINE_SOURCES):
        for passes in (0, 1, 3):
            model, forward_log, root = random_reader(seed), list[ForwardRecord](), Seeded(seed)
            refiner = ScriptedRefiner(model.counting(forward_log), passes)
            running = parts.refine(model, source, refiner, Seeded(seed), forward_log)
            events = [
                (step.iteration, int(step.before.tokens[0, 0]), len(step.calls)) for step in running
            ]
            state = float(model.encode(torch.tensor([list(source)])).states.sum())
            keys = [("start", 0), *(("rewrite", number) for number in range(passes))]
            drawn = [round(float(root.split(*key).uniforms(1)[0]), 6) for key in keys]
            mask = model.config.mask
            expected = [
                ("start", tuple(source), None, state, drawn[0]),
                *(
                    ("rewrite", number, mask + number, state, drawn[1 + number])
                    for number in range(passes)
                ),
                ("choose", tuple(source), mask + passes),
            ]
            told = {"source": tuple(source), "passes wanted": passes, "seed": seed}
            _expect_in_loop(expected, refiner.log, told, "what the refiner is asked")
            _expect_in_loop(
                [(n, mask + n, 1) for n in range(passes)],
                events,
                told,
                "what is told of the passes",
            )
            _expect_in_loop([mask + passes] * 2, running.tokens, told, "the text that is kept")
            _expect_in_loop(1, running.chosen, told, "the candidate that is kept")
            names = [call.model for call in forward_log]
            _expect_in_loop(
                [f"{model.name}/encoder", *[model.name] * passes], names, told, "the forward log"
            )
            seen += 1
    return Evidence(REFINE_LOOP, seen, 0, perf_counter() - begun)


def _expect_in_loop(expected: Any, got: Any, told: dict[str, Any], what: str) -> None:
    if expected != got:
        accuse(REFINE_LOOP, expected, got, **told, asked=what)


# ---------------------------------------------------------------------- the judgement


def teacher_judges(parts: Parts) -> Evidence:
    """log p of each token and of the end, as a dense pass over each candidate alone says it;
    nothing at padding.
    """
    begun, seen = perf_counter(), 0
    for seed, source in enumerate(REFINE_SOURCES):
        teacher = random_writer(seed)
        for texts in JUDGED_TEXTS:
            canvas = blank([len(text) for text in texts], 8)
            for row, text in enumerate(texts):
                canvas.tokens[row, : len(text)] = torch.tensor(text)
            got = parts.judge(teacher, source, canvas).tolist()
            for row, text in enumerate(texts):
                laws = dense_logits(teacher, source, (teacher.config.bos, *text)).log_softmax(
                    dim=-1
                )
                expected = [
                    float(law[token])
                    for law, token in zip(laws, (*text, teacher.config.eos), strict=True)
                ]
                expected += [0.0] * (len(canvas.tokens[0]) - len(text))
                if any(
                    abs(a - b) > TRANSLATION_TOLERANCE
                    for a, b in zip(expected, got[row], strict=True)
                ):
                    accuse(
                        TEACHER_JUDGES,
                        expected,
                        got[row],
                        source=tuple(source),
                        candidate=text,
                        beside=texts,
                    )
                seen += 1
    return Evidence(TEACHER_JUDGES, seen, 0, perf_counter() - begun)


TRANSLATION_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    LISTENS_TO_SOURCE: listens_to_source,
    REFINE_LOOP: refines_in_order,
    TEACHER_JUDGES: teacher_judges,
}
