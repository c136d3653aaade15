"""REST (He et al. 2024): the longest match decides, its continuations compete by weight, and the
law is kept.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference, exact_law
from tinyspec.laws.exact.models import recite_until
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap, card
from tinyspec.technique import Request

LONGEST = "the longest match decides"
WEIGHED = "the tree is the heaviest beginnings of what followed"
Build = Callable[..., Decoder]


def prefers_the_longest(build: Build) -> Evidence:
    """A longer match that occurs once is continued rather than a shorter one that occurs more
    often.
    """
    poem = [1, 2, 7, 8]
    for often in (1, 2, 3):
        references = [poem, *([9, 2, 5, 5] for _ in range(often))]
        rounds = recite_until(build, poem, 2, references, shortest=1, nodes=2, price=0.0).rounds
        if rounds != 1:
            accuse(
                LONGEST,
                "1 call",
                f"{rounds} calls",
                prompt=poem[:2],
                text_to_come=poem[2:],
                references=references,
            )
    return Evidence(LONGEST, 3)


def _tree(
    build: Build, references: Sequence[Sequence[int]], prompt: Sequence[int], **knobs: float
) -> Any:
    model = TableModel(vocabulary=4, rows=lambda text: [1, 1, 1, 1])
    decoder = build(Request(model.session(), references=references), **knobs)
    decoder.extend(prompt)
    tree = decoder.step(Seeded(0)).tree
    return [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]


def is_the_heaviest(build: Build) -> Evidence:
    """Every match of random texts is read and every beginning counted; the tree must be the
    heaviest of them.
    """
    rng, seen = random.Random(0), 0
    for number in range(60):
        texts = [[rng.randrange(3) for _ in range(4 + number // 4)] for _ in range(2)]
        prompt, nodes = [rng.randrange(3) for _ in range(3)], 1 + number % 6
        weight: Counter[tuple[int, ...]] = Counter()
        for n in (3, 2, 1):
            for text in texts:
                for at in range(n, len(text)):
                    if text[at - n : at] == prompt[-n:]:
                        weight.update(
                            tuple(text[at:end]) for end in range(at + 1, min(at + 3, len(text)) + 1)
                        )
            if weight:
                break
        expected = sorted(weight, key=lambda path: (-weight[path], len(path), path))[:nodes]
        got = _tree(build, texts, prompt, shortest=1, longest=3, length=3, nodes=nodes, price=0.0)
        if got != expected:
            accuse(WEIGHED, expected, got, references=texts, prompt=prompt, nodes=nodes)
        seen += 1
    return Evidence(WEIGHED, seen)


def law_of_two_continuations(build: Build) -> Evidence:
    """Where both 0 and 1 followed, the first tokens are distributed as the target's."""
    seen, branches = 0, 0
    for weights in ((5, 3, 2), (1, 1, 1), (1, 0, 3)):
        model = TableModel(vocabulary=3, rows=lambda text, weights=weights: list(weights))  # type: ignore[misc]
        texts = [[2, 0, 1, 2, 1, 0]]

        def make(model: TableModel = model, texts: Any = texts) -> Decoder:
            return build(
                Request(model.session(), references=texts),
                shortest=1,
                longest=2,
                length=2,
                price=0.0,
            )

        got, expected = (
            exact_law(make, 2, (2,)),
            Reference(lambda text: model.row(text), SamplingParams()).law(2, (2,)),  # noqa: B023
        )
        seen, branches = seen + 1, branches + got.branches
        if got != expected:
            accuse(
                JOINT,
                dict(sorted(expected.items())),
                dict(sorted(got.items())),
                p=weights,
                references=texts,
            )
    return Evidence(JOINT, seen, branches)


TRAPS = [
    Trap(LONGEST, prefers_the_longest, card("rest")),
    Trap(WEIGHED, is_the_heaviest, card("rest")),
    Trap(JOINT, law_of_two_continuations, card("rest")),
]
