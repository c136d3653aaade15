"""translate: from a source to its translation, by any technique.

A technique that extends a text runs in the common loop, on a model that writes from left to right and has read the source
(`Seq2Seq.given`); a technique that rewrites a canvas runs in `refine`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from tinyspec.decoding.chance import Seeded
from tinyspec.decoding.decode import Round
from tinyspec.decoding.refine import Pass, Refinement, Written
from tinyspec.decoding.rescore import check_teacher
from tinyspec.decoding.sampling import Warp
from tinyspec.decoding.stop import Stop
from tinyspec.decoding.trace import Statistics, Trace
from tinyspec.errors import TinyspecError
from tinyspec.generation import Generation, Running
from tinyspec.lm.feed import Call
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.transformer import Model
from tinyspec.technique import Card, RefineRequest, Request, find
from tinyspec.translators import load_translator, suited

Source: TypeAlias = str | Sequence[int]

AUTOREGRESSIVE = "autoregressive"


@dataclass
class Work(Statistics):
    """Passes of a translation. target_calls are those of its decoder, row_layers their (row, layer) evaluations.

    encoder_calls  passes of its encoder;  teacher_calls  of a teacher's encoder and decoder, which judged candidates
    candidates     canvases that were rewritten side by side
    """

    encoder_calls: int = 0
    teacher_calls: int = 0
    candidates: int = 1

    def encoded(self, model: Seq2Seq, ledger: Sequence[Call]) -> None:
        """Read from the ledger what rounds do not tell."""
        self.encoder_calls = sum(call.model == f"{model.name}/encoder" for call in ledger)


@dataclass
class Translation(Generation):
    """What came of a source: a Generation, and, where a canvas was rewritten, what every pass made of it.

    finish_reason  "length" where a canvas was rewritten: its length was decided before its tokens
    passes         of a technique that rewrites, one entry a decoder pass
    """

    source: list[int] = field(default_factory=list)
    passes: list[Written] = field(default_factory=list)

    def figures(self) -> str:
        """Its passes and seconds on one line."""
        stats = self.stats
        assert isinstance(stats, Work)
        beside = f", {stats.candidates} candidates side by side" if stats.candidates > 1 else ""
        judged = f", {stats.teacher_calls} of a teacher" if stats.teacher_calls else ""
        return (
            f"{stats.emitted} tokens, {stats.encoder_calls} encoder pass, {stats.target_calls} decoder passes{judged}"
            f"{beside}, {stats.seconds:.3f} s; ended by {self.finish_reason}"
        )

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


class Extending:
    """A translation that grows from left to right: iterate it for its rounds."""

    def __init__(self, model: Seq2Seq, source: list[int], make: Callable[[Model], Running], ledger: list[Call]):
        self.begun = time.perf_counter()
        self.model, self.source, self.ledger = model, source, ledger
        self.running = make(model.counting(ledger).given(source))
        self.running.started = self.begun
        self.running.stats = self.stats = Work()

    def __iter__(self) -> Iterator[Round]:
        return iter(self.running)

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
        self.stats.encoded(self.model, self.ledger)
        done = self.running.result()
        return Translation(
            done.text, done.tokens, done.logprobs, done.finish_reason, self.stats, done.trace, self.source
        )


class Rewriting:
    """A translation whose canvas is rewritten: iterate it for its passes."""

    def __init__(self, model: Seq2Seq, source: list[int], card: Card, request: RefineRequest, seed: int, **knobs: Any):
        self.begun = time.perf_counter()
        self.model, self.source, self.ledger, self.teacher = model, source, request.ledger, request.teacher
        refiner = card.refiner(request, **knobs)
        self.refinement = Refinement(request.model, source, refiner, Seeded(seed))
        self.stats, self.passes, self.finished = Work(), list[Written](), False

    def __iter__(self) -> Iterator[Pass]:
        for step in self.refinement:
            self.passes.append(step.written())
            yield step
        self.finished = True
        self._close()

    def _close(self) -> None:
        stats, canvas = self.stats, self.refinement.canvas
        stats.encoded(self.model, self.ledger)
        decoding = [call for call in self.ledger if call.model == self.model.name]
        stats.target_calls, stats.row_layers = len(decoding), sum(call.row_layers for call in decoding)
        if self.teacher is not None:
            names = (self.teacher.name, f"{self.teacher.name}/encoder")
            stats.teacher_calls = sum(call.model in names for call in self.ledger)
        stats.emitted, stats.candidates = len(self.refinement.tokens), 0 if canvas is None else len(canvas.tokens)
        stats.seconds = time.perf_counter() - self.begun

    @property
    def text(self) -> str:
        """The best candidate as it stands."""
        return self.model.tokenizer.decode(self.refinement.tokens) if self.model.has_tokenizer else ""

    def shown(self) -> str:
        """The best candidate, its masks too."""
        mask, tokens = self.model.config.mask, self.refinement.tokens
        if not self.model.has_tokenizer:
            return " ".join("_" if token == mask else str(token) for token in tokens)
        return "".join(" _" if token == mask else self.model.tokenizer.token_text(token) for token in tokens).strip()

    def interrupted(self) -> Translation:
        """What there is of it."""
        return self.result()

    def result(self) -> Translation:
        """The whole, or what there is of it."""
        if not self.finished:
            self._close()
        tokens, scores = self.refinement.tokens, self.refinement.scores
        reason, trace = "length" if self.finished else "interrupted", Trace(list(self.source))
        return Translation(self.text, tokens, scores, reason, self.stats, trace, self.source, self.passes)


def start(
    model: Seq2Seq | str,
    source: Source,
    *,
    method: str | None = None,
    seed: int = 0,
    teacher: Seq2Seq | str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    **knobs: Any,
) -> Extending | Rewriting:
    """Prepare a translation: everything that can be wrong with its arguments is said here."""
    model = translator(model)
    card = find(spelled(model, method))
    card.settings(knobs)
    ids = model.tokenizer.encode(source) if isinstance(source, str) else [int(token) for token in source]
    check_source(model, ids)
    check_pair(model, card)
    ledger: list[Call] = []
    if card.kind == "refine":
        if temperature or top_k is not None or top_p is not None:
            raise TinyspecError(
                f"{card.name} rewrites a canvas and has no temperature: its own knobs say what is drawn"
            )
        if max_new_tokens is not None:
            raise TinyspecError(f"{card.name} decides the length before the tokens: max_new_tokens has no meaning")
        judge = teacher_of(model, card, teacher)
        request = RefineRequest(model, judge, ledger)
        return Rewriting(model, ids, card, request, seed, **knobs)
    warp = Warp(temperature, top_k, top_p)
    room = most_tokens(len(ids)) if max_new_tokens is None else max_new_tokens

    def make(given: Model) -> Running:
        request = Request(
            target=given.session(ledger),
            warp=warp,
            stop=Stop(frozenset(given.config.eos), max_new_tokens=room),
            positions=given.config.max_positions,
            ledger=ledger,
            clock=time.perf_counter,
        )
        return Running(card.make(request, **knobs), given, [model.config.bos], seed)

    return Extending(model, ids, make, ledger)


def translate(
    model: Seq2Seq | str, source: Source | Sequence[Source], **options: Any
) -> Translation | list[Translation]:
    """Translate a source, or several one after another. See `tinyspec.translate` for the options."""
    if isinstance(source, str) or not source or isinstance(source[0], int):
        return _finish(start(model, source, **options))  # type: ignore[arg-type]
    seed, model = options.pop("seed", 0), translator(model)
    return [_finish(start(model, one, seed=seed + row, **options)) for row, one in enumerate(source)]  # type: ignore[arg-type]


def _finish(running: Extending | Rewriting) -> Translation:
    """Run to the end. Ctrl-C keeps what there is."""
    try:
        for _ in running:
            pass
    except KeyboardInterrupt:
        return running.interrupted()
    return running.result()


# ---------------------------------------------------------------------- what is asked for


def spelled(model: Seq2Seq, method: str | None) -> str:
    """The registry's name of a method: `plain` is autoregressive; None: what the model was trained for."""
    if method is None:
        method = str(model.config.extra.get("trained_for", "plain"))
    return AUTOREGRESSIVE if method in ("plain", "teacher") else method


def translator(model: Seq2Seq | str) -> Seq2Seq:
    """An encoder-decoder, loaded or by name."""
    if isinstance(model, str):
        return load_translator(model)
    if not isinstance(model, Seq2Seq):
        raise TinyspecError(
            f"{getattr(model, 'name', model)} extends texts and translates none: use generate, or load an encoder-decoder "
            "with tinyspec.load_translator"
        )
    return model


def for_method(method: str, device: str = "cpu", dtype: str | None = None) -> Seq2Seq:
    """The model on this machine that was trained for a method."""
    card = find(AUTOREGRESSIVE if method == "plain" else method)
    return load_translator(suited(method, card.kind == "refine"), device, dtype)


def most_tokens(source: int) -> int:
    """Tokens of a translation that is written from left to right, at most, its end among them.

    >>> most_tokens(10)
    26
    """
    return source + source // 2 + 11


def check_source(model: Seq2Seq, ids: Sequence[int]) -> None:
    """Raise TinyspecError unless these ids can be translated."""
    if not ids:
        raise TinyspecError("the source is empty: give at least one token")
    model.fits(len(ids))
    strange = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if strange:
        raise TinyspecError(
            f"token {strange[0]} is not in the vocabulary of {model.name}: ids are below {model.config.vocab_size}"
        )
    if model.config.pad in ids:
        raise TinyspecError(f"the source holds {model.name}'s padding token {model.config.pad}: leave it out")


def check_pair(model: Seq2Seq, card: Card) -> None:
    """Raise TinyspecError if this model was made for another way of translating."""
    trained = str(model.config.extra.get("trained_for", ""))
    wanted = card.name if card.kind == "refine" else "teacher"
    if card.kind == "analysis":
        raise TinyspecError(f"{card.name} is an analysis: it translates nothing")
    if card.drafts:
        raise TinyspecError(f"{card.name} needs a draft model, and translation models have none: use another method")
    if trained and spelled(model, trained) != spelled(model, wanted):
        raise TinyspecError(
            f"{model.name} was trained for {trained}, and {card.name} needs a model trained for {wanted}: leave out the "
            "model, or name one with --model"
        )


def teacher_of(model: Seq2Seq, card: Card, teacher: Seq2Seq | str | None) -> Seq2Seq | None:
    """The model that judges candidates: what was given, else the one that the model's own card names, if it is here."""
    if teacher is None and card.teacher and (named := model.config.extra.get("teacher")):
        try:
            teacher = load_translator(str(named), model.device, model.dtype)
        except TinyspecError:
            return None  # not on this machine; a technique that cannot do without says so
    if teacher is not None and not card.teacher:
        raise TinyspecError(f"{card.name} asks no teacher: leave it out")
    judge = None if teacher is None else translator(teacher)
    if judge is not None:
        check_teacher(model, judge)
    return judge
