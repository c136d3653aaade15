"""Laws of a session: a tree in one pass equals its paths, and a cache equals a fresh pass.

The judge is `run_dense`: the whole text, prompt and path, in one plain pass. Masks, positions,
slots, gathered paths and leftovers of a session must not show. Models are float64 and random, with
weights so large that every layer, position and token changes every row.
"""

import random
from collections.abc import Callable, Sequence
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
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.models import Array, run_dense
from tinyspec.laws.parts import Parts
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch, Plan, Scores
from tinyspec.lm.gate import run_together
from tinyspec.lm.model import Model
from tinyspec.lm.session import Session
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

NODE_LOGITS = "node logits = path logits (SpecInfer's tree attention, arXiv 2305.09781)"
SIBLING_ORDER = "permuting siblings changes no logits and no greedy output"
ROW_IDENTITY = "row identity: no bit of a row depends on what is computed beside it"
COMMITTED_SLOTS = "committed slots = a fresh forward, up to their reach, after every round"

Begin = Callable[[], Session]


def random_tree(rng: random.Random, nodes: int, names: Sequence[int]) -> TokenTree:
    """Return a tree of `nodes` nodes spelled with few tokens, so that siblings are often equal."""
    parents = [rng.randrange(ROOT, i) for i in range(nodes)]
    return TokenTree(
        [rng.choice(names) for _ in parents], parents, (None,) * nodes, (False,) * nodes
    )


def reorder_siblings(rng: random.Random, tree: TokenTree) -> tuple[TokenTree, list[int]]:
    """Return the tree with siblings in another order, and the old index of every node."""
    order: list[int] = []
    waiting = [i for i, parent in enumerate(tree.parents) if parent == ROOT]
    while waiting:  # any node whose parent stands already
        order.append(waiting.pop(rng.randrange(len(waiting))))
        waiting += [i for i, parent in enumerate(tree.parents) if parent == order[-1]]
    new = {old: i for i, old in enumerate(order)} | {ROOT: ROOT}
    moved = [new[tree.parents[old]] for old in order]
    return TokenTree(
        tree.tokens_on(order),
        moved,
        [tree.draft_probs[i] for i in order],
        [tree.probe[i] for i in order],
    ), order


def node_logits(
    begin: Begin, *, cases: int = 3, rounds: int = 3, nodes: int = 6, tolerance: float = 1e-10
) -> Evidence:
    """Check every row of scored trees, over several rounds, against the path alone.

    tolerance  of the greatest magnitude in the row
    """
    began, looked = perf_counter(), 0
    for case, size in ((case, size) for size in range(nodes + 1) for case in range(cases)):
        rng = random.Random(f"{size}:{case}")
        session = begin()
        names = _some_tokens(rng, session)
        session.extend([rng.choice(names) for _ in range(1 + size + case)])
        for _ in range(rounds):
            tree = random_tree(rng, size, names)
            text = session.text
            scores = session.score(tree)
            for node in range(ROOT, size):
                expected = run_dense(
                    session.model, [*text, *tree.tokens_on(tree.path(node))]
                ).logits[-1]
                _expect_rows_agree(
                    NODE_LOGITS, expected, scores.logits[node + 1], tolerance, text, tree, node=node
                )
                looked += 1
            session.commit(
                tree.path(rng.randrange(ROOT, size)),
                rng.choice([*names, None]) if size else names[0],
            )
            if session.text == text:
                session.append(names[:1])
    return Evidence(NODE_LOGITS, looked, 0, perf_counter() - began)


def row_identity(begin: Begin, *, cases: int = 8) -> Evidence:
    """Check that every row of a tree equals, bit for bit, decoding its path token by token.

    Then what is lossless in arithmetic is lossless in float32 and bfloat16 too.
    """
    began, looked = perf_counter(), 0
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
            alone, looked = plain.score(TokenTree()).logits[0], looked + 1
            _expect_rows_agree(
                ROW_IDENTITY, _as_array(alone), logits[node + 1], 0.0, text, tree, node=node
            )
    return Evidence(ROW_IDENTITY, looked, 0, perf_counter() - began)


def sibling_order(
    begin: Begin,
    verifier: Callable[[TokenTree, Any, RandomSource], Verdict],
    *,
    cases: int = 30,
    nodes: int = 6,
    tolerance: float = 1e-10,
) -> Evidence:
    """Check that the order of siblings changes no row and no greedy token.

    The tokens are those that the highest logits of the plain pass spell down the tree.
    """
    began = perf_counter()
    for case in range(cases):
        rng = random.Random(case)
        prompt_length, size = 1 + case % 5, 2 + case * (nodes - 1) // cases
        plain = begin()
        names = _some_tokens(rng, plain)
        text = [rng.choice(names) for _ in range(prompt_length)]
        plain.extend(text)
        names = [
            *names,
            int(run_dense(plain.model, text).logits[-1].argmax()),
        ]  # something that greedy decoding takes
        tree = random_tree(rng, size, names)
        other, old = reorder_siblings(rng, tree)
        turned = begin()
        turned.extend(text)
        rows, moved = plain.score(tree).logits, turned.score(other).logits
        for node in range(ROOT, size):
            expected = rows[ROOT + 1] if node == ROOT else rows[old[node] + 1]
            _expect_rows_agree(
                SIBLING_ORDER,
                _as_array(expected),
                moved[node + 1],
                tolerance,
                text,
                other,
                node=node,
                was=tree.tokens,
            )
        spelled = _greedily(plain, text, tree)
        for shape, logits in ((tree, rows), (other, moved)):
            sharp = {node: _one_hot(logits[node + 1]) for node in range(ROOT, size)}
            verdict = verifier(shape, sharp, Seeded(case))
            said = (*shape.tokens_on(verdict.accepted), verdict.next)
            if said != spelled:
                accuse(
                    SIBLING_ORDER,
                    spelled,
                    said,
                    text=text,
                    tokens=tuple(shape.tokens),
                    parents=tuple(shape.parents),
                )
    return Evidence(SIBLING_ORDER, cases, 0, perf_counter() - began)


def _greedily(session: Session, text: Sequence[int], tree: TokenTree) -> tuple[int, ...]:
    """Return the best tokens of the plain pass while some node spells them, and one more."""
    paths = {tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))}
    said: tuple[int, ...] = ()
    while True:
        said = (*said, int(run_dense(session.model, [*text, *said]).logits[-1].argmax()))
        if said not in paths:
            return said


def committed_slots(session: Session, tolerance: float = 1e-10, run: bool = True) -> int:
    """Compare every committed slot but the newest with a fresh pass over the text.

    Only the layers it has reached are compared; returns how many (slot, layer) pairs.

    run  also demand that each has been run at all (a draft's session may be behind its text, a
         target's may not)

    A token that left early, and one that looked at keys copied up for such a token, is compared as
    far as it was run exactly: such a session does not say `cache_exact`.
    """
    text, cache = session.text, session.cache
    fresh = run_dense(session.model, text, session.plan)
    compared, lawful = 0, session.cache_exact
    for slot, node in enumerate(session.committed[:-1]):
        if run and not cache.present[slot].any():
            accuse(COMMITTED_SLOTS, "keys and values", "none", text=text, slot=slot)
        if not (lawful or node.exact):
            continue
        for layer in np.flatnonzero(cache.present[slot]):
            if not lawful and layer >= (node.sublayers_done + 1) // 2:
                break  # copied up
            for name, expected, held in (
                ("key", fresh.keys, cache.keys),
                ("value", fresh.values, cache.values),
            ):
                want = expected[layer]
                if want is not None:
                    got = _as_array(held[layer][:, slot])
                    if not np.abs(got - want[slot]).max() <= tolerance * max(
                        1.0, float(np.abs(want).max())
                    ):
                        where = {"slot": slot, "layer": int(layer)}
                        accuse(
                            COMMITTED_SLOTS,
                            want[slot].ravel()[:4],
                            got.ravel()[:4],
                            text=text,
                            of=name,
                            **where,
                        )
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
    return Evidence(
        COMMITTED_SLOTS,
        rounds,
        compared,
        perf_counter() - began,
        [f"{compared} (slot, layer) compared"],
    )


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
        where = {
            "text": tuple(text),
            "tokens": tuple(tree.tokens),
            "parents": tuple(tree.parents),
            **case,
        }
        accuse(law, float(expected[worst]), float(_as_array(got)[worst]), **where, logit_of=worst)


POSITIONS_COUNT = "positions count the text"
CACHE_FRESH = "cache is a fresh forward"
REWIND_TRACELESS = "rewinding is never having gone"
EXIT_TRUNCATED = "an exit is the truncated model"
SESSION_GREEDY = "greedy equality"
BATCH_ROW = "a batch row is the row alone"

SESSION_TOLERANCE = 1e-9
SESSION_VOCABULARY, SESSION_LAYERS = 7, 3
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


def greedy_text(model: Model, prompt: Sequence[int], n: int) -> list[int]:
    """Return the target's greedy tokens, by a whole pass for each."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(run_dense(model, text).logits[-1].argmax()))
    return text[len(prompt) :]


def small_trees() -> list[TokenTree]:
    """Return every shape of up to two nodes, some larger ones, and equal siblings."""
    shapes = [(), (-1,), (-1, -1), (-1, 0), (-1, -1, 1), (-1, -1, 0, 1, 3), (-1, 0, 0, -1, 3, 2)]
    made = [TokenTree(range(1, len(s) + 1), s, (None,) * len(s), (False,) * len(s)) for s in shapes]
    return [*made, TokenTree((2, 2, 3), (-1, -1, 1), (None,) * 3, (False,) * 3)]


def positions_count_the_text(parts: Parts) -> Evidence:
    """Check that a row's position is the number of tokens before it on its own path."""
    seen = 0
    for prompt, (family, _, model), tree in product(PROMPTS, judged_models(parts), small_trees()):
        session, seen = parts.session(model), seen + 1
        session.extend(prompt)
        model.fed.clear()
        session.score(tree)
        expected = sorted(len(prompt) - 1 + depth for depth in {0, *tree.depths()})
        got = sorted({position for feed in model.fed for position in feed.positions})
        if got != expected:
            accuse(
                POSITIONS_COUNT, expected, got, model=family, prompt=prompt, parents=tree.parents
            )
    return Evidence(POSITIONS_COUNT, seen)


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


def cache_is_a_fresh_forward(parts: Parts) -> Evidence:
    """Check that after a round the keys are those of one pass over the text, on any path."""
    seen = 0
    for prompt, (family, _, model), tree in product(
        PROMPTS[:2], judged_models(parts), small_trees()
    ):
        for node, after in product(range(ROOT, len(tree.tokens)), (None, 6)):
            if node == ROOT and after is None:
                continue
            session, seen, path = parts.session(model), seen + 1, tree.path(node)
            session.extend(prompt)
            session.score(tree)
            session.commit(path, after)
            text = [*prompt, *tree.tokens_on(path), *(() if after is None else (after,))]
            case = {
                "model": family,
                "prompt": prompt,
                "tokens": list(tree.tokens),
                "parents": tree.parents,
            }
            _judge_session(CACHE_FRESH, session, text, {**case, "kept": path, "next": after})
    long = [1 + at % 5 for at in range(80)]  # more slots than a cache begins with
    for family, _, model in judged_models(parts):
        session, seen = parts.session(model), seen + 1
        session.extend(long[:60])
        for token in long[60:]:
            session.score(TokenTree())
            session.commit((), token)
        _judge_session(
            CACHE_FRESH,
            session,
            long,
            {"model": family, "text": f"{len(long)} tokens, the last 20 one by one"},
        )
    return Evidence(CACHE_FRESH, seen)


def rewinding_is_never_having_gone(parts: Parts) -> Evidence:
    """Check that a rewound text continues like one that was never longer.

    What a fork does, to its end, is not seen by the session it came from.
    """
    seen, text = 0, [1, 2, 3, 4]
    for (family, _, model), length in product(judged_models(parts), range(1, len(text) + 1)):
        for then in ((), (5,), (5, 6)):
            session, seen = parts.session(model), seen + 1
            session.extend(text)
            session.score(TokenTree.chain([5, 5]))
            session.rewind(length)
            if then:
                session.extend(then)
            case = {"model": family, "text": text, "rewind": length, "then": then}
            _judge_session(REWIND_TRACELESS, session, [*text[:length], *then], case)
        session, seen = parts.session(model), seen + 1
        session.extend(text)
        twin = session.fork()
        twin.rewind(length)
        twin.extend([6, 6, 6, 6])
        twin.score(TokenTree.chain([5]))
        case = {"model": family, "text": text, "a fork goes on as": [*text[:length], 6, 6, 6, 6]}
        _judge_session(REWIND_TRACELESS, session, text, case)
    return Evidence(REWIND_TRACELESS, seen)


def an_exit_is_the_truncated_model(parts: Parts) -> Evidence:
    """Check that a view that leaves after E layers equals the model truncated to E layers.

    A token that left early and was run further after all leaves the keys and values of a full pass.
    """
    seen = 0
    for prompt, (family, judge, model), layers in product(
        PROMPTS, judged_models(parts), range(1, SESSION_LAYERS + 1)
    ):
        case = {"model": family, "prompt": prompt, "exit after layer": layers}
        session, plan, seen = parts.session(model), Plan(last=layers), seen + 1
        session.extend(prompt)
        row = parts.view(session, plan).score(TokenTree.chain([2])).logits[1]
        expected = run_dense(judge, [*prompt, 2], plan).logits[-1]
        if rows_differ(row, expected):
            accuse(EXIT_TRUNCATED, expected, row, **case, token=2)
        early = parts.session(model)
        early.extend(prompt)
        early.advance(TokenTree.chain([2]), layers)
        early.commit((0,), 3)
        early.fill("recompute")
        _judge_session(
            EXIT_TRUNCATED, early, [*prompt, 2, 3], {**case, "then": "filled by recomputing"}
        )
    return Evidence(EXIT_TRUNCATED, seen)


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
        return TokenTree((other, *drafted), (ROOT, ROOT, 1), (None,) * 3, (False,) * 3)


def greedy_equality_of_parts(parts: Parts) -> Evidence:
    """Check that at temperature 0 the tokens are the target's greedy ones, whatever is drafted."""
    seen, wanted = 0, 5
    for prompt, (family, judge, model) in product(PROMPTS[:2], judged_models(parts)):
        expected = greedy_text(judge, prompt, wanted)
        drafters: dict[str, Any] = {
            f"2 tokens, {right} of them right{', as the second sibling' if wide else ''}": PartlyRightDrafter(
                judge, right, wide
            )
            for right, wide in product(range(3), (False, True))
        }
        drafters["another model's 2 tokens"] = parts.drafter(
            family_model(family, seed=1).session(), 2, frozenset()
        )
        for draft, drafter in drafters.items():
            seen, stop = seen + 1, StoppingCriteria(max_new_tokens=wanted)
            sampling = parts.sampling(temperature=0.0)
            decoder = parts.decoder(
                parts.session(model), drafter, parts.walk, sampling=sampling, stop=stop
            )
            decoder.extend(prompt)
            for at in range(wanted):
                if not decoder.finished:
                    decoder.step(parts.seeded(at))
            if decoder.new != expected:
                accuse(
                    SESSION_GREEDY, expected, decoder.new, model=family, prompt=prompt, draft=draft
                )
    return Evidence(SESSION_GREEDY, seen)


def batch_row_is_the_row_alone(parts: Parts) -> Evidence:
    """Check that requests of unequal lengths that share passes get what each gets alone."""
    seen, prompts = 0, [(1,), (2, 3), (4, 5, 6, 1, 2)]

    def job(model: ThroughParts, row: int) -> Any:
        def run(gate: Any) -> list[Any]:
            session, shown = Session(model, gate=gate.through(model)), list[Any]()
            session.extend(prompts[row])
            for token in (3, 4):
                shown.append(session.score(TokenTree.chain([token] * (row % 2))).logits[0])
                session.commit((), token)
            return shown

        return run

    for rows, (family, judge, model) in product(
        ((0, 1), (1, 0), (0, 2), (2, 0, 1)), judged_models(parts)
    ):
        seen, together = seen + 1, run_together([job(model, row) for row in rows])
        for at, row in product(range(2), range(len(rows))):
            text = [*prompts[rows[row]], *(3, 4)[:at]]
            expected, got = run_dense(judge, text).logits[-1], together[row][at]
            if rows_differ(got, expected):
                batch = [prompts[other] for other in rows]
                accuse(
                    BATCH_ROW,
                    expected,
                    got,
                    model=family,
                    batch=batch,
                    row=prompts[rows[row]],
                    text=text,
                )
    return Evidence(BATCH_ROW, seen)


SESSION_LAWS = {
    POSITIONS_COUNT: positions_count_the_text,
    CACHE_FRESH: cache_is_a_fresh_forward,
    REWIND_TRACELESS: rewinding_is_never_having_gone,
    EXIT_TRUNCATED: an_exit_is_the_truncated_model,
    SESSION_GREEDY: greedy_equality_of_parts,
    BATCH_ROW: batch_row_is_the_row_alone,
}
