"""Laws of the decoding loop: which tokens come out, with which noise, and where the text ends.

Each takes a `Parts` (or a builder), tries its cases smallest first, raises `LawViolated` with the
first that breaks it, and returns `Evidence`. The expected result is worked out from the tables
themselves; no part that is judged takes part in it. Also here: cascades of decoders, joint targets,
and trees of drafts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tinyspec.decoding.decode import Decoder, Drafter
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.checking.uniforms import Name, Noise
from tinyspec.laws.evidence import Evidence, accuse, expect_equal
from tinyspec.laws.exact.joint import (
    JOINT,
    JointDistribution,
    Reference,
    exact_distribution,
    first_differing_text,
)
from tinyspec.laws.exact.models import FunctionDrafter, Reciter
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.parts import Parts
from tinyspec.laws.row_laws import normalize_weights
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

ONE, TWO, BOTH, FEW = "chain of 1", "chain of 2", "2 siblings", "2 siblings without replacement"
FORK = "2 siblings without replacement, one below the first"
POINTS, BESIDE = "the tokens 1, 0", "the tokens 0 | 1 side by side"

Table = tuple[tuple[int, ...], ...]
"""Weights of the next token, one row for each token that the text may end with; one row alone: the
same everywhere.
"""


def table_model(table: Table) -> TableModel:
    """Return a table model whose rows are these weights, by the last token."""
    return TableModel(
        vocabulary=len(table[0]), rows=lambda context: table[context[-1] % len(table)]
    )


def format_table(table: Table) -> Any:
    """Return a table for a counterexample: one distribution, or one for each last token."""
    rows = [normalize_weights(weights) for weights in table]
    return rows[0] if len(rows) == 1 else {f"after {token}": row for token, row in enumerate(rows)}


class ConstantDrafter(FunctionDrafter):
    """Proposes the same tokens for every text, in a chain or side by side, as point masses."""

    def __init__(self, tokens: Sequence[int], side_by_side: bool = False):
        n = len(tokens)
        siblings = TokenTree(tokens, (ROOT,) * n, (None,) * n, (False,) * n)

        def draft(context: Sequence[int], depth: int) -> TokenTree:
            return siblings if side_by_side and depth >= 1 else TokenTree.chain(tokens[:depth])

        super().__init__(draft)


def table_reference(table: Table, sampling: SamplingParams | None = None) -> Reference:
    """Return plain decoding on a table."""
    return Reference(
        lambda text: normalize_weights(table[text[-1] % len(table)]), sampling or SamplingParams()
    )


class HalvingParams(SamplingParams):
    """Sampling with an exact penalty: a token that the text already holds has half its weight."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        weights = [x / 2 if token in history else x for token, x in enumerate(logits)]
        return [x / sum(weights) for x in weights]


# ------------------------------------------------------------------ what comes out


@dataclass(frozen=True)
class LoopCase:
    """A target, a draft, how draft tokens are made, the warpers, and the tokens compared."""

    p: Table
    q: Table
    draft: str
    tokens: int
    sampling: SamplingParams | None = None

    def decoder(self, parts: Parts) -> Decoder:
        """Return the decoder made of these parts."""
        sampling = self.sampling or parts.sampling()
        return parts.decoder(
            table_model(self.p).session(), self._drafter(parts), parts.walk, sampling=sampling
        )

    def _drafter(self, parts: Parts) -> Drafter:
        if self.draft == POINTS:
            return ConstantDrafter((1, 0))
        if self.draft == BESIDE:
            return ConstantDrafter((0, 1), side_by_side=True)
        small = table_model(self.q).session()
        if self.draft in (ONE, TWO):
            return parts.drafter(small, 1 if self.draft == ONE else 2, frozenset())
        if self.draft == FORK:
            return parts.trees(small, (ROOT, ROOT, 0), False)
        return parts.siblings(small, 2, self.draft == BOTH)

    def expected(self, n: int) -> JointDistribution:
        """Return the distribution of the first n tokens of plain decoding."""
        if isinstance(self.sampling, HalvingParams):
            sampling = self.sampling
            return Reference(
                lambda text: sampling.probs(normalize_weights(self.p[0]), text)
            ).distribution(n)
        return table_reference(self.p, self.sampling).distribution(n)

    def shown(self) -> dict[str, Any]:
        """Return the case for a counterexample."""
        sampling = {} if self.sampling is None else {"sampling": self.sampling}
        return {
            "p": format_table(self.p),
            "q": format_table(self.q),
            "draft": self.draft,
            **sampling,
        }


SMALL_TABLES: list[tuple[Table, Table]] = [
    (((1, 0),), ((0, 1),)),
    (((0, 1),), ((1, 1),)),
    (((1, 1),), ((0, 1),)),
    (((1, 1),), ((1, 1),)),
    (((1, 1),), ((1, 3),)),
    (((1, 3),), ((3, 1),)),
    (((1, 0), (0, 1)), ((1, 1),)),
    (((1, 3), (3, 1)), ((1, 1),)),
    (((1, 1, 0),), ((0, 1, 1),)),
    (((0, 1, 2),), ((2, 1, 1),)),
]
LOOP_KNOBS = (
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 2},
    {"top_p": 0.5},
    {"min_p": 0.7},
)
WIDE: Table = ((1, 2, 3), (3, 1, 2), (2, 0, 1))
WIDER: Table = ((2, 1, 1), (1, 1, 2), (1, 3, 1))


def loop_cases() -> Iterator[LoopCase]:
    """Yield the cases, smallest first: one draft token, then two, then larger tables."""
    for p, q in SMALL_TABLES:
        yield LoopCase(p, q, ONE, 2)
    for knobs in LOOP_KNOBS:
        yield LoopCase(((1, 2),), ((2, 1),), ONE, 2, SamplingParams(**knobs))
    yield LoopCase(((1, 1),), ((1, 1),), ONE, 2, HalvingParams(repetition_penalty=2.0))
    for draft in (POINTS, BESIDE, TWO, BOTH, FEW):
        for p, q in SMALL_TABLES:
            yield LoopCase(p, q, draft, 3 if len(p[0]) == 2 and draft == TWO else 2)
    for draft in (ONE, TWO, BOTH, FEW):
        yield LoopCase(WIDE, WIDER, draft, 2)
    for p, q in (*SMALL_TABLES[2:6], (((1, 1),), ((1, 3), (3, 1)))):
        yield LoopCase(p, q, FORK, 2)
    for knobs in LOOP_KNOBS:
        yield LoopCase(WIDE, WIDER, ONE, 2, SamplingParams(**knobs))
    yield LoopCase(((1, 1, 2),), ((1, 1, 1),), TWO, 2, HalvingParams(repetition_penalty=2.0))


def enumerate_tokens(
    make: Callable[[], Decoder], tokens: int
) -> tuple[dict[tuple[int, ...], Any], int]:
    """Return the distribution of the first tokens over all their rounds, and the branches
    walked."""
    branches = 0

    def run(rng: Exhaustive) -> tuple[int, ...]:
        nonlocal branches
        branches += 1
        decoder, noise = make(), Noise(rng)
        decoder.extend((0,))
        while len(decoder.new) < tokens:
            decoder.step(noise)
        return tuple(decoder.new[:tokens])

    return Exhaustive.distribution(run), branches


def expect_distribution(
    law: str, expected: JointDistribution, got: dict[tuple[int, ...], Any], **case: Any
) -> None:
    """Raise LawViolated for this case unless two distributions of texts are equal.

    Floats may differ by rounding.
    """

    within = 1e-12 if any(isinstance(x, float) for x in expected.values()) else 0.0
    if first_differing_text(expected, got, within) is not None:
        accuse(law, dict(sorted(expected.items())), dict(sorted(got.items())), **case)


def joint_distribution_of_parts(parts: Parts) -> Evidence:
    """Check that the tokens of several rounds are distributed as the target's own.

    Noise that is used twice is seen too.
    """
    seen, branches = 0, 0
    for case in loop_cases():
        texts, walked = enumerate_tokens(partial(case.decoder, parts), case.tokens)
        seen, branches = seen + 1, branches + walked
        for n in range(1, case.tokens + 1):  # the shortest text whose distribution is wrong
            got: dict[tuple[int, ...], Any] = {}
            for text, x in texts.items():
                got[text[:n]] = got.get(text[:n], 0) + x
            expect_distribution(JOINT, case.expected(n), got, **case.shown(), tokens=n)
    return Evidence(JOINT, seen, branches)


def chance_ledger(parts: Parts) -> Evidence:
    """Check that no two decisions of a request share a uniform, over eight rounds."""
    name, rounds = "chance ledger", 8
    for draft in (ONE, TWO, BOTH, FEW):
        case = LoopCase(((1, 3),), ((3, 1),), draft, 1)

        def request(rng: Exhaustive, case: LoopCase = case) -> list[Name]:
            decoder, noise = case.decoder(parts), Noise(rng)
            decoder.extend((0,))
            for _ in range(rounds):
                decoder.step(noise)
            return noise.reads

        reads, _ = next(iter(Exhaustive.walk(request)))
        twice = [uniform for at, uniform in enumerate(reads) if uniform in reads[:at]]
        if twice:
            once, again = "every uniform used once", f"{twice[0]} again"
            accuse(name, once, again, **case.shown(), uniforms=reads)
    return Evidence(name, 4)


LAWS = {JOINT: joint_distribution_of_parts, "chance ledger": chance_ledger}


STOP_LETTERS = "abc"
OVERLONG_DRAFT = (0, 0, 0, 0)  # of a drafter that ignores how deep a draft may be
STOP_RULES: list[dict[str, Any]] = [
    {},
    {"eos": frozenset({1})},
    {"eos": frozenset({1, 2})},
    {"sequences": ((1, 1),)},
    {"sequences": ((1, 0, 0), (0, 2))},
    {"strings": ("b",)},
    {"strings": ("ab",)},
    {"eos": frozenset({2}), "strings": ("ba",), "sequences": ((1, 1),)},
]


def end_of_text(case: "StopCase") -> tuple[list[int], str]:
    """Return where a text ends and why, token by token, by the definition.

    A text that completes a stop ends there before its budget does.
    """
    new: list[int] = []
    while True:
        if case.limit is not None and len(new) >= case.limit and case.limit < case.most:
            return new, "context"
        if len(new) >= case.most:
            return new, "length"
        new.append(case.poem[len(new)])
        if new[-1] in case.rule.get("eos", ()):
            return new, "eos"
        if any(tuple(new[len(new) - len(s) :]) == s for s in case.rule.get("sequences", ())):
            return new, "stop"
        written = "".join(STOP_LETTERS[x] for x in new)
        if any(s in written for s in case.rule.get("strings", ())):
            return new, "stop"


class StopCase(NamedTuple):
    """A text to come, where it must stop, and what is drafted.

    poem    the text that the target writes
    rule    the arguments of the stopping criteria
    most    max_new_tokens
    limit   how many tokens the context has left; None: enough
    gamma   how many draft tokens are right
    then    the wrong draft tokens after them
    """

    poem: tuple[int, ...]
    rule: dict[str, Any]
    most: int
    limit: int | None = None
    gamma: int = 0
    then: tuple[int, ...] = ()

    def draft(self, context: Sequence[int], depth: int) -> TokenTree:
        """Return the next tokens of the text to come, and the wrong ones after them."""
        at = len(context) - 1
        chain = [*self.poem[at : at + self.gamma], *self.then]
        return TokenTree.chain(chain if self.then is OVERLONG_DRAFT else chain[:depth])

    def decoder(self, parts: Parts) -> Decoder:
        """Return a decoder after its prompt, made of these parts."""
        stop: StoppingCriteria = parts.stop(
            **self.rule,
            max_new_tokens=self.most,
            decode=lambda ids: "".join(STOP_LETTERS[x] for x in ids),
        )
        decoder = parts.decoder(
            Reciter([0, *self.poem, 0], vocabulary=3).session(),
            FunctionDrafter(self.draft),
            parts.walk,
            stop=stop,
            positions=None if self.limit is None else 1 + self.limit,
        )
        decoder.extend((0,))
        return decoder


def stop_cases() -> Iterator[StopCase]:
    """Yield the cases, small first."""
    drafts = ((0, ()), (0, (1,)), (1, ()), (2, ()), (3, ()), (1, (2, 1)))
    for most in range(5):
        yield StopCase((0,) * 4, {}, most, gamma=4, then=OVERLONG_DRAFT)
        for poem in product(range(3 if most < 3 else 2), repeat=max(most, 1)):
            for rule, (gamma, then) in product(STOP_RULES, drafts):
                yield StopCase(poem, rule, most, None, gamma, then)
    for limit in range(4):
        yield StopCase((0, 2, 0, 0), {"eos": frozenset({1})}, 4, limit, gamma=2)


def stop_law(parts: Parts) -> Evidence:
    """Check that a text ends at the first stop or at the budget, whatever was drafted.

    A stop is an end token, a stop sequence or a stop string, at every alignment with the blocks.
    Nothing comes after it, and the reason is the one that plain decoding gives.
    """
    name, seen = "stop", 0
    for case in stop_cases():
        decoder, drafts, seen = case.decoder(parts), [], seen + 1
        while not decoder.finished and len(decoder.new) <= case.most:
            drafts.append(decoder.step(parts.seeded(decoder.rounds)).tree.tokens)
        left = {} if case.limit is None else {"context left": case.limit}
        expect_equal(
            name,
            end_of_text(case),
            (decoder.new, decoder.finished),
            text_to_come=case.poem,
            stop=case.rule,
            max_new_tokens=case.most,
            **left,
            drafts=drafts,
        )
    return Evidence(name, seen)


def room_law(parts: Parts) -> Evidence:
    """Check that a draft is never deeper than the tokens still allowed, less one."""
    name, seen = "room", 0
    for most, limit in product(range(1, 5), (None, 1, 2, 3)):
        decoder, seen = StopCase((0,) * 9, {}, most, limit, gamma=3).decoder(parts), seen + 1
        while not decoder.finished:
            made = len(decoder.new)
            room = min(most, most if limit is None else limit) - made - 1
            depth = len(decoder.step(parts.seeded(decoder.rounds)).tree.tokens)
            if depth > room:
                case = {"max_new_tokens": most, "context_left": limit, "made": made}
                accuse(name, f"at most {room} draft tokens", depth, **case)
    return Evidence(name, seen)


def committed_text(parts: Parts) -> Evidence:
    """Check that the target's text is the prompt and the output after every round.

    Nothing that a stop cut off stays, and nothing is missing.
    """
    name, seen = "committed text", 0
    for case in stop_cases():
        if not (case.gamma or case.then):
            continue  # nothing to cut in a round of one token
        decoder, made, seen = case.decoder(parts), [0], seen + 1
        while not decoder.finished and len(made) <= case.most:
            made += decoder.step(parts.seeded(decoder.rounds)).tokens
            text = list(decoder.target.text)  # type: ignore[attr-defined]
            if not text == made == decoder.context:
                shown: dict[str, Any] = {"text_to_come": case.poem, "stop": case.rule}
                shown |= {"max_new_tokens": case.most, "right draft tokens": case.gamma}
                accuse(name, made, text, **shown)
    return Evidence(name, seen)


STOP_LAWS = {"stop": stop_law, "room": room_law, "committed text": committed_text}


LEVELS = "joint distribution of three levels"

HALF_TABLE, THIRD_TABLE, OTHER_TABLE = ((1, 1),), ((1, 2),), ((2, 1),)
CASCADE_CASES: tuple[tuple[Table, Table, Table], ...] = (
    (HALF_TABLE, HALF_TABLE, THIRD_TABLE),
    (HALF_TABLE, THIRD_TABLE, OTHER_TABLE),
    (THIRD_TABLE, OTHER_TABLE, HALF_TABLE),
    (((1, 3), (2, 1)), ((2, 1), (1, 2)), THIRD_TABLE),
    (((1, 2, 1), (1, 0, 1), (2, 1, 1)), ((1, 1, 2), (1, 1, 1), (1, 2, 1)), ((2, 1, 1),)),
)
"""Target, middle, small."""


def make_cascade(parts: Parts, tables: tuple[Table, Table, Table]) -> Decoder:
    """Return a decoder in which a small model drafts one token for a middle one, which drafts
    two."""
    target, middle, small = (table_model(table).session() for table in tables)
    inner = parts.decoder(middle, parts.drafter(small, 1, frozenset()), parts.walk)
    return parts.decoder(target, parts.nested(inner, 2), parts.walk)


def three_levels(parts: Parts) -> Evidence:
    """Check the joint distribution of the first two tokens of a cascade of three levels."""
    branches = 0
    for tables in CASCADE_CASES:
        got = exact_distribution(partial(make_cascade, parts, tables), 2)
        branches += got.branches
        shown = dict(zip(("p", "middle", "small"), map(format_table, tables), strict=True))
        expect_distribution(
            LEVELS, table_reference(tables[0]).distribution(2), got, **shown, gamma=2
        )
    return Evidence(LEVELS, len(CASCADE_CASES), branches)


CASCADE_LAWS: dict[str, Callable[[Parts], Evidence]] = {LEVELS: three_levels}


JOINT_ROWS = "a joint row is made of its members' rows"

JOINT_FORK = TokenTree((1, 2, 0, 1), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
JOINT_CHAIN = TokenTree.chain((2, 0))

Act = tuple[str, tuple[Any, ...]]
JOINT_STORIES: tuple[tuple[Act, ...], ...] = (
    (("score", (JOINT_CHAIN,)),),
    (("score", (JOINT_FORK,)), ("commit", ((0, 2), 1)), ("score", (JOINT_CHAIN,))),
    (("score", (JOINT_CHAIN,)), ("commit", ((0,), None)), ("score", (JOINT_FORK,))),
    (("append", ((1, 2),)), ("score", (JOINT_FORK,))),
    (
        ("score", (JOINT_FORK,)),
        ("commit", ((1,), 0)),
        ("rewind", (2,)),
        ("extend", ((0, 1),)),
        ("score", (JOINT_FORK,)),
    ),
    (("score", (JOINT_CHAIN,)), ("end", ()), ("extend", ((2, 2),)), ("score", (JOINT_CHAIN,))),
)
"""What a target goes through after its prompt."""


def penalised_row(rows: Sequence[Any], text: Sequence[int], path: Sequence[int]) -> list[Any]:
    """Return the first member's weights, lowered by the second's and by repetition."""
    first, second = rows
    whole = (*text, *path)
    return [
        a * (2 - b) / (2 if x in whole else 1)
        for x, (a, b) in enumerate(zip(first, second, strict=True))
    ]


def play_story(
    joint: Callable[..., Any], story: Sequence[Act], models: Sequence[TableModel]
) -> Iterator[tuple[Any, ...]]:
    """Yield the text, a path below it, and the joint row there, for every row that is scored."""
    target = joint([model.session() for model in models], penalised_row)
    text, tree = [0, 1], TokenTree()
    target.extend(text)
    for act, given in story:
        made = getattr(target, act)(*given)
        if act == "score":
            tree = given[0]
            for node in range(ROOT, len(tree.tokens)):
                yield tuple(text), tree.tokens_on(tree.path(node)), made.logits[node + 1]
        elif act in ("extend", "append"):
            text += given[0]
        elif act == "commit":
            text += [*tree.tokens_on(given[0]), *(() if given[1] is None else given[1:])]
        else:
            del text[given[0] if given else 0 :]


def rows_are_the_members(parts: Parts) -> Evidence:
    """Check joint rows against the members' rows by passes of their own."""
    seen = 0
    for story in JOINT_STORIES:
        models = [TableModel(seed, zeros=False) for seed in (3, 4)]
        for text, path, got in play_story(parts.joint, story, models):
            rows = [model.row((*text, *path)) for model in models]
            expected, seen = penalised_row(rows, text, path), seen + 1
            case = {"text": text, "path": path, "rows": rows, "story": [act for act, _ in story]}
            expect_equal(JOINT_ROWS, expected, [Fraction(x) for x in got], **case)
    return Evidence(JOINT_ROWS, seen)


JOINT_ROW_LAWS = {JOINT_ROWS: rows_are_the_members}


Build = Callable[..., Decoder]

OWN_CHILDREN = "every node has children of its own, and the draft model is called once a depth"

TREE_TARGET: Table = ((1, 2, 3), (3, 1, 2), (2, 0, 1))
TREE_DRAFTS: tuple[Table, ...] = (
    ((2, 1, 1), (1, 1, 2), (1, 3, 1)),
    ((1, 1, 3), (2, 2, 1), (1, 0, 1)),
)


def tree_tables(drafts: int, most: int = 3) -> Iterator[tuple[Table, list[Table]]]:
    """Yield p and the q of each draft, over two tokens and then, at most, three."""
    for p, q in SMALL_TABLES[3::2]:
        if len(p[0]) <= most:
            yield p, [q, tuple(row[::-1] for row in q)][:drafts]
    if most >= 3:
        yield TREE_TARGET, list(TREE_DRAFTS[:drafts])


def tree_joint_distribution(
    build: Build,
    wide: Sequence[dict[str, Any]],
    deep: Sequence[dict[str, Any]] = (),
    drafts: int = 1,
    samplings: Sequence[SamplingParams] = (SamplingParams(),),
    tokens: int = 2,
) -> Evidence:
    """Check that the tokens of a technique that drafts trees are distributed as the target's.

    Noise that is used twice is seen too.

    wide, deep  settings of the knobs, on tables over two and three tokens, and over two alone
    """
    seen, branches = 0, 0
    for setting in (*wide, *deep):
        pairs = tree_tables(drafts, 3 if setting in wide else 2)
        for (p, qs), sampling in product(pairs, samplings):

            def make(
                p: Table = p,
                qs: list[Table] = qs,
                sampling: SamplingParams = sampling,
                setting: dict[str, Any] = setting,
            ) -> Decoder:
                models = [table_model(q).session() for q in qs]
                return build(Request(table_model(p).session(), models, sampling), **setting)

            got, walked = enumerate_tokens(make, tokens)
            seen, branches = seen + 1, branches + walked
            case = {"p": format_table(p), "q": [format_table(q) for q in qs], **setting}
            if sampling != SamplingParams():
                case["sampling"] = sampling
            expect_distribution(
                JOINT, table_reference(p, sampling).distribution(tokens), got, **case
            )
    return Evidence(JOINT, seen, branches)


def own_children(build: Build, setting: Callable[[str], dict[str, Any]]) -> Evidence:
    """Check that every node has children of its own, with one draft pass for each depth.

    2x2 is two nodes with two children each: six nodes, from two passes of the draft model.
    `setting` returns the knobs of a shape.
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
        expected = {"nodes": nodes, "calls": shape.count("x") + 1}
        got = {"nodes": len(tree.tokens), "calls": len(forward_log)}
        expect_equal(OWN_CHILDREN, expected, got, **setting(shape))
    return Evidence(OWN_CHILDREN, 3)
