"""What a submission to A3 is given: a model whose cache can have holes, one that counts, a lattice.

All calculate with small whole numbers, so that every verdict is exact and every step can be done
by hand. They record what was asked of them (`trace`), and answer misuse with a sentence.

A child process loads this file: it imports the standard library and `child` alone.
"""

from collections.abc import Sequence
from fractions import Fraction

from tinyspec.grade.child import Prop, require_whole

MODULUS = 97  # a state is a whole number below this
MAX_CALLS = 1000  # of one run: a function that needs more is not going to stop


class LayeredModel(Prop):
    """A language model that is run a layer and a token at a time, with a key/value cache per layer.

    Its states are whole numbers.

    seed        which model
    depth       L, its layers are 1 to L
    vocabulary  V, its tokens are 0 to V - 1

    The trace has an entry for every write and every layer that was run:
    ("store", layer, position, pair), ("run", layer, position, state, the state that came out), and
    ("hole", layer, position, the position that was not written) if a layer could not be run.

    >>> model = LayeredModel(seed=1, depth=2)
    >>> state = model.embed(2)
    >>> model.store(1, 0, model.project(1, 0, state))
    >>> state, model.run(1, 0, state)
    (24, 1)
    >>> model.run(2, 0, 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a hole: layer 2, run at position 0, reads the keys and values of position 0, ...
    """

    _limit = 50 * MAX_CALLS
    _overrun = "the model was asked for more than fifty thousand things"

    def __init__(self, seed: int, depth: int, vocabulary: int = 3):
        super().__init__(seed=seed, depth=depth, vocabulary=vocabulary)
        self._seed, self.depth, self.vocabulary = seed, depth, vocabulary
        layers = range(depth + 1)  # no layer 0
        self._cache: list[dict[int, int]] = [{} for _ in layers]  # [layer][position] -> pair

    def embed(self, token: int) -> int:
        """Return the state of a token below layer 1."""
        require_whole(token, "the token", 0, self.vocabulary - 1)
        return (10 * token + 3 * self._seed + 1) % MODULUS

    def project(self, layer: int, position: int, state: int) -> int:
        """Return the key and value that a layer makes of a token's state: one number here."""
        self._check(layer, position, state)
        return ((layer + 1) * state + position + self._seed) % MODULUS

    def store(self, layer: int, position: int, pair: int) -> None:
        """Write a key and value into the cache of a layer; what stood there is overwritten."""
        self._check(layer, position)
        self._cache[layer][position] = require_whole(pair, "the key and value", 0, MODULUS - 1)
        self.note("store", layer, position, pair)

    def run(self, layer: int, position: int, state: int) -> int:
        """Run a layer for the token at a position; it reads the layer's cache up to there.

        Raises ValueError if one of the positions was not stored: a hole.
        """
        self._check(layer, position, state)
        for at in range(position + 1):
            if at not in self._cache[layer]:
                self.note("hole", layer, position, at)
                raise ValueError(
                    f"a hole: layer {layer}, run at position {position}, reads the keys and values "
                    f"of position {at}, which nobody stored there"
                )
        pairs = [self._cache[layer][at] for at in range(position + 1)]
        out = mix_states(layer, position, state, pairs)
        self.note("run", layer, position, state, out)
        return out

    def _check(self, layer: int, position: int, state: int = 0) -> None:
        """Raise ValueError unless the layer, the state and the position are possible."""
        require_whole(layer, "the layer", 1, self.depth)
        require_whole(state, "the state", 0, MODULUS - 1)
        require_whole(position, "the position", 0, MAX_CALLS)

    def row(self, state: int) -> list[Fraction]:
        """Return [V] the distribution of the next word, by the one head that all layers share."""
        require_whole(state, "the state", 0, MODULUS - 1)
        weights = [1 + (state + 7 * token) ** 2 % MODULUS % 9 for token in range(self.vocabulary)]
        return [Fraction(weight, sum(weights)) for weight in weights]


def mix_states(layer: int, position: int, state: int, pairs: Sequence[int]) -> int:
    """Return what a layer makes of a state and the keys and values up to it.

    Near ones weigh less.
    """
    attended = sum((position - at + 1) * pair for at, pair in enumerate(pairs))
    return (state + attended * attended + layer) % MODULUS


class CountedModel(Prop):
    """A language model at temperature 0 that predicts all positions of a block in one forward pass.

    rule        the likeliest token after a text:
                "mixing"    s % V, where s depends on every token: s = seed at first, and s = (5 s +
                            token^2 + token + 1) % 97 for each token after the other
                "counting"  the number after the last token, (last + 1) % V
                "places"    the number of the position, len(text) % V, whatever the tokens are
    vocabulary  V, its tokens are 0 to V - 1
    eos         the token that ends a text, or None

    The trace has an entry for every forward pass: (text, guesses, answers).

    >>> model = CountedModel("counting", vocabulary=5)
    >>> model.says([1], [0, 3, 3])
    [2, 1, 4]
    >>> len(model.trace)
    1
    """

    _limit = MAX_CALLS
    _overrun = f"the model ran {MAX_CALLS} forward passes"

    def __init__(self, rule: str, seed: int = 0, vocabulary: int = 3, eos: int | None = None):
        super().__init__(rule=rule, seed=seed, vocabulary=vocabulary, eos=eos)
        self._rule, self._seed, self.vocabulary, self.eos = rule, seed, vocabulary, eos

    def says(self, text: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """Run one forward pass: for every i the likeliest token after text + guesses[:i].

        The last guess is not read.
        """
        for name, tokens in (("the text", text), ("the guesses", guesses)):
            if not isinstance(tokens, (list, tuple)) or not tokens:
                raise ValueError(
                    f"{name} must be a list of tokens that is not empty: got {tokens!r}"
                )
            for token in tokens:
                require_whole(token, f"a token of {name}", 0, self.vocabulary - 1)
        answers = [self._next([*text, *guesses[:at]]) for at in range(len(guesses))]
        self.note(list(text), list(guesses), answers)
        return list(answers)

    def _next(self, text: Sequence[int]) -> int:
        """Return the likeliest token after a text."""
        if self._rule == "places":
            return len(text) % self.vocabulary
        if self._rule == "counting":
            return (text[-1] + 1) % self.vocabulary
        state = self._seed
        for token in text:
            state = (5 * state + token * token + token + 1) % MODULUS
        return state % self.vocabulary


class CountedLattice(Prop):
    """The scores of all sentences of so many places, with so many candidate words at each.

    Emissions and transitions are whole numbers.

    kind        "dynamic": transitions depend on the place; "static": they do not; "none": all are 0
    seed        which lattice
    places      T, counted from 0
    candidates  k of each place, counted from 0

    The trace has an entry for everything that was asked for: ("emission", place, a) and
    ("transition", place, a, b).

    >>> lattice = CountedLattice("static", seed=1, places=2, candidates=2)
    >>> lattice.emission(0, 1), lattice.transition(0, 1, 0), len(lattice.trace)
    (14, -6, 2)
    """

    _limit = 50 * MAX_CALLS
    _overrun = "the lattice was asked for more than fifty thousand scores"

    def __init__(self, kind: str, seed: int, places: int, candidates: int):
        super().__init__(kind=kind, seed=seed, places=places, candidates=candidates)
        self._kind, self._seed, self.places, self.candidates = kind, seed, places, candidates

    def emission(self, place: int, a: int) -> int:
        """Return the score s of candidate a at a place."""
        require_whole(place, "the place", 0, self.places - 1)
        require_whole(a, "the candidate", 0, self.candidates - 1)
        self.note("emission", place, a)
        return ((self._seed + 3) * (a + 2) + (place + 1) * (place + a + 1)) % 19

    def transition(self, place: int, a: int, b: int) -> int:
        """Return the score t of candidate a at a place and candidate b at the next one."""
        require_whole(place, "the place", 0, self.places - 2)
        for candidate in (a, b):
            require_whole(candidate, "the candidate", 0, self.candidates - 1)
        self.note("transition", place, a, b)
        if self._kind == "none":
            return 0
        moved = place * (2 * a + 3 * b + 1) if self._kind == "dynamic" else 0
        return ((self._seed + 1) * (a + 1) * (3 * b + 2) + b + moved) % 29 - 14
