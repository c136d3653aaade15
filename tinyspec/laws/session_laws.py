"""Laws of a session: a tree in one pass equals its paths, and a cache equals a fresh pass.

The judge is `run_dense`: the whole text, prompt and path, in one plain pass. Masks, positions,
slots, gathered paths and leftovers of a session must not show. Models are float64 and random, with
weights so large that every layer, position and token changes every row.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import Array, run_dense
from tinyspec.laws.parts import Parts
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch, Plan, Scores
from tinyspec.lm.model import Model
from tinyspec.lm.scheduler import run_together
from tinyspec.lm.session import Session
from tinyspec.lm.transformer import Transformer
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

NODE_LOGITS = "node logits = path logits (SpecInfer's tree attention, arXiv 2305.09781)"
SIBLING_ORDER = "permuting siblings changes no logits and no greedy output"
ROW_IDENTITY = "row identity: no bit of a row depends on what is computed beside it"
COMMITTED_SLOTS = "committed slots = a fresh forward, up to their reach, after every round"

Begin = Callable[[], Session]


def random_tree(rng: random.Random, nodes: int, names: Sequence[int]) -> TokenTree:
    """Return a tree of `nodes` nodes with few tokens, so that siblings are often equal."""
    parents = [rng.randrange(ROOT, i) for i in range(nodes)]
    return point_masses([rng.choice(names) for _ in parents], parents)


def point_masses(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Return a tree whose nodes declare no distribution."""
    n = len(tokens)
    return TokenTree(tokens, parents, (None,) * n, (False,) * n)


def reorder_siblings(rng: random.Random, tree: TokenTree) -> tuple[TokenTree, list[int]]:
    """Return the tree with siblings in another order, and the old index of every node."""
    order: list[int] = []
    waiting = [i for i, parent in enumerate(tree.parents) if parent == ROOT]
    while waiting:  # any node whose parent stands already
        order.append(waiting.pop(rng.randrange(len(waiting))))
        waiting += [i for i, parent in enumerate(tree.parents) if parent == order[-1]]
    new = {old: i for i, old in enumerate(order)} | {ROOT: ROOT}
    parents = [new[tree.parents[old]] for old in order]
    draft_probs = [tree.draft_probs[i] for i in order]
    probe = [tree.probe[i] for i in order]
    return TokenTree(tree.tokens_on(order), parents, draft_probs, probe), order


@collect_evidence(NODE_LOGITS)
def node_logits(
    begin: Begin, *, cases: int = 3, rounds: int = 3, nodes: int = 6, tolerance: float = 1e-10
) -> Iterator[int]:
    """Check every row of scored trees, over several rounds, against the path alone.

    tolerance  of the greatest magnitude in the row
    """
    for size, case in product(range(nodes + 1), range(cases)):
        rng = random.Random(f"{size}:{case}")
        session = begin()
        names = _some_tokens(rng, session)
        session.extend([rng.choice(names) for _ in range(1 + size + case)])
        for _ in range(rounds):
            tree = random_tree(rng, size, names)
            text = session.text
            scores = session.score(tree)
            for node in range(ROOT, size):
                path = tree.tokens_on(tree.path(node))
                expected = run_dense(session.model, [*text, *path]).logits[-1]
                got = scores.logits[node + 1]
                _expect_rows_agree(NODE_LOGITS, expected, got, tolerance, text, tree, node=node)
                yield 0
            accepted = tree.path(rng.randrange(ROOT, size))
            session.commit(accepted, rng.choice([*names, None]) if size else names[0])
            if session.text == text:
                session.append(names[:1])


@collect_evidence(ROW_IDENTITY)
def row_identity(begin: Begin, *, cases: int = 8) -> Iterator[int]:
    """Check that every row of a tree equals, bit for bit, decoding its path token by token.

    Then what is lossless in arithmetic is lossless in float32 and bfloat16 too.
    """
    for case in range(cases):
        rng = random.Random(case)
        session = begin()
        names = _some_tokens(rng, session)
        text = [rng.choice(names) for _ in range(1 + 4 * case)]
        tree = random_tree(rng, 1 + case, names)
        session.extend(text)
        logits = session.score(tree).logits
        for node in range(ROOT, len(tree.tokens)):
            plain = begin()
            plain.extend(text[:1])
            for token in (*text[1:], *tree.tokens_on(tree.path(node))):
                plain.score(TokenTree())
                plain.commit((), token)
            alone = _as_array(plain.score(TokenTree()).logits[0])
            _expect_rows_agree(ROW_IDENTITY, alone, logits[node + 1], 0.0, text, tree, node=node)
            yield 0


@collect_evidence(SIBLING_ORDER)
def sibling_order(
    begin: Begin,
    verifier: Callable[[TokenTree, Any, RandomSource], Verdict],
    *,
    cases: int = 30,
    nodes: int = 6,
    tolerance: float = 1e-10,
) -> Iterator[int]:
    """Check that the order of siblings changes no row and no greedy token.

    The tokens are those of the highest logits of the plain pass, down the tree.
    """
    for case in range(cases):
        rng = random.Random(case)
        prompt_length, size = 1 + case % 5, 2 + case * (nodes - 1) // cases
        plain = begin()
        names = _some_tokens(rng, plain)
        text = [rng.choice(names) for _ in range(prompt_length)]
        plain.extend(text)
        names = [*names, *greedy_text(plain.model, text, 1)]  # greedy decoding takes the last one
        tree = random_tree(rng, size, names)
        other, old = reorder_siblings(rng, tree)
        turned = begin()
        turned.extend(text)
        rows, moved = plain.score(tree).logits, turned.score(other).logits
        for node in range(ROOT, size):
            expected = _as_array(rows[ROOT + 1] if node == ROOT else rows[old[node] + 1])
            where = {"node": node, "was": tree.tokens}
            _expect_rows_agree(
                SIBLING_ORDER, expected, moved[node + 1], tolerance, text, other, **where
            )
        greedy = _decode_in_tree(plain, text, tree)
        for shape, logits in ((tree, rows), (other, moved)):
            sharp = {node: _one_hot(logits[node + 1]) for node in range(ROOT, size)}
            verdict = verifier(shape, sharp, Seeded(case))
            output = (*shape.tokens_on(verdict.accepted), verdict.next)
            where = {"tokens": tuple(shape.tokens), "parents": tuple(shape.parents)}
            expect_equal(SIBLING_ORDER, greedy, output, text=text, **where)
        yield 0


def _decode_in_tree(session: Session, text: Sequence[int], tree: TokenTree) -> tuple[int, ...]:
    """Return the plain pass's greedy tokens while they are a path of the tree, and one more."""
    paths = {tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))}
    output: tuple[int, ...] = ()
    while True:
        output = (*output, *greedy_text(session.model, [*text, *output], 1))
        if output not in paths:
            return output


def committed_slots(session: Session, tolerance: float = 1e-10, run: bool = True) -> int:
    """Compare every committed slot but the newest with a fresh pass over the text.

    Only the layers it has reached are compared; returns how many (slot, layer) pairs.

    run  also demand that each has been run at all (a draft's session may not have run all of its
         text yet, a target's has)

    A token that left early, and one that looked at keys copied up for such a token, is compared as
    far as it was run exactly: such a session does not claim `cache_exact`.
    """
    text, cache = session.text, session.cache
    fresh = run_dense(session.model, text, session.plan)
    compared, exact = 0, session.cache_exact
    for slot, node in enumerate(session.committed[:-1]):
        if run and not cache.present[slot].any():
            accuse(COMMITTED_SLOTS, "keys and values", "none", text=text, slot=slot)
        if not (exact or node.exact):
            continue
        for layer in np.flatnonzero(cache.present[slot]):
            if not exact and layer >= (node.sublayers_done + 1) // 2:
                break  # copied up
            for name, dense, cached in (
                ("key", fresh.keys[layer], cache.keys),
                ("value", fresh.values[layer], cache.values),
            ):
                if dense is None:
                    continue
                expected, got = dense[slot], _as_array(cached[layer][:, slot])
                limit = tolerance * max(1.0, float(np.abs(dense).max()))
                if not np.abs(got - expected).max() <= limit:
                    where = {"slot": slot, "layer": int(layer), "of": name}
                    numbers = expected.ravel()[:4], got.ravel()[:4]
                    accuse(COMMITTED_SLOTS, *numbers, text=text, **where)
            compared += 1
    return compared


def cache_after_every_round(
    make: Callable[[Request], Decoder],
    target: Begin,
    drafts: Sequence[Begin] = (),
    *,
    references: Sequence[Sequence[int]] = (),
    texts: int = 2,
    tokens: int = 16,
    tolerance: float = 1e-10,
) -> Evidence:
    """Check the caches of target and drafts after every round of whole requests."""
    began, rounds, compared = perf_counter(), 0, 0
    for case in range(texts):
        rng = random.Random(case)
        session, small = target(), [begin() for begin in drafts]
        names = _some_tokens(rng, session)
        request = Request(
            session,
            small,
            sampling=SamplingParams(temperature=float(case % 2)),
            stop=StoppingCriteria(max_new_tokens=tokens),
            references=references,
            positions=session.model.config.max_positions,
        )
        decoder, source = make(request), Seeded(case)
        decoder.extend([rng.choice(names) for _ in range(2 + 3 * case)])
        while not decoder.finished:
            decoder.step(source)
            rounds += 1
            compared += committed_slots(session, tolerance)
            for other in small:
                if len(other):
                    compared += committed_slots(other, tolerance, run=False)
        decoder.end()
    notes = [f"{compared} (slot, layer) compared"]
    return Evidence(COMMITTED_SLOTS, rounds, compared, perf_counter() - began, notes)


def _some_tokens(rng: random.Random, session: Session) -> list[int]:
    return rng.sample(range(session.model.config.vocab_size), 3)


def _one_hot(logits: Any) -> Array:
    row = np.zeros(len(logits))
    row[int(logits.argmax())] = 1.0
    return row


def _as_array(tensor: Any) -> Array:
    found: Array = tensor.detach().double().cpu().numpy()
    return found


def _expect_rows_agree(
    law: str,
    expected: Array,
    got: Any,
    tolerance: float,
    text: Sequence[int],
    tree: TokenTree,
    **case: Any,
) -> None:
    """Raise LawViolated unless two rows agree; show the logit that is furthest off."""
    off = np.abs(_as_array(got) - expected)
    worst = int(np.nan_to_num(off, nan=np.inf).argmax())
    if not off[worst] <= tolerance * max(1.0, float(np.abs(expected).max())):
        where = {"tokens": tuple(tree.tokens), "parents": tuple(tree.parents), **case}
        logits = float(expected[worst]), float(_as_array(got)[worst])
        accuse(law, *logits, text=tuple(text), **where, logit_of=worst)


POSITIONS_COUNT = "positions count the text"
CACHE_FRESH = "cache is a fresh forward"
REWIND_TRACELESS = "rewinding is never having gone"
EXIT_TRUNCATED = "an exit is the truncated model"
SESSION_GREEDY = "greedy equality"
BATCH_ROW = "a batch row is the row alone"

SESSION_TOLERANCE = 1e-9
SESSION_VOCABULARY = 7
SESSION_LAYERS = 3
ROTARY_CONFIG = Config(
    vocab_size=SESSION_VOCABULARY,
    d_model=16,
    n_layers=SESSION_LAYERS,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    d_ff=24,
    max_positions=96,
    tied=True,
)
LEARNED_CONFIG = replace(
    ROTARY_CONFIG,
    norm="layer",
    positions="learned",
    activation="gelu_new",
    gated=False,
    n_kv_heads=4,
    family="gpt2",
)
FAMILIES = {"rotations": ROTARY_CONFIG, "learned positions": LEARNED_CONFIG}
PROMPTS = [(1,), (1, 2), (3, 1, 4, 1, 5)]


@cache
def family_model(family: str, seed: int = 0) -> Model:
    """Return a random float64 model of a family."""
    return Model.random(FAMILIES[family], seed=seed, dtype=torch.float64, scale=0.5)


class ThroughParts(Model):
    """A model whose passes go through the part that is judged.

    `fed` holds what reached the model itself.
    """

    def __init__(self, inner: Model, parts: Parts):
        super().__init__(inner.config, inner.weights)
        self.parts, self.fed = parts, list[ForwardBatch]()

    def forward(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        return self.parts.forward(self._inner, feeds)

    def _inner(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        self.fed += feeds
        return super().forward(feeds)


def judged_models(parts: Parts) -> list[tuple[str, Model, ThroughParts]]:
    """Return (family, the judge's model, the same weights through the part that is judged)."""
    return [
        (family, family_model(family), ThroughParts(family_model(family), parts))
        for family in FAMILIES
    ]


def rows_differ(got: Any, expected: Any) -> bool:
    """Return whether two rows differ by more than rounding."""
    return not np.allclose(np.asarray(got), np.asarray(expected), rtol=0, atol=SESSION_TOLERANCE)


def greedy_text(model: Transformer, prompt: Sequence[int], n: int) -> list[int]:
    """Return the target's greedy tokens, by a whole pass for each."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(run_dense(model, text).logits[-1].argmax()))
    return text[len(prompt) :]


def small_trees() -> list[TokenTree]:
    """Return every shape of up to two nodes, some larger ones, and equal siblings."""
    shapes = [(), (-1,), (-1, -1), (-1, 0), (-1, -1, 1), (-1, -1, 0, 1, 3), (-1, 0, 0, -1, 3, 2)]
    trees = [point_masses(range(1, len(shape) + 1), shape) for shape in shapes]
    return [*trees, point_masses((2, 2, 3), (-1, -1, 1))]


def _begin_session(parts: Parts, model: Model, text: Sequence[int]) -> Session:
    """Return a session of these parts that has read a text."""
    session = parts.session(model)
    session.extend(text)
    return session


@collect_evidence(POSITIONS_COUNT)
def positions_count_the_text(parts: Parts) -> Iterator[int]:
    """Check that a row's position is the number of tokens before it on its own path."""
    for prompt, (family, _, model), tree in product(PROMPTS, judged_models(parts), small_trees()):
        session = _begin_session(parts, model, prompt)
        model.fed.clear()
        session.score(tree)
        expected = sorted(len(prompt) - 1 + depth for depth in {0, *tree.depths()})
        got = sorted({position for feed in model.fed for position in feed.positions})
        case = {"model": family, "prompt": prompt, "parents": tree.parents}
        expect_equal(POSITIONS_COUNT, expected, got, **case)
        yield 0


def _judge_session(law: str, session: Session, text: list[int], case: dict[str, Any]) -> None:
    """Compare the session's text, next row and keys in every layer with one plain pass."""
    if session.text != text:
        accuse(law, f"the text {text}", f"the text {session.text}", **case)
    row, fresh = session.score(TokenTree()).logits[0], run_dense(session.model, text)
    if rows_differ(row, fresh.logits[-1]):
        accuse(law, fresh.logits[-1], row, **case, shown="the next logits")
    for slot, layer in product(range(len(text)), range(SESSION_LAYERS)):
        got, expected = session.cache.keys[layer][:, slot], np.asarray(fresh.keys[layer])[slot]
        if rows_differ(got, expected):
            accuse(law, expected, got, **case, shown=f"keys in slot {slot}, layer {layer}")


@collect_evidence(CACHE_FRESH)
def cache_is_a_fresh_forward(parts: Parts) -> Iterator[int]:
    """Check that after a round the keys are those of one pass over the text, on any path."""
    for prompt, (family, _, model), tree in product(
        PROMPTS[:2], judged_models(parts), small_trees()
    ):
        for node, after in product(range(ROOT, len(tree.tokens)), (None, 6)):
            if node == ROOT and after is None:
                continue
            path = tree.path(node)
            session = _begin_session(parts, model, prompt)
            session.score(tree)
            session.commit(path, after)
            text = [*prompt, *tree.tokens_on(path), *(() if after is None else (after,))]
            case: dict[str, Any] = {"model": family, "prompt": prompt, "tokens": list(tree.tokens)}
            case |= {"parents": tree.parents, "accepted": path, "next": after}
            _judge_session(CACHE_FRESH, session, text, case)
            yield 0
    long = [1 + at % 5 for at in range(80)]  # more slots than a cache begins with
    for family, _, model in judged_models(parts):
        session = _begin_session(parts, model, long[:60])
        for token in long[60:]:
            session.score(TokenTree())
            session.commit((), token)
        case = {"model": family, "text": f"{len(long)} tokens, the last 20 one by one"}
        _judge_session(CACHE_FRESH, session, long, case)
        yield 0


@collect_evidence(REWIND_TRACELESS)
def rewinding_is_never_having_gone(parts: Parts) -> Iterator[int]:
    """Check that a rewound text continues like one that was never longer.

    What a fork does, to its end, is not seen by the session it came from.
    """
    text = [1, 2, 3, 4]
    for (family, _, model), length in product(judged_models(parts), range(1, len(text) + 1)):
        for then in ((), (5,), (5, 6)):
            session = _begin_session(parts, model, text)
            session.score(TokenTree.chain([5, 5]))
            session.rewind(length)
            if then:
                session.extend(then)
            case = {"model": family, "text": text, "rewind": length, "then": then}
            _judge_session(REWIND_TRACELESS, session, [*text[:length], *then], case)
            yield 0
        session = _begin_session(parts, model, text)
        twin = session.fork()
        twin.rewind(length)
        twin.extend([6, 6, 6, 6])
        twin.score(TokenTree.chain([5]))
        case = {"model": family, "text": text, "a fork goes on as": [*text[:length], 6, 6, 6, 6]}
        _judge_session(REWIND_TRACELESS, session, text, case)
        yield 0


@collect_evidence(EXIT_TRUNCATED)
def an_exit_is_the_truncated_model(parts: Parts) -> Iterator[int]:
    """Check that a view that leaves after E layers equals the model truncated to E layers.

    A token that left early and was run further after all leaves the keys and values of a full pass.
    """
    for prompt, (family, judge, model), layers in product(
        PROMPTS, judged_models(parts), range(1, SESSION_LAYERS + 1)
    ):
        case = {"model": family, "prompt": prompt, "exit after layer": layers}
        session, plan = _begin_session(parts, model, prompt), Plan(last=layers)
        row = parts.view(session, plan).score(TokenTree.chain([2])).logits[1]
        expected = run_dense(judge, [*prompt, 2], plan).logits[-1]
        if rows_differ(row, expected):
            accuse(EXIT_TRUNCATED, expected, row, **case, token=2)
        early = _begin_session(parts, model, prompt)
        early.run_to_layer(TokenTree.chain([2]), layers)
        early.commit((0,), 3)
        early.fill_cache("recompute")
        case["then"] = "filled by recomputing"
        _judge_session(EXIT_TRUNCATED, early, [*prompt, 2, 3], case)
        yield 0


class PartlyRightDrafter(BaseDrafter):
    """Proposes two tokens, the first `right` of which are the greedy ones.

    With `wide`, they stand beside a first sibling that is wrong.
    """

    def __init__(self, model: Model, right: int, wide: bool):
        self.model, self.right, self.wide = model, right, wide

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        drafted: list[int] = []
        for at in range(min(2, max_draft_depth)):
            best = greedy_text(self.model, [*context, *drafted], 1)[0]
            drafted.append((best + (at >= self.right)) % SESSION_VOCABULARY)
        if not (self.wide and len(drafted) == 2):
            return TokenTree.chain(drafted)
        other = (drafted[0] + 1) % SESSION_VOCABULARY
        return point_masses((other, *drafted), (ROOT, ROOT, 1))


@collect_evidence(SESSION_GREEDY)
def greedy_equality_of_parts(parts: Parts) -> Iterator[int]:
    """Check that at temperature 0 the tokens are the target's greedy ones, whatever is drafted."""
    wanted = 5
    stop = StoppingCriteria(max_new_tokens=wanted)
    for prompt, (family, judge, model) in product(PROMPTS[:2], judged_models(parts)):
        expected = greedy_text(judge, prompt, wanted)
        drafters: dict[str, Any] = {}
        for right, wide in product(range(3), (False, True)):
            place = ", as the second sibling" if wide else ""
            drafter = PartlyRightDrafter(judge, right, wide)
            drafters[f"2 tokens, {right} of them right{place}"] = drafter
        small = family_model(family, seed=1).session()
        drafters["another model's 2 tokens"] = parts.drafter(small, 2, frozenset())
        for draft, drafter in drafters.items():
            session, sampling = parts.session(model), parts.sampling(temperature=0.0)
            decoder = parts.decoder(session, drafter, parts.walk, sampling=sampling, stop=stop)
            decoder.extend(prompt)
            for at in range(wanted):
                if not decoder.finished:
                    decoder.step(parts.seeded(at))
            case = {"model": family, "prompt": prompt, "draft": draft}
            expect_equal(SESSION_GREEDY, expected, decoder.new, **case)
            yield 0


@collect_evidence(BATCH_ROW)
def batch_row_is_the_row_alone(parts: Parts) -> Iterator[int]:
    """Check that requests of unequal lengths that share passes get what each gets alone."""
    prompts = [(1,), (2, 3), (4, 5, 6, 1, 2)]

    def job(model: ThroughParts, row: int) -> Any:
        def run(scheduler: Any) -> list[Any]:
            session, logits = Session(model, forward=scheduler.forward_of(model)), list[Any]()
            session.extend(prompts[row])
            for token in (3, 4):
                logits.append(session.score(TokenTree.chain([token] * (row % 2))).logits[0])
                session.commit((), token)
            return logits

        return run

    for rows, (family, judge, model) in product(
        ((0, 1), (1, 0), (0, 2), (2, 0, 1)), judged_models(parts)
    ):
        together = run_together([job(model, row) for row in rows])
        for at, row in product(range(2), range(len(rows))):
            text = [*prompts[rows[row]], *(3, 4)[:at]]
            expected, got = run_dense(judge, text).logits[-1], together[row][at]
            if rows_differ(got, expected):
                batch = [prompts[other] for other in rows]
                case = {"model": family, "batch": batch, "row": prompts[rows[row]], "text": text}
                accuse(BATCH_ROW, expected, got, **case)
        yield 0


SESSION_LAWS = {
    POSITIONS_COUNT: positions_count_the_text,
    CACHE_FRESH: cache_is_a_fresh_forward,
    REWIND_TRACELESS: rewinding_is_never_having_gone,
    EXIT_TRUNCATED: an_exit_is_the_truncated_model,
    SESSION_GREEDY: greedy_equality_of_parts,
    BATCH_ROW: batch_row_is_the_row_alone,
}
