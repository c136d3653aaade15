"""What every technique that rewrites a canvas obeys, and what translation stands on.

The rule of such a technique is its own, so an oracle of its own proves it. These laws are what all
of them owe: by the forward log, one pass of the encoder, and one of the decoder for each rewriting;
candidates that know nothing of each other, nor of padding; randomness from the seed alone. They run
on random float64 encoder-decoders that have every head. The dense decoder is the oracle; it is
itself compared with a version written token by token (tests/lm/test_seq2seq.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas, Pass, Refinement, Refiner, blank_canvas, refine
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig
from tinyspec.technique import Card, RefineRequest
from tinyspec.tree import ROOT, TokenTree

REFINE_PASSES = "passes of a rewriting"
CANDIDATE_ALONE = "a candidate alone"
PADDING_DECIDES = "padding decides nothing"
SEED_DECIDES = "only the seed decides"
CANVAS_ORDER = "a canvas in order"

REFINE_TOLERANCE = 1e-9
READER_POSITIONS = 12
REFINE_SOURCES = ((4,), (6, 5, 4), (4, 7, 5, 8, 6), (8,) * READER_POSITIONS)
MOST_PASSES = 100  # passes of a technique that ends

Build = Callable[[RefineRequest], Refiner]


@cache
def random_reader(seed: int, positional: bool = True, positions: int = READER_POSITIONS) -> Seq2Seq:
    """Return a random encoder-decoder of nine tokens with LENGTH token, fertilities, large
    weights."""
    config = Seq2SeqConfig(
        9, 8, 2, 12, 1, 2, positions, positional=positional, lengths=9, fertilities=4
    )
    made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
    loud = {name: 2 * w if w.ndim == 2 else w for name, w in made.weights.items()}
    return Seq2Seq(config, loud, name="reader" if positional else "teacher")


@dataclass(frozen=True)
class RefineScene:
    """One request: models, source, settings, seed."""

    build: Build
    source: Sequence[int]
    teacher: bool = False
    model: int = 0
    seed: int = 0
    knobs: dict[str, Any] = field(
        default_factory=dict
    )  # what `build` was made with, for a counterexample

    def begin(self) -> tuple[RefineRequest, Refiner]:
        """Return a request and its refiner."""
        judge = (
            random_reader(self.model + 1, positional=False, positions=4 * READER_POSITIONS)
            if self.teacher
            else None
        )
        request = RefineRequest(random_reader(self.model), judge)
        return request, self.build(request)

    def run(self) -> tuple[RefineRequest, Refinement, list[Pass]]:
        """Run the whole request."""
        request, refiner = self.begin()
        running = refine(
            request.model, self.source, refiner, Seeded(self.seed), request.forward_log
        )
        return request, running, list(self.steps(running))

    def steps(self, running: Refinement) -> Iterator[Pass]:
        """Yield its passes; a technique must come to an end."""
        for step in running:
            if step.iteration == MOST_PASSES:
                accuse(CANVAS_ORDER, f"an end within {MOST_PASSES} passes", "none", **self.words())
            yield step

    def words(self) -> dict[str, Any]:
        """Return the scene for a counterexample."""
        return {
            "source": tuple(self.source),
            "seed": self.seed,
            "model": f"reader {self.model}",
            **self.knobs,
        }


def passes_of_a_rewriting(scene: RefineScene) -> None:
    """Check by the forward log: one encoder pass, and one decoder pass for each rewriting.

    A decoder pass covers the whole canvas, and there are no others.
    """
    request, _, passes = scene.run()
    named = [call.model for call in request.forward_log]
    name = request.model.name
    counts = {"encoder": named.count(f"{name}/encoder"), "decoder": named.count(name)}
    if counts != {"encoder": 1, "decoder": len(passes)}:
        accuse(REFINE_PASSES, {"encoder": 1, "decoder": len(passes)}, counts, **scene.words())
    for step in passes:
        own = [call.rows for call in step.calls if call.model == name]
        if own != [step.after.tokens.numel()]:
            accuse(
                REFINE_PASSES,
                [step.after.tokens.numel()],
                own,
                **scene.words(),
                rows_of_pass=step.iteration,
            )
    judged = sorted(model for model in named if not model.startswith(name))
    allowed = ["teacher", "teacher/encoder"] if scene.teacher else []
    if judged not in ([], allowed):
        accuse(REFINE_PASSES, allowed, judged, **scene.words(), counted="passes of a teacher")


def a_candidate_alone(scene: RefineScene) -> None:
    """Check that a candidate becomes what it becomes without the others and without padding."""
    request, refiner = scene.begin()
    running = refine(request.model, scene.source, refiner, Seeded(scene.seed), request.forward_log)
    memory = request.model.encode(torch.tensor([list(scene.source)]))
    for step in scene.steps(running):
        for row in range(len(step.before.tokens)):
            own = canvas_alone(step.before, row, len(scene.source))
            if own is None:
                continue
            _, fresh = scene.begin()  # a refiner that remembers nothing of the others
            rng = Seeded(scene.seed).split("rewrite", step.iteration)
            with torch.inference_mode():
                got = fresh.rewrite(own, memory, step.iteration, rng)
            _compare_candidates(
                CANDIDATE_ALONE,
                candidate_of(got, 0),
                candidate_of(step.after, row),
                scene,
                candidate=row,
                iteration=step.iteration,
            )


def canvas_alone(canvas: Canvas, row: int, source: int) -> Canvas | None:
    """Return one candidate's canvas without padding, or None if `extra` cannot be taken apart.

    That happens where source and canvas are equally long.
    """
    length, room = int(canvas.mask[row].sum()), canvas.tokens.shape[1]
    extra = canvas.extra
    if isinstance(extra, Tensor) and len(extra) == len(canvas.tokens):
        if source == room and extra.ndim > 1:
            return None
        extra = extra[row : row + 1]
        if extra.ndim > 1 and extra.shape[1] == room:
            extra = extra[:, : max(length, 1)]
    tokens, mask, scores = (part[row : row + 1, : max(length, 1)] for part in canvas[:3])
    return Canvas(tokens, mask, scores, extra)


def padding_decides_nothing(scene: RefineScene) -> None:
    """Check that tokens and scores at padding change no slot and no choice."""
    request, running, passes = scene.run()
    memory = request.model.encode(torch.tensor([list(scene.source)]))
    for step in passes:
        _, fresh = scene.begin()
        rng = Seeded(scene.seed).split("rewrite", step.iteration)
        with torch.inference_mode():
            got = fresh.rewrite(scribble_padding(step.before), memory, step.iteration, rng)
        for row in range(len(got.tokens)):
            _compare_candidates(
                PADDING_DECIDES,
                candidate_of(got, row),
                candidate_of(step.after, row),
                scene,
                candidate=row,
                iteration=step.iteration,
            )
    assert running.canvas is not None
    with torch.inference_mode():
        chosen = scene.begin()[1].choose(scribble_padding(running.canvas), scene.source, memory)
    if chosen != running.chosen:
        accuse(
            PADDING_DECIDES,
            running.chosen,
            chosen,
            **scene.words(),
            asked="which candidate is chosen",
        )


def scribble_padding(canvas: Canvas) -> Canvas:
    """Return the canvas with other tokens and scores at its padding slots."""
    tokens = torch.where(canvas.mask, canvas.tokens, 4 + torch.arange(canvas.tokens.shape[1]) % 5)
    return canvas._replace(tokens=tokens, scores=torch.where(canvas.mask, canvas.scores, -77.0))


def only_the_seed_decides(scene: RefineScene) -> None:
    """Check that the same seed gives the same translation, and that torch's global state is
    unused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = scene.run()[1]
        if not torch.equal(before, torch.get_rng_state()):
            accuse(SEED_DECIDES, "the global state of torch as it was", "another", **scene.words())
        torch.manual_seed(2)
        second = scene.run()[1]
    if (first.tokens, first.scores) != (second.tokens, second.scores):
        accuse(SEED_DECIDES, first.tokens, second.tokens, **scene.words())


def a_canvas_in_order(scene: RefineScene) -> None:
    """Check the form of a canvas: slots before padding, known tokens, no pass alters its input."""
    request, refiner = scene.begin()
    running = refine(request.model, scene.source, refiner, Seeded(scene.seed), request.forward_log)
    kept: Canvas | None = None
    for step in scene.steps(running):
        if kept is not None and any(
            not torch.equal(a, b) for a, b in zip(kept[:3], step.before[:3], strict=True)
        ):
            accuse(
                CANVAS_ORDER,
                kept.tokens,
                step.before.tokens,
                **scene.words(),
                canvas=f"behind pass {step.iteration - 1}",
            )
        kept = Canvas(*(part.clone() for part in step.after[:3]))
        mask, tokens = step.after.mask, step.after.tokens
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            accuse(CANVAS_ORDER, "slots, then padding", mask, **scene.words())
        if mask.shape[1] > request.model.config.max_positions:
            accuse(
                CANVAS_ORDER,
                f"at most {request.model.config.max_positions} slots",
                mask.shape[1],
                **scene.words(),
            )
        strange = tokens[mask][
            (tokens[mask] < 0) | (tokens[mask] >= request.model.config.vocab_size)
        ]
        if len(strange):
            accuse(CANVAS_ORDER, "tokens of the vocabulary", strange, **scene.words())
        if not bool(torch.isfinite(step.after.scores[mask]).all()):
            accuse(CANVAS_ORDER, "finite scores", step.after.scores, **scene.words())
    count = 0 if kept is None else len(kept.tokens)
    if running.chosen not in range(count):
        accuse(
            CANVAS_ORDER,
            f"one of {count} candidates",
            running.chosen,
            **scene.words(),
            asked="which candidate is chosen",
        )
    if not running.tokens:
        accuse(CANVAS_ORDER, "a translation", running.tokens, **scene.words())


REFINE_LAWS: dict[str, Callable[[RefineScene], None]] = {
    REFINE_PASSES: passes_of_a_rewriting,
    CANDIDATE_ALONE: a_candidate_alone,
    PADDING_DECIDES: padding_decides_nothing,
    SEED_DECIDES: only_the_seed_decides,
    CANVAS_ORDER: a_canvas_in_order,
}


def candidate_of(canvas: Canvas, row: int) -> tuple[list[int], list[float]]:
    """Return a candidate's tokens and scores."""
    return canvas.text(row), [float(x) for x in canvas.scores[row][canvas.mask[row]]]


def _compare_candidates(
    law: str, got: Any, expected: Any, scene: RefineScene, **where: Any
) -> None:
    far = any(abs(a - b) > REFINE_TOLERANCE for a, b in zip(got[1], expected[1], strict=False))
    if got[0] != expected[0] or far:
        accuse(law, expected, got, **scene.words(), **where)


def knob_settings(card: Card) -> Iterator[dict[str, Any]]:
    """Yield the small values of the knobs, and then each other value once."""
    base = {knob.name: knob.small[0] if knob.small else knob.default for knob in card.knobs}
    yield base
    for knob in card.knobs:
        for value in knob.choices or knob.small[1:]:
            if value != base[knob.name]:
                yield {**base, knob.name: value}


def hold_on_sources(law: str, card: Card, knobs: dict[str, Any], seed: int = 0) -> Evidence:
    """Check a law on every source."""
    begun = perf_counter()
    for number, source in enumerate(REFINE_SOURCES):

        def build(request: RefineRequest) -> Refiner:
            return card.refiner(request, **knobs)

        REFINE_LAWS[law](RefineScene(build, source, card.teacher, 10 * seed + number, seed, knobs))
    return Evidence(law, len(REFINE_SOURCES), 0, perf_counter() - begun)


LISTENS_TO_SOURCE = "a session that has read a source"
REFINE_LOOP = "the loop of rewriting"
TEACHER_JUDGES = "a teacher's judgement"

TRANSLATION_TOLERANCE = 1e-9
LISTEN_TEXT = (1, 4, 8, 8, 5)
LISTEN_TREE = TokenTree((4, 6, 7, 5), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
LISTEN_PATHS = ((), (4,), (6,), (4, 7), (4, 7, 5))  # what the root and its nodes spell
JUDGED_TEXTS = (((4, 5, 6, 8), (7,), (5, 5)), ((8,), (8, 8)), ((6, 7, 4),))


def random_writer(seed: int) -> Seq2Seq:
    """Return a random encoder-decoder that writes from left to right."""
    return random_reader(seed, positional=False)


def dense_logits(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Return the logits after every token of a text, [n, V], in one causal pass."""
    causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    memory = model.encode(torch.tensor([list(source)]))
    return model.logits(model.decode(model.embed(torch.tensor([list(text)])), memory, causal))[0]


# ---------------------------------------------------------------------- the session


def listens_to_source(parts: Parts) -> Evidence:
    """Check the rows of trees, also after commits and rewinds, against the dense decoder."""
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
        return blank_canvas([2, 2], self.model.config.mask)

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
    """Check the order of start, passes and choice, each with its own randomness and one
    encoding."""
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
    """Check the teacher's log p of each token and of the end against a dense pass.

    Padding has none.
    """
    begun, seen = perf_counter(), 0
    for seed, source in enumerate(REFINE_SOURCES):
        teacher = random_writer(seed)
        for texts in JUDGED_TEXTS:
            canvas = blank_canvas([len(text) for text in texts], 8)
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
