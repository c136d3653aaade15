"""What a drafter owes to the verifier, for every token whose law it declares (a law of None owes nothing).

    truthful drafter   the token is drawn from the law that is declared for it
    presence           whether it is in the tree does not depend on which token it is
    examined tokens    a token that a verifier has looked at is not proposed again with its law

All three say one thing: among all runs in which the text is the same, the verifier has looked at the same earlier guesses, and
the same law is declared for a node, the token at that node is distributed as this law says. `offences` tests just that, by
enumeration, and names the contract by what the drafter drew: from that very law in this round (then something kept or
dropped it for what it is), in an earlier round (then it has been looked at), or never.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from tinyspec.decoding.chance import Chance
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import Warp
from tinyspec.laws.accused import Accused, Counterexample, Evidence
from tinyspec.laws.tables import TableModel
from tinyspec.technique import Request
from tinyspec.tree import Row, TokenTree

TRUTHFUL, PRESENCE, EXAMINED = "truthful drafter", "presence", "examined tokens"
LAWS = (TRUTHFUL, PRESENCE, EXAMINED)
EXPECTED = {
    TRUTHFUL: "tokens drawn from the declared law",
    PRESENCE: "tokens drawn from the declared law, proposed whatever they are",
    EXAMINED: "tokens of the declared law that no verifier has looked at (else declare None)",
}
ROUNDING = 1e-12  # float64 rows; the draws of a row and the row itself are the same numbers in any dtype

Make = Callable[[Request], Decoder]
"""What is judged: a technique's builder, or a function that puts a drafter into a decoder."""


class Offence(NamedTuple):
    """A node whose token is not distributed as declared.

    context  the text when it was proposed;  before: the guesses looked at before it;  got: the law it has
    """

    law: str
    context: tuple[int, ...]
    before: tuple[int, ...]
    declared: list[Any]
    got: list[Any]


class _Watched:
    """A chance that notes which token was drawn from which row."""

    def __init__(self, chance: Any, log: Counter[tuple[Any, int]]):
        self._chance, self._log = chance, log

    def split(self, role: str, round: int) -> "_Watched":
        return _Watched(self._chance.split(role, round), self._log)

    def draw(self, row: Row) -> int:
        token: int = self._chance.draw(row)
        self._log[_key(row), token] += 1
        return token

    def order(self, row: Row, k: int) -> list[int]:
        tokens: list[int] = self._chance.order(row, k)
        left = list(row)
        for token in tokens:
            self._log[_key(left), token] += 1
            left[token] = 0 * left[token]
        return tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chance, name)


class _Draws:
    """The chance of a decoder whose draws for drafting are noted, round by round."""

    def __init__(self, chance: Exhaustive):
        self._chance = chance
        self.log: list[Counter[tuple[Any, int]]] = []

    def split(self, role: str, round: int) -> Any:
        stream = self._chance.split(role, round)
        if role != "draft":
            return stream
        self.log.append(Counter())
        return _Watched(stream, self.log[-1])


def _key(row: Row) -> tuple[Any, ...]:
    """A law as something that can be looked up: normalised, floats to twelve digits."""
    numbers = row.tolist() if hasattr(row, "tolist") else list(row)
    mass = sum(numbers)
    return tuple(x / mass if isinstance(x, Fraction) else round(x / mass, 12) for x in numbers)


def looked_at(tree: TokenTree, node: int) -> list[int]:
    """The nodes a verifier has tested when it comes to `node`: down its path, siblings in order up to the accepted one.

    >>> looked_at(TokenTree((5, 7, 7, 4, 3), (-1, -1, -1, 1, 2), (None,) * 5, (False,) * 5), 4)
    [0, 1, 3]
    """
    spelled = [tree.spelled(tree.path(parent)) for parent in tree.parents]
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


def offences(
    factory: Callable[[], Decoder], prompt: Sequence[int] = (0,), rounds: int = 1
) -> tuple[list[Offence], int]:
    """Every offence in the trees of the first `rounds` rounds, the shortest text first; and how many runs there were."""
    groups: dict[Any, dict[int, Any]] = {}  # what is given -> token -> probability
    names: dict[Any, set[str]] = {}
    runs = 0

    def run(chance: Exhaustive) -> list[tuple[Any, int, str]]:
        decoder, events = factory(), list[tuple[Any, int, str]]()
        draws: Any = _Draws(chance)
        if not decoder.context:
            decoder.extend(prompt)
        for number in range(rounds):
            if decoder.finished:
                break
            context = tuple(decoder.context)
            if number + 1 < rounds:
                tree = decoder.step(draws).tree
            else:
                stream: Chance = draws.split("draft", decoder.rounds)
                tree = decoder.drafter.propose(decoder.context, decoder.room, decoder.warp, stream)
            left = Counter(draws.log[-1])
            for node, law in enumerate(tree.laws):
                if law is not None and not tree.probe[node]:
                    before = tuple((tree.tokens[i], None if tree.laws[i] is None else _key(tree.laws[i]))
                                   for i in looked_at(tree, node))  # fmt: skip
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
        if any(not _same(a, b) for a, b in zip(declared, got, strict=True)) or max(group) >= len(declared):
            name = next(law for law in (EXAMINED, TRUTHFUL, PRESENCE) if law in names[given])
            found.append(Offence(name, context, tuple(token for token, _ in before), list(declared), got))
    return sorted(found, key=lambda offence: (len(offence.context), len(offence.before), offence.context)), runs


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, Fraction) and isinstance(b, Fraction) else abs(a - b) <= ROUNDING


# ---------------------------------------------------------------------- what drafters are tried on


class _Typed(TableModel):
    """A table whose rows are logits in a dtype, as a network gives them."""

    dtype = torch.float64

    def head(self, state: Any) -> Any:
        if state not in self._heads:
            weights = torch.tensor([float(x) for x in self.network.weights(state)], dtype=torch.float64)
            self._heads[state] = weights.log().to(self.dtype)
        return self._heads[state]


class Setting(NamedTuple):
    """Rows by hand, the same in every context, or tables from a seed; a warper; what rows are made of; rounds."""

    rows: tuple[tuple[int, ...], tuple[int, ...]] | int
    warp: Warp = Warp()
    dtype: torch.dtype | None = None
    rounds: int = 1

    def model(self, which: int) -> TableModel:
        """The target is 0, drafts are 1, 2, ..."""
        kind: Any = TableModel
        if self.dtype is not None:
            kind = type("Typed", (_Typed,), {"dtype": self.dtype})
        if isinstance(self.rows, int):
            return kind(3 * self.rows + which, 3)  # type: ignore[no-any-return]
        weights = self.rows[min(which, 1)]
        return kind(0, len(weights), rows=lambda context: weights)  # type: ignore[no-any-return]

    def shown(self) -> dict[str, Any]:
        """For an accusation."""
        case: dict[str, Any] = (
            {"tables": f"TableModel(seed, 3), seeds from {3 * self.rows} on"} if isinstance(self.rows, int) else {}
        )
        if not isinstance(self.rows, int):
            case = {name: [Fraction(x, sum(row)) for x in row] for name, row in zip("pq", self.rows, strict=True)}
        if self.warp != Warp():
            case["warp"] = self.warp
        if self.dtype is not None:
            case["rows"] = str(self.dtype).removeprefix("torch.")
        return case


RATIONAL = (
    Warp(temperature=0.5), Warp(temperature=1 / 3), Warp(temperature=0.0), Warp(top_k=2), Warp(top_p=0.6), Warp(min_p=0.4),
    Warp(temperature=0.5, top_k=2), Warp(top_k=2, top_p=0.7), Warp(temperature=0.5, min_p=0.3), Warp(top_p=0.8, min_p=0.3),
)  # fmt: skip
"""Warpers that Fractions can follow."""

IRRATIONAL = (
    Warp(temperature=0.7), Warp(repetition_penalty=1.3), Warp(temperature=1.6, top_k=2),
    Warp(temperature=0.7, top_p=0.9, repetition_penalty=1.2), Warp(temperature=0.7, min_p=0.2),
)  # fmt: skip
"""Warpers that act on logits."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def settings() -> Iterator[Setting]:
    """The smallest first: two rounds with p and q by hand, then every warper in Fractions and in every dtype."""
    half, third, other, quarter = (1, 1), (1, 2), (2, 1), (1, 3)
    for p, q in ((half, half), (half, third), (third, other), (quarter, other)):
        yield Setting((p, q), rounds=2)
    for warp in (Warp(), *RATIONAL):
        yield Setting(1, warp)
    for dtype in DTYPES:
        for warp in (Warp(), *IRRATIONAL, *RATIONAL):
            yield Setting(2, warp, dtype)
        yield Setting((third, other), IRRATIONAL[0], dtype, rounds=2)


def contracts(make: Make, drafts: int = 1, laws: Sequence[str] = LAWS) -> list[Evidence]:
    """Hold the drafter of a technique to its contracts; raises Accused with the smallest case that breaks one of `laws`.

    make    request -> Decoder, as a card's `make`;  drafts: how many draft models the request brings
    """
    evidence = {law: Evidence(law) for law in laws}
    for setting in settings():
        began = time.perf_counter()
        target, models = setting.model(0), [setting.model(1 + i) for i in range(drafts)]

        def factory(
            setting: Setting = setting, target: TableModel = target, models: list[TableModel] = models
        ) -> Decoder:
            return make(Request(target.session(), [model.session() for model in models], setting.warp))

        found, runs = offences(factory, rounds=setting.rounds)
        for offence in found:
            if offence.law in laws:
                raise Accused(_counterexample(setting, offence))
        for law in laws:
            evidence[law] += Evidence(law, 1, runs, time.perf_counter() - began)
    return list(evidence.values())


def _counterexample(setting: Setting, offence: Offence) -> Counterexample:
    case = setting.shown() | {
        "text": list(offence.context),
        "looked at before": list(offence.before),
        "declared": offence.declared,
    }
    return Counterexample(offence.law, case, EXPECTED[offence.law], offence.got)


def truthful(make: Make, drafts: int = 1) -> Evidence:
    """A declared law is the law the token was drawn from, under every warper and dtype."""
    return contracts(make, drafts, (TRUTHFUL,))[0]


def presence(make: Make, drafts: int = 1) -> Evidence:
    """Whether a node is in the tree does not depend on the token drawn at it, unless its law is None."""
    return contracts(make, drafts, (PRESENCE,))[0]


def examined(make: Make, drafts: int = 1) -> Evidence:
    """What a verifier has looked at is proposed again with law None only."""
    return contracts(make, drafts, (EXAMINED,))[0]
