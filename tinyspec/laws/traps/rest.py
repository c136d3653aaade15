"""REST (He et al. 2024): the longest match decides, and its continuations compete by weight.

The output keeps the target's distribution.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import recite_until
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import SAMPLED, Build, Trap, card, check_joint_distribution
from tinyspec.technique import Request

LONGEST = "the longest match decides"
WEIGHED = "the tree is the heaviest beginnings of what followed"


@collect_evidence(LONGEST)
def prefers_the_longest(build: Build) -> Iterator[int]:
    """Check that a longer match that occurs once beats a shorter one that occurs more often."""
    poem = [1, 2, 7, 8]
    for often in (1, 2, 3):
        references = [poem, *([9, 2, 5, 5] for _ in range(often))]
        rounds = recite_until(build, poem, 2, references, shortest=1, nodes=2).rounds
        case = {"prompt": poem[:2], "text_to_come": poem[2:], "references": references}
        expect_equal(LONGEST, 1, rounds, **case, counted="calls")
        yield 0


def _draft_paths(
    build: Build, references: Sequence[Sequence[int]], prompt: Sequence[int], **knobs: float
) -> Any:
    model = TableModel(vocabulary=4, rows=lambda text: [1, 1, 1, 1])
    decoder = build(Request(model.session(), references=references), **knobs)
    decoder.extend(prompt)
    tree = decoder.step(Seeded(0)).tree
    return [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]


@collect_evidence(WEIGHED)
def is_the_heaviest(build: Build) -> Iterator[int]:
    """Check that the tree holds the most frequent beginnings of what followed a match.

    Every match of random texts is read and every beginning counted.
    """
    rng = random.Random(0)
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
        knobs: dict[str, Any] = {"shortest": 1, "longest": 3, "length": 3, "nodes": nodes}
        got = _draft_paths(build, texts, prompt, **knobs)
        expect_equal(WEIGHED, expected, got, references=texts, prompt=prompt, nodes=nodes)
        yield 0


@collect_evidence(JOINT)
def distribution_of_two_continuations(build: Build) -> Iterator[int]:
    """Check the first tokens where both 0 and 1 followed: their distribution is the target's."""
    texts = [[2, 0, 1, 2, 1, 0]]
    knobs: dict[str, Any] = {"shortest": 1, "longest": 2, "length": 2}
    for weights in ((5, 3, 2), (1, 1, 1), (1, 0, 3)):
        model = table_model((weights,))
        case = {"p": weights, "references": texts}
        yield check_joint_distribution(build, [model], case, SAMPLED, (2,), texts, **knobs)


TRAPS = [
    Trap(LONGEST, prefers_the_longest, card("rest")),
    Trap(WEIGHED, is_the_heaviest, card("rest")),
    Trap(JOINT, distribution_of_two_continuations, card("rest")),
]
