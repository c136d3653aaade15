"""Which draft models and trained heads go with a model."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from tinyspec import models
from tinyspec.arguments import wrong_argument
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.heads import (
    HeadFile,
    HeadSettings,
    add_head,
    check_head,
    head_settings,
    head_weights,
    missing_head,
    prepare_head,
    read_head,
)
from tinyspec.lm.model import Model
from tinyspec.technique import Card, Trained, load_techniques

Draft: TypeAlias = Model | str | Path | Sequence[Model | str | Path] | None
"""One draft model or several, loaded or by name; None: the one that the model's own card names."""

Head: TypeAlias = str | Path | None
"""The folder or the name of a trained head; None: the one that was trained for the model."""

_headed: WeakKeyDictionary[Model, dict[Any, Model]] = WeakKeyDictionary()
"""Models with heads, by what was read: each lives as long as the model without a head."""

_named: WeakKeyDictionary[Model, dict[str, Model]] = WeakKeyDictionary()
"""Drafts that no caller named: they are read once, and live as long as the model that they draft
for.
"""


def drafts_for(model: Model, card: Card, draft: Draft) -> list[Model]:
    """Return the draft models that a method needs or can use.

    These are the given ones, else those that the model's own card names. Of more than the method
    can use, the first; of fewer, the last once more. A name that was given is loaded once and kept,
    and read again when its files have changed.
    """
    if card.drafts == 0 and not card.optional_draft:
        return []
    silent = draft is None
    if card.own_draft and draft is None:
        draft = next(iter(models.find_drafts_of(model.name, card.name)), None)
        if draft is None:
            raise TinyspecError(
                f"{card.name} needs a draft model that was trained for it, and {model.name} has "
                "none here: train one from a recipe with extra.draft_for = "
                f"'{card.name}' (tinyspec train lm --recipe FILE --out FOLDER), or pass draft=..."
            )
    draft = model.config.extra.get("draft") if draft is None else draft
    if (
        draft is None and card.drafts
    ):  # the card is silent: a draft on this machine that was made for it
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
            small = known.get(str(named)) or load(named, device=model.device, dtype=model.dtype)
        check_pair(model, small)
        if not isinstance(named, Model):
            known[str(named)] = small
        loaded.append(small)
    return loaded + loaded[-1:] * (needed - len(loaded))


def attach_head(model: Model, card: Card, head: Head = None) -> Model:
    """Return the model with the head that a method needs; the same model if it needs none.

    head  a folder or a name; None: the one that the model has already, else one on this machine
          that was trained for this model and method

    Raises TinyspecError if there is none, or if it does not fit.
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
    if named is None:
        raise missing_head(model.name, method)
    if not isinstance(named, (str, Path)):
        raise wrong_argument("head", head, "the folder of a head, or its name")
    path = models.find_model(named)
    if path is None:
        raise TinyspecError(f"{named}: no such head; it is a folder with config.json")
    known = _headed.setdefault(model, {})
    key = method, models.stamp(path)
    if key not in known:
        found = _read_fitting(path, model, card)
        known[key] = add_head(model, method, found.weights, found.settings)
    return known[key]


def _read_fitting(path: Path, model: Model, card: Card) -> HeadFile:
    """Return the content of a head's folder. Raises TinyspecError unless it fits."""
    found = read_head(path)
    if found.method != card.head_method or card.trained is None:
        raise TinyspecError(f"{path}: a head for {found.method}, not for {card.head_method}")
    settings = _check_fit(found, card.trained, model, path)
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


def advised_knobs(card: Card, drafts: Sequence[Model]) -> dict[str, Any]:
    """Return the defaults that the first draft's card advises, for the knobs that take advice."""
    advice = drafts[0].config.extra if drafts else {}
    return {
        knob.name: advice[knob.name]
        for knob in card.knobs
        if knob.advised and advice.get(knob.name) is not None
    }


def check_pair(model: Model, small: Model) -> None:
    """Raise TinyspecError unless both read the same tokens."""
    ours, theirs = model.config.vocab_size, small.config.vocab_size
    same = not (model.has_tokenizer and small.has_tokenizer) or model.tokenizer.same_vocabulary(
        small.tokenizer
    )
    if ours != theirs or not same:
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
