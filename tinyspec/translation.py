"""translate: from a source to its translation, by any technique.

A technique that extends a text runs in the common loop, on a model that writes from left to right
and has read the source (`Seq2Seq.given`); a technique that rewrites a canvas runs in `refine`.
"""

import time
from collections.abc import Sequence
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
from tinyspec.decoding.refine import check_teacher
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.generation import GenerationRun
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import Card, RefineRequest, Request, find_technique
from tinyspec.translating import ExtendingRun, RewritingRun, Translation
from tinyspec.translators import load_translator, load_translator_once, name_for_method

__all__ = [
    "AUTOREGRESSIVE",
    "ExtendingRun",
    "RewritingRun",
    "Source",
    "Translation",
    "load_for_method",
    "start_translation",
    "translate",
]

Source: TypeAlias = str | Sequence[int]

AUTOREGRESSIVE = "autoregressive"
_judges: WeakKeyDictionary[Seq2Seq, Seq2Seq] = (
    WeakKeyDictionary()
)  # a teacher that a card named is read once


def start_translation(
    model: Seq2Seq | str | Path,
    source: Source,
    *,
    method: str | None = None,
    seed: int = 0,
    teacher: Seq2Seq | str | Path | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **knobs: Any,
) -> ExtendingRun | RewritingRun:
    """Prepare a translation: everything that can be wrong with its arguments is said here."""
    model = load_encoder_decoder(model)
    card = find_technique(registry_name(model, method))
    check_names(card, knobs, start_translation.__kwdefaults__ or (), temperature)
    source = check_source_type(source)
    check_budget(max_new_tokens, seed)
    if temperature is not None and any(knob.name == "temperature" for knob in card.knobs):
        knobs["temperature"], temperature = (
            temperature,
            None,
        )  # its own, and another's than the tokens'
    card.settings(knobs)
    check_sampling(0.0 if temperature is None else temperature, top_k, top_p)
    ids = model.tokenizer.encode(source) if isinstance(source, str) else list(source)
    check_source(model, ids)
    check_trained_for(model, card)
    if teacher is not None and not card.teacher:
        raise TinyspecError(f"{card.name} asks no teacher: leave it out")
    forward_log: list[ForwardRecord] = []
    if card.kind == "refine":
        if temperature is not None or top_k is not None or top_p is not None:
            raise TinyspecError(
                f"{card.name} rewrites a canvas and has no temperature: its own knobs say what is drawn"
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
            forward_log=forward_log,
            clock=time.perf_counter,
        )
        return GenerationRun(card.make(request, **knobs), given, [model.config.bos], seed)

    return ExtendingRun(model, ids, make, forward_log)


def translate(
    model: Seq2Seq | str | Path, source: Source | Sequence[Source], **options: Any
) -> Translation | list[Translation]:
    """Translate a source, or several one after another. See `tinyspec.translate` for the
    options.
    """
    if not is_batch(source):
        return _finish(start_translation(model, source, **options))  # type: ignore[arg-type]
    sources = [check_source_type(one, f"source[{row}]") for row, one in enumerate(source)]
    seed, model = options.pop("seed", 0), load_encoder_decoder(model)
    check_budget(None, seed)
    return [
        _finish(start_translation(model, one, seed=seed + row, **options))
        for row, one in enumerate(sources)
    ]


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
    """The registry's name of a method: `plain` is autoregressive; None: what the model was trained
    for.
    """
    if method is None:
        method = str(model.config.extra.get("trained_for", "plain"))
    return AUTOREGRESSIVE if method in ("plain", "teacher") else method


def load_encoder_decoder(model: Seq2Seq | str | Path, name: str = "model") -> Seq2Seq:
    """An encoder-decoder, loaded, by name or by folder."""
    if isinstance(model, (str, Path)):
        return load_translator_once(model)
    if isinstance(model, Model):
        raise TinyspecError(
            f"{model.name} extends texts and translates none: use generate, or load an encoder-decoder with "
            "tinyspec.load_translator"
        )
    if not isinstance(model, Seq2Seq):
        raise wrong_argument(
            name, model, "a name, a folder, or what tinyspec.load_translator returned"
        )
    return model


def load_for_method(method: str, device: str = "cpu", dtype: str | None = None) -> Seq2Seq:
    """The model on this machine that was trained for a method."""
    card = find_technique(AUTOREGRESSIVE if method == "plain" else method)
    return load_translator(name_for_method(method, card.kind == "refine"), device, dtype)


def default_max_tokens(source: int) -> int:
    """Tokens of a translation that is written from left to right, at most, its end among them.

    >>> most_tokens(10)
    26
    """
    return source + source // 2 + 11


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
    model.fits(len(ids))
    strange = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if strange:
        raise TinyspecError(
            f"token {strange[0]} is not in the vocabulary of {model.name}: ids are below {model.config.vocab_size}"
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
    if card.drafts:
        raise TinyspecError(
            f"{card.name} needs a draft model, and translation models have none: use another method"
        )
    if trained and registry_name(model, trained) != registry_name(model, wanted):
        raise TinyspecError(
            f"{model.name} was trained for {trained}, and {card.name} needs a model trained for {wanted}: leave out the "
            "model, or name one with --model"
        )


def find_teacher(
    model: Seq2Seq, card: Card, teacher: Seq2Seq | str | Path | None
) -> Seq2Seq | None:
    """The model that judges candidates: what was given, else the one that the model's own card
    names, if it is here.
    """
    if teacher is None and card.teacher and (named := model.config.extra.get("teacher")):
        if model not in _judges:
            try:
                _judges[model] = load_translator(str(named), model.device, model.dtype)
            except TinyspecError:
                return None  # not on this machine; a technique that cannot do without says so
        teacher = _judges[model]
    judge = None if teacher is None else load_encoder_decoder(teacher, "teacher")
    if judge is not None:
        check_teacher(model, judge)
    return judge
