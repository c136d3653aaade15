"""What can be seen of parts without asking any law. A defect that changes none of it would be no
defect.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.cache_laws import FAMILIES, Through, trees, weights
from tinyspec.laws.loop_laws import (
    BOTH,
    FEW,
    FORK,
    ONE,
    SMALL,
    TWO,
    WIDE,
    WIDER,
    Case,
    Halving,
    model,
)
from tinyspec.laws.noise import Noise
from tinyspec.laws.parts import Parts
from tinyspec.laws.report_laws import finished, request
from tinyspec.laws.stop_laws import DEAF, STOPS, recite
from tinyspec.lm.gate import run_together
from tinyspec.lm.plan import Plan
from tinyspec.lm.session import Session
from tinyspec.tree import ROOT, TokenTree

KNOBS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_k": 2, "top_p": 0.8},
    {"repetition_penalty": 2.0},
]


def outcomes(parts: Parts, cases: Sequence[Case], tokens: int = 2) -> Any:
    """For each case the exact law of (the first tokens, the rounds they took)."""

    def run(rng: Exhaustive, case: Case) -> Any:
        decoder, noise = case.decoder(parts), Noise(rng)
        decoder.extend((0,))
        while len(decoder.new) < tokens:
            decoder.step(noise)
        return tuple(decoder.new), decoder.rounds

    return [Exhaustive.law(lambda rng, case=case: run(rng, case)) for case in cases]  # type: ignore[misc]


def chains(parts: Parts) -> Any:
    """Outcomes of a chain of two over two tokens, and of one over three, and under a warper."""
    warped = Case(((1, 2),), ((2, 1),), ONE, 2, SamplingParams(top_k=1))
    return outcomes(
        parts, [Case(*SMALL[4], TWO, 2), Case(*SMALL[7], TWO, 2), Case(*SMALL[9], ONE, 2), warped]
    )


def siblings(parts: Parts) -> Any:
    """Outcomes of two siblings, drawn independently and without replacement."""
    return outcomes(
        parts,
        [Case(p, q, draft, 2) for p, q in (*SMALL[8:], (WIDE, WIDER)) for draft in (BOTH, FEW)],
        1,
    )


def penalised(parts: Parts) -> Any:
    """Outcomes under a penalty on what the text holds already."""
    return outcomes(parts, [Case(((1, 1),), ((1, 1),), TWO, 2, Halving(repetition_penalty=2.0))])


def trees_drafted(parts: Parts) -> Any:
    """The first trees of some drafters: tokens and declared laws."""
    made: list[Any] = []
    for draft, (p, q), seed in product(
        (TWO, BOTH, FEW, FORK), (*SMALL[2:6], (WIDE, WIDER)), range(4)
    ):
        decoder = Case(p, q, draft, 6, SamplingParams(top_k=2, temperature=0.5)).decoder(parts)
        decoder.extend((0,))
        tree = decoder.step(parts.seeded(seed)).tree
        made.append(
            (list(tree.tokens), [row if row is None else list(row) for row in tree.draft_probs])
        )
    for seed in range(4):
        drafter = parts.trees(model(WIDER).session(), (ROOT, ROOT, ROOT, 0), True)
        drafter.extend((0,), None)  # type: ignore[arg-type]
        made.append(tuple(drafter.propose([0], 2, SamplingParams(), parts.seeded(seed)).tokens))
    return made


def ends(parts: Parts) -> Any:
    """Where a recited text ends under each stop rule, why, what the target holds, and how deep the
    drafts were.
    """
    made = []
    drafts_of = ((3, ()), (1, ()), (0, (1, 1)), (4, DEAF))
    for rule, poem, most, (gamma, then) in product(
        STOPS, ((0, 1, 1, 0), (1, 0, 0, 0), (2, 0, 0, 0)), (1, 4), drafts_of
    ):
        decoder, drafts = recite(parts, poem, rule, most, None, gamma, then), []
        while not decoder.finished and len(decoder.new) <= most:
            drafts.append(list(decoder.step(parts.seeded(decoder.rounds)).tree.tokens))
        made.append((decoder.new, decoder.finished, list(decoder.target.text), drafts))  # type: ignore[attr-defined]
    return made


def figures(parts: Parts) -> Any:
    """Statistics, origins and round laws of requests on tables; log-probabilities on a
    transformer.
    """
    made: list[Any] = []
    for most, eos, seed in product((0, 1, 4), ((), (1,)), range(4)):
        decoder, rng = request(parts, WIDE, WIDER, 2, most, seed, eos)
        stats = parts.statistics()
        for one in finished(decoder, rng):
            stats.count(one)
            made += [parts.origins(one), [list(row) for row in one.output_probs]]
        made.append(repr(stats.as_dict()))
    target = weights("rotations")
    small = parts.drafter(weights("rotations", seed=1).session(), 2, frozenset())
    decoder = parts.decoder(
        target.session(), small, parts.walk, sampling=SamplingParams(temperature=0.5)
    )
    decoder.extend((1,))
    return [*made, [parts.logprobs(decoder.step(parts.seeded(at))) for at in range(3)]]


def rows(parts: Parts) -> Any:
    """What the functions of one row give, at the edges too."""
    made: list[Any] = []
    for logits, history in product(
        ([0.0, 1.0, 1.0], [2.0, -1.0, 0.5], [math.nan, 0.0, 1.0]), ((), (0, 0))
    ):
        for knobs in KNOBS:
            try:
                made.append(parts.sampling(**knobs).probs(np.array(logits), history).tolist())
            except TinyspecError:
                made.append("refused")
    for p, q in product(([1.0, 0.0], [0.5, 0.5]), repeat=2):
        made.append(parts.residual(np.array(p), np.array(q)).tolist())
    made += [
        parts.replay([0.0]).accept(0),
        parts.replay([0.0]).draw([0, 1]),
        parts.replay([0.5]).draw([0.5, 0.5]),
    ]
    made.append(parts.race(np.array([0.0, 1.0]), np.array([0.0, 1.0])))
    made.append([parts.replay([u, 0.5]).exponential_race([0.8, 0.2], 0) for u in (0.5, 0.95)])
    index = parts.index(2)
    index.append(0, [70_000, 4, 70_000, 5, 70_000])
    return repr([*made, index.lookup([70_000], 2)])


def kernels(parts: Parts) -> Any:
    """Kernels at the edges: two near laws, a row with hardly any mass."""
    row, tiny = np.array([0.1, 0.2, 0.7, 0.0]), np.array([5e-324, 0.0])
    near = row + np.array([1e-9, -1e-9, 0.0, 0.0])
    return parts.kernels["residual"](near, row).tolist(), parts.kernels["pick"](tiny, 0.75)


def drafted_outside(parts: Parts) -> Any:
    """What a verifier makes of an id that nobody knows, and of a draft with a smaller
    vocabulary.
    """
    made: list[Any] = []
    for token, q in ((-1, None), (0, [1.0])):
        try:
            tree = TokenTree.chain([token], [q])
            made.append(parts.walk(tree, {-1: [0.5, 0.5], 0: [0.5, 0.5]}, parts.replay([0.1, 0.9])))  # type: ignore[arg-type]
        except TinyspecError:
            made.append("refused")
    return made


def states(parts: Parts) -> Any:
    """Rows of trees, positions, and what a session says after a commit, a rewind, a fork, an exit
    and an end.
    """
    made: list[Any] = []

    def note(what: Any) -> None:
        made.append(np.asarray(what).round(8).tolist())

    for family, tree, node in (
        (f, t, n) for f in FAMILIES for t in trees()[3:5] for n in {ROOT, 0, len(t.tokens) - 1}
    ):
        if node >= len(tree.tokens):
            continue
        model = Through(weights(family), parts)
        session = parts.session(model)
        session.extend((1, 2, 3))
        note(session.score(tree).logits)
        made.append([feed.positions for feed in model.fed])
        session.commit(tree.path(node), 4)
        made.append(session.text)
        twin = session.fork()
        twin.rewind(2)
        twin.extend([5] * 9)
        note(session.score(TokenTree()).logits)
        for length in (len(session), 2):
            session.rewind(length)
            made.append(session.text)
        session.extend((6,))
        note(session.score(TokenTree()).logits)
        note(parts.view(session, Plan(last=1)).score(TokenTree()).logits)
        session.advance(TokenTree.chain([2]), 1)
        session.commit((0,), 3)
        session.fill("recompute")
        session.extend([1] * 70)
        note(session.score(TokenTree()).logits)
        session.end()
        made.append(session.text)
    return made


def bits(parts: Parts) -> Any:
    """The rows of a tree in float32, to the bit."""
    session = parts.session(Through(weights("rotations").to(dtype=torch.float32), parts))
    session.extend((1, 2, 3))
    return session.score(trees()[-2]).logits.tolist()


def batches(parts: Parts) -> Any:
    """What two requests that share every pass see."""
    model = Through(weights("rotations"), parts)

    def job(prompt: tuple[int, ...]) -> Any:
        def run(gate: Any) -> Any:
            session = Session(model, gate=gate.through(model))
            session.extend(prompt)
            return session.score(TokenTree()).logits.numpy().round(8).tolist()

        return run

    return run_together([job((2, 3, 4)), job((1, 5))])


def noise_states(parts: Parts) -> Any:
    """A request, the same again, and whether it moved the global generator of `random`."""
    made = []
    for _ in range(2):
        before = random.getstate()
        decoder, rng = request(parts, WIDE, WIDER, 1, 6, 1)
        finished(decoder, rng)
        made.append((decoder.new, random.getstate() == before))
    return made[0] == made[1], made[0][1]


def uniforms(parts: Parts) -> Any:
    """The names of the uniforms that eight rounds use."""

    def run(rng: Exhaustive) -> Any:
        decoder, noise = Case(((1, 3),), ((3, 1),), ONE, 1).decoder(parts), Noise(rng)
        decoder.extend((0,))
        for _ in range(8):
            decoder.step(noise)
        return noise.reads

    return next(iter(Exhaustive.walk(run)))[0]


def greedy_texts(parts: Parts) -> Any:
    """Six tokens at temperature 0 on tables."""
    made = []
    for (p, q), seed in product((*SMALL[2:6], (WIDE, WIDER)), range(3)):
        decoder, rng = (
            Case(p, q, TWO, 6, parts.sampling(temperature=0.0)).decoder(parts),
            parts.seeded(seed),
        )
        decoder.extend((0,))
        while len(decoder.new) < 6:
            decoder.step(rng)
        made.append(decoder.new)
    return made
