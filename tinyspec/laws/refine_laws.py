"""What every technique that rewrites a canvas is held to, whatever its own rule is.

Its rule is nobody else's, so an oracle of its own proves that. These laws are about what all of
them owe: one pass of the encoder and one of the decoder a rewriting, by the forward log; candidates
that stand side by side and know nothing of each other, nor of the padding between them; the seed as
the only chance. They run on random float64 encoder-decoders that have every head.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas, Pass, Refinement, Refiner, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import Card, RefineRequest

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
    """A random encoder-decoder of nine tokens with strong opinions, a LENGTH token and a fertility
    head.
    """
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
        """A request and its refiner."""
        judge = (
            random_reader(self.model + 1, positional=False, positions=4 * READER_POSITIONS)
            if self.teacher
            else None
        )
        request = RefineRequest(random_reader(self.model), judge)
        return request, self.build(request)

    def run(self) -> tuple[RefineRequest, Refinement, list[Pass]]:
        """The whole request."""
        request, refiner = self.begin()
        running = refine(
            request.model, self.source, refiner, Seeded(self.seed), request.forward_log
        )
        return request, running, list(self.steps(running))

    def steps(self, running: Refinement) -> Iterator[Pass]:
        """Its passes; a technique has to come to an end."""
        for step in running:
            if step.iteration == MOST_PASSES:
                accuse(CANVAS_ORDER, f"an end within {MOST_PASSES} passes", "none", **self.words())
            yield step

    def words(self) -> dict[str, Any]:
        """For a counterexample."""
        return {
            "source": tuple(self.source),
            "seed": self.seed,
            "model": f"reader {self.model}",
            **self.knobs,
        }


def passes_of_a_rewriting(scene: RefineScene) -> None:
    """By the forward log: the source is encoded once; a rewriting is one decoder pass over the
    whole canvas, nothing else is one.
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
    """What a pass makes of a candidate is what it makes of it by itself, without the others and
    without padding.
    """
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
    """One candidate's canvas without padding; None where `extra` cannot be taken apart (source and
    canvas are equally long).
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
    """Other tokens and scores at padding slots change nothing of any slot, nor of the choice."""
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
    """The same with other things at its padding slots."""
    tokens = torch.where(canvas.mask, canvas.tokens, 4 + torch.arange(canvas.tokens.shape[1]) % 5)
    return canvas._replace(tokens=tokens, scores=torch.where(canvas.mask, canvas.scores, -77.0))


def only_the_seed_decides(scene: RefineScene) -> None:
    """The same seed, the same translation, whatever else was drawn in the process; the global state
    is not drawn from.
    """
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
    """Slots, then padding; some slot in what is chosen; tokens of the vocabulary; no pass alters
    the canvas it was given.
    """
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
    """A candidate's tokens and scores."""
    return canvas.text(row), [float(x) for x in canvas.scores[row][canvas.mask[row]]]


def _compare_candidates(
    law: str, got: Any, expected: Any, scene: RefineScene, **where: Any
) -> None:
    far = any(abs(a - b) > REFINE_TOLERANCE for a, b in zip(got[1], expected[1], strict=False))
    if got[0] != expected[0] or far:
        accuse(law, expected, got, **scene.words(), **where)


def knob_settings(card: Card) -> Iterator[dict[str, Any]]:
    """The small values of its knobs, and then each other value once."""
    base = {knob.name: knob.small[0] if knob.small else knob.default for knob in card.knobs}
    yield base
    for knob in card.knobs:
        for value in knob.choices or knob.small[1:]:
            if value != base[knob.name]:
                yield {**base, knob.name: value}


def hold_on_sources(law: str, card: Card, knobs: dict[str, Any], seed: int = 0) -> Evidence:
    """A law on every source."""
    begun = perf_counter()
    for number, source in enumerate(REFINE_SOURCES):

        def build(request: RefineRequest) -> Refiner:
            return card.refiner(request, **knobs)

        REFINE_LAWS[law](RefineScene(build, source, card.teacher, 10 * seed + number, seed, knobs))
    return Evidence(law, len(REFINE_SOURCES), 0, perf_counter() - begun)
