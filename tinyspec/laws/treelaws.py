"""Laws of techniques that draft trees, for their traps: what a builder is held to, whatever it
builds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.exact import JOINT, Reference
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, enumerate_tokens, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.technique import Request

Build = Callable[..., Decoder]

OWN_CHILDREN = "every node has children of its own, and the draft model is called once a depth"

TREE_TARGET: Table = ((1, 2, 3), (3, 1, 2), (2, 0, 1))
TREE_DRAFTS: tuple[Table, ...] = (
    ((2, 1, 1), (1, 1, 2), (1, 3, 1)),
    ((1, 1, 3), (2, 2, 1), (1, 0, 1)),
)


def tree_tables(drafts: int, most: int = 3) -> Iterator[tuple[Table, list[Table]]]:
    """p and the q of each draft, over two tokens and then, at most, three."""
    for p, q in SMALL_TABLES[3::2]:
        if len(p[0]) <= most:
            yield p, [q, tuple(row[::-1] for row in q)][:drafts]
    if most >= 3:
        yield TREE_TARGET, list(TREE_DRAFTS[:drafts])


def tree_joint_law(
    build: Build,
    wide: Sequence[dict[str, Any]],
    deep: Sequence[dict[str, Any]] = (),
    drafts: int = 1,
    samplings: Sequence[SamplingParams] = (SamplingParams(),),
    tokens: int = 2,
) -> Evidence:
    """The tokens of several rounds are distributed as the target's, also where the same noise is
    used twice.

    wide, deep  settings of the knobs, on tables over two and three tokens, and over two alone
    """
    seen, branches = 0, 0
    for setting in (*wide, *deep):
        pairs = tree_tables(drafts, 3 if setting in wide else 2)
        for (p, qs), sampling in ((pair, sampling) for pair in pairs for sampling in samplings):

            def make(
                p: Table = p,
                qs: list[Table] = qs,
                sampling: SamplingParams = sampling,
                s: dict[str, Any] = setting,
            ) -> Decoder:
                return build(
                    Request(
                        table_model(p).session(), [table_model(q).session() for q in qs], sampling
                    ),
                    **s,
                )

            got, walked = enumerate_tokens(make, tokens)
            expected = Reference(lambda text, p=p: normalised(p[text[-1] % len(p)]), sampling).law(  # type: ignore[misc]
                tokens
            )
            seen, branches = seen + 1, branches + walked
            if got != expected:
                case = {
                    "p": format_table(p),
                    "q": [format_table(q) for q in qs],
                    **setting,
                    **({} if sampling == SamplingParams() else {"sampling": sampling}),
                }
                accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
    return Evidence(JOINT, seen, branches)


def own_children(build: Build, setting: Callable[[str], dict[str, Any]]) -> Evidence:
    """2x2 is two nodes with two each below them: six, from two calls of the draft model. `setting`:
    the knobs of a shape.
    """
    for shape, nodes in (("2x2", 6), ("2x1x2", 8), ("1x2", 3)):
        forward_log: list[Any] = []
        request = Request(
            table_model(TREE_TARGET).session(),
            [table_model(TREE_DRAFTS[0]).session(forward_log)],
            forward_log=forward_log,
        )
        decoder = build(request, **setting(shape))
        decoder.extend((0,))
        del forward_log[:]
        tree = decoder.drafter.propose([0], 9, request.sampling, Seeded(0))
        expected, got = (
            {"nodes": n, "calls": c}
            for n, c in ((nodes, shape.count("x") + 1), (len(tree.tokens), len(forward_log)))
        )
        if got != expected:
            accuse(OWN_CHILDREN, expected, got, **setting(shape))
    return Evidence(OWN_CHILDREN, 3)
