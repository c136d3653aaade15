"""Count back-off n-grams (Katz 1987) in text that a model wrote: the lowest level of a cascade.

After a context that was seen, the count of each continuation is reduced by a discount. The
probability that becomes free goes to the tokens that were not seen there, in proportion to their
probabilities after the context without its first token. The discount is absolute, one half, because
Katz's own (Good-Turing) is undefined for small counts.

Tokens that it proposes are point masses, so it cannot change an output distribution. It is counted
once per model and is not part of a request's state.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.lm.batching import BatchBarrier, run_together
from tinyspec.tree import TokenTree

Context: TypeAlias = tuple[int, ...]

STREAMS = 32  # texts that are sampled in one batch
DISCOUNT = Fraction(1, 2)  # what is taken off each count


class KatzModel:
    """A back-off model of n-grams up to an order, over a vocabulary of V tokens.

    backoff  context -> the factor on an unseen token's probability after the shorter context
    best     context -> the most likely next token

    >>> model = KatzModel([[1, 2, 3, 1, 2, 0]], order=3, vocabulary=4)
    >>> model.most_likely([9, 1]), model.most_likely([3, 1, 2]), model.most_likely([0])
    (2, 0, None)
    """

    def __init__(self, texts: Iterable[Sequence[int]], order: int, vocabulary: int):
        self.order, self.vocabulary = order, vocabulary
        counts: defaultdict[Context, Counter[int]] = defaultdict(Counter)
        for text in texts:
            for end, token in enumerate(text):
                for n in range(min(order - 1, end) + 1):
                    counts[tuple(text[end - n : end])][token] += 1
        self.counts = {context: dict(counts[context]) for context in sorted(counts, key=len)}
        self.backoff: dict[Context, Fraction] = {}
        for context, after in self.counts.items():
            if len(after) < vocabulary:
                below: Fraction | int = vocabulary - len(after)
                if context:
                    below = 1 - sum(self.prob(token, context[1:]) for token in after)
                self.backoff[context] = DISCOUNT * len(after) / sum(after.values()) / below
        ranked = {
            context: sorted(after, key=lambda t: (-after[t], t))
            for context, after in self.counts.items()
        }
        self.best = {
            context: self._best(context, frozenset(), ranked)[1] for context in self.counts
        }

    def prob(self, token: int, context: Sequence[int]) -> Fraction:
        """Return the probability of a token after a context."""
        seen = self._longest_seen(context)
        if seen is None:
            return Fraction(1, self.vocabulary)
        after = self.counts[seen]
        if token in after:
            discount = DISCOUNT if seen in self.backoff else 0
            return (after[token] - discount) / Fraction(sum(after.values()))
        return self.backoff[seen] * (self.prob(token, seen[1:]) if seen else 1)

    def most_likely(self, context: Sequence[int]) -> int | None:
        """Return the most likely next token; None if the newest token was never continued."""
        seen = self._longest_seen(context)
        return self.best[seen] if seen else None

    def _longest_seen(self, context: Sequence[int]) -> Context | None:
        """Return the longest end of the context that was continued; None if nothing was counted."""
        for n in range(min(self.order - 1, len(context)), -1, -1):
            found = tuple(context[len(context) - n :])
            if found in self.counts:
                return found
        return None

    def _best(
        self, context: Context, but: frozenset[int], ranked: dict[Context, list[int]]
    ) -> tuple[Fraction, int]:
        """Return the most likely token after a context that is not in `but`, with its probability.

        Of equally likely tokens it is the lowest id.
        """
        first = next((token for token in ranked[context] if token not in but), None)
        found = [] if first is None else [(self.prob(first, context), first)]
        but = but.union(self.counts[context])
        if context in self.backoff and len(but) < self.vocabulary:
            below = (Fraction(1), next(token for token in count() if token not in but))
            if context:
                below = self._best(context[1:], but, ranked)
            found.append((self.backoff[context] * below[0], below[1]))
        return max(found, key=lambda entry: (entry[0], -entry[1]))


def sample_unconditionally(model: Any, tokens: int, seed: int = 0) -> list[list[int]]:
    """Sample so many tokens from a model at temperature 1, without a prompt, in several texts.

    model  with `session` and `config`: a transformer or a table
    """
    config = model.config
    start = config.bos if config.bos is not None else min(config.eos, default=0)
    streams = min(STREAMS, tokens)
    lengths = [
        min((tokens + number) // streams, config.max_positions - 1) for number in range(streams)
    ]

    def sample(number: int, barrier: BatchBarrier) -> list[int]:
        session, rng, text = (
            model.session(None, barrier),
            Seeded(seed).split("text", number),
            [start],
        )
        session.extend(text)
        while len(text) <= lengths[number]:
            text.append(rng.draw(UNCHANGED.probs(session.score(TokenTree()).logits[0], text)))
            session.commit((), text[-1])
        return text

    return run_together([partial(sample, number) for number in range(streams)])
