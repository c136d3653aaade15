"""What a drafter owes the verifier for every token whose distribution it declares.

    truthful drafter   the token is drawn from the distribution that is declared for it
    presence           whether it is in the tree does not depend on which token it is
    examined tokens    a token that a verifier has examined is not proposed again as a drawn one

A distribution of None owes nothing. All three say one thing: among all runs in which the text is
the same, the verifier has examined the same earlier draft tokens, and the same distribution is
declared for a node, the token at that node is distributed as declared. `find_violations` tests just
that, by enumeration. It names the contract by what the drafter drew: from that very distribution in
this round (then its presence depended on which token it is), in an earlier round (then it was
examined), or never.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import Counterexample, Evidence, LawViolated
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.stage import Stage, choose_every_way
from tinyspec.technique import Card, Request
from tinyspec.tree import Probs, TokenTree

TRUTHFUL, PRESENCE, EXAMINED = "truthful drafter", "presence", "examined tokens"
CONTRACT_LAWS = (TRUTHFUL, PRESENCE, EXAMINED)
CONTRACT_ROUNDING = 1e-12
"""How far floats may be apart: in any dtype a row and the draws from it are the same numbers."""


class ContractViolation(NamedTuple):
    """A node whose token is not distributed as declared.

    context   the text when it was proposed
    before    the draft tokens that the verifier has examined before it
    declared  the distribution that it declares
    got       the distribution that it has
    """

    law: str
    context: tuple[int, ...]
    before: tuple[int, ...]
    declared: list[Any]
    got: list[Any]


class _LoggedDraws(Exhaustive):
    """Enumerates all outcomes, and counts which token was drawn from which distribution."""

    def __init__(self, rng: Exhaustive, log: Counter[tuple[Any, int]]):
        super().__init__(rng._script)
        self._log = log

    def split(self, role: str, round: int) -> "_LoggedDraws":
        return _LoggedDraws(super().split(role, round), self._log)

    def draw(self, row: Probs) -> int:
        token = super().draw(row)
        self._log[_key(row), token] += 1
        return token


class _DraftLog(Exhaustive):
    """The random source of a decoder whose draws for drafting are counted, round by round."""

    def __init__(self, rng: Exhaustive):
        super().__init__(rng._script)
        self.log: list[Counter[tuple[Any, int]]] = []

    def split(self, role: str, round: int) -> Exhaustive:
        stream = super().split(role, round)
        if role != "draft":
            return stream
        self.log.append(Counter())
        return _LoggedDraws(stream, self.log[-1])


def _key(row: Probs) -> tuple[Any, ...]:
    """Return a distribution as a key: normalised, floats rounded to twelve digits."""
    numbers = row.tolist() if hasattr(row, "tolist") else list(row)
    mass = sum(numbers)
    return tuple(x / mass if isinstance(x, Fraction) else round(x / mass, 12) for x in numbers)


def examined_nodes(tree: TokenTree, node: int) -> list[int]:
    """Return the nodes a verifier has tested when it comes to `node`.

    They are those down its path, with siblings in order up to the accepted one.

    >>> examined_nodes(TokenTree((5, 7, 7, 4, 3), (-1, -1, -1, 1, 2), (None,) * 5, (False,) * 5), 4)
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
    """Return every violation in the trees of the first `rounds` rounds, and the number of runs.

    The shortest text comes first.
    """
    groups: dict[Any, dict[int, Any]] = {}  # what is given -> token -> probability
    names: dict[Any, set[str]] = {}
    runs = 0

    def run(rng: Exhaustive) -> list[tuple[Any, int, str]]:
        decoder, events = factory(), list[tuple[Any, int, str]]()
        draws = _DraftLog(rng)
        if not decoder.context:
            decoder.extend(prompt)
        for number in range(rounds):
            if decoder.finished:
                break
            context = tuple(decoder.context)
            if number + 1 < rounds:
                tree = decoder.step(draws).tree
            else:
                stream = draws.split("draft", decoder.rounds)
                tree = decoder.drafter.propose(
                    decoder.context, decoder.max_draft_depth, decoder.sampling, stream
                )
            unexplained = Counter(draws.log[-1])
            keys = [None if row is None else _key(row) for row in tree.draft_probs]
            for node, (token, declared) in enumerate(zip(tree.tokens, keys, strict=True)):
                if declared is None or tree.probe[node]:
                    continue
                before = tuple((tree.tokens[i], keys[i]) for i in examined_nodes(tree, node))
                drawn = (declared, token)
                unexplained[drawn] -= 1  # a draw explains one node
                name = PRESENCE if unexplained[drawn] >= 0 else TRUTHFUL
                if name == TRUTHFUL and any(log[drawn] for log in draws.log[:-1]):
                    name = EXAMINED
                events.append(((context, before, declared), token, name))
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
        is_kept = all(_same_probability(a, b) for a, b in zip(declared, got, strict=True))
        if is_kept and max(group) < len(declared):
            continue
        law = next(law for law in (EXAMINED, TRUTHFUL, PRESENCE) if law in names[given])
        tokens = tuple(token for token, _ in before)
        found.append(ContractViolation(law, context, tokens, list(declared), got))
    found.sort(
        key=lambda violation: (len(violation.context), len(violation.before), violation.context)
    )
    return found, runs


def _same_probability(a: Any, b: Any) -> bool:
    is_exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return bool(a == b) if is_exact else abs(a - b) <= CONTRACT_ROUNDING


EXPECTED_BY_CONTRACT = {
    TRUTHFUL: "tokens drawn from the declared distribution",
    PRESENCE: "tokens drawn as declared, and proposed whichever token was drawn",
    EXAMINED: "tokens drawn as declared and not examined before (or declare None)",
}

MakeDecoder = Callable[[Request], Decoder]
"""What is judged: a technique's builder, or a function that puts a drafter into a decoder."""


class _TypedTable(TableModel):
    """A table whose rows are logits in a dtype, as a network gives them."""

    dtype = torch.float64

    def head(self, state: Any) -> Any:
        if state not in self._heads:
            weights = torch.tensor(
                [float(x) for x in self.network.weights(state)], dtype=torch.float64
            )
            self._heads[state] = weights.log().to(self.dtype)
        return self._heads[state]


class ContractSetting(NamedTuple):
    """The models that a drafter is tried on, its sampling settings, their dtype, and the rounds.

    Rows are written by hand, the same in every context, or come from tables with a seed.
    """

    rows: tuple[tuple[int, ...], tuple[int, ...]] | int
    sampling: SamplingParams = SamplingParams()
    dtype: torch.dtype | None = None
    rounds: int = 1
    vocabulary: int = 3  # of tables with a seed

    def model(self, which: int) -> TableModel:
        """Return the target (0) or a draft (1, 2, ...)."""
        kind: Any = TableModel
        if self.dtype is not None:
            kind = type("Typed", (_TypedTable,), {"dtype": self.dtype})
        if isinstance(self.rows, int):
            return kind(3 * self.rows + which, self.vocabulary)  # type: ignore[no-any-return]
        weights = self.rows[min(which, 1)]
        return kind(0, len(weights), rows=lambda context: weights)  # type: ignore[no-any-return]

    def shown(self) -> dict[str, Any]:
        """Return the setting for a counterexample."""
        case: dict[str, Any]
        if isinstance(self.rows, int):
            table = f"TableModel(seed, {self.vocabulary})"
            case = {"tables": f"{table}, seeds from {3 * self.rows} on"}
        else:
            case = {
                name: [Fraction(x, sum(row)) for x in row]
                for name, row in zip("pq", self.rows, strict=True)
            }
        if self.sampling != SamplingParams():
            case["sampling"] = self.sampling
        if self.dtype is not None:
            case["rows"] = str(self.dtype).removeprefix("torch.")
        return case


EXACT_SAMPLINGS = (
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1 / 3),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.4),
    SamplingParams(temperature=0.5, top_k=2),
    SamplingParams(top_k=2, top_p=0.7),
    SamplingParams(temperature=0.5, min_p=0.3),
    SamplingParams(top_p=0.8, min_p=0.3),
)
"""Sampling settings that Fractions can follow."""

FLOAT_SAMPLINGS = (
    SamplingParams(temperature=0.7),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.6, top_k=2),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, min_p=0.2),
)
"""Warpers that act on logits."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def contract_settings() -> Iterator[ContractSetting]:
    """Yield the settings, smallest first: p and q by hand, then every warper in every dtype."""
    half, third, other, quarter = (1, 1), (1, 2), (2, 1), (1, 3)
    for p, q in ((half, half), (half, third), (third, other), (quarter, other)):
        yield ContractSetting((p, q), rounds=2)
    for sampling in (SamplingParams(), *EXACT_SAMPLINGS):
        yield ContractSetting(1, sampling)
    for dtype in DTYPES:
        for sampling in (SamplingParams(), *FLOAT_SAMPLINGS, *EXACT_SAMPLINGS):
            yield ContractSetting(2, sampling, dtype)
        yield ContractSetting((third, other), FLOAT_SAMPLINGS[0], dtype, rounds=2)


def check_contracts(
    make: MakeDecoder,
    drafts: int = 1,
    laws: Sequence[str] = CONTRACT_LAWS,
    settings: Iterable[ContractSetting] | None = None,
) -> list[Evidence]:
    """Check the contracts of a technique's drafter; raises LawViolated with the smallest case.

    make      request -> Decoder, as a card's `make`
    drafts    how many draft models the request brings
    settings  default: `contract_settings`
    """
    evidence = {law: Evidence(law) for law in laws}
    for setting in contract_settings() if settings is None else settings:
        target, models = setting.model(0), [setting.model(1 + i) for i in range(drafts)]

        def factory(
            setting: ContractSetting = setting,
            target: TableModel = target,
            models: list[TableModel] = models,
        ) -> Decoder:
            sessions = [model.session() for model in models]
            return make(Request(target.session(), sessions, setting.sampling))

        for found in check_decoder_contracts(factory, (0,), setting.rounds, laws, setting.shown()):
            evidence[found.law] += found
    return list(evidence.values())


def check_decoder_contracts(
    factory: Callable[[], Decoder],
    prompt: Sequence[int] = (0,),
    rounds: int = 1,
    laws: Sequence[str] = CONTRACT_LAWS,
    case: dict[str, Any] | None = None,
) -> list[Evidence]:
    """Check the contracts in the first rounds of any decoder; raises LawViolated.

    `case` says which one it is, for a counterexample.
    """
    began = time.perf_counter()
    found, runs = find_violations(factory, prompt, rounds)
    for violation in found:
        if violation.law in laws:
            shown = (case or {}) | {
                "text": list(violation.context),
                "examined before": list(violation.before),
                "declared": violation.declared,
            }
            raise LawViolated(
                Counterexample(
                    violation.law, shown, EXPECTED_BY_CONTRACT[violation.law], violation.got
                )
            )
    return [Evidence(law, 1, runs, time.perf_counter() - began) for law in laws]


def contracts_of_technique(card: Card) -> list[Evidence]:
    """Check the contracts of a registered technique's drafter.

    It runs on tables, or on small transformers where the technique reads hidden states.

    None for what has no drafter, and for one that races: shared noise cannot be enumerated, and a
    raced draft token declares no distribution.
    """
    if card.kind != "decoder" or card.coupled:
        return []
    if not card.hidden:
        texts = [[0, 1, 1, 0, 0, 1, 0]] if card.copies else []  # ids that every table here knows

        def make(request: Request, largest: int) -> Decoder:
            request = replace(request, references=texts, choose=choose_every_way)
            return card.make(request, **Stage(card, largest=largest).settings)

        small = check_contracts(partial(make, largest=2), card.hosted)
        # Larger knobs, on five tokens: of three siblings none is the last that is left.
        wide = [ContractSetting(1, vocabulary=5)]
        more = check_contracts(partial(make, largest=4), card.hosted, settings=wide)
        return [a + b for a, b in zip(small, more, strict=True)]
    evidence = {law: Evidence(law) for law in CONTRACT_LAWS}
    for sampling, rounds in (
        (SamplingParams(top_k=2), 2),
        (SamplingParams(temperature=0.7), 1),
        (SamplingParams(top_p=0.6), 1),
    ):
        stage = Stage(card, sampling=sampling, deep=True, vocabulary=4)
        for found in check_decoder_contracts(
            stage.new_decoder, stage.prompt, rounds, case=stage.describe()
        ):
            evidence[found.law] += found
    return list(evidence.values())
