"""A statistical model as the lowest level of a cascade: Katz's back-off n-grams, counted in text
that a model said.

Katz 1987: after a context that was seen, a continuation has its count less a discount; the mass
this frees goes to the others, as the context shorter by one token shares it out. The discount is
absolute (one half), for Good-Turing's is undefined on small counts. Its guesses are point masses,
so nothing that it says can change a law; and it is counted once, so it is no state of a request.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.lm.gate import BatchBarrier, run_together
from tinyspec.tree import TokenTree

Context: TypeAlias = tuple[int, ...]

STREAMS = 32  # texts that are sampled side by side: one forward serves them all
DISCOUNT = Fraction(1, 2)


class KatzModel:
    """n-grams up to an order over a vocabulary of V tokens.

    >>> model = KatzModel([[1, 2, 3, 1, 2, 0]], order=3, vocabulary=4)
    >>> model.likeliest([9, 1]), model.likeliest([3, 1, 2]), model.likeliest([0])
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
        self.share: dict[
            Context, Fraction
        ] = {}  # what an unseen token's law in the shorter context is multiplied by
        for context, after in self.counts.items():
            if len(after) < vocabulary:
                below = (
                    1 - sum(self.law(token, context[1:]) for token in after)
                    if context
                    else vocabulary - len(after)
                )
                self.share[context] = DISCOUNT * len(after) / sum(after.values()) / below
        ranked = {
            context: sorted(after, key=lambda t: (-after[t], t))
            for context, after in self.counts.items()
        }
        self.best = {
            context: self._best(context, frozenset(), ranked)[1] for context in self.counts
        }

    def law(self, token: int, context: Sequence[int]) -> Fraction:
        """The probability of a token after a context."""
        seen = self._seen(context)
        if seen is None:
            return Fraction(1, self.vocabulary)
        after = self.counts[seen]
        if token in after:
            return (after[token] - (DISCOUNT if seen in self.share else 0)) / Fraction(
                sum(after.values())
            )
        return self.share[seen] * (self.law(token, seen[1:]) if seen else 1)

    def likeliest(self, context: Sequence[int]) -> int | None:
        """The likeliest next token. None where not even the newest token was ever continued: what
        knows nothing of the context is no guess."""
        seen = self._seen(context)
        return self.best[seen] if seen else None

    def _seen(self, context: Sequence[int]) -> Context | None:
        """The longest end of the context that was continued; None where nothing was counted at
        all.
        """
        for n in range(min(self.order - 1, len(context)), -1, -1):
            found = tuple(context[len(context) - n :])
            if found in self.counts:
                return found
        return None

    def _best(
        self, context: Context, but: frozenset[int], ranked: dict[Context, list[int]]
    ) -> tuple[Fraction, int]:
        """The likeliest token after a context that is none of these, with its probability; the
        lowest id of equals.
        """
        first = next((token for token in ranked[context] if token not in but), None)
        found = [] if first is None else [(self.law(first, context), first)]
        but = but.union(self.counts[context])
        if context in self.share and len(but) < self.vocabulary:
            below = (
                self._best(context[1:], but, ranked)
                if context
                else (Fraction(1), next(_others(but)))
            )
            found.append((self.share[context] * below[0], below[1]))
        return max(found, key=lambda entry: (entry[0], -entry[1]))


def _others(tokens: Container[int]) -> Iterator[int]:
    return (token for token in count() if token not in tokens)


def sample_texts(model: Any, tokens: int, seed: int = 0) -> list[list[int]]:
    """So many tokens that a model says of itself at temperature 1, in several texts; the same for
    the same seed.

    model  with `session` and `config`: a transformer or a table
    """
    config = model.config
    start = config.bos if config.bos is not None else min(config.eos, default=0)
    streams = min(STREAMS, tokens)
    lengths = [
        min((tokens + number) // streams, config.max_positions - 1) for number in range(streams)
    ]

    def say(number: int, gate: BatchBarrier) -> list[int]:
        session, rng, sampling, text = (
            model.session(None, gate),
            Seeded(seed).split("text", number),
            UNCHANGED,
            [start],
        )
        session.extend(text)
        while len(text) <= lengths[number]:
            text.append(rng.draw(sampling.probs(session.score(TokenTree()).logits[0], text)))
            session.commit((), text[-1])
        return text

    return run_together([partial(say, number) for number in range(streams)])
