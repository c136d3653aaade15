"""What a submission to A3 is given: a model of a few layers whose cache can have holes, and a model
that counts its calls.

Both calculate with small whole numbers, so that every judgement is exact and every step can be done
by hand; both write down what was asked of them (`trace`), and refuse misuse in a sentence. Standard
library only: a child process loads this.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Self

from tinyspec.grade.child import Prop

MODULUS = 97  # a state is a whole number below this
MOST_CALLS = 1000  # of one run: whoever asks more often is not going to stop


def whole(value: Any, what: str, low: int, high: int) -> int:
    """The value, if it is a whole number from low to high; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{what} is {value!r}: it must be a whole number from {low} to {high}")
    return value


class LayeredModel(Prop):
    """A language model whose states are whole numbers, run a layer and a token at a time, with a
    key/value cache per layer.

    seed        which model
    depth       L, its layers are 1 to L
    vocabulary  V, its tokens are 0 to V - 1

    The trace has an entry for every write and every layer that was run:
    ("store", layer, position, pair), ("run", layer, position, state, the state that came out), and
    ("hole", layer, position, the position that was not written) where a layer was refused.

    >>> model = LayeredModel(seed=1, depth=2)
    >>> state = model.embed(2)
    >>> model.store(1, 0, model.project(1, 0, state))
    >>> state, model.run(1, 0, state)
    (24, 1)
    >>> model.run(2, 0, 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a hole: layer 2, run at position 0, reads the keys and values of position 0, ...
    """

    def __init__(self, seed: int, depth: int, vocabulary: int = 3):
        super().__init__()
        self._seed, self.depth, self.vocabulary = seed, depth, vocabulary
        self._cache: list[dict[int, int]] = [
            {} for _ in range(depth + 1)
        ]  # [layer][position] -> pair; no layer 0

    def plain(self) -> Any:
        return {"seed": self._seed, "depth": self.depth, "vocabulary": self.vocabulary}

    @classmethod
    def make(cls, plain: Any) -> Self:
        return cls(**plain)

    def embed(self, token: int) -> int:
        """The state of a token below layer 1."""
        return (
            10 * whole(token, "the token", 0, self.vocabulary - 1) + 3 * self._seed + 1
        ) % MODULUS

    def project(self, layer: int, position: int, state: int) -> int:
        """The key and value, one number here, that a layer makes of the state that a token brings
        to it.
        """
        whole(layer, "the layer", 1, self.depth), whole(state, "the state", 0, MODULUS - 1)
        return (
            (layer + 1) * state + whole(position, "the position", 0, MOST_CALLS) + self._seed
        ) % MODULUS

    def store(self, layer: int, position: int, pair: int) -> None:
        """Write a key and value into the cache of a layer; what stood there is overwritten."""
        whole(layer, "the layer", 1, self.depth), whole(position, "the position", 0, MOST_CALLS)
        self._cache[layer][position] = whole(pair, "the key and value", 0, MODULUS - 1)
        self.note("store", layer, position, pair)

    def run(self, layer: int, position: int, state: int) -> int:
        """Run a layer for the token at a position: it reads the cache of that layer at positions 0
        to `position`.

        ValueError where one of them was not stored: a hole.
        """
        whole(layer, "the layer", 1, self.depth), whole(state, "the state", 0, MODULUS - 1)
        for at in range(whole(position, "the position", 0, MOST_CALLS) + 1):
            if at not in self._cache[layer]:
                self.note("hole", layer, position, at)
                raise ValueError(
                    f"a hole: layer {layer}, run at position {position}, reads the keys and values of position {at}, "
                    "which nobody stored there"
                )
        out = _mixed(layer, position, state, [self._cache[layer][at] for at in range(position + 1)])
        self.note("run", layer, position, state, out)
        return out

    def row(self, state: int) -> list[Fraction]:
        """[V] The law of the next word, read from a state: by the one head that all layers
        share.
        """
        whole(state, "the state", 0, MODULUS - 1)
        weights = [1 + (state + 7 * token) ** 2 % MODULUS % 9 for token in range(self.vocabulary)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    def note(self, *event: Any) -> None:
        """Remember it, unless it is too much."""
        if len(self.trace) >= 50 * MOST_CALLS:
            raise ValueError(
                "the model was asked for more than fifty thousand things: the function is not going to stop"
            )
        super().note(*event)


def _mixed(layer: int, position: int, state: int, pairs: Sequence[int]) -> int:
    """What a layer makes of a state and of the keys and values of positions 0 to `position`: near
    ones weigh less.
    """
    heard = sum((position - at + 1) * pair for at, pair in enumerate(pairs))
    return (state + heard * heard + layer) % MODULUS


class CountedModel(Prop):
    """A language model at temperature 0: it says the likeliest token, for all places of a block in
    one call.

    rule        what it says after a text:
                "mixing"    s % V, where s depends on every token: s = seed at first, and s = (5 s +
                            token^2 + token + 1) % 97 for each token after the other
                "counting"  the number behind the last token, (last + 1) % V
                "places"    the number of the place, len(text) % V, whatever the tokens are
    vocabulary  V, its tokens are 0 to V - 1
    eos         the token that ends a text, or None

    The trace has an entry for every call: (text, guesses, said).

    >>> model = CountedModel("counting", vocabulary=5)
    >>> model.says([1], [0, 3, 3])
    [2, 1, 4]
    >>> len(model.trace)
    1
    """

    def __init__(self, rule: str, seed: int = 0, vocabulary: int = 3, eos: int | None = None):
        super().__init__()
        self._rule, self._seed, self.vocabulary, self.eos = rule, seed, vocabulary, eos

    def plain(self) -> Any:
        return {
            "rule": self._rule,
            "seed": self._seed,
            "vocabulary": self.vocabulary,
            "eos": self.eos,
        }

    @classmethod
    def make(cls, plain: Any) -> Self:
        return cls(**plain)

    def says(self, text: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """One call of the model: for every i the likeliest token behind text + guesses[:i]. The
        last guess is not read.
        """
        for name, tokens in (("the text", text), ("the guesses", guesses)):
            if not isinstance(tokens, (list, tuple)) or not tokens:
                raise ValueError(
                    f"{name} must be a list of tokens that is not empty: got {tokens!r}"
                )
            for token in tokens:
                whole(token, f"a token of {name}", 0, self.vocabulary - 1)
        if len(self.trace) >= MOST_CALLS:
            raise ValueError(
                f"the model ran {MOST_CALLS} forward passes: the function is not going to stop"
            )
        said = [self._behind([*text, *guesses[:at]]) for at in range(len(guesses))]
        self.note(list(text), list(guesses), said)
        return list(said)

    def _behind(self, text: Sequence[int]) -> int:
        """The likeliest token behind a text."""
        if self._rule == "places":
            return len(text) % self.vocabulary
        if self._rule == "counting":
            return (text[-1] + 1) % self.vocabulary
        state = self._seed
        for token in text:
            state = (5 * state + token * token + token + 1) % MODULUS
        return state % self.vocabulary
