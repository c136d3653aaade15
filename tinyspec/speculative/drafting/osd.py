"""Online speculative decoding: train the draft between requests, on the tokens that were rejected.

Paper: Liu et al., ICML 2024, arXiv 2310.07177. The draft model is trained; the target is not. The
constants were read in the authors' code (github.com/LiuXiaoxuanPKU/OSD, commit 788a403).

Idea. Verification shows where the draft is wrong, and has computed what is right there. So the
draft is trained on just these places, while the requests are served. After a request, the buffer
gets its text, the places at which the target rejected a draft token, and the target's rows there.
After every I requests the draft takes one step on all places of the buffer, and the buffer is
emptied:

    L = mean over places t of D(p_t || q_t)         p_t: target's row after y_1 .. y_t, q_t: draft's

where t is the place *before* the rejected token: the draft drew that token from its row at t. D is
KL (as in the authors' online step), reverse KL, or the Jensen-Shannon divergence. The rows are
those at temperature 1. The optimiser is AdamW without weight decay; gradients are clipped to norm
1.

The weights of a draft change only between requests. So all draft tokens of a request are drawn from
one model, and the distribution that they declare is that model's.

Guarantee: EXACT before, across and after updates: only the draft changes.
Pitfall: the released step keeps the row *at* the rejected token, which predicts the next one, and
it counts the bonus token of a fully accepted round as rejected. Both are rows of laws/museum. A
draft whose keys and values are older than its weights.
State: weights, optimiser and buffer outlive the request (`persistent`). There is one for each
target, draft, interval, lr and loss; a target keeps those that were used last. In a batch, and so
in `tinyspec serve`, a text must be the one that its request gets alone. So nothing is learned
there. Above temperature 0 the text of a seed depends on the requests before it. At temperature 0 it
is plain decoding's text. The first update copies the draft's weights in float32, and Adam keeps two
more numbers for each.
Tests: tests/speculative/test_osd.py (only places of rejected tokens get a gradient, and it is
(q - p) / n; the joint distribution while a draft changes between rounds and after an update; every
draft of a request is that of one set of weights; more tokens are accepted after updates).
Defaults: gamma, interval and lr are those of the authors' commands (bash_scripts). Under the name
jsd their offline step adds 0.9 KL and 0.1 reverse KL; ours is the divergence to the mean of p and
q, with weights 1/2 (see `distillspec`).
Left out: several drafts by topic; texts that the draft writes; training beside the decoding, in
idle time: an update here takes its time at the end of a request.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.distillspec import DIVERGENCES, Divergence
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique

MAX_GRADIENT_NORM = 1.0  # the default of transformers' Trainer, which the authors use


class RejectedPlaces(NamedTuple):
    """Where the target rejected draft tokens in one request.

    ids     the text, up to the last of the places
    places  [k] positions in it, rising: the token drafted after each of them was rejected
    logits  [k, V] of the target at these positions
    """

    ids: list[int]
    places: list[int]
    logits: Tensor


def rejection_loss(
    blocks: Blocks, requests: Sequence[RejectedPlaces], divergence: Divergence
) -> Tensor:
    """Return the mean divergence of the draft from the target over all rejected places.

    The texts stand in one batch, padded at the end. No logits are computed at other places.
    """
    longest = max(len(request.ids) for request in requests)
    ids = torch.tensor([[*r.ids, *[0] * (longest - len(r.ids))] for r in requests])
    states = blocks.final_states(ids.to(blocks.device))
    drafted = [states[row, request.places] for row, request in enumerate(requests)]
    q = blocks.apply_head(torch.cat(drafted)).softmax(-1)
    p = torch.cat([request.logits for request in requests]).to(q).softmax(-1)
    return divergence(p, q).mean()


class OnlineDraft:
    """A draft model that learns between requests.

    model     the draft of the next request. An update makes a new model, and leaves this one as it
              is to the requests that still run
    interval  requests between two updates
    lr        learning rate
    loss      name of the divergence
    """

    def __init__(self, model: Any, interval: int, lr: float, loss: str):
        self.model, self.interval, self.lr, self.loss = model, interval, lr, loss
        self.requests = self.updates = 0  # requests: those since the last update
        self.buffer = list[RejectedPlaces]()
        self.weights = dict[str, Tensor]()
        self.optimizer: torch.optim.AdamW | None = None

    @property
    def can_learn(self) -> bool:
        """Return whether the draft has weights; the tables of the laws have none."""
        return isinstance(self.model, Model)

    def finish_request(self, rejected: RejectedPlaces | None) -> None:
        """Take note of a request that ended, and update the draft if it is time."""
        self.requests += 1
        self.buffer += [] if rejected is None else [rejected]
        if self.requests >= self.interval:
            if self.buffer:
                with torch.inference_mode(False), torch.enable_grad():
                    self.update()
            self.requests, self.buffer = 0, []

    def update(self) -> None:
        """Take one step on the buffer. The model is a new one afterwards."""
        draft = self.model
        if self.optimizer is None:
            self.weights = {
                name: w.detach().to(torch.promote_types(w.dtype, torch.float32), copy=True)
                for name, w in draft.weights.items()
            }
            tensors = [w.requires_grad_() for w in self.weights.values()]
            self.optimizer = torch.optim.AdamW(tensors, lr=self.lr, weight_decay=0.0)
        self.optimizer.zero_grad()
        blocks = Blocks(draft.config, self.weights)
        loss = rejection_loss(blocks, self.buffer, DIVERGENCES[self.loss])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), MAX_GRADIENT_NORM)
        if not norm.isfinite():  # such a step would spoil the draft for good
            return
        self.optimizer.step()
        self.updates += 1
        weights = {name: w.detach().to(draft.dtype, copy=True) for name, w in self.weights.items()}
        tokenizer = draft.tokenizer if draft.has_tokenizer else None
        self.model = Model(draft.config, weights, tokenizer, draft.name, draft.extras)


class OsdDrafter(ModelDrafter):
    """Sample a chain from a draft model, and collect what the target rejects of it.

    online       the draft that learns
    session      a session of its model
    forward_log  where sessions of later models record their forward passes
    """

    def __init__(
        self,
        online: OnlineDraft,
        session: Any,
        gamma: int,
        ends: frozenset[int],
        positions: int | None,
        forward_log: list[ForwardRecord],
    ):
        super().__init__(session, gamma, ends, positions)
        self.online, self.forward_log = online, forward_log
        self.text, self.places, self.rows = list[int](), list[int](), list[Tensor]()

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        super().extend(tokens, scores)
        self.text += tokens

    def observe(self, round: Round) -> None:
        super().observe(round)
        verdict = round.verdict
        # Where a stop has cut the round, the rejected token's place may not be in the text.
        if self.online.can_learn and verdict.rejected and verdict.next is not None:
            before = round.tree.parents[verdict.rejected[0]]
            self.places.append(len(self.text) + len(verdict.accepted) - 1)
            self.rows.append(round.scores.logits[before + 1].detach().clone())
        self.text += round.tokens

    def rewind(self, length: int) -> None:
        super().rewind(length)
        del self.text[length:]
        n_left = bisect_left(self.places, length)
        del self.places[n_left:], self.rows[n_left:]

    def end(self) -> None:
        super().end()
        if self.text:
            rejected = None
            if self.places:
                ids = self.text[: self.places[-1] + 1]
                rejected = RejectedPlaces(ids, self.places, torch.stack(self.rows))
            self.online.finish_request(rejected)
        self.text, self.places, self.rows = [], [], []
        if self.online.model is not self.model.model:  # type: ignore[attr-defined]
            self.model = self.online.model.session(self.forward_log)


@technique(
    title="Online speculative decoding",
    summary="a draft that learns between requests",
    paper="Liu et al. 2024, arXiv 2310.07177",
    reported="latency 1.22x to 3.06x lower (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    persistent=True,
    knobs=(
        Knob(
            "gamma",
            5,
            "tokens the draft model proposes in a round",
            low=1,
            high=64,
            small=(2, 1),
            advised=True,
        ),
        Knob(
            "interval",
            8,
            "requests between two updates of the draft",
            low=1,
            high=1024,
            small=(1, 2),
        ),
        Knob(
            "loss",
            "kl",
            "divergence of the draft from the target: KL, reverse KL, Jensen-Shannon",
            choices=("kl", "rkl", "jsd"),
        ),
        Knob("lr", 1e-4, "learning rate", low=0.0, high=1.0, small=(1.0,)),
    ),
)
def osd(request: Request, *, gamma: int, interval: int, loss: str, lr: float) -> Decoder:
    """Return a decoder whose draft model is trained after every `interval` requests.

    A request that runs alone shares the draft with later ones.
    """
    session: Any = request.drafts[0]
    make = partial(OnlineDraft, session.model, interval, lr, loss)
    if request.clock is None:
        online = make()
    else:  # the request runs alone
        key = ("osd", session.model, interval, lr, loss)
        online = per_model_state(request.target, key, make)
        if online.model is not session.model:
            session = online.model.session(request.forward_log)
    ends, positions = request.stop.eos, request.draft_max_length
    drafter = OsdDrafter(online, session, gamma, ends, positions, request.forward_log)
    return request.decoder(drafter, verify_tree)
