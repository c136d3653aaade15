"""Which draft models go with a model."""

from collections.abc import Sequence
from typing import TypeAlias

from tinyspec import models
from tinyspec.errors import TinyspecError
from tinyspec.lm.transformer import Model
from tinyspec.technique import Card, techniques

Draft: TypeAlias = Model | str | Sequence[Model | str] | None
"""One draft model or several, loaded or by name; None: the one that the model's own card names."""


def drafts_for(model: Model, card: Card, draft: Draft) -> list[Model]:
    """The draft models a method needs or can use: what was given, else what the model's own card names.

    Of more than it can use, the first; of fewer, the last once more.
    """
    if card.drafts == 0 and not card.optional_draft:
        return []
    draft = model.config.extra.get("draft") if draft is None else draft
    if draft is None and card.drafts:  # the card is silent: a draft on this machine that was made for it
        draft = next(iter(models.drafts_of(model.name)), None)
    given = [draft] if isinstance(draft, (Model, str)) else list(draft or ())
    if not given and card.drafts == 0:
        return []
    if not given:
        raise TinyspecError(
            f"{card.name} needs a draft model and the card of {model.name} names none: pass draft=... "
            f"(a smaller model with the same tokenizer), or a method without one: {draftless()}"
        )
    needed = max(card.drafts, 1)
    used = given if card.several else given[:needed]
    loaded = [d if isinstance(d, Model) else models.load(d, device=model.device, dtype=model.dtype) for d in used]
    for small in loaded:
        check_pair(model, small)
    return loaded + loaded[-1:] * (needed - len(loaded))


def check_pair(model: Model, small: Model) -> None:
    """Raise TinyspecError unless both read the same tokens."""
    ours, theirs = model.config.vocab_size, small.config.vocab_size
    same = not (model.has_tokenizer and small.has_tokenizer) or model.tokenizer.same_vocabulary(small.tokenizer)
    if ours != theirs or not same:
        how = f"{theirs} tokens against {ours}" if ours != theirs else "same size, other tokens"
        raise TinyspecError(
            f"the draft {small.name} has another vocabulary than {model.name} ({how}): "
            f"use a draft with the same tokenizer, or a method without a draft model: {draftless()}"
        )


def draftless() -> str:
    """The methods that need no draft model, for an error."""
    return ", ".join(name for name, card in techniques().items() if not card.drafts and card.kind == "decoder")
