"""Laws for what remembers: cache, positions, exits, rewinds, and rows that share a pass. Trees and
masks are in passes.py.

The judge is `dense`, one plain pass over the whole text: no session, no cache, no mask but the
causal one. Models are float64, random, with weights so large that every layer, position and token
changes every row. Each law takes a `Parts`, goes from few tokens to many, and raises `LawViolated`
with the first case that breaks it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.decode import BaseDrafter
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.dense import run_dense
from tinyspec.laws.parts import Parts
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch, Plan, Scores
from tinyspec.lm.gate import run_together
from tinyspec.lm.session import Session
from tinyspec.lm.transformer import Model
from tinyspec.tree import ROOT, TokenTree

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
    """A random float64 model of a family."""
    return Model.random(FAMILIES[family], seed=seed, dtype=torch.float64, scale=0.5)


class ThroughParts(Model):
    """A model whose passes go through the part that is judged. `fed` holds what reached the model
    itself.
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
    """(family, the judge's model, the same weights through the part that is judged)."""
    return [
        (family, family_model(family), ThroughParts(family_model(family), parts))
        for family in FAMILIES
    ]


def rows_differ(got: Any, expected: Any) -> bool:
    """Whether two rows differ by more than rounding."""
    return not np.allclose(np.asarray(got), np.asarray(expected), rtol=0, atol=SESSION_TOLERANCE)


def greedy_text(model: Model, prompt: Sequence[int], n: int) -> list[int]:
    """The target's greedy tokens, a whole pass for each."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(run_dense(model, text).logits[-1].argmax()))
    return text[len(prompt) :]


def small_trees() -> list[TokenTree]:
    """Every shape of up to two guesses, a fork behind a second child, two larger ones, and equal
    siblings.
    """
    shapes = [(), (-1,), (-1, -1), (-1, 0), (-1, -1, 1), (-1, -1, 0, 1, 3), (-1, 0, 0, -1, 3, 2)]
    made = [TokenTree(range(1, len(s) + 1), s, (None,) * len(s), (False,) * len(s)) for s in shapes]
    return [*made, TokenTree((2, 2, 3), (-1, -1, 1), (None,) * 3, (False,) * 3)]


def positions_count_the_text(parts: Parts) -> Evidence:
    """A row's position is the number of tokens before it on its own path."""
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
    """The session's text, what it says next, and its keys in every layer, against one plain
    pass.
    """
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
    """After a round the keys of the text are those of one pass over it, whichever path of the tree
    was kept.
    """
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
    """After `rewind(n)` the text has n tokens, whatever n is, and goes on like a text that never
    was longer; and what a fork does, to its end, is not seen by the session it came from."""
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
    """A view that leaves after E layers says what the model cut down to E layers says; a token that
    left early and was run further after all leaves the keys and values of a full pass."""
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
    """Proposes two tokens, the first `right` of which are the greedy ones; `wide`: beside a first
    sibling that is wrong.
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
    """At temperature 0 the tokens are the target's greedy ones, whatever is drafted."""
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
    """Requests of unequal lengths that share passes get what each gets alone, in whatever order
    they stand.
    """
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
