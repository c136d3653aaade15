"""TriForce: draft for a long context with the target itself, on a retrieved part of its cache.

Paper: Sun et al., COLM 2024, arXiv 2404.11912. Nothing is trained.

Idea. With a long context the target's cost is its key/value cache. Three levels share the work:
1. a small draft model that reads only the first tokens and the latest ones, at positions 0, 1, ...
   (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453), drafts gamma1 tokens for level 2;
2. the target's own weights, over *retrieved* chunks of its cache and all later tokens, verify them,
   and repeat until there are gamma2 tokens;
3. the target with its full cache verifies these gamma2 tokens in one forward pass.

Retrieval: old keys are cut into chunks. In every layer, for every key/value head, the chunks whose
mean key agrees most with the newest query q are kept, and the first chunk always:

    score(chunk) = q . mean of the chunk's keys             q: summed over the heads that share keys

Attention changes slowly, so the choice serves many rounds. It is made when the prompt has been
read, and again every `rebuild` tokens. A key that is not chosen is invisible, not deleted, so every
rollback is defined. `tinyspec bench long-context` measures acceptance and time by context and
budget.

Guarantee: EXACT. Level 2 is exact for its own distribution, so its tokens declare that one as q.
Pitfall: after a rejection in level 2 the released loop samples from level 2's distribution instead
of the residual; its tokens then do not follow the q that they declare.
Tests: tests/speculative/test_triforce.py (`decode_three_levels` against the code that runs, outcome
by outcome; a needle that only retrieval finds; a small model of 16 positions against dense passes;
the chunks against brute force; a budget that holds the context). The joint distribution is
enumerated on small transformers.
Left out: the rolling cache of StreamingLLM. There one key is evicted for each new token, and the
keys that stay were computed when their evicted neighbours were still visible. Here half of the
window is evicted at once, and the rest is computed anew at its new positions. So the small model
sees between half of `window` and all of it, and its distribution is that of a plain pass over what
it sees. New chunks are not chosen when acceptance falls. To choose chunks takes a query of the
target. It comes from a round that is run anyway, so the first round has no draft. In the authors'
code new tokens take the places of the chunks with the lowest scores, so the budget stays as it is;
and level 2 adds its bonus token, so it gives gamma2 or gamma2 + 1. The defaults are those of that
code, except `rebuild`, for which they have no fixed number. `window` is that of their class of
caches; their scripts set 234.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Cache, Plan, Scores, VisibleSet
from tinyspec.lm.model import Model
from tinyspec.lm.ops import linear, rotary_tables, rotate
from tinyspec.lm.session import Session
from tinyspec.speculative.drafting.speculative_decoding import verify_chain
from tinyspec.speculative.nested import NestedDrafter
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

NextProbs = Callable[[list[int]], Any]
"""(draft tokens after the text) -> distribution of the next token [V]."""


def decode_three_levels(
    small: NextProbs, middle: NextProbs, target: NextProbs, gamma1: int, gamma2: int, rng: Any
) -> list[int]:
    """Return the tokens of one round (algorithm 1).

    small   the draft model on the first and latest tokens
    middle  the target on the retrieved part of its cache
    target  the target on its full cache
    rng     a numpy.random.Generator

    The decoder runs `TriforceDrafter`, a decoder inside a decoder. A test compares the two on every
    outcome.
    """
    stood = list[int]()  # tokens that level 2 has written; each follows its row of q
    q = list[Any]()
    while len(stood) < gamma2:
        draft, q_small = list[int](), list[Any]()
        for _ in range(min(gamma1, gamma2 - len(stood) - 1)):  # a round of level 2 adds one token
            q_small.append(small(stood + draft))
            draft.append(rng.choice(len(q_small[-1]), p=q_small[-1]))
        p_middle = [middle(stood + draft[:i]) for i in range(len(draft) + 1)]
        tokens = verify_chain(p_middle, q_small, draft, rng)
        stood += tokens
        q += p_middle[: len(tokens)]  # not q_small: level 2 is exact for its own distribution
    p = [target(stood[:i]) for i in range(len(stood) + 1)]  # one forward pass
    return verify_chain(p, q, stood, rng)


class StreamingDrafter(ModelDrafter):
    """Draft with a model that reads the first `sink` tokens and the latest ones, as one text.

    The cache holds `sink` tokens, `window` tokens, and a draft. Positions count within the cache,
    so a model with a short context serves a text of any length. When the cache is full, the older
    half of the window is evicted at once, and the next draft computes the other half anew. What is
    evicted depends on the length of the text alone.

    text  all tokens
    gap   how many tokens after the first `sink` were evicted
    """

    def __init__(self, session: Session, gamma: int, ends: frozenset[int], sink: int, window: int):
        super().__init__(session, gamma, ends)
        self.session, self.sink, self.window = session, sink, window
        self.text: list[int] = []
        self.gap = 0

    def find_gap(self) -> int:
        """Return how many tokens must be evicted, in steps of half the window."""
        step = max(self.window // 2, 1)
        excess = max(len(self.text) - self.sink - self.window, 0)
        return -(-excess // step) * step

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. The next draft computes them."""
        self.text += tokens
        if self.find_gap() == self.gap:
            self.session.append(tokens)
        else:
            self.read_anew()

    def read_anew(self) -> None:
        """Keep the first tokens in the cache, and put the latest ones after them."""
        self.gap = self.find_gap()
        held = self.text[: self.sink] + self.text[self.sink + self.gap :]
        same = min(self.sink, len(self.session), len(held))  # these stay where they are
        self.session.rewind(same)
        self.session.append(held[same:])

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.append(tokens)
        self.session.extend(())  # computes what was appended

    def observe(self, round: Round) -> None:
        self.append(round.tokens)

    def rewind(self, length: int) -> None:
        if length >= len(self.text):
            return
        del self.text[length:]
        if self.find_gap() == self.gap:
            self.session.rewind(length - self.gap)
        else:
            self.read_anew()

    def end(self) -> None:
        super().end()
        self.text, self.gap = [], 0


class TriforceDrafter(NestedDrafter):
    """Draft with the target's own weights, over chosen chunks of its cache and what came since.

    budget   tokens that are kept of the old cache
    chunk    tokens that are kept or dropped together
    rebuild  tokens after which the chunks are chosen anew; 0: never
    """

    def __init__(self, inner: Decoder, gamma: int, budget: int, chunk: int, rebuild: int):
        super().__init__(inner, gamma, is_view=True)
        self.view: Any = inner.target
        self.budget, self.chunk, self.rebuild = budget, chunk, rebuild
        self.chosen_at: int | None = None  # length of the text when the chunks were chosen

    def propose(
        self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: RandomSource
    ) -> TokenTree:
        n = len(self.text)
        is_due = self.chosen_at is None or (self.rebuild and n >= self.chosen_at + self.rebuild)
        # The target shows its hidden states in a round after which chunks are chosen.
        n_layers = self.view.session.model.config.n_layers
        self.hidden_layers = range(n_layers) if is_due else ()
        if self.chosen_at is None:
            return TokenTree()
        return super().propose(context, max_draft_depth, sampling, rng)

    def observe(self, round: Round) -> None:
        super().observe(round)
        if self.hidden_layers:
            path = round.verdict.accepted
            newest = len(self.text) - 1 - (round.verdict.next is not None)  # that was computed
            states = round.scores.hidden[:, path[-1] + 1 if path else 0]
            self.view.plan = self.retrieve_chunks(states, newest)
            self.chosen_at, self.hidden_layers = len(self.text), ()

    def retrieve_chunks(self, states: Any, newest: int) -> Plan:
        """Return the plan for the text up to position `newest`.

        states  [L, d] what entered each layer at that position
        """
        session = self.view.session
        config = session.model.config
        chunks, keep = (newest + 1) // self.chunk, self.budget // self.chunk
        if keep >= chunks:  # the full cache
            return Plan()
        queries = recompute_queries(session.model, states, newest)  # [L, H, hd]
        grouped = queries.view(len(queries), config.n_kv_heads, -1, config.head_dim).sum(dim=2)
        layers = []
        for layer, query in enumerate(grouped):  # query [KV, hd]
            keys = mean_keys(session.cache, layer, self.chunk, chunks)  # [KV, chunks, hd]
            scores = (keys @ query[:, :, None])[:, :, 0]  # [KV, chunks]
            layers.append(tuple(map(self.chunk_positions, select_chunks(scores, keep))))
        return Plan(visible=VisibleSet(tuple(layers), since=chunks * self.chunk))

    def chunk_positions(self, chunks: list[int]) -> frozenset[int]:
        """Return the positions of all tokens of these chunks."""
        return frozenset(chunk * self.chunk + i for chunk in chunks for i in range(self.chunk))

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if self.chosen_at is not None and length < self.chosen_at:  # a chosen chunk may be gone
            self.chosen_at, self.view.plan = None, Plan()

    def end(self) -> None:
        super().end()
        self.chosen_at, self.view.plan, self.hidden_layers = None, Plan(), ()


# ------------------------------ retrieval (section 4.1)


def recompute_queries(model: Model, states: Tensor, position: int) -> Tensor:
    """Return the queries of the token at `position`, rotated to it: [L, H, hd].

    states  [L, d] what entered each layer (hidden layers 0 to L - 1)

    A forward pass does not keep its queries, so they are computed again from the hidden states.
    """
    c, weights = model.config, model.weights
    rows = list[Tensor]()
    for layer, state in enumerate(states):
        gain, bias = (
            _like(state, weights.get(f"{layer}.norm1.{kind}")) for kind in ("weight", "bias")
        )
        if c.norm == "rms":
            x = F.rms_norm(state, (c.d_model,), gain, c.norm_eps)
        else:
            x = F.layer_norm(state, (c.d_model,), gain, bias, c.norm_eps)
        qkv = weights[f"{layer}.qkv.weight"][: c.q_dim].to(state.device, state.dtype)
        offset = _like(state, weights.get(f"{layer}.qkv.bias"))
        rows.append(linear(x[None], qkv, None if offset is None else offset[: c.q_dim])[0])
    queries = torch.stack(rows).view(len(rows), c.n_heads, c.head_dim)
    if c.qk_norm:
        gains = [_like(state, weights[f"{i}.q_norm.weight"]) for i, state in enumerate(states)]
        normed = zip(queries, gains, strict=True)
        queries = torch.stack(
            [F.rms_norm(q, (c.head_dim,), gain, c.norm_eps) for q, gain in normed]
        )
    if c.positions == "rope":
        cos, sin = rotary_tables(c, states.dtype, states.device, position + 1)
        queries = rotate(queries, cos[position], sin[position])
    return queries


def mean_keys(cache: Cache, layer: int, chunk: int, chunks: int) -> Tensor:
    """Return the mean key of each of the first `chunks` chunks: [KV, chunks, hd]."""
    keys = cache.keys[layer][:, : chunk * chunks].unflatten(1, (chunks, chunk))
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    means: Tensor = keys.mean(dim=2, dtype=wide)
    return means


def select_chunks(scores: Tensor, keep: int) -> list[list[int]]:
    """Return for every head the `keep` chunks with the highest scores, in order.

    scores  [KV, chunks]

    The first chunk is always among them. Of chunks with equal scores the earlier one is kept.
    """
    order: Sequence[Sequence[int]] = (
        scores[:, 1:].argsort(dim=-1, descending=True, stable=True).tolist()
    )
    return [sorted([0, *(chunk + 1 for chunk in row[: keep - 1])]) for row in order]


def _like(state: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.to(state.device, state.dtype)


# ------------------------------ the card


@technique(
    title="TriForce",
    summary="the target drafts with few keys",
    paper="Sun et al. 2024, arXiv 2404.11912",
    reported="2.31x, LLaMA2-7B-128K (survey)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    hidden=True,
    knobs=(
        Knob(
            "gamma1",
            1,
            "tokens the small model drafts for the middle level",
            low=1,
            high=1024,
            small=(1,),
        ),
        Knob(
            "gamma2",
            6,
            "tokens the middle level writes before the target verifies them",
            low=1,
            high=1024,
            small=(2,),
        ),
        Knob(
            "budget",
            4096,
            "tokens of the old cache that the middle level sees",
            low=1,
            high=1 << 20,
            small=(1, 2),
        ),
        Knob("chunk", 8, "tokens that are retrieved together", low=1, high=4096, small=(1,)),
        Knob(
            "rebuild",
            256,
            "tokens after which chunks are chosen anew; 0: never",
            low=0,
            high=1 << 20,
            small=(1, 0),
        ),
        Knob("sink", 16, "first tokens that the small model sees", low=0, high=4096, small=(1,)),
        Knob(
            "window",
            496,
            "most of the latest tokens that the small model sees",
            low=1,
            high=1 << 20,
            small=(1,),
        ),
    ),
)
def triforce(
    request: Request,
    *,
    gamma1: int,
    gamma2: int,
    budget: int,
    chunk: int,
    rebuild: int,
    sink: int,
    window: int,
) -> Decoder:
    """Return a decoder whose draft comes from a decoder: the target on retrieved keys, and below it
    a small model.
    """
    if budget < chunk:
        raise TinyspecError(
            f"the budget of {budget} tokens holds no chunk of {chunk}: give a budget of at least "
            f"{chunk}"
        )
    if request.positions is not None and budget >= request.positions:
        warnings.warn(
            f"the retrieval budget of {budget} tokens holds the whole context of "
            f"{request.positions}: the middle level of triforce sees the full cache, as the target "
            "does; set a smaller budget to retrieve",
            stacklevel=2,
        )
    session: Any = request.target
    small: Any = request.drafts[0]
    ends = request.stop.eos
    limit = request.draft_max_length
    if limit is not None:  # sink, window and draft must fit into the small model's context
        gamma1 = min(gamma1, limit // 2)
        sink = min(sink, (limit - gamma1) // 2)
        window = min(window, limit - gamma1 - sink)
    drafter = StreamingDrafter(small, gamma1, ends, sink, window)
    middle = Decoder(
        session.view(Plan()),
        drafter,
        verify_tree,
        sampling=request.sampling,
        stop=StoppingCriteria(eos=ends),
        forward_log=request.forward_log,
    )
    return request.decoder(TriforceDrafter(middle, gamma2, budget, chunk, rebuild), verify_tree)
