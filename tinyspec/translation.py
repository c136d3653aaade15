"""translate: from a source to its translation, by any technique.

A technique that extends a text runs in the common loop, on a model that writes from left to right
and has read the source (`Seq2Seq.condition_on`). A technique that rewrites a canvas runs in
`refine`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from tinyspec.arguments import (
    check_budget,
    check_ids,
    check_names,
    check_sampling,
    is_batch,
    wrong_argument,
)
from tinyspec.decoding.decode import Round
from tinyspec.decoding.refine import Pass, PassRecord, Refinement, check_teacher
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics, Trace
from tinyspec.errors import TinyspecError, unwrap_rows
from tinyspec.generation import Generation, GenerationRun
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.models import (
    find_students_of,
    find_training_command,
    load_translator,
    load_translator_once,
    name_for_method,
)
from tinyspec.notebook import render_passes
from tinyspec.pairing import advised_knobs, check_pair
from tinyspec.technique import Card, RefineRequest, Request, find_technique

Source: TypeAlias = str | Sequence[int]

AUTOREGRESSIVE = "autoregressive"
_teachers: WeakKeyDictionary[Seq2Seq, Seq2Seq] = WeakKeyDictionary()
"""Teachers that a model's own card names: each is read once."""
_drafters: WeakKeyDictionary[Seq2Seq, dict[str, Seq2Seq]] = WeakKeyDictionary()
"""Draft models that no caller named, by method: each is read once."""


@dataclass
class TranslationStatistics(Statistics):
    """Statistics of a translation; target_calls and row_layers are its decoder's.

    encoder_calls  passes of its encoder, and of a draft model's
    teacher_calls  passes of a teacher's encoder and decoder, which judged candidates
    candidates     canvases that were rewritten side by side
    """

    encoder_calls: int = 0
    teacher_calls: int = 0
    candidates: int = 1

    def encoded(self, forward_log: Sequence[ForwardRecord], teacher: Seq2Seq | None = None) -> None:
        """Count the passes of encoders in the forward log, but not the teacher's."""
        judge = None if teacher is None else f"{teacher.name}/encoder"
        self.encoder_calls = sum(
            call.model.endswith("/encoder") and call.model != judge for call in forward_log
        )


@dataclass(repr=False)
class Translation(Generation):
    """The result for a source: a Generation, and what every pass made of a canvas.

    finish_reason  "length" where a canvas was rewritten, because its length was decided before its
                   tokens; a technique with a method `finish_reason` says which
    passes         of a technique that rewrites, one entry a decoder pass
    """

    source: list[int] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)

    def figures(self) -> str:
        """Return its passes and seconds on one line."""
        stats = self.stats
        assert isinstance(stats, TranslationStatistics)
        beside = f", {stats.candidates} candidates side by side" if stats.candidates > 1 else ""
        judged = f", {stats.teacher_calls} of a teacher" if stats.teacher_calls else ""
        drafted = f", {stats.draft_calls} of a draft model" if stats.draft_calls else ""
        encoder = (
            "1 encoder pass"
            if stats.encoder_calls == 1
            else f"{stats.encoder_calls} encoder passes"
        )
        return (
            f"{stats.emitted} tokens, {encoder}, {stats.target_calls} decoder passes{drafted}"
            f"{judged}{beside}, {stats.seconds:.3f} s; ended by {self.finish_reason}"
        )

    def _repr_html_(self) -> str:
        if not self.passes or self.tokenizer is None:
            return super()._repr_html_()
        best = self.passes[-1].tokens.index(self.tokens)
        passes = [(written.tokens[best], written.changed[best]) for written in self.passes]
        return render_passes(self.text, passes, self.tokenizer, self.figures())

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
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
        self.running = make(model.with_log(forward_log).condition_on(source))
        self.running.started = self.begun
        self.running.stats = self.stats = TranslationStatistics()

    def __iter__(self) -> Iterator[Round]:
        return iter(self.running)

    def detail(self, wanted: bool) -> None:
        """Set whether the trace keeps probabilities."""
        self.running.trace.detailed = wanted

    @property
    def text(self) -> str:
        """Return the text so far."""
        return self.running.text

    def shown(self) -> str:
        """Return the text so far, to be looked at."""
        return self.text

    def interrupted(self) -> Translation:
        """End it, and return what there is of it."""
        self.running.close("interrupted")
        return self.result()

    def result(self) -> Translation:
        """Return the result, or what there is of it."""
        self.stats.encoded(self.forward_log)
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
        self.stats, self.passes, self.finished = TranslationStatistics(), list[PassRecord](), False

    def __iter__(self) -> Iterator[Pass]:
        for step in self.refinement:
            self.passes.append(step.as_record())
            yield step
        self.finished = True
        self._close()

    def _close(self) -> None:
        stats, canvas = self.stats, self.refinement.canvas
        stats.encoded(self.forward_log, self.teacher)
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
        """Do nothing: passes always keep what a replay shows."""

    @property
    def text(self) -> str:
        """Return the best candidate as it stands."""
        return (
            self.model.tokenizer.decode(self.refinement.tokens) if self.model.has_tokenizer else ""
        )

    def shown(self) -> str:
        """Return the best candidate, with its masks."""
        mask, tokens = self.model.config.mask, self.refinement.tokens
        if not self.model.has_tokenizer:
            return " ".join("_" if token == mask else str(token) for token in tokens)
        return "".join(
            " _" if token == mask else self.model.tokenizer.token_text(token) for token in tokens
        ).strip()

    def interrupted(self) -> Translation:
        """Return what there is of it."""
        return self.result()

    def result(self) -> Translation:
        """Return the result, or what there is of it."""
        if not self.finished:
            self._close()
        tokens, scores = self.refinement.tokens, self.refinement.scores
        tell_reason = getattr(self.refinement.refiner, "finish_reason", lambda canvas: "length")
        reason = tell_reason(self.refinement.canvas) if self.finished else "interrupted"
        trace = Trace(list(self.source))
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


def start_translation(
    model: Seq2Seq | str | Path,
    source: Source,
    *,
    method: str | None = None,
    seed: int = 0,
    teacher: Seq2Seq | str | Path | None = None,
    draft: Seq2Seq | str | Path | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **knobs: Any,
) -> ExtendingRun | RewritingRun:
    """Prepare a translation. Raise TinyspecError for whatever is wrong with its arguments."""
    model = load_encoder_decoder(model)
    card = find_technique(registry_name(model, method))
    check_names(card, knobs, start_translation.__kwdefaults__ or (), temperature)
    source = check_source_type(source)
    check_budget(max_new_tokens, seed)
    if temperature is not None and any(knob.name == "temperature" for knob in card.knobs):
        knobs["temperature"], temperature = (
            temperature,
            None,
        )  # its own knob, not the tokens'
    card.settings(knobs)
    check_sampling(0.0 if temperature is None else temperature, top_k, top_p)
    ids = model.tokenizer.encode(source) if isinstance(source, str) else list(source)
    check_source(model, ids)
    check_trained_for(model, card)
    drafters = find_drafters(model, card, draft)
    knobs = card.settings({**advised_knobs(card, drafters), **knobs})
    if teacher is not None and not card.teacher:
        raise TinyspecError(f"{card.name} asks no teacher: leave it out")
    forward_log: list[ForwardRecord] = []
    if card.kind == "refine":
        if temperature is not None or top_k is not None or top_p is not None:
            raise TinyspecError(
                f"{card.name} rewrites a canvas and has no temperature: its own knobs say what is "
                "drawn"
            )
        if max_new_tokens is not None:
            raise TinyspecError(
                f"{card.name} decides the length before the tokens: max_new_tokens has no meaning"
            )
        judge = find_teacher(model, card, teacher)
        request = RefineRequest(model, judge, forward_log)
        return RewritingRun(model, ids, card, request, seed, **knobs)
    sampling = SamplingParams(temperature or 0.0, top_k, top_p)
    room = default_max_tokens(len(ids)) if max_new_tokens is None else max_new_tokens

    def make(given: Model) -> GenerationRun:
        request = Request(
            target=given.session(forward_log),
            sampling=sampling,
            stop=StoppingCriteria(frozenset(given.config.eos), max_new_tokens=room),
            positions=given.config.max_positions,
            drafts=[one.with_log(forward_log).fill_masks(ids) for one in drafters],
            draft_max_lengths=[one.config.max_positions for one in drafters],
            forward_log=forward_log,
            clock=time.perf_counter,
        )
        return GenerationRun(card.make(request, **knobs), given, [model.config.bos], seed, knobs)

    return ExtendingRun(model, ids, make, forward_log)


def translate(
    model: Seq2Seq | str | Path, source: Source | Sequence[Source], **options: Any
) -> Translation | list[Translation]:
    """Translate a source, or several one after another. `tinyspec.translate` tells the options.

    Raises BatchError after the last of several, if some failed.
    """
    if not is_batch(source):
        return _finish(start_translation(model, source, **options))  # type: ignore[arg-type]
    sources = [check_source_type(one, f"source[{row}]") for row, one in enumerate(source)]
    seed, model = options.pop("seed", 0), load_encoder_decoder(model)
    check_budget(None, seed)
    results: list[Translation | None] = []
    errors: dict[int, Exception] = {}
    for row, one in enumerate(sources):
        try:
            results.append(_finish(start_translation(model, one, seed=seed + row, **options)))
        except Exception as error:
            errors[row] = error
            results.append(None)
    return unwrap_rows("source", results, errors)


def _finish(running: ExtendingRun | RewritingRun) -> Translation:
    """Run to the end. Ctrl-C keeps what there is."""
    try:
        for _ in running:
            pass
    except KeyboardInterrupt:
        return running.interrupted()
    return running.result()


# ---------------------------------------------------------------------- what is asked for


def registry_name(model: Seq2Seq, method: str | None) -> str:
    """Return the registry's name of a method.

    `plain` is autoregressive; None is what the model was trained for.
    """
    if method is None:
        method = str(model.config.extra.get("trained_for", "plain"))
    plain = isinstance(method, str) and method in ("plain", "teacher")
    return AUTOREGRESSIVE if plain else method  # find_technique names what is no text


def load_encoder_decoder(model: Seq2Seq | str | Path, name: str = "model") -> Seq2Seq:
    """Return an encoder-decoder, given itself, its name or its folder."""
    if isinstance(model, (str, Path)):
        return load_translator_once(model)
    if isinstance(model, Model):
        raise TinyspecError(
            f"{model.name} extends texts and translates none: use generate, or load an "
            "encoder-decoder with "
            "tinyspec.load_translator"
        )
    if not isinstance(model, Seq2Seq):
        raise wrong_argument(
            name, model, "a name, a folder, or what tinyspec.load_translator returned"
        )
    return model


def load_for_method(method: str, device: str = "cpu", dtype: str | None = None) -> Seq2Seq:
    """Return the model on this machine that was trained for a method."""
    card = find_technique(AUTOREGRESSIVE if method == "plain" else method)
    if card.trained is not None:
        method = card.head_method
    needs_own = card.kind == "refine" or card.trained is not None
    return load_translator(name_for_method(method, needs_own), device, dtype)


def default_max_tokens(source: int) -> int:
    """Return the most tokens, end included, of a translation from left to right.

    >>> default_max_tokens(10)
    26
    """
    return source + source // 2 + 11


def limit_lengths(memory: EncoderOutput, most: int) -> list[int]:
    """Return the most tokens of the translation of each source: the default, or `most`."""
    return [min(default_max_tokens(length), most) for length in memory.mask.sum(dim=1).tolist()]


def check_source_type(source: Any, name: str = "source") -> Source:
    """Return a source as a text or a list of token ids. Raise TinyspecError for anything else."""
    return (
        source
        if isinstance(source, str)
        else check_ids(name, source, "a text or a list of token ids")
    )


def check_source(model: Seq2Seq, ids: Sequence[int]) -> None:
    """Raise TinyspecError unless these ids can be translated."""
    if not ids:
        raise TinyspecError("the source is empty: give at least one token")
    model.check_length(len(ids))
    strange = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if strange:
        raise TinyspecError(
            f"token {strange[0]} is not in the vocabulary of {model.name}: ids are below "
            f"{model.config.vocab_size}"
        )
    if model.config.pad in ids:
        raise TinyspecError(
            f"the source holds {model.name}'s padding token {model.config.pad}: leave it out"
        )


def check_trained_for(model: Seq2Seq, card: Card) -> None:
    """Raise TinyspecError if this model was made for another way of translating."""
    trained = str(model.config.extra.get("trained_for", ""))
    wanted = card.name if card.kind == "refine" else "teacher"
    if card.kind == "analysis":
        raise TinyspecError(f"{card.name} is an analysis: it translates nothing")
    if card.kind == "policy":
        raise TinyspecError(f"{card.name} schedules requests: it translates nothing")
    if card.kind == "streams":
        raise TinyspecError(f"{card.name} writes answers of language models: it translates nothing")
    if card.drafts and not card.fills_masks:
        raise TinyspecError(
            f"{card.name} needs a draft model, and translation models have none: use another method"
        )
    if card.fills_masks and trained == card.name:
        raise TinyspecError(
            f"{model.name} drafts for its teacher and translates nothing by itself: name the "
            "teacher as the model, and this one as the draft"
        )
    heads = {name.partition("/")[0] for name in model.decoder_extras}
    if card.trained is not None and card.trained.needed and card.head_method not in heads:
        raise TinyspecError(f"{model.name} has no head for {card.head_method}: {_say_how(card)}")
    if trained in heads and wanted == "teacher":
        return  # it writes from left to right too
    if trained and registry_name(model, trained) != registry_name(model, wanted):
        recipe = f"a recipe with method = '{wanted}' (tinyspec train mt)"
        how = "" if wanted == "teacher" else f", or train one from {recipe}"
        raise TinyspecError(
            f"{model.name} was trained for {trained}, and {card.name} needs a model trained for "
            f"{wanted}: leave out the model, or name one with --model{how}"
        )


def _say_how(card: Card) -> str:
    """Return how a translation model gets the head of a method."""
    if find_technique(card.head_method).translator is None:
        return "it is trained for models that extend texts alone"
    return (
        f"train a model from a recipe with method = '{card.head_method}' (tinyspec train mt), and "
        "name it with --model"
    )


def find_teacher(
    model: Seq2Seq, card: Card, teacher: Seq2Seq | str | Path | None
) -> Seq2Seq | None:
    """Return the model that judges candidates.

    It is the given one, else the one that the model's own card names, if it is here.
    """
    if teacher is None and card.teacher and (named := model.config.extra.get("teacher")):
        if model not in _teachers:
            try:
                _teachers[model] = load_translator(str(named), model.device, model.dtype)
            except TinyspecError:
                return None  # not on this machine; a technique that needs it raises an error
        teacher = _teachers[model]
    judge = None if teacher is None else load_encoder_decoder(teacher, "teacher")
    if judge is not None:
        check_teacher(model, judge)
    return judge


def find_drafters(model: Seq2Seq, card: Card, draft: Seq2Seq | str | Path | None) -> list[Seq2Seq]:
    """Return the model that fills in masks for a method that needs one; none for other methods.

    It is the given one, else one on this machine that was trained for the method and this model.
    """
    if not card.fills_masks:
        if draft is not None:
            raise TinyspecError(f"{card.name} takes no draft model here: leave draft out")
        return []
    if draft is None:
        known = _drafters.setdefault(model, {})
        if card.name not in known:
            named = next(iter(find_students_of(model.name, card.name)), None)
            if named is None:
                command = find_training_command(card.name) or (
                    "tinyspec train mt --recipe FILE --out FOLDER, from a recipe with "
                    f"method = '{card.name}'"
                )
                raise TinyspecError(
                    f"{card.name} needs a draft model that was trained for it, and {model.name} "
                    f"has none here: pass draft=..., or train one: {command}"
                )
            known[card.name] = load_translator(named, model.device, model.dtype)
        draft = known[card.name]
    drafter = load_encoder_decoder(draft, "draft")
    trained = drafter.config.extra.get("trained_for", card.name)
    if trained != card.name:
        raise TinyspecError(
            f"{drafter.name} was trained for {trained}, and {card.name} drafts with a model "
            f"trained for {card.name}"
        )
    check_pair(model, drafter)
    return [drafter]
