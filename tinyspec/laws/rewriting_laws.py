"""Laws of every technique that rewrites a canvas, and of what translation stands on.

The rule of such a technique is its own, so an oracle of its own proves it. These laws hold for all
of them. By the forward log there is one pass of the encoder, and one of the decoder for each
rewriting. A candidate depends neither on the others nor on padding, and the seed alone decides what
is random. The models are random float64 encoder-decoders that have every head. The oracle is the
dense decoder; it is itself compared with a version written token by token
(tests/lm/test_seq2seq.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import (
    Canvas,
    Pass,
    Refinement,
    Refiner,
    blank_canvas,
    encode_sources,
    refine,
)
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.parts import Parts
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig
from tinyspec.technique import Card, RefineRequest, TrainedTranslator
from tinyspec.tree import ROOT, TokenTree

REFINE_PASSES = "passes of a rewriting"
CANDIDATE_ALONE = "a candidate alone"
PADDING_DECIDES = "padding decides nothing"
SEED_DECIDES = "only the seed decides"
CANVAS_ORDER = "a canvas in order"

REFINE_TOLERANCE = 1e-9
READER_POSITIONS = 12
REFINE_SOURCES = ((4,), (6, 5, 4), (4, 7, 5, 8, 6), (8,) * READER_POSITIONS)
READER_PAIRS = (((4, 5), (6, 8)), ((5, 6), (7, 7)), ((7, 4), (5, 6)))
"""Where a technique counts words for a reader. Word 8 is in no source, and word 4 in no target."""
MOST_PASSES = 100  # passes of a technique that ends

Build = Callable[[RefineRequest], Refiner]


def random_translator(
    config: Seq2SeqConfig, seed: int, factor: float, name: str, embed: float | None = None
) -> Seq2Seq:
    """Return a random float64 encoder-decoder, its matrices multiplied, so that words differ.

    embed  the factor of the embedding, if it is another one
    """
    made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
    factors = {"embed": factor if embed is None else embed}
    weights = {
        key: w * factors.get(key, factor) if w.ndim == 2 else w for key, w in made.weights.items()
    }
    return Seq2Seq(config, weights, name=name)


@cache
def random_reader(seed: int, positional: bool = True, positions: int = READER_POSITIONS) -> Seq2Seq:
    """Return a random encoder-decoder of nine tokens with LENGTH token and fertilities."""
    config = Seq2SeqConfig(
        9, 8, 2, 12, 1, 2, positions, positional=positional, lengths=9, fertilities=4
    )
    return random_translator(config, seed, 2, "reader" if positional else "teacher")


def align_in_order(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return links of pairs that are translated word by word, in order."""
    pairs = zip(sources, targets, strict=True)
    return [[min(j, len(x) - 1) for j in range(len(y))] for x, y in pairs]


def reader_of(
    trained: TrainedTranslator | None, seed: int, positions: int = READER_POSITIONS, **settings: Any
) -> Seq2Seq:
    """Return a random encoder-decoder of nine tokens, as a technique trains it.

    trained   what the technique trains; None: any model with every head
    settings  other values than the defaults
    """
    if trained is None:
        return random_reader(seed, positions=positions)
    given = trained.settings(**settings)
    counted = trained.counts(given, READER_PAIRS, align_in_order)
    config = Seq2SeqConfig(9, 8, 2, 12, 1, 2, positions, extra={**asdict(given), **counted})
    shape = replace(config, **trained.shape)
    return random_translator(trained.equip(shape, given), seed, 2, "reader")


def numbers_differ(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two lists of numbers differ by more than rounding."""
    return len(a) != len(b) or any(abs(x - y) > REFINE_TOLERANCE for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class RefineScene:
    """One request: models, source, settings, seed.

    trained  what the technique trains; None: any model with every head
    """

    build: Build
    source: Sequence[int]
    teacher: bool = False
    trained: TrainedTranslator | None = None
    model: int = 0
    seed: int = 0
    knobs: dict[str, Any] = field(
        default_factory=dict
    )  # what `build` was made with, for a counterexample

    def begin(self) -> tuple[RefineRequest, Refiner]:
        """Return a request and its refiner."""
        judge = None
        if self.teacher:
            judge = random_reader(self.model + 1, False, 4 * READER_POSITIONS)
        request = RefineRequest(reader_of(self.trained, self.model), judge)
        return request, self.build(request)

    def start(self) -> tuple[RefineRequest, Refinement, Iterator[Pass]]:
        """Return a request that has begun, and its passes; a technique must come to an end."""
        request, refiner = self.begin()
        rng = Seeded(self.seed)
        running = refine(request.model, self.source, refiner, rng, request.forward_log)

        def passes() -> Iterator[Pass]:
            for step in running:
                if step.iteration == MOST_PASSES:
                    limit = f"an end within {MOST_PASSES} passes"
                    accuse(CANVAS_ORDER, limit, "none", **self.words())
                yield step

        return request, running, passes()

    def run(self) -> tuple[RefineRequest, Refinement, list[Pass]]:
        """Run the whole request."""
        request, running, passes = self.start()
        return request, running, list(passes)

    def rewrite_again(self, step: Pass, canvas: Canvas) -> Canvas:
        """Return what a refiner that remembers nothing makes of another canvas in this pass."""
        request, refiner = self.begin()
        rng = Seeded(self.seed).split("rewrite", step.iteration)
        memory = encode_sources(request.model, refiner, torch.tensor([list(self.source)]))
        with torch.inference_mode():
            return refiner.rewrite(canvas, memory, step.iteration, rng)

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

    A decoder pass covers the whole canvas, or the slots that it adds, or as many positions as the
    technique says, and there are no others.
    """
    request, running, passes = scene.run()
    count_rows = getattr(running.refiner, "count_rows", None)
    named = [call.model for call in request.forward_log]
    name = request.model.name
    counts = {"encoder": named.count(f"{name}/encoder"), "decoder": named.count(name)}
    expect: Callable[..., None] = partial(expect_equal, REFINE_PASSES, **scene.words())
    expect({"encoder": 1, "decoder": len(passes)}, counts)
    for step in passes:
        own = [call.rows for call in step.calls if call.model == name]
        added = step.after.tokens.numel() - step.before.tokens.numel()
        covered = added or step.after.tokens.numel()
        if count_rows is not None:
            covered = count_rows(step.before, step.after)
        expect([covered], own, rows_of_pass=step.iteration)
    judged = sorted(model for model in named if not model.startswith(name))
    allowed = ["teacher", "teacher/encoder"] if scene.teacher else []
    if judged not in ([], allowed):
        accuse(REFINE_PASSES, allowed, judged, **scene.words(), counted="passes of a teacher")


def a_candidate_alone(scene: RefineScene) -> None:
    """Check that a candidate becomes what it becomes without the others and without padding."""
    for step in scene.start()[2]:
        for row in range(len(step.before.tokens)):
            own = canvas_alone(step.before, row, len(scene.source))
            if own is not None:
                got = candidate_of(scene.rewrite_again(step, own), 0)
                _compare_candidate(CANDIDATE_ALONE, got, scene, step, row)


def canvas_alone(canvas: Canvas, row: int, source: int) -> Canvas | None:
    """Return one candidate's canvas without padding, or None if `extra` cannot be taken apart.

    That happens where source and canvas are equally long.
    """
    length, room = int(canvas.mask[row].sum()), canvas.tokens.shape[1]
    extras = canvas.extra if type(canvas.extra) is tuple else (canvas.extra,)
    own = list[Any]()
    for extra in extras:
        if isinstance(extra, Tensor) and len(extra) == len(canvas.tokens):
            if source == room and extra.ndim == 2:
                return None
            extra = extra[row : row + 1]
            if extra.ndim > 1 and extra.shape[1] == room:
                extra = extra[:, : max(length, 1)]
        own.append(extra)
    tokens, mask, scores = (part[row : row + 1, : max(length, 1)] for part in canvas[:3])
    return Canvas(tokens, mask, scores, tuple(own) if type(canvas.extra) is tuple else own[0])


def padding_decides_nothing(scene: RefineScene) -> None:
    """Check that tokens and scores at padding change no slot and no choice."""
    request, running, passes = scene.run()
    for step in passes:
        got = scene.rewrite_again(step, scribble_padding(step.before))
        for row in range(len(got.tokens)):
            _compare_candidate(PADDING_DECIDES, candidate_of(got, row), scene, step, row)
    assert running.canvas is not None
    refiner = scene.begin()[1]
    memory = encode_sources(request.model, refiner, torch.tensor([list(scene.source)]))
    with torch.inference_mode():
        chosen = refiner.choose(scribble_padding(running.canvas), scene.source, memory)
    asked = "which candidate is chosen"
    expect_equal(PADDING_DECIDES, running.chosen, chosen, **scene.words(), asked=asked)


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
    request, running, passes = scene.start()
    config = request.model.config
    complain: Callable[..., None] = partial(accuse, CANVAS_ORDER, **scene.words())
    last: Canvas | None = None
    for step in passes:
        if last is not None and any(
            not torch.equal(a, b) for a, b in zip(last[:3], step.before[:3], strict=True)
        ):
            where = f"after pass {step.iteration - 1}"
            complain(last.tokens, step.before.tokens, canvas=where)
        last = Canvas(*(part.clone() for part in step.after[:3]))
        mask = step.after.mask
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            complain("slots, then padding", mask)
        if mask.shape[1] > config.max_positions:
            complain(f"at most {config.max_positions} slots", mask.shape[1])
        tokens = step.after.tokens[mask]
        unknown = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
        if len(unknown):
            complain("tokens of the vocabulary", unknown)
        if not bool(torch.isfinite(step.after.scores[mask]).all()):
            complain("finite scores", step.after.scores)
    count = 0 if last is None else len(last.tokens)
    if running.chosen not in range(count):
        asked = "which candidate is chosen"
        complain(f"one of {count} candidates", running.chosen, asked=asked)
    if not running.tokens:
        complain("a translation", running.tokens)


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


def _compare_candidate(law: str, got: Any, scene: RefineScene, step: Pass, row: int) -> None:
    expected = candidate_of(step.after, row)
    if got[0] != expected[0] or numbers_differ(got[1], expected[1]):
        accuse(law, expected, got, **scene.words(), candidate=row, iteration=step.iteration)


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

    @collect_evidence(law)
    def check() -> Iterator[int]:
        build = partial(card.refiner, **knobs)
        for number, source in enumerate(REFINE_SOURCES):
            model = 10 * seed + number
            REFINE_LAWS[law](
                RefineScene(build, source, card.teacher, card.translator, model, seed, knobs)
            )
            yield 0

    return check()


LISTENS_TO_SOURCE = "a session that has read a source"
REFINE_LOOP = "the loop of rewriting"
TEACHER_JUDGES = "a teacher's judgement"

LISTEN_TEXT = (1, 4, 8, 8, 5)
LISTEN_TREE = TokenTree((4, 6, 7, 5), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
LISTEN_PATHS = ((), (4,), (6,), (4, 7), (4, 7, 5))  # of the root and its nodes
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


@collect_evidence(LISTENS_TO_SOURCE)
def listens_to_source(parts: Parts) -> Iterator[int]:
    """Check the rows of trees, also after commits and rewinds, against the dense decoder."""
    for seed, source in enumerate(REFINE_SOURCES):
        model = random_writer(seed)
        session = parts.given(model, source).session()

        def expect_row(
            text: tuple[int, ...],
            row: Tensor,
            where: str,
            model: Seq2Seq = model,
            source: Any = source,
        ) -> int:
            expected = dense_logits(model, source, text)[-1]
            if not torch.allclose(row, expected, rtol=0, atol=REFINE_TOLERANCE):
                case = {"source": tuple(source), "text": text, "after": where}
                accuse(LISTENS_TO_SOURCE, expected, row, **case)
            return 0

        for length in range(1, len(LISTEN_TEXT) + 1):
            session.extend(LISTEN_TEXT[length - 1 : length])
            if length % 2:
                session.run_to_layer(LISTEN_TREE, 1)
            rows = session.score(LISTEN_TREE).logits
            for row, path in zip(rows, LISTEN_PATHS, strict=True):
                yield expect_row((*LISTEN_TEXT[:length], *path), row, "a tree below the text")
        session.rewind(2)
        session.score(LISTEN_TREE)
        session.commit((0, 2), 6)
        row = session.score(TokenTree()).logits[0]
        yield expect_row((*LISTEN_TEXT[:2], 4, 7, 6), row, "a committed path")
        session.rewind(3)
        row = session.score(TokenTree()).logits[0]
        yield expect_row((*LISTEN_TEXT[:2], 4), row, "taken back")


# ---------------------------------------------------------------------- the loop


class ScriptedRefiner:
    """A refiner that records what it is asked; it chooses its second candidate."""

    def __init__(self, model: Seq2Seq, passes: int):
        self.model, self.passes, self.log = model, passes, list[Any]()

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        self._record("start", rng, tuple(source), memory)
        return blank_canvas([2, 2], self.model.config.mask)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        self._record("rewrite", rng, iteration, memory, canvas)
        self.model.logits(self.model.decode(self.model.embed(canvas.tokens), memory))
        return canvas._replace(tokens=canvas.tokens + 1)

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration >= self.passes

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        self.log.append(("choose", tuple(source), int(canvas.tokens[0, 0])))
        return 1

    def _record(
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


@collect_evidence(REFINE_LOOP)
def refines_in_order(parts: Parts) -> Iterator[int]:
    """Check the order of start, passes and choice.

    Each has its own randomness, and the source is encoded once.
    """
    for (seed, source), passes in product(enumerate(REFINE_SOURCES), (0, 1, 3)):
        model, forward_log, root = random_reader(seed), list[ForwardRecord](), Seeded(seed)
        refiner = ScriptedRefiner(model.with_log(forward_log), passes)
        running = parts.refine(model, source, refiner, Seeded(seed), forward_log)
        events = [
            (step.iteration, int(step.before.tokens[0, 0]), len(step.calls)) for step in running
        ]
        state = float(model.encode(torch.tensor([list(source)])).states.sum())
        keys = [("start", 0), *(("rewrite", n) for n in range(passes))]
        drawn = [round(float(root.split(*key).uniforms(1)[0]), 6) for key in keys]
        mask = model.config.mask
        questions = [
            ("start", tuple(source), None, state, drawn[0]),
            *(("rewrite", n, mask + n, state, drawn[1 + n]) for n in range(passes)),
            ("choose", tuple(source), mask + passes),
        ]
        case = {"source": tuple(source), "passes wanted": passes, "seed": seed}
        expect: Callable[..., None] = partial(expect_equal, REFINE_LOOP, **case)
        expect(questions, refiner.log, asked="what the refiner is asked")
        reports = [(n, mask + n, 1) for n in range(passes)]
        expect(reports, events, asked="what is reported of the passes")
        expect([mask + passes] * 2, running.tokens, asked="the text that is chosen")
        expect(1, running.chosen, asked="the candidate that is chosen")
        names = [call.model for call in forward_log]
        expect([f"{model.name}/encoder", *[model.name] * passes], names, asked="the forward log")
        yield 0


# ---------------------------------------------------------------------- the judgement


@collect_evidence(TEACHER_JUDGES)
def teacher_judges(parts: Parts) -> Iterator[int]:
    """Check the teacher's log p of each token and of the end against a dense pass.

    Padding has none.
    """
    for seed, source in enumerate(REFINE_SOURCES):
        teacher = random_writer(seed)
        for texts in JUDGED_TEXTS:
            canvas = blank_canvas([len(text) for text in texts], 8)
            for row, text in enumerate(texts):
                canvas.tokens[row, : len(text)] = torch.tensor(text)
            got = parts.judge(teacher, source, canvas).tolist()
            for row, text in enumerate(texts):
                logits = dense_logits(teacher, source, (teacher.config.bos, *text))
                logprobs, output = logits.log_softmax(dim=-1), (*text, teacher.config.eos)
                expected = [float(row[token]) for row, token in zip(logprobs, output, strict=True)]
                expected += [0.0] * (len(canvas.tokens[0]) - len(text))
                if numbers_differ(expected, got[row]):
                    case = {"source": tuple(source), "candidate": text, "beside": texts}
                    accuse(TEACHER_JUDGES, expected, got[row], **case)
                yield 0


TRANSLATION_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    LISTENS_TO_SOURCE: listens_to_source,
    REFINE_LOOP: refines_in_order,
    TEACHER_JUDGES: teacher_judges,
}
