"""Laws of what a session computes: a tree in one pass is its paths one by one, and a cache is what
a fresh pass leaves.

The judge is `dense`: the whole text, prompt and path, in one plain pass. The implementation is a
function that begins an empty session; whatever the session does with masks, positions, slots,
gathered paths and leftovers must not show.
"""

import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.dense import Array, run_dense
from tinyspec.lm.session import Session
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

NODE_LOGITS = "node logits = path logits (SpecInfer's tree attention, arXiv 2305.09781)"
SIBLING_ORDER = "permuting siblings changes no logits and no greedy output"
ROW_IDENTITY = "row identity: no bit of a row depends on what is computed beside it"
COMMITTED_SLOTS = "committed slots = a fresh forward, up to their reach, after every round"

Begin = Callable[[], Session]


def random_tree(rng: random.Random, nodes: int, names: Sequence[int]) -> TokenTree:
    """A tree of so many nodes spelled with few names, so that siblings are often equal."""
    parents = [rng.randrange(ROOT, i) for i in range(nodes)]
    return TokenTree(
        [rng.choice(names) for _ in parents], parents, (None,) * nodes, (False,) * nodes
    )


def reorder_siblings(rng: random.Random, tree: TokenTree) -> tuple[TokenTree, list[int]]:
    """The same tree with siblings, and with them their subtrees, in another order; and the old
    index of every node.
    """
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
    """Every row of a scored tree, over several rounds of score and commit, against the path alone.

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
    """Every row of a tree behind a prefilled text equals, bit for bit, what decoding its path token
    by token gives: then what is lossless in arithmetic is lossless in float32 and bfloat16 too."""
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
    """The same tree with its siblings in another order: the same row at every node, and greedily
    the same tokens, which are the ones that the highest logits of the plain pass spell down the
    tree."""
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
    """Follow the best token of the plain pass as long as some node spells it, one token beyond."""
    paths = {tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))}
    said: tuple[int, ...] = ()
    while True:
        said = (*said, int(run_dense(session.model, [*text, *said]).logits[-1].argmax()))
        if said not in paths:
            return said


def committed_slots(session: Session, tolerance: float = 1e-10, run: bool = True) -> int:
    """Compare every committed slot but the newest with a fresh pass over the text, in the layers it
    has reached; returns how many (slot, layer) were compared.

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
    """Run whole requests, greedily and by sampling, and look into the caches of target and drafts
    after every round.
    """
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
    """Accuse unless the two rows agree; shows the logit that is furthest off."""
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
