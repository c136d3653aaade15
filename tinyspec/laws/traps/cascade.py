"""Cascade speculative drafting (Chen et al. 2023): recursion, quotas and max-gram.

A token has the distribution of the level that made it final.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card, check_joint_distribution
from tinyspec.speculative.drafting.cascade import MaxGramDrafter, parse_quotas

CALLS = "where all levels agree, each is called as often as K says"
LONGEST = "max-gram copies what followed the longest match"

KNOBS: dict[str, Any] = {
    "lenience": 1.0,
    "vertical": True,
    "horizontal": True,
    "longest": 10,
    "sample": 0,
}
MATRICES = ("3,2/1", "4,1/3", "2,0/1", "3,2,1/2,1/1", "5,4,3/1,2/2")
PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)


def predict_calls(quotas: str) -> list[int]:
    """Return the calls of the target, the first draft, the second ... in one round.

    A level that is to make n tokens, with s drafted for it from below, is called ceil(n / (s + 1))
    times; the last draft of such a level is as long as is still wanted.
    """
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


@collect_evidence(CALLS)
def called_as_k_says(build: Build) -> Iterator[int]:
    """Check the tokens of a round and the calls of each level.

    Every model recites one text that repeats itself, so that max-gram agrees as well.
    """
    poem = list(PROMPT[:5]) * 20
    for quotas in MATRICES:
        models = [Reciter(poem) for _ in range(quotas.count("/") + 1)]
        for number, model in enumerate(models):
            model.name = f"level {number}"
        decoder = begin_decoder(build, models, PROMPT, quotas=quotas, **KNOBS)
        decoder.step(Seeded(0))
        decoder.forward_log.clear()
        made = len(decoder.step(Seeded(1)).tokens)
        counts = Counter(call.model for call in decoder.forward_log)
        got = [made, *(counts[model.name] for model in models)]
        drafted = sum(parse_quotas(quotas, len(models) - 1)[0])
        counted = "tokens of the round, then calls of each level"
        expected = [drafted + 1, *predict_calls(quotas)]
        expect_equal(CALLS, expected, got, quotas=quotas, counted=counted)
        yield 0


@collect_evidence(JOINT)
def joint_distribution_of_levels(build: Build) -> Iterator[int]:
    """Check two tokens of a cascade of a target, a middle and a small model, and max-gram."""
    for seed, quotas in ((0, "2,1,0/1,0/1"), (3, "2,0,1/1,1/1")):
        models = [TableModel(seed + number, 2, zeros=False) for number in range(3)]
        case = {"seeds": seed, "quotas": quotas}
        yield check_joint_distribution(build, models, case, SAMPLED, quotas=quotas, **KNOBS)


@collect_evidence(LONGEST)
def copies_the_longest_gram(make: Callable[[int], MaxGramDrafter]) -> Iterator[int]:
    """Check max-gram against a search by definition.

    Of all places whose past agrees with the text, one that agrees furthest is continued.
    """
    for number in range(200):
        text = [(number * number >> at) % 3 for at in range(2 + number % 8)]
        level = make(9)
        level.extend(text, None)  # type: ignore[arg-type]
        got = level.write(text, 1, SAMPLED, Seeded(0))[0]
        lengths = [
            max(n for n in range(at + 1) if text[at - n : at] == text[len(text) - n :])
            for at in range(len(text))
        ]
        allowed = {text[at] for at, n in enumerate(lengths) if n == max(lengths) and n > 0}
        if set(got) - allowed or bool(got) != bool(allowed):
            accuse(LONGEST, f"one of {sorted(allowed)}", got, text=text)
        yield 0


TRAPS = [
    Trap(CALLS, called_as_k_says, card("cascade")),
    Trap(JOINT, joint_distribution_of_levels, card("cascade")),
    Trap(LONGEST, copies_the_longest_gram, lambda: lambda longest: MaxGramDrafter(longest, None)),
]
