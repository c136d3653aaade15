"""Assignment A1: speculative sampling.

Five functions, each built on those before it. A row is a list of V Fractions, one number per token: they calculate like floats,
without rounding, so write ordinary code. Functions that decide by chance ask the `chance` they are given, and nothing else:

    chance.accept(ratio)    True with probability min(1, ratio)
    chance.draw(row)        a token; token x with probability row[x]

The examples below run with `python -m doctest submission.py`; `tinyspec grade A1 .` judges.
"""

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

Row = list[Fraction]
"""[V] One number per token: weights from 0 on, or a distribution, whose numbers add up to one."""

Knobs = tuple[Fraction, int | None, Fraction | None]
"""The user's (temperature, top_k, top_p): `warp(row, *knobs)`."""


class Chance(Protocol):
    """Where every random decision comes from. The grader takes each branch of each decision in turn."""

    def accept(self, ratio: Fraction) -> bool:
        """True with probability min(1, ratio)."""
        ...

    def draw(self, row: Row) -> int:
        """A token from a distribution."""
        ...


class Session(Protocol):
    """A model and its cache: the text it has read. `len(session)` is the number of tokens in the cache."""

    def __len__(self) -> int: ...

    def score(self, tokens: Sequence[int]) -> list[Row]:
        """One forward pass: read tokens after the cache, where they stand from then on.

        Returns a row of weights for each of them: the weights of the token that follows it. At least one token.
        """
        ...

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the cache and forget the others."""
        ...


class Submission(Protocol):
    """What is handed in: a file `submission.py` with these functions."""

    def warp(
        self, weights: Row, temperature: Fraction, top_k: int | None, top_p: Fraction | None
    ) -> Row: ...
    def acceptance(self, p: Row, q: Row, token: int) -> Fraction: ...
    def residual(self, p: Row, q: Row) -> Row: ...
    def verify(
        self, p_rows: list[Row], q_rows: list[Row], draft: list[int], chance: Chance
    ) -> list[int]: ...
    def generate(
        self,
        target: Session,
        draft: Session,
        prompt: list[int],
        n: int,
        gamma: int,
        eos: int | None,
        knobs: Knobs,
        chance: Chance,
    ) -> list[int]: ...


class Dice:
    """A chance to try things with."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def accept(self, ratio: Fraction) -> bool:
        return self.random.random() < ratio

    def draw(self, row: Row) -> int:
        return self.random.choices(range(len(row)), [float(x) for x in row])[0]


def warp(weights: Row, temperature: Fraction, top_k: int | None, top_p: Fraction | None) -> Row:
    """A1.1 The distribution that is sampled from: the model's weights after the user's settings.

    weights      [V] e to the power of the logits: from 0 on, not all 0; they need not be whole, nor add up to one
    temperature  0, 1, 1/2 or 1/3. A logit divided by T is a weight to the power 1/T: of a Fraction w, `w ** (1 / temperature)`
                 is exact here. 0 is greedy: all mass on the greatest weight, whatever top_k and top_p are
    top_k        from 1 on: then keep exactly the k tokens of greatest weight; None keeps all
    top_p        above 0, up to 1: then keep the smallest set of most probable tokens whose share of what top_k left reaches
                 top_p; None keeps all

    Among equal weights the lower token comes first, everywhere. Returns the distribution [V]: its numbers add up to one.

    >>> weights = [Fraction(3), Fraction(1), Fraction(2)]
    >>> [str(x) for x in warp(weights, Fraction(1), None, None)]
    ['1/2', '1/6', '1/3']
    >>> [str(x) for x in warp(weights, Fraction(1, 2), 2, None)]
    ['9/13', '0', '4/13']
    >>> [str(x) for x in warp(weights, Fraction(1), None, Fraction(1, 2))]
    ['1', '0', '0']
    """
    # solution
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if temperature == 0:
        return [Fraction(token == ranked[0]) for token in range(len(weights))]
    power = int(1 / temperature)
    powered = [weight**power for weight in weights]
    kept = ranked[:top_k]
    if top_p is not None:
        enough = top_p * sum(powered[token] for token in kept)
        reached, size = Fraction(0), 0
        while reached < enough:
            reached += powered[kept[size]]
            size += 1
        kept = kept[:size]
    mass = sum(powered[token] for token in kept)
    return [
        powered[token] / mass if token in kept else Fraction(0) for token in range(len(weights))
    ]
    # end of solution


def acceptance(p: Row, q: Row, token: int) -> Fraction:
    """A1.2 The probability that a draft token is accepted.

    p, q   [V] the target's distribution and the one that the token was drawn from
    token  the draft token: q[token] > 0

    >>> p, q = [Fraction(1, 4), Fraction(3, 4)], [Fraction(1, 2), Fraction(1, 2)]
    >>> str(acceptance(p, q, 0)), str(acceptance(p, q, 1))
    ('1/2', '1')
    """
    # solution
    return min(Fraction(1), p[token] / q[token])
    # end of solution


def residual(p: Row, q: Row) -> Row:
    """A1.3 The distribution of the token that replaces a rejected one.

    p, q  [V] the target's distribution and the one that the rejected token was drawn from

    Where p and q are equal nothing is ever rejected, and nothing is left to normalise: return p.

    >>> p, q = [Fraction(1, 4), Fraction(3, 4)], [Fraction(1, 2), Fraction(1, 2)]
    >>> [str(x) for x in residual(p, q)]
    ['0', '1']
    """
    # solution
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    mass = sum(left)
    return [x / mass for x in left] if mass else list(p)
    # end of solution


def verify(p_rows: list[Row], q_rows: list[Row], draft: list[int], chance: Chance) -> list[int]:
    """A1.4 One round: the tokens that are added to the text, given what was drafted.

    p_rows  [gamma + 1, V] the target's distributions; p_rows[i] is that of the token after draft[:i]
    q_rows  [gamma, V] q_rows[i] is the distribution that draft[i] was drawn from
    draft   [gamma] the draft tokens; gamma may be 0

    From left to right each draft token is accepted with its acceptance probability. The first that is rejected is replaced by
    a draw from the residual, and ends the round; if none is, one more token, the bonus, is drawn from the last row of p_rows.
    Returns the accepted tokens and the one drawn: 1 to gamma + 1 tokens.

    >>> yes, no = [Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)]
    >>> verify([yes, no, yes], [yes, no], [0, 1], Dice(0))
    [0, 1, 0]
    >>> verify([yes, no, yes], [yes, yes], [0, 0], Dice(0))
    [0, 1]
    """
    # solution
    for place, token in enumerate(draft):
        if not chance.accept(acceptance(p_rows[place], q_rows[place], token)):
            recovered = chance.draw(residual(p_rows[place], q_rows[place]))
            return [*draft[:place], recovered]
    return [*draft, chance.draw(p_rows[len(draft)])]
    # end of solution


def generate(
    target: Session,
    draft: Session,
    prompt: list[int],
    n: int,
    gamma: int,
    eos: int | None,
    knobs: Knobs,
    chance: Chance,
) -> list[int]:
    """A1.5 The loop: rounds of drafting and verifying, until n tokens or the end of the text.

    target, draft  two sessions that have read nothing yet. `score` returns weights: warp both models' rows with the knobs
    prompt         [at least 1] the tokens the text begins with
    n              how many tokens to add; 0 is allowed, and needs no forward pass
    gamma          how many tokens to draft a round; fewer where fewer are wanted
    eos            the token that ends a text: it is returned, and nothing after it; one in the prompt ends nothing. Or None

    Each round runs one forward pass of the target, and every row comes from a forward pass: use nothing else of a session. At
    every forward pass the cache holds tokens of the text, and for the draft also those it drafted in this round: no rejected
    ones (rewind!). Nothing that was accepted is read twice. Returns the new tokens, without the prompt.

    The examples import the grader's Session. Do so in examples only: where the submission is graded, there is no tinyspec.

    >>> from tinyspec.grade.props_a1 import Session
    >>> rows = [[Fraction(x == 1) for x in range(3)], [Fraction(x == 2) for x in range(3)]]  # after 1 token: 1; then: 2
    >>> generate(Session(rows), Session(rows), [0], 4, 2, None, (Fraction(1), None, None), Dice(0))
    [1, 2, 2, 2]
    >>> generate(Session(rows), Session(rows), [0], 4, 2, 2, (Fraction(1), None, None), Dice(0))
    [1, 2]
    """
    # solution
    text, end = list(prompt), len(prompt) + n
    while len(text) < end and (len(text) == len(prompt) or text[-1] != eos):
        drafted: list[int] = []
        q_rows: list[Row] = []
        for _ in range(min(gamma, end - len(text) - 1)):
            unread = [*text, *drafted][len(draft) :]
            q_rows.append(warp(draft.score(unread)[-1], *knobs))
            drafted.append(chance.draw(q_rows[-1]))
        rows = target.score([*text[len(target) :], *drafted])
        p_rows = [warp(row, *knobs) for row in rows[-len(drafted) - 1 :]]
        for token in verify(p_rows, q_rows, drafted, chance):
            text.append(token)
            if token == eos:
                break
        for session in (
            target,
            draft,
        ):  # the newest token is no model's yet, and what was rejected must go
            session.rewind(min(len(session), len(text) - 1))
    return text[len(prompt) :]
    # end of solution
