"""TriForce: for long contexts, the target drafts for itself over a retrieved part of its cache.

Sun et al., COLM 2024, arXiv 2404.11912. Three levels. A small draft model that sees only the first
tokens and the latest ones (StreamingLLM) drafts for the *target itself with a retrieved cache*;
what that commits is the draft for the target with its full cache. Retrieval: the old keys are cut
into chunks; in every layer and for every key/value head the chunks whose mean key agrees most with
the current query are kept, the first chunk always, and so is whatever came since. The choice serves
many rounds, because what is looked at changes slowly; it is made when the prompt has been read, and
again every `rebuild` tokens. Nothing is trained. Eviction is a visible set, never a physical drop,
so every rollback is defined.

Guarantee: EXACT. The middle level is exact for its own law, so its tokens declare that law; after a
refusal inside it draws from the residual (the released loop draws from the middle's row again, and
loses the law). Tested in tests/speculative/test_triforce.py: a needle that only retrieval finds;
the chosen set against brute force; a budget that holds the whole context makes middle and target
agree always. The law of three levels is enumerated on small transformers.
Left out: a choice made anew when acceptance falls. Chunks are chosen by a round that is run anyway
(the first is plain), whose newest token gives the query; where query heads share keys, their scores
are added.
"""

import warnings
from typing import Any

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.plan import Plan, Visible
from tinyspec.lm.queries import chosen, mean_keys, queries
from tinyspec.lm.session import Session
from tinyspec.speculative.nested import Nested
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree


class StreamingDrafter(ModelDrafter):
    """A model that sees the first `sink` tokens and at least the latest `window` (Xiao et al. 2023,
    arXiv 2309.17453).

    The window moves in steps of an eighth of itself: what was run under another plan is run again.
    """

    def __init__(
        self,
        session: Session,
        gamma: int,
        ends: frozenset[int],
        positions: int | None,
        sink: int,
        window: int,
    ):
        super().__init__(session, gamma, ends, positions)
        self.session, self.sink, self.window = session, sink, window

    def propose(
        self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: RandomSource
    ) -> TokenTree:
        self.session.replan(self.streaming_plan(len(self.session)))
        return super().propose(context, max_draft_depth, sampling, rng)

    def streaming_plan(self, length: int) -> Plan:
        """What is seen of a text of so many tokens."""
        step = max(self.window // 8, 1)
        since = (length - self.window) // step * step
        if since <= self.sink:
            return Plan()
        c = self.session.model.config
        return Plan(visible=Visible.everywhere(range(self.sink), since, c.n_layers, c.n_kv_heads))


class TriforceDrafter(Nested):
    """The middle level: the target's own weights over the chunks of its cache that were chosen, and
    what came since.

    budget  tokens that are kept of the old cache; chunk: tokens that are kept or dropped together
    """

    def __init__(self, inner: Decoder, gamma: int, budget: int, chunk: int, rebuild: int):
        super().__init__(inner, gamma, guest=True)
        self.view: Any = inner.target
        self.budget, self.chunk, self.rebuild = budget, chunk, rebuild
        self.chosen_at: int | None = None  # length of the text when the chunks were chosen

    def propose(
        self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: RandomSource
    ) -> TokenTree:
        n = len(self.text)
        due = self.chosen_at is None or (self.rebuild and n >= self.chosen_at + self.rebuild)
        self.hidden_layers = (
            range(self.view.session.model.config.n_layers) if due else ()
        )  # this round shows its states
        return (
            TokenTree()
            if self.chosen_at is None
            else super().propose(context, max_draft_depth, sampling, rng)
        )

    def observe(self, round: Round) -> None:
        super().observe(round)
        if self.hidden_layers:
            path = round.verdict.accepted
            newest = (
                len(self.text) - 1 - (round.verdict.next is not None)
            )  # the last token that was run
            self.view.plan = self.retrieve_chunks(
                round.scores.hidden[:, path[-1] + 1 if path else 0], newest
            )
            self.chosen_at, self.hidden_layers = len(self.text), ()

    def retrieve_chunks(self, states: Any, newest: int) -> Plan:
        """The plan for the text up to position `newest`, whose token entered the layers with these
        states [L, d].
        """
        session = self.view.session
        config, chunks, keep = (
            session.model.config,
            (newest + 1) // self.chunk,
            self.budget // self.chunk,
        )
        if keep >= chunks:  # the full cache
            return Plan()
        asked = queries(session.model, states, newest)  # [L, H, hd]
        grouped = asked.view(len(asked), config.n_kv_heads, -1, config.head_dim).sum(
            dim=2
        )  # [L, KV, hd]
        layers = []
        for layer, query in enumerate(grouped):
            scores = (mean_keys(session.cache, layer, self.chunk, chunks) @ query[:, :, None])[
                :, :, 0
            ]  # [KV, chunks]
            layers.append(tuple(self.chunk_positions(kept) for kept in chosen(scores, keep)))
        return Plan(visible=Visible(tuple(layers), since=chunks * self.chunk))

    def chunk_positions(self, chunks: list[int]) -> frozenset[int]:
        """All tokens of these chunks."""
        return frozenset(chunk * self.chunk + i for chunk in chunks for i in range(self.chunk))

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if self.chosen_at is not None and length < self.chosen_at:  # what was chosen may be gone
            self.chosen_at, self.view.plan = None, Plan()

    def end(self) -> None:
        super().end()
        self.chosen_at, self.view.plan, self.hidden_layers = None, Plan(), ()


@technique(
    title="TriForce",
    summary="the target drafts with few keys",
    paper="Sun et al. 2024, arXiv 2404.11912",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    hidden=True,
    knobs=(
        Knob("gamma1", 1, "tokens the small model drafts for the middle level", low=1, small=(1,)),
        Knob(
            "gamma2", 6, "tokens the middle level makes before the target looks", low=1, small=(2,)
        ),
        Knob(
            "budget",
            4096,
            "tokens of the old cache that the middle level sees",
            low=1,
            small=(1, 2),
        ),
        Knob("chunk", 8, "tokens that are retrieved together", low=1, small=(1,)),
        Knob(
            "rebuild",
            256,
            "tokens after which chunks are chosen anew; 0: never",
            low=0,
            small=(1, 0),
        ),
        Knob("sink", 16, "first tokens that the small model sees", low=0, small=(1,)),
        Knob("window", 496, "latest tokens that the small model sees", low=1, small=(1,)),
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
    """A small model, the target on retrieved keys, the target."""
    if budget < chunk:
        raise TinyspecError(
            f"the budget of {budget} tokens holds no chunk of {chunk}: give a budget of at least {chunk}"
        )
    if request.positions is not None and budget >= request.positions:
        warnings.warn(
            f"the retrieval budget of {budget} tokens holds the whole context of {request.positions}: the middle level of "
            "triforce sees the full cache, as the target does; set a smaller budget to retrieve",
            stacklevel=2,
        )
    session: Any = request.target
    small: Any = request.drafts[0]
    ends, reach = (
        request.stop.eos,
        request.draft_max_lengths[0] if request.draft_max_lengths else None,
    )
    drafter = StreamingDrafter(small, gamma1, ends, reach, sink, window)
    middle = Decoder(
        session.view(Plan()),
        drafter,
        verify_tree,
        sampling=request.sampling,
        stop=StoppingCriteria(eos=ends),
        forward_log=request.forward_log,
    )
    return request.decoder(TriforceDrafter(middle, gamma2, budget, chunk, rebuild), verify_tree)
