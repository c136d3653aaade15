"""Cascade speculative drafting (Chen et al. 2023): recursion, quotas, max-gram, and the law of
whoever finalised a token.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference, exact_law
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.drafting.cascade import MaxGramDrafter, parse_quotas
from tinyspec.technique import Request

CALLS = "where all levels agree, each is called as often as K says"
LONGEST = "max-gram copies what followed the longest match"

Build = Callable[..., Decoder]
KNOBS = {"lenience": 1.0, "vertical": True, "horizontal": True, "longest": 10, "sample": 0}
MATRICES = ("3,2/1", "4,1/3", "2,0/1", "3,2,1/2,1/1", "5,4,3/1,2/2")
PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)


def predicted(quotas: str) -> list[int]:
    """Calls of the target, the first draft, the second ... in one round: a level that is to make n
    tokens, with s drafted for it from below, is called ceil(n / (s + 1)) times; the last draft of
    such a level is as long as is still wanted."""
    k = parse_quotas(quotas, quotas.count("/"))
    calls = [0] * len(k)

    def draft(row: int, max_draft_depth: int) -> int:
        made = 0
        for level, quota in enumerate(k[row] if row < len(k) else (), start=row + 1):
            n = min(quota, max_draft_depth - made)
            made += n
            while n > 0 and level < len(k):
                calls[level] += 1
                n -= draft(level, n - 1) + 1
        return made

    calls[0] = 1
    draft(0, 1 << 30)
    return calls


def called_as_k_says(build: Build) -> Evidence:
    """Every model recites one text that repeats itself, so that max-gram agrees as well."""
    poem = list(PROMPT[:5]) * 20
    for quotas in MATRICES:
        models = [Reciter(poem) for _ in range(quotas.count("/") + 1)]
        for number, model in enumerate(models):
            model.name = f"level {number}"
        forward_log: list[Any] = []
        sessions = [model.session(forward_log) for model in models]
        decoder = build(
            Request(sessions[0], sessions[1:], SamplingParams(0.0), forward_log=forward_log),
            quotas=quotas,
            **KNOBS,
        )
        decoder.extend(PROMPT)
        decoder.step(Seeded(0))
        del forward_log[:]
        made = len(decoder.step(Seeded(1)).tokens)
        counts = Counter(call.model for call in forward_log)
        got = [made, *(counts[model.name] for model in models)]
        expected = [sum(parse_quotas(quotas, len(models) - 1)[0]) + 1, *predicted(quotas)]
        if got != expected:
            accuse(
                CALLS,
                expected,
                got,
                quotas=quotas,
                counted="tokens of the round, then calls of each level",
            )
    return Evidence(CALLS, len(MATRICES))


def joint_law_of_levels(build: Build) -> Evidence:
    """Target, middle and small model, and max-gram: two tokens over as many rounds as they take."""
    branches = 0
    for seed, quotas in ((0, "2,1,0/1,0/1"), (3, "2,0,1/1,1/1")):
        models = [TableModel(seed + number, 2, zeros=False) for number in range(3)]

        def make(models: Sequence[TableModel] = models, quotas: str = quotas) -> Decoder:
            target, *drafts = [model.session() for model in models]
            return build(Request(target, drafts), quotas=quotas, **KNOBS)

        got = exact_law(make, 2, outside=lambda decoder, models=models: models)  # type: ignore[misc]
        expected, branches = Reference(models[0].row).law(2), branches + got.branches
        if got != expected:
            accuse(
                JOINT,
                dict(sorted(expected.items())),
                dict(sorted(got.items())),
                seeds=seed,
                quotas=quotas,
            )
    return Evidence(JOINT, 2, branches)


def copies_the_longest(make: Callable[[int], MaxGramDrafter]) -> Evidence:
    """Against a search by definition: of all places whose past agrees, one that agrees furthest is
    continued.
    """
    texts = list(_texts())
    for text in texts:
        level = make(9)
        level.extend(text, None)  # type: ignore[arg-type]
        got = level.write(text, 1, SamplingParams(), Seeded(0))[0]
        lengths = [
            max(n for n in range(at + 1) if text[at - n : at] == text[len(text) - n :])
            for at in range(len(text))
        ]
        allowed = {text[at] for at, n in enumerate(lengths) if n == max(lengths) and n > 0}
        if set(got) - allowed or bool(got) != bool(allowed):
            accuse(LONGEST, f"one of {sorted(allowed)}", got, text=text)
    return Evidence(LONGEST, len(texts))


def _texts() -> Iterator[list[int]]:
    for number in range(200):
        yield [(number * number >> at) % 3 for at in range(2 + number % 8)]


TRAPS = [
    Trap(CALLS, called_as_k_says, card("cascade")),
    Trap(JOINT, joint_law_of_levels, card("cascade")),
    Trap(LONGEST, copies_the_longest, lambda: lambda longest: MaxGramDrafter(longest, None)),
]
