"""MagicDec: for long contexts and large batches, draft with the target on a few keys.

Paper: Sadhukhan et al. 2024, arXiv 2408.11049 (ICLR 2025). Nothing is trained.

Idea. Speculative decoding gains little in a large batch, because a target pass is then bound by
arithmetic. But the keys and values of a batch are read for each request, and with a long context
they outweigh the weights: passes are bound by memory again, whatever the batch size. A draft that
reads a fixed number of keys is then much cheaper than the target, and the cheaper the longer the
context is. So the target drafts for itself: with its own weights, and only the first tokens and the
latest ones visible (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453):

    visible  = the first `sink` tokens, and the latest budget - sink
    speed-up = tokens(gamma, alpha) / (gamma t_draft / t + t_verify / t)

    t: seconds of a plain target pass; t_verify over gamma + 1 rows. As keys come to outweigh the
    weights, t_draft / t falls to 0 and t_verify / t to 1, so the gain *grows* with the batch size.

Guarantee: EXACT. The draft declares its own distribution.
Pitfall: a draft whose keys grow with the text; a gain that is shown on short texts, where the
draft costs as much as the target.
Tests: tests/speculative/test_magicdec.py (a draft knows one old token just where it may read it;
the number of keys does not grow; a budget that holds the text is the target itself, so that all is
accepted; the forecast where only weights, or only keys, take time).
Left out: other choices of keys (the later versions use SnapKV). The released code drafts with a
cache of its own, with 16 first tokens, and counts positions within that cache. Here the draft reads
the target's keys of accepted tokens, which were computed from the full context; they keep their
true positions, and the window moves with the text. gamma is that of the released script. Its
budgets are 257 to 4,097 tokens; 512, and 4 first tokens, are our choice.
"""

from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.costs import CostModel
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import SharedSessionDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan, VisibleSet
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree


def forecast_gain(costs: CostModel, n_requests: int, gamma: int, alpha: float) -> float:
    """Return how many times as fast as plain decoding a batch is forecast to be; below 1: slower.

    alpha  acceptance rate of a draft token
    """
    plain = costs.verify_seconds(n_requests, 0)
    drafted = gamma * costs.step_seconds(n_requests)
    drafted += costs.verify_seconds(n_requests, gamma * n_requests)
    return sum(alpha**n for n in range(gamma + 1)) * plain / drafted


class MagicDecDrafter(SharedSessionDrafter):
    """Draft with a view of the target that reads the first tokens and the latest ones.

    sink    first tokens that are read
    window  latest tokens that are read, before the draft's own
    """

    def __init__(self, request: Request, gamma: int, sink: int, window: int):
        session: Any = request.target
        self.view = session.view(Plan())
        super().__init__(self.view, gamma, request.stop.eos)
        self.sink, self.window, self.config = sink, window, session.model.config

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        since = len(context) - self.window
        if since > self.sink:
            shape = self.config.n_layers, self.config.n_kv_heads
            seen = VisibleSet.for_all_layers(range(self.sink), since, *shape)
            self.view.plan = Plan(visible=seen)
        else:
            self.view.plan = Plan()
        return super().propose(context, max_draft_depth, sampling, rng)


@technique(
    title="MagicDec",
    summary="drafts on a fixed number of keys",
    paper="Sadhukhan et al. 2024, arXiv 2408.11049",
    reported="2.51x, Llama 3.1 8B, batches of 32 to 256 (arXiv 2408.11049)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob("gamma", 7, "tokens of a draft", low=1, high=64, small=(2,)),
        Knob("budget", 512, "tokens that the draft reads", low=2, high=1 << 20, small=(2, 3)),
        Knob("sink", 4, "first tokens among them", low=0, high=4096, small=(1, 0)),
    ),
)
def magicdec(request: Request, *, gamma: int, budget: int, sink: int) -> Decoder:
    """Return a decoder whose draft is the target with a fixed number of keys."""
    if sink >= budget:
        raise TinyspecError(
            f"sink is {sink}, and the draft reads {budget} tokens: give a sink below the budget"
        )
    drafter = MagicDecDrafter(request, gamma, sink, budget - sink)
    return request.decoder(drafter, verify_tree)
