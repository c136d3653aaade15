"""A translation under way, and what comes of it: extended from left to right, or rewritten on a
canvas.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tinyspec.decoding.decode import Round
from tinyspec.decoding.refine import Pass, Refinement, Written
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.trace import Statistics, Trace
from tinyspec.generation import Generation, GenerationRun
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.notebook import render_passes
from tinyspec.technique import Card, RefineRequest


@dataclass
class TranslationStatistics(Statistics):
    """Passes of a translation. target_calls are those of its decoder, row_layers their (row, layer)
    evaluations.

    encoder_calls  passes of its encoder;  teacher_calls  of a teacher's encoder and decoder, which
                   judged candidates
    candidates     canvases that were rewritten side by side
    """

    encoder_calls: int = 0
    teacher_calls: int = 0
    candidates: int = 1

    def encoded(self, model: Seq2Seq, forward_log: Sequence[ForwardRecord]) -> None:
        """Read from the forward log what rounds do not tell."""
        self.encoder_calls = sum(call.model == f"{model.name}/encoder" for call in forward_log)


@dataclass(repr=False)
class Translation(Generation):
    """What came of a source: a Generation, and, where a canvas was rewritten, what every pass made
    of it.

    finish_reason  "length" where a canvas was rewritten: its length was decided before its tokens
    passes         of a technique that rewrites, one entry a decoder pass
    """

    source: list[int] = field(default_factory=list)
    passes: list[Written] = field(default_factory=list)

    def figures(self) -> str:
        """Its passes and seconds on one line."""
        stats = self.stats
        assert isinstance(stats, TranslationStatistics)
        beside = f", {stats.candidates} candidates side by side" if stats.candidates > 1 else ""
        judged = f", {stats.teacher_calls} of a teacher" if stats.teacher_calls else ""
        return (
            f"{stats.emitted} tokens, {stats.encoder_calls} encoder pass, {stats.target_calls} decoder passes{judged}"
            f"{beside}, {stats.seconds:.3f} s; ended by {self.finish_reason}"
        )

    def _repr_html_(self) -> str:
        if not self.passes or self.tokenizer is None:
            return super()._repr_html_()
        best = self.passes[-1].tokens.index(self.tokens)
        passes = [(written.tokens[best], written.changed[best]) for written in self.passes]
        return render_passes(self.text, passes, self.tokenizer, self.figures())

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "source": self.source,
            "passes": [asdict(written) for written in self.passes],
            "stats": self.stats.as_dict(),
        }


class ExtendingRun:
    """A translation that grows from left to right: iterate it for its rounds."""

    def __init__(
        self,
        model: Seq2Seq,
        source: list[int],
        make: Callable[[Model], GenerationRun],
        forward_log: list[ForwardRecord],
    ):
        self.begun = time.perf_counter()
        self.model, self.source, self.forward_log = model, source, forward_log
        self.running = make(model.counting(forward_log).given(source))
        self.running.started = self.begun
        self.running.stats = self.stats = TranslationStatistics()

    def __iter__(self) -> Iterator[Round]:
        return iter(self.running)

    def detail(self, wanted: bool) -> None:
        """Whether the trace keeps probabilities."""
        self.running.trace.detailed = wanted

    @property
    def text(self) -> str:
        """The text so far."""
        return self.running.text

    def shown(self) -> str:
        """The text so far, to be looked at."""
        return self.text

    def interrupted(self) -> Translation:
        """What there is of it."""
        self.running.close("interrupted")
        return self.result()

    def result(self) -> Translation:
        """The whole, or what there is of it."""
        self.stats.encoded(self.model, self.forward_log)
        done = self.running.result()
        return Translation(
            done.text,
            done.tokens,
            done.logprobs,
            done.finish_reason,
            self.stats,
            done.trace,
            self.source,
            tokenizer=done.tokenizer,
        )


class RewritingRun:
    """A translation whose canvas is rewritten: iterate it for its passes."""

    def __init__(
        self,
        model: Seq2Seq,
        source: list[int],
        card: Card,
        request: RefineRequest,
        seed: int,
        **knobs: Any,
    ):
        self.begun = time.perf_counter()
        self.model, self.source, self.forward_log, self.teacher = (
            model,
            source,
            request.forward_log,
            request.teacher,
        )
        refiner = card.refiner(request, **knobs)
        self.refinement = Refinement(request.model, source, refiner, Seeded(seed))
        self.stats, self.passes, self.finished = TranslationStatistics(), list[Written](), False

    def __iter__(self) -> Iterator[Pass]:
        for step in self.refinement:
            self.passes.append(step.written())
            yield step
        self.finished = True
        self._close()

    def _close(self) -> None:
        stats, canvas = self.stats, self.refinement.canvas
        stats.encoded(self.model, self.forward_log)
        decoding = [call for call in self.forward_log if call.model == self.model.name]
        stats.target_calls, stats.row_layers = (
            len(decoding),
            sum(call.row_layers for call in decoding),
        )
        if self.teacher is not None:
            names = (self.teacher.name, f"{self.teacher.name}/encoder")
            stats.teacher_calls = sum(call.model in names for call in self.forward_log)
        stats.emitted, stats.candidates = (
            len(self.refinement.tokens),
            0 if canvas is None else len(canvas.tokens),
        )
        stats.seconds = time.perf_counter() - self.begun

    def detail(self, wanted: bool) -> None:
        """Passes keep what a replay shows, wanted or not."""

    @property
    def text(self) -> str:
        """The best candidate as it stands."""
        return (
            self.model.tokenizer.decode(self.refinement.tokens) if self.model.has_tokenizer else ""
        )

    def shown(self) -> str:
        """The best candidate, its masks too."""
        mask, tokens = self.model.config.mask, self.refinement.tokens
        if not self.model.has_tokenizer:
            return " ".join("_" if token == mask else str(token) for token in tokens)
        return "".join(
            " _" if token == mask else self.model.tokenizer.token_text(token) for token in tokens
        ).strip()

    def interrupted(self) -> Translation:
        """What there is of it."""
        return self.result()

    def result(self) -> Translation:
        """The whole, or what there is of it."""
        if not self.finished:
            self._close()
        tokens, scores = self.refinement.tokens, self.refinement.scores
        reason, trace = "length" if self.finished else "interrupted", Trace(list(self.source))
        return Translation(
            self.text,
            tokens,
            scores,
            reason,
            self.stats,
            trace,
            self.source,
            self.passes,
            tokenizer=self.model.tokenizer if self.model.has_tokenizer else None,
        )
