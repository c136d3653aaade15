"""Which draft models and trained heads go with a model."""

import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from tinyspec import models
from tinyspec.arguments import wrong_argument
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.head_formats import (
    FORMATS,
    convert_head,
    find_format,
    read_foreign_head,
    read_head_method,
)
from tinyspec.lm.heads import (
    RANKS,
    HeadFile,
    HeadSettings,
    add_head,
    check_head,
    head_settings,
    head_weights,
    missing_head,
    prepare_head,
    read_head,
    write_head_files,
)
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq, has_same_vocabulary
from tinyspec.technique import Card, Trained, find_technique, load_techniques

Draft: TypeAlias = Model | str | Path | Sequence[Model | str | Path] | None
"""One draft model or several, loaded or by name; None: the one that the model's own card names.

"quantized_draft" is the model itself in four bits: see `make_draft`.
"""

Head: TypeAlias = str | Path | None
"""The folder or the name of a trained head; None: the one that was trained for the model."""

_headed: WeakKeyDictionary[Model, dict[Any, Model]] = WeakKeyDictionary()
"""Models with heads, by what was read: each lives as long as the model without a head."""

_named: WeakKeyDictionary[Model, dict[str, Model]] = WeakKeyDictionary()
"""Drafts that no caller named, by name or by the method that made them: they are read or made once,
and live as long as the model that they draft for.
"""
_making = threading.Lock()


def drafts_for(model: Model, card: Card, draft: Draft) -> list[Model]:
    """Return the draft models that a method needs or can use.

    These are the given ones, else what the method makes of the model itself, else those that the
    model's own card names. If more are given than the method can use, the first ones are taken. If
    fewer are given, the last one is used again. A name that was given is loaded once and kept, and
    read again when its files have changed. The name of a method that makes its draft stands for
    that draft: see `make_draft`.
    """
    if card.drafts == 0 and not card.optional_draft:
        return []
    silent = draft is None
    if draft is None and card.make_draft is not None:
        draft = card.name
    if card.own_draft and draft is None:
        draft = next(iter(models.find_drafts_of(model.name, card.name)), None)
        if draft is None:
            raise TinyspecError(
                f"{card.name} needs a draft model that was trained for it, and {model.name} has "
                "none here: train one from a recipe with extra.draft_for = "
                f"'{card.name}' (tinyspec train lm --recipe FILE --out FOLDER), or pass draft=..."
            )
    draft = model.config.extra.get("draft") if draft is None else draft
    if draft is None and card.drafts:
        # The model's card names no draft: take one on this machine that was made for the model.
        draft = next(iter(models.find_drafts_of(model.name)), None)
    given: Sequence[Any] = () if draft is None else [draft]
    if isinstance(draft, Sequence) and not isinstance(draft, str):
        given = draft
    for named in given:
        if not isinstance(named, (Model, str, Path)):
            raise wrong_argument(
                "draft", named, "a loaded model, a name, a path, or a list of these"
            )
    if not given and card.drafts == 0:
        return []
    if not given and not silent:
        raise TinyspecError("draft is an empty list: name a model, or leave draft out")
    if not given:
        raise TinyspecError(
            f"{card.name} needs a draft model and the card of {model.name} names none: pass "
            "draft=... (a smaller model with the same tokenizer), or a method without one: "
            f"{list_draftless()}"
        )
    needed = max(card.drafts, 1)
    used = given if card.several else given[:needed]
    known = _named.setdefault(model, {}) if silent else {}
    loaded = list[Model]()
    for named in used:
        if isinstance(named, Model):
            small = named
        else:
            load = models.load if silent else models.load_once
            found = make_draft(model, named) or known.get(str(named))
            dtype = None if model.quantised_bytes else model.dtype  # None: as it is stored
            small = found or load(named, device=model.device, dtype=dtype)
        check_pair(model, small)
        if not isinstance(named, Model):
            known[str(named)] = small
        loaded.append(small)
    return loaded + loaded[-1:] * (needed - len(loaded))


def make_draft(model: Model, method: Any) -> Model | None:
    """Return the draft model that a method makes of a model; None if no method of this name does.

    It is made once, and lives as long as the model.
    """
    card = load_techniques().get(method) if isinstance(method, str) else None
    if card is None or card.make_draft is None:
        return None
    with _making:  # requests of a batch come here together, and share the draft
        known = _named.setdefault(model, {})
        if card.name not in known:
            known[card.name] = card.make_draft(model)
        return known[card.name]


def find_head_card(card: Card, head: Head) -> Card:
    """Return the card of the method whose head a method uses: its own, or that of a given head."""
    if not card.optional_head or head is None:
        return card
    if not isinstance(head, (str, Path)):
        raise wrong_argument("head", head, "the folder of a head, or its name")
    return find_technique(read_head_method(find_head(head)))


def attach_head(model: Model, card: Card, head: Head = None) -> Model:
    """Return the model with the head that a method needs; the same model if it needs none.

    head  a folder or a name; None: the one that the model has already, else one on this machine
          that was trained for this model and method

    Raises TinyspecError if there is none and the method always needs one, or if it does not fit.
    """
    if card.trained is None:
        return model
    method = card.head_method
    lead = f"{method}/"
    if head is None and any(name.startswith(lead) for name in model.extras):
        prepare_head(model, lead, lambda own: _check_own_head(own, card))
        return model
    named = head or next(iter(models.find_heads_of(model.name, method)), None)
    if named is None and card.tuned is not None:
        raise TinyspecError(
            f"{model.name} has no heads for {card.name}: take a model that was tuned with them, or "
            f"tune this: tinyspec train head --for {model.name} --method {card.name} --out FOLDER"
        )
    if named is None and not card.trained.needed:
        return model
    if named is None:
        raise missing_head(model.name, method)
    if not isinstance(named, (str, Path)):
        raise wrong_argument("head", head, "the folder of a head, or its name")
    path = find_head(named)
    known = _headed.setdefault(model, {})
    key = method, models.stamp(path)
    if key not in known:
        found = read_fitting_head(path, model, card)
        known[key] = add_head(model, method, found.weights, found.settings)
    return known[key]


def find_head(named: str | Path) -> Path:
    """Return the folder of a head, by path or name.

    Raises TinyspecError if there is none, or if it is one of the zoo that is not trained yet.
    """
    models.check_trained(named)
    path = models.find_model(named)
    if path is None:
        raise TinyspecError(f"{named}: no such head; it is a folder with config.json")
    return path


def read_fitting_head(path: Path, model: Model, card: Card) -> HeadFile:
    """Return the content of a head's folder, in any format. Raises TinyspecError unless it fits."""
    method, trained = read_head_method(path), card.trained
    if method != card.head_method or trained is None:
        raise TinyspecError(
            f"{path}: a head for {method}, not for {card.head_method}: give another head, or "
            "another method"
        )
    format = find_format(path)
    if format is None:
        found = read_head(path)
    else:
        layers = trained.layers(model.config, trained.settings())
        found = read_foreign_head(path, format, model, layers)
        if RANKS not in found.weights:  # nothing was measured: draft a chain
            shapes = trained.all_shapes(model.config, trained.settings(**found.settings))
            ranks = torch.zeros(shapes[RANKS])
            ranks[:, 0] = 1
            found = found._replace(weights={**found.weights, RANKS: ranks})
    settings = _check_fit(found, trained, model, path)
    return found._replace(settings=vars(settings))


def _check_fit(found: HeadFile, trained: Trained, model: Model, path: Path) -> HeadSettings:
    """Return the settings of a head. Raises TinyspecError unless it fits the model."""
    kind = trained.settings
    for name in found.settings:
        if name not in (names := {field.name for field in fields(kind)}):
            hint = suggest_nearest(name, names)
            raise TinyspecError(f"{path / 'config.json'}: settings {name} is not known; {hint}")
    settings = kind(**found.settings)
    check_head(found, model, trained.all_shapes(model.config, settings), path)
    trained.layers(model.config, settings)  # raises if the model lacks one
    return settings


def _check_own_head(model: Model, card: Card) -> None:
    """Raise TinyspecError unless the head that a model brings with it fits it."""
    method, trained = card.head_method, card.trained
    assert trained is not None
    try:
        settings = head_settings(model, method)
    except (TypeError, ValueError) as error:  # no text
        raise TinyspecError(
            f"{model.name}: the settings of its head for {method} cannot be read; tune it again"
        ) from error
    check = embedding_checksum(model.weights["embed"])
    own = HeadFile(method, model.name, check, settings, {}, head_weights(model, method))
    _check_fit(own, trained, model, Path(model.name))


def export_head(
    head: str | Path,
    format: str,
    out: str | Path,
    target: str | Path | None = None,
    verifier: str | None = None,
) -> Path:
    """Write a head in the format of another program, and return its folder.

    head      a folder that `tinyspec train head` wrote, or its name
    format    speculators, vllm-medusa or vllm-eagle
    out       a new folder
    target    the model of the head; None: the one that the head names
    verifier  speculators: how its loader finds the target, a folder or a hub id; None: the name
              that the head has for it

    Raises TinyspecError, one line, for a head or settings that the format does not have, for an
    existing folder, and if the target is not here. Then nothing is written.
    """
    path, folder = find_head(head), Path(out)
    if format not in FORMATS:
        raise TinyspecError(f"unknown format {format!r}: {suggest_nearest(str(format), FORMATS)}")
    if folder.exists():
        raise TinyspecError(f"{folder} exists already: name a new folder")
    if (known := find_format(path)) is not None:
        raise TinyspecError(
            f"{path}: a head in the format {known}: give a head that `tinyspec train head` wrote"
        )
    found = read_head(path)
    if found.method != FORMATS[format].method:
        fitting = [name for name, one in FORMATS.items() if one.method == found.method]
        hint = f"use {fitting[0]}" if fitting else f"no format holds heads of {found.method}"
        raise TinyspecError(
            f"{path}: a head of {found.method}, and {format} holds heads of "
            f"{FORMATS[format].method}: {hint}"
        )
    if verifier is not None and format != "speculators":
        raise TinyspecError(f"{format} does not name its target, so it takes no verifier")
    card = find_technique(found.method)
    assert card.trained is not None
    try:
        model = models.load(target or found.target)
    except TinyspecError as error:
        hint = (
            "" if target else f" (the target of {path}: name its folder with --target, target=...)"
        )
        raise TinyspecError(f"{error}{hint}") from error
    fitting_head = read_fitting_head(path, model, card)
    layers = card.trained.layers(model.config, card.trained.settings(**fitting_head.settings))
    try:
        values, weights = convert_head(format, fitting_head, model, layers)
    except TinyspecError as error:
        raise TinyspecError(f"{path}: {error}") from error
    if verifier is not None:
        values["speculators_config"]["verifier"]["name_or_path"] = verifier
    write_head_files(folder, values, weights)
    return folder


def advised_knobs(card: Card, drafts: Sequence[Model | Seq2Seq]) -> dict[str, Any]:
    """Return the defaults that the first draft's card advises, for the knobs that take advice."""
    advice = drafts[0].config.extra if drafts else {}
    return {
        knob.name: advice[knob.name]
        for knob in card.knobs
        if knob.advised and advice.get(knob.name) is not None
    }


def check_pair(model: Model | Seq2Seq, small: Model | Seq2Seq) -> None:
    """Raise TinyspecError unless both read the same tokens."""
    if not has_same_vocabulary(model, small):
        ours, theirs = model.config.vocab_size, small.config.vocab_size
        how = f"{theirs} tokens against {ours}" if ours != theirs else "same size, other tokens"
        raise TinyspecError(
            f"the draft {small.name} has another vocabulary than {model.name} ({how}): "
            "use a draft with the same tokenizer, or a method without a draft model: "
            f"{list_draftless()}"
        )


def list_draftless() -> str:
    """Return the names of the methods that need no draft model, for an error."""
    return ", ".join(
        name
        for name, card in load_techniques().items()
        if not card.drafts and card.kind == "decoder"
    )
