"""What a drafter owes to the verifier, for every token whose law it declares (a law of None owes
nothing).

    truthful drafter   the token is drawn from the law that is declared for it
    presence           whether it is in the tree does not depend on which token it is
    examined tokens    a token that a verifier has looked at is not proposed again with its law

All three say one thing: among all runs in which the text is the same, the verifier has looked at
the same earlier guesses, and the same law is declared for a node, the token at that node is
distributed as this law says. `offences` tests just that, by enumeration, and names the contract by
what the drafter drew: from that very law in this round (then something kept or dropped it for what
it is), in an earlier round (then it has been looked at), or never.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import RandomSource
from tinyspec.tree import Probs, TokenTree

TRUTHFUL, PRESENCE, EXAMINED = "truthful drafter", "presence", "examined tokens"
CONTRACT_LAWS = (TRUTHFUL, PRESENCE, EXAMINED)
CONTRACT_ROUNDING = (
    1e-12  # float64 rows; the draws of a row and the row itself are the same numbers in any dtype
)


class ContractViolation(NamedTuple):
    """A node whose token is not distributed as declared.

    context  the text when it was proposed;  before: the guesses looked at before it;  got: the law
             it has
    """

    law: str
    context: tuple[int, ...]
    before: tuple[int, ...]
    declared: list[Any]
    got: list[Any]


class _Watched:
    """A chance that notes which token was drawn from which row."""

    def __init__(self, rng: Any, log: Counter[tuple[Any, int]]):
        self._rng, self._log = rng, log

    def split(self, role: str, round: int) -> "_Watched":
        return _Watched(self._rng.split(role, round), self._log)

    def draw(self, row: Probs) -> int:
        token: int = self._rng.draw(row)
        self._log[_key(row), token] += 1
        return token

    def sample_without_replacement(self, row: Probs, k: int) -> list[int]:
        tokens: list[int] = self._rng.sample_without_replacement(row, k)
        left = list(row)
        for token in tokens:
            self._log[_key(left), token] += 1
            left[token] = 0 * left[token]
        return tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


class _Draws:
    """The chance of a decoder whose draws for drafting are noted, round by round."""

    def __init__(self, rng: Exhaustive):
        self._rng = rng
        self.log: list[Counter[tuple[Any, int]]] = []

    def split(self, role: str, round: int) -> Any:
        stream = self._rng.split(role, round)
        if role != "draft":
            return stream
        self.log.append(Counter())
        return _Watched(stream, self.log[-1])


def _key(row: Probs) -> tuple[Any, ...]:
    """A law as something that can be looked up: normalised, floats to twelve digits."""
    numbers = row.tolist() if hasattr(row, "tolist") else list(row)
    mass = sum(numbers)
    return tuple(x / mass if isinstance(x, Fraction) else round(x / mass, 12) for x in numbers)


def examined_nodes(tree: TokenTree, node: int) -> list[int]:
    """The nodes a verifier has tested when it comes to `node`: down its path, siblings in order up
    to the accepted one.

    >>> looked_at(TokenTree((5, 7, 7, 4, 3), (-1, -1, -1, 1, 2), (None,) * 5, (False,) * 5), 4)
    [0, 1, 3]
    """
    spelled = [tree.tokens_on(tree.path(parent)) for parent in tree.parents]
    text, tested = spelled[node], list[int]()
    for depth in range(len(text) + 1):
        for other, above in enumerate(spelled):
            if tree.probe[other] or above != text[:depth]:
                continue
            if depth == len(text) and other == node:
                break
            tested.append(other)
            if depth < len(text) and tree.tokens[other] == text[depth]:
                break
    return tested


def find_violations(
    factory: Callable[[], Decoder], prompt: Sequence[int] = (0,), rounds: int = 1
) -> tuple[list[ContractViolation], int]:
    """Every offence in the trees of the first `rounds` rounds, the shortest text first; and how
    many runs there were.
    """
    groups: dict[Any, dict[int, Any]] = {}  # what is given -> token -> probability
    names: dict[Any, set[str]] = {}
    runs = 0

    def run(rng: Exhaustive) -> list[tuple[Any, int, str]]:
        decoder, events = factory(), list[tuple[Any, int, str]]()
        draws: Any = _Draws(rng)
        if not decoder.context:
            decoder.extend(prompt)
        for number in range(rounds):
            if decoder.finished:
                break
            context = tuple(decoder.context)
            if number + 1 < rounds:
                tree = decoder.step(draws).tree
            else:
                stream: RandomSource = draws.split("draft", decoder.rounds)
                tree = decoder.drafter.propose(
                    decoder.context, decoder.max_draft_depth, decoder.sampling, stream
                )
            left = Counter(draws.log[-1])
            for node, law in enumerate(tree.draft_probs):
                if law is not None and not tree.probe[node]:
                    before = tuple((tree.tokens[i], None if tree.draft_probs[i] is None else _key(tree.draft_probs[i]))
                                   for i in examined_nodes(tree, node))  # fmt: skip
                    declared = _key(law)
                    drawn = (declared, tree.tokens[node])
                    left[drawn] -= 1  # a draw explains one node
                    name = PRESENCE if left[drawn] >= 0 else TRUTHFUL
                    if name == TRUTHFUL and any(log[drawn] for log in draws.log[:-1]):
                        name = EXAMINED
                    events.append(((context, before, declared), tree.tokens[node], name))
        return events

    for events, probability in Exhaustive.walk(run):
        runs += 1
        for given, token, name in events:
            group = groups.setdefault(given, {})
            group[token] = group.get(token, 0) + probability
            names.setdefault(given, set()).add(name)
    found = []
    for given, group in groups.items():
        context, before, declared = given
        mass = sum(group.values())
        got = [group.get(token, 0 * mass) / mass for token in range(len(declared))]
        if any(not _same_probability(a, b) for a, b in zip(declared, got, strict=True)) or max(
            group
        ) >= len(declared):
            name = next(law for law in (EXAMINED, TRUTHFUL, PRESENCE) if law in names[given])
            found.append(
                ContractViolation(
                    name, context, tuple(token for token, _ in before), list(declared), got
                )
            )
    return sorted(
        found, key=lambda offence: (len(offence.context), len(offence.before), offence.context)
    ), runs


def _same_probability(a: Any, b: Any) -> bool:
    return (
        bool(a == b)
        if isinstance(a, Fraction) and isinstance(b, Fraction)
        else abs(a - b) <= CONTRACT_ROUNDING
    )
