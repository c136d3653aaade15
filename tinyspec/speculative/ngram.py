"""Count back-off n-grams (Katz 1987) in text that a model wrote: the lowest level of a cascade.

After a context that was seen, the count of each continuation is reduced by a discount. The
probability that becomes free goes to the tokens that were not seen there, in proportion to their
probabilities after the context without its first token. The discount is absolute, one half, because
Katz's own (Good-Turing) is undefined for small counts. Every count is discounted, and tokens that
the text lacks share the rest evenly.

The text is the model's own sampling run: it samples from the beginning-of-text token on, without a
prompt. The run is a function of the model, so n tokens always mean its first n tokens. A short run
is sampled when a model is loaded. `tinyspec train ngrams` keeps a long one in the cache, in files
that are named after the weights. The table is counted once per model and is not part of a request's
state.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tinyspec import models
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import EXACT, UNCHANGED, kernels_of
from tinyspec.errors import TinyspecError
from tinyspec.lm.checkpoint import hash_weights
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.tree import TokenTree

Context: TypeAlias = tuple[int, ...]

STREAMS = 32  # texts that are sampled in one batch
TEXT_LENGTH = 256  # tokens of a text at most, so that an interrupted run loses 32 such texts
AT_ONCE = STREAMS * TEXT_LENGTH  # tokens that are sampled when a model is loaded: a few seconds
DISCOUNT = Fraction(1, 2)  # what is taken off each count


class KatzModel:
    """A back-off model of n-grams up to an order, over a vocabulary of V tokens.

    exact  whether probabilities are Fractions, for a model whose own are; else float64

    >>> model = KatzModel([[1, 2, 3, 1, 2, 0]], order=3, vocabulary=4)
    >>> model.most_likely([9, 1]), model.most_likely([3, 1, 2]), model.most_likely([0])
    (2, 0, None)
    """

    def __init__(
        self, texts: Iterable[Sequence[int]], order: int, vocabulary: int, exact: bool = False
    ):
        self.order, self.vocabulary = order, vocabulary
        self.number: Any = Fraction if exact else float
        counts: defaultdict[Context, dict[int, int]] = defaultdict(dict)
        for text in texts:
            for end, token in enumerate(text):
                for n in range(min(order - 1, end) + 1):
                    after = counts[tuple(text[end - n : end])]
                    after[token] = after.get(token, 0) + 1
        self.counts = dict(counts)
        uniform = np.full(vocabulary, self.number(1) / vocabulary, object if exact else float)
        self.unigrams = self._add_counts(uniform, ()) if self.counts else uniform

    def probs(self, context: Sequence[int]) -> Any:
        """Return the distribution of the next token, a vector [V].

        prob(x | c) = (count(c x) - discount) / count(c)    where x was seen after c
        prob(x | c) = backoff(c) prob(x | c without its first token)                  elsewhere

        The discount is 0 if all tokens of the vocabulary were seen after c.
        """
        row, longest = self.unigrams, self._longest_seen(context)
        for n in range(1, len(longest) + 1):
            row = self._add_counts(row, longest[-n:])
        return row

    def logits(self, context: Sequence[int]) -> Any:
        """Return log-probabilities [V]; of an exact model the probabilities, as Fractions."""
        row = self.probs(context)
        return row.tolist() if self.number is Fraction else np.log(row)

    def most_likely(self, context: Sequence[int]) -> int | None:
        """Return the most likely next token; None if the newest token was never continued.

        Of equally likely tokens it is the lowest id.
        """
        return int(self.probs(context).argmax()) if self.knows(context) else None

    def knows(self, context: Sequence[int]) -> bool:
        """Return whether the newest token of the context was ever continued."""
        return bool(self._longest_seen(context))

    def _longest_seen(self, context: Sequence[int]) -> Context:
        """Return the longest end of the context that was continued."""
        for n in range(min(self.order - 1, len(context)), 0, -1):
            if (end := tuple(context[-n:])) in self.counts:
                return end
        return ()

    def _add_counts(self, row: Any, context: Context) -> Any:
        """Return the distribution after a context, from that after the context one shorter."""
        after, number = self.counts[context], self.number
        seen, total = list(after), number(sum(after.values()))
        discount = number(DISCOUNT) if len(after) < self.vocabulary else number(0)
        if discount:  # a token that was not seen shares the mass that the discount leaves
            row = row * (discount * len(after) / total / (1 - row[seen].sum()))
        else:
            row = row.copy()
        row[seen] = [(n - discount) / total for n in after.values()]
        return row


# ------------------------------ a model's own sampling run


def sample_unconditionally(model: Any, tokens: int, seed: int = 0) -> list[list[int]]:
    """Sample so many tokens from a model at temperature 1, without a prompt, in several texts.

    model  with `session` and `config`: a transformer or a table
    """
    texts, size = list[list[int]](), batch_tokens(model)
    for number in range(-(-tokens // size)):
        texts += sample_batch(model, number, min(tokens - number * size, size), seed)
    return texts


def batch_tokens(model: Any) -> int:
    """Return how many tokens a batch of texts has."""
    return STREAMS * min(TEXT_LENGTH, int(model.config.max_positions) - 1)


def sample_batch(model: Any, number: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Sample texts in turns: a token of text 0, then one of text 1, and so on.

    With fewer tokens, each text is a beginning of the text that it is with more.
    """
    start = start_token(model)

    def sample(row: int, scheduler: Scheduler) -> list[int]:
        session, text = model.session(None, scheduler), [start]
        rng = Seeded(seed).split("text", number * STREAMS + row)
        session.extend(text)
        while len(text) <= (tokens + STREAMS - 1 - row) // STREAMS:
            text.append(rng.draw(UNCHANGED.probs(session.score(TokenTree()).logits[0], text)))
            session.commit((), text[-1])
        return text

    return run_together([partial(sample, row) for row in range(min(STREAMS, tokens))])


def start_token(model: Any) -> int:
    """Return the token that a text without a prompt begins with."""
    config = model.config
    return config.bos if config.bos is not None else min(config.eos, default=0)


def has_exact_rows(model: Any) -> bool:
    """Return whether a model gives Fractions, as the tables of the exact laws do."""
    session = model.session()
    session.extend([start_token(model)])
    return kernels_of(session.score(TokenTree()).logits) is EXACT


def own_texts_folder(model: Any) -> Path:
    """Return the folder in the cache for this model's own sampling run, a file for each batch."""
    key = hash_weights(model.weights)
    return models.models_folder().parent / "ngrams" / f"{model.name}-{key}"


def name_batch(number: int) -> str:
    """Return the name of a batch's file: a JSON list of texts."""
    return f"{number:05d}.json"


def read_own_texts(model: Any, tokens: int) -> list[list[int]]:
    """Return the first tokens of a model's own sampling run, in several texts.

    A short run is sampled now. Raises TinyspecError if a long one is not in the cache.
    """
    if tokens <= AT_ONCE:
        return sample_unconditionally(model, tokens)
    folder, size = own_texts_folder(model), batch_tokens(model)
    texts = list[list[int]]()
    for number in range(-(-tokens // size)):
        path = folder / name_batch(number)
        if not path.exists():
            raise TinyspecError(
                f"{number * size} tokens of {model.name}'s own sampling run are in the cache, and "
                f"{tokens} are to be counted: run `tinyspec train ngrams --draft {model.name} "
                f"--tokens {tokens}`"
            )
        try:
            batch = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TinyspecError(
                f"{path}: damaged; delete it, and `tinyspec train ngrams` writes it again"
            ) from error
        wanted = tokens - number * size
        texts += [
            text[: 1 + (wanted + STREAMS - 1 - row) // STREAMS]
            for row, text in enumerate(batch[:wanted])
        ]
    return texts
