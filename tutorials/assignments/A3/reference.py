"""A3: exits and fixed points.

Ten functions. The hand-out (handout.md) says what each is for, with an example by hand; here stand their exact terms.
Numbers may be Fractions: they calculate like floats, without rounding, so write ordinary code. Use the standard library
alone, and no randomness. The examples below run with `python -m doctest submission.py`; `tinyspec grade A3 .` judges.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

Row = Sequence[Fraction]  # [V] the distribution of the next word
Read = tuple[list[int], list[int]]  # new tokens [n], and the layers after which they were read [n]


class LayeredModel(Protocol):
    """What `decode` is given: a model that is run a layer and a token at a time. Layers are 1 to `depth`, positions from 0.

    A layer that is run for a token reads that layer's keys and values of the token itself and of all positions before it.
    They must have been stored; where one was not, `run` raises ValueError. Every `run` is counted.
    """

    depth: int

    def embed(self, token: int) -> int:
        """The state of a token below layer 1."""
        ...

    def project(self, layer: int, position: int, state: int) -> int:
        """The key and value that this layer makes of the state that a token brings to it."""
        ...

    def store(self, layer: int, position: int, pair: int) -> None:
        """Write a key and value into the cache of a layer; what stood there is overwritten."""
        ...

    def run(self, layer: int, position: int, state: int) -> int:
        """The state above this layer, of the state below it."""
        ...

    def row(self, state: int) -> list[Fraction]:
        """[V] The distribution of the next word, read from a state above any layer. Not counted."""
        ...


class CountedModel(Protocol):
    """What `jacobi` is given: a model at temperature 0. Every `says` is counted."""

    eos: int | None  # the token that ends a text

    def says(self, text: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """One forward pass: for every i the likeliest token after text + guesses[:i], so as many as there are guesses."""
        ...


class CountedLattice(Protocol):
    """What `viterbi` is given: the scores of all sentences. Everything that is asked for is counted."""

    places: int  # T, counted from 0
    candidates: int  # k words at each place, counted from 0

    def emission(self, place: int, a: int) -> int:
        """The score of candidate a at a place."""
        ...

    def transition(self, place: int, a: int, b: int) -> int:
        """The score of candidate a at a place and candidate b at the next one; places 0 to T - 2."""
        ...


class Submission(Protocol):
    """What `submission.py` offers. Write the functions here, or anywhere else and import them here."""

    def softmax_response(self, row: Row) -> Any: ...
    def saturation(self, state: Sequence[int], below: Sequence[int]) -> float: ...
    def exit_layer(
        self, confidences: Sequence[float], threshold: float, step: int, limit: int, tau: float
    ) -> int: ...
    def decode(self, model: Any, prompt: list[int], n: int, threshold: Any) -> Read: ...
    def decode_recomputing(self, model: Any, prompt: list[int], n: int, threshold: Any) -> Read: ...
    def p_value(self, losses: int, n: int, delta: Fraction) -> Fraction: ...
    def calibrate(
        self, thresholds: list[float], p_values: list[Fraction], epsilon: Fraction
    ) -> float: ...
    def jacobi(self, model: Any, prompt: list[int], n: int, block: int) -> list[int]: ...
    def decode_waiting(
        self, model: Any, prompt: list[int], n: int, shallow: int, threshold: Any
    ) -> Read: ...
    def viterbi(self, lattice: Any) -> list[int]: ...


def softmax_response(row: Row) -> Any:
    """The greatest probability of a row less the second greatest: the confidence of an exit.

    Args:
        row: [V] probabilities that sum to one, in the order of the tokens; V is 2 or more.
    Returns:
        A number from 0 to 1: 0 where two words are equally likely, 1 where only one is possible.

    >>> softmax_response([Fraction(1, 8), Fraction(1, 2), Fraction(3, 8)])
    Fraction(1, 8)
    """
    # solution
    first, second = sorted(row, reverse=True)[:2]
    return first - second
    # end of solution


def saturation(state: Sequence[int], below: Sequence[int]) -> float:
    """The cosine between a token's state above a layer and its state below it: near 1 when the layer changed little.

    Args:
        state, below: [d] numbers.
    Returns:
        A number from 0 to 1: a negative cosine counts as 0, and so does that of a state that is all zeros.

    >>> saturation([3, 4], [4, 3])
    0.96
    """
    # solution
    lengths = math.sqrt(sum(x * x for x in state) * sum(x * x for x in below))
    if lengths == 0:
        return 0.0
    return max(0.0, sum(x * y for x, y in zip(state, below, strict=True)) / lengths)
    # end of solution


def exit_layer(
    confidences: Sequence[float], threshold: float, step: int, limit: int, tau: float
) -> int:
    """After how many layers a token leaves, under CALM's decaying threshold.

    The threshold of new token `step` is 0.9 * threshold + 0.1 * exp(-tau * step / limit), cut to 0 below and to 1 above. The
    token leaves after the first layer whose confidence reaches it (is equal or greater); if none does, after the last
    layer. A threshold of math.inf means: never before the last layer, however sure the token is.

    Args:
        confidences: [L - 1] of layers 1 to L - 1, each from 0 to 1.
        threshold: 0 or more, or math.inf.
        step: which new token, from 0; limit: the most new tokens, at least 1; tau: 0 or more.
    Returns:
        A layer from 1 to L.

    >>> exit_layer([0.2, 0.5, 0.9], 0.5, step=0, limit=10, tau=4.0)  # the threshold is 0.55
    3
    >>> exit_layer([0.2, 0.5, 0.9], 0.5, step=5, limit=10, tau=4.0)  # the threshold is 0.4635...
    2
    """
    # solution
    if threshold < math.inf:
        due = min(max(0.9 * threshold + 0.1 * math.exp(-tau * step / limit), 0.0), 1.0)
        for layer, confidence in enumerate(confidences, 1):
            if confidence >= due:
                return layer
    return len(confidences) + 1
    # end of solution


# solution
def through(model: LayeredModel, layer: int, position: int, state: int) -> int:
    """One layer for one token: its own key and value first, for it reads those too."""
    model.store(layer, position, model.project(layer, position, state))
    return model.run(layer, position, state)


def climb(model: LayeredModel, position: int, token: int, threshold: Any) -> tuple[int, int]:
    """The state at a token's exit, and the layer that it leaves after."""
    state = model.embed(token)
    for layer in range(1, model.depth + 1):
        state = through(model, layer, position, state)
        if layer < model.depth and softmax_response(model.row(state)) >= threshold:
            return state, layer
    return state, model.depth


def likeliest(row: Row) -> int:
    """The lowest token among equals."""
    return row.index(max(row))


# end of solution


def decode(model: LayeredModel, prompt: list[int], n: int, threshold: Any) -> Read:
    """Greedy decoding with early exits; what a token leaves out is filled from its state at the exit ("copy").

    All tokens of the prompt but the last run through every layer. The last one, and every new token that another one
    follows, leaves after the first layer below the top at which the gap of its row's two greatest probabilities reaches the
    threshold (is equal or greater), or after the last layer. The row at its exit decides the next word: the likeliest
    token, the lowest among equals. Into every layer above the exit goes a key and value that *this layer* makes of the state
    at the exit. No layer is run twice for a token, and none above its exit.

    Args:
        prompt: at least one token. n: at least 1. threshold: one number for all tokens; math.inf means never.
    Returns:
        The n new tokens, and for each of them the layer after which its row was read.

    >>> from tinyspec.grade.props_a3 import LayeredModel
    >>> decode(LayeredModel(seed=0, depth=3), [0], 2, Fraction(1, 4))
    ([2, 2], [1, 3])
    >>> decode(LayeredModel(seed=0, depth=3), [0], 2, math.inf)
    ([1, 0], [3, 3])
    """
    # solution
    text, layers, first = list(prompt), list[int](), len(prompt) - 1
    for position in range(first + n):
        state, left = climb(
            model, position, text[position], math.inf if position < first else threshold
        )
        for layer in range(left + 1, model.depth + 1):
            model.store(layer, position, model.project(layer, position, state))
        if position >= first:
            text.append(likeliest(model.row(state)))
            layers.append(left)
    return text[first + 1 :], layers
    # end of solution


def decode_recomputing(model: LayeredModel, prompt: list[int], n: int, threshold: Any) -> Read:
    """As `decode`, but what a token left out is computed after all: the layers above its exit are run ("recompute").

    The word of a token that left is still the one of its exit. Its layers above are run before the next token is, so that
    the cache is that of a model without exits on the same text. The last token to be run has no next one: nobody reads what
    it left out, and nothing above its exit is run.

    >>> from tinyspec.grade.props_a3 import LayeredModel
    >>> decode_recomputing(LayeredModel(seed=0, depth=3), [0], 2, Fraction(1, 4))
    ([2, 1], [1, 3])
    """
    # solution
    text, layers, first = list(prompt), list[int](), len(prompt) - 1
    for position in range(first + n):
        state, left = climb(
            model, position, text[position], math.inf if position < first else threshold
        )
        if position >= first:
            text.append(likeliest(model.row(state)))
            layers.append(left)
        if position < first + n - 1:  # after the last token nobody comes who could read it
            for layer in range(left + 1, model.depth + 1):
                state = through(model, layer, position, state)
    return text[first + 1 :], layers
    # end of solution


def p_value(losses: int, n: int, delta: Fraction) -> Fraction:
    """How surprising so few losses are, if the risk is delta: P(Bin(n, delta) <= losses), exactly.

    Args:
        losses: examples of n, from 0 to n, on which the text with exits was not good enough.
        delta: the risk that must not be exceeded, a Fraction between 0 and 1.
    Returns:
        A Fraction, or a whole number; no float, which is rounded.

    >>> p_value(1, 5, Fraction(1, 2))
    Fraction(3, 16)
    """
    # solution
    return sum(
        (math.comb(n, k) * delta**k * (1 - delta) ** (n - k) for k in range(losses + 1)),
        Fraction(0),
    )
    # end of solution


def calibrate(thresholds: list[float], p_values: list[Fraction], epsilon: Fraction) -> float:
    """Learn then Test, by testing in a fixed order: the threshold whose risk is at most delta with probability 1 - epsilon.

    Args:
        thresholds: from the safest (the highest) to the boldest, at least one.
        p_values: of "the risk of this threshold is above delta", one for each; it is rejected where p <= epsilon.
    Returns:
        The last threshold that was rejected before testing stopped, or math.inf (never leave early) where none was.

    >>> calibrate([0.9, 0.8, 0.7], [Fraction(1, 100), Fraction(1, 30), Fraction(1, 5)], Fraction(1, 20))
    0.8
    """
    # solution
    chosen = math.inf
    for threshold, p in zip(thresholds, p_values, strict=True):
        if p > epsilon:
            break
        chosen = threshold
    return chosen
    # end of solution


def jacobi(model: CountedModel, prompt: list[int], n: int, block: int) -> list[int]:
    """Greedy decoding by Jacobi iteration: block by block, each block by sweeps over all of its tokens.

    The first guess of a block is yours: any tokens will do, if no model is asked for them. A sweep is one forward pass, with a
    text that is final and guesses for what is left of the block. A block of m tokens takes m forward passes at most; two,
    where no answer depends on a guess.

    Args:
        prompt: at least one token. n: the most new tokens, at least 1. block: tokens of a block, at least 1; the last block
            is shorter where n is no multiple of it.
    Returns:
        The new tokens: n of them, or fewer if `model.eos` is among them, which is then the last.

    >>> from tinyspec.grade.props_a3 import CountedModel
    >>> model = CountedModel("places", vocabulary=5)
    >>> jacobi(model, [0, 0], 6, 3), len(model.trace)
    ([2, 3, 4, 0, 1, 2], 4)
    """
    # solution
    made = list[int]()
    while len(made) < n:
        size = min(block, n - len(made))
        guess = [0] * size
        for _ in range(size):  # after so many sweeps the block is final: nothing has to confirm it
            said = model.says([*prompt, *made], guess)
            if said == guess:
                break
            guess = said
        if model.eos in guess:
            return made + guess[: guess.index(model.eos) + 1]
        made += guess
    return made
    # end of solution


def decode_waiting(
    model: LayeredModel, prompt: list[int], n: int, shallow: int, threshold: Any
) -> Read:
    """Greedy decoding with one early exit, after which a token waits for its other layers ("FREE").

    All tokens of the prompt but the last run through every layer. The last one, and every new token that another one
    follows, runs the first `shallow` layers. If the gap of its row there *exceeds* the threshold (is greater), that row
    decides the next word, and the token waits. If not, all tokens that wait run the other layers together with it, layer by
    layer, and the row above the last layer decides. So the cache is that of a model without exits on the same text. Tokens
    that still wait at the end run no more.

    Args:
        prompt: at least one token. n: at least 1. shallow: from 1 to depth - 1. threshold: a number; math.inf means never.
    Returns:
        The n new tokens, and for each of them the layer after which its row was read: `shallow` or the last one.

    >>> from tinyspec.grade.props_a3 import LayeredModel
    >>> decode_waiting(LayeredModel(seed=0, depth=3), [0], 2, 1, Fraction(1, 4))
    ([2, 1], [1, 3])
    """
    # solution
    text, layers, first = list(prompt), list[int](), len(prompt) - 1
    waiting = list[tuple[int, int]]()  # position and state of each token that waits
    for position in range(first + n):
        state = model.embed(text[position])
        for layer in range(1, shallow + 1):
            state = through(model, layer, position, state)
        waiting.append((position, state))
        left = shallow
        if position < first or softmax_response(model.row(state)) <= threshold:
            for layer in range(shallow + 1, model.depth + 1):
                waiting = [(at, through(model, layer, at, below)) for at, below in waiting]
            state, left, waiting = waiting[-1][1], model.depth, []
        if position >= first:
            text.append(likeliest(model.row(state)))
            layers.append(left)
    return text[first + 1 :], layers
    # end of solution


def viterbi(lattice: CountedLattice) -> list[int]:
    """The likeliest sentence of a linear-chain CRF: the sum of its emissions and transitions is the greatest.

    Args:
        lattice: of `places` places, at least one, with `candidates` words each. It may be asked for T k emissions and
            (T - 1) k^2 transitions; there are k^T sentences.
    Returns:
        The candidate at each place. Of sentences with equal scores any will do.

    >>> from tinyspec.grade.props_a3 import CountedLattice
    >>> viterbi(CountedLattice("dynamic", seed=0, places=3, candidates=2))
    [1, 1, 0]
    """
    # solution
    words = range(lattice.candidates)
    scores, before = [lattice.emission(0, a) for a in words], list[list[int]]()
    for place in range(1, lattice.places):
        best = [
            max((scores[a] + lattice.transition(place - 1, a, b), a) for a in words) for b in words
        ]
        scores = [score + lattice.emission(place, b) for b, (score, _) in enumerate(best)]
        before.append([a for _, a in best])
    path = [scores.index(max(scores))]
    for pointers in reversed(before):
        path.append(pointers[path[-1]])
    return path[::-1]
    # end of solution
