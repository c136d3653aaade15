"""EESD: the first layers and one trained layer draft; Thompson sampling says how many tokens.

Paper: Liu, Wang, Wang, Cai, Findings of ACL 2024, arXiv 2406.03853. There is no public code. We
could read the abstract, the introduction and a summary; the formulas of the control are ours.

Idea. After the first N layers stands one trainable layer of the target's form, then the target's
output matrix. Draft tokens are sampled from its logits, and the target verifies them with its other
layers. How many tokens a draft should have depends on how often they are accepted, which is not
known. So a beta distribution stands for what is known of the acceptance rate. Each round draws a
rate from it, and drafts as many tokens as are best at this rate (*Thompson sampling*). While little
is known, the lengths vary; later they are the best one.

    theta ~ Beta(a, b)               a: 1 + draft tokens accepted so far, b: 1 + those rejected
    tokens of a round = 1 + theta + ... + theta^n    n: draft tokens
    time of a round   = 1 + n c                      c: of a draft token, in target passes

Another token pays if the tokens per time rise by it: if theta^(n+1) / c > tokens / time. The first
token is always drafted; else nothing would be learned. What stands after a rejected token has not
been judged.

Training. Cross-entropy of what the target wrote itself (*self-distillation*); the target is frozen.

Guarantee: EXACT, at any temperature: draft tokens are sampled and declare their distributions. The
length is chosen before a token is drawn. An end of text stops the draft, and stays in it.
Pitfall: a control that takes the mean of the beta distribution explores nothing. One that counts
tokens after a rejected one as rejected underrates the draft. One that looks at the token just drawn
and takes it back breaks the joint distribution. (To sample the layer of the exit, not the length,
is another method.)
State: a and b outlive a request (`persistent`), one pair per set of knobs, the last 8 of a model,
while it lives. In a batch each request has its own: no text may depend on other requests.
Ablation: control = fixed. In a test with simulated rounds Thompson sampling is within 3 % of the
best length at three acceptance rates, and a fixed length of 8 has less than 0.6 of its speed at the
lowest one. On a trained model the two were not compared. In another test drafts of an untrained
layer are accepted less often.
Tests: tests/early_exit/test_eesd.py (`draft_by_thompson` against the code that runs, on every
outcome; the length against all lengths; the posterior; the rows are those of a dense pass; a fitted
layer) and laws F1 and F2.
Left out: the variant Calibration-TS, whose prior depends on the draft's own confidence, since its
formula could not be read; the tree of draft tokens. Ours: the length for a drawn rate, which is
that of Leviathan et al., section 3.5; c is (N + 1) / L if it is not given; the default N.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.kangaroo import (
    NORM,
    KangarooDrafter,
    KangarooHead,
    KangarooSettings,
    initialize_exit_layer,
    kangaroo_layers,
    predict_by_adapter,
)
from tinyspec.lm.config import Config
from tinyspec.lm.heads import FrozenTarget, prepare_head
from tinyspec.lm.stack import INPUT_NORM, layer_shapes
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Knob,
    Request,
    Trained,
    TrainingBatch,
    per_model_state,
    technique,
)
from tinyspec.tree import TokenTree

LONGEST = 8  # draft tokens of a round: ours


def draft_by_thompson(
    next_probs: Callable[[list[int]], Any],
    draw_rate: Callable[[], float],
    c: float,
    longest: int,
    rng: Any,
) -> list[int]:
    """Return the draft tokens of a round.

    next_probs  draft tokens -> next-token distribution [V] of the trained exit
    draw_rate   () -> an acceptance rate, drawn from what is known of it
    c           time of a draft token, in target passes
    rng         a numpy.random.Generator

    The decoder runs `EesdDrafter`. A test compares the two on every outcome.
    """
    theta, draft = draw_rate(), list[int]()
    while len(draft) < longest:
        n = len(draft)
        tokens, time = sum(theta**i for i in range(n + 1)), 1 + n * c
        if draft and theta ** (n + 1) * time <= c * tokens:
            break
        row = next_probs(draft)
        draft.append(rng.choice(len(row), p=row))
    return draft


# ------------------------------ the control


def choose_draft_length(theta: float, c: float, longest: int) -> int:
    """Return the number of draft tokens, at least one, that is best at an acceptance rate.

    The tokens per time rise with the number up to the best one, and fall after it.

    >>> [choose_draft_length(theta, 0.25, 8) for theta in (0.1, 0.6, 0.9, 1.0)]
    [1, 2, 6, 8]
    """
    n, tokens = 1, 1 + theta
    while n < longest and theta ** (n + 1) * (1 + n * c) > c * tokens:
        n += 1
        tokens += theta**n
    return n


class ThompsonControl:
    """What is known of the acceptance rate: a beta distribution, uniform at first."""

    def __init__(self) -> None:
        self.accepted = self.rejected = 0

    def draw_rate(self, rng: RandomSource) -> float:
        """Return a rate drawn from the distribution.

        It is the mean if `rng` gives no uniforms, as when all outcomes are enumerated.
        """
        a, b = 1 + self.accepted, 1 + self.rejected
        uniforms = rng.uniforms(1)
        if uniforms is None or not len(uniforms):
            return a / (a + b)
        seed = int(float(uniforms[0]) * 2**53)
        return float(np.random.Generator(np.random.Philox(seed)).beta(a, b))

    def learn(self, round: Round) -> None:
        """Count the judged tokens of a draft. A round that a stop has cut is not counted."""
        if round.truncated:
            return
        n = len(round.verdict.accepted)
        self.accepted += n
        self.rejected += n < len(round.tree.tokens)


# ------------------------------ what is trained


def exit_layer_shapes(config: Config, settings: KangarooSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a whole layer and of the norm after it."""
    d = config.d_model
    return {**layer_shapes(config), f"layers.0.{INPUT_NORM}.weight": (d,), NORM: (d,)}


def initialize_eesd(
    target: FrozenTarget, settings: KangarooSettings, seed: int
) -> dict[str, Tensor]:
    """Return a random layer that begins as an early exit."""
    return initialize_exit_layer(target, exit_layer_shapes(target.config, settings), seed)


def eesd_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the cross-entropy of what the target wrote."""
    logits = predict_by_adapter(weights, target, batch.ids, batch.states, 0)
    return batch.cross_entropy(target, 0, logits)


# ------------------------------ the draft


class EesdDrafter(KangarooDrafter):
    """A chain by the target's first layers and the trained one, as long as is best.

    choose_length  random numbers -> draft tokens of the round
    control        learns from every round; None: nothing is learned
    """

    def __init__(
        self,
        request: Request,
        head: KangarooHead,
        gamma: int,
        choose_length: Callable[[RandomSource], int],
        control: ThompsonControl | None,
    ):
        super().__init__(request, head, gamma, threshold=0.0)  # no token is too uncertain
        self.choose_length, self.control = choose_length, control

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        length = self.choose_length(rng.split("length", 0))
        return super().propose(context, min(length, max_draft_depth), sampling, rng)

    def observe(self, round: Round) -> None:
        super().observe(round)
        if self.control is not None:
            self.control.learn(round)


@technique(
    title="EESD: early-exiting speculative decoding",
    summary="an exit drafts; Thompson sampling sets lengths",
    paper="Liu et al. 2024, arXiv 2406.03853",
    family="early exit",
    guarantee=Guarantee.EXACT,
    hidden=True,
    persistent=True,
    trained=Trained(
        KangarooSettings,
        lambda config, settings: kangaroo_layers(config, settings)[:1],
        exit_layer_shapes,
        initialize_eesd,
        lambda weights: LONGEST,
        predict_by_adapter,
        eesd_loss,
        small=KangarooSettings(exit=1),
    ),
    knobs=(
        Knob("gamma", LONGEST, "tokens drafted in a round, at most", low=1, high=64, small=(2, 1)),
        Knob(
            "control",
            "thompson",
            "thompson: as many as are best at a sampled acceptance rate; fixed: always gamma",
            choices=("thompson", "fixed"),
            small=("fixed", "thompson"),
        ),
        Knob(
            "cost",
            0.0,
            "time of a draft token, in target passes; 0: (exit + 1) / layers of the target",
            low=0.0,
            high=1.0,
        ),
    ),
)
def eesd(request: Request, *, gamma: int, control: str, cost: float) -> Decoder:
    """Return a decoder whose target drafts with its first layers and a trained one."""
    target: Any = request.target
    head = prepare_head(target.model, "eesd", partial(KangarooHead, method="eesd"))
    if control == "fixed":
        drafter = EesdDrafter(request, head, gamma, lambda rng: gamma, None)
        return request.decoder(drafter, verify_tree)
    c, posterior = cost or (head.exit + 1) / target.model.config.n_layers, ThompsonControl()
    if request.clock is not None:  # a batch gives its requests no clock
        posterior = per_model_state(target, ("eesd", gamma, c), ThompsonControl)

    def choose_length(rng: RandomSource) -> int:
        if request.choose is not None:
            return 1 + request.choose(gamma, rng)
        return choose_draft_length(posterior.draw_rate(rng), c, gamma)

    return request.decoder(EesdDrafter(request, head, gamma, choose_length, posterior), verify_tree)
