"""ConsistentEE: a policy decides layer by layer whether to leave, and only that exit is trained.

Paper: Zeng, Hong, Dai, Zhuang, Chen, AAAI 2024, arXiv 2312.11882. The order of the phases, the
policy's shape and the sampling were read in the authors' code (github.com/ZeroNLP/ConsistentEE),
which has a version for BERT and one for LLaMA.

Idea. Losses at all exits ask each exit to be right about every token. When the model is used, one
exit per token is enough. So a *policy* at each layer decides between leaving and going on, and the
loss counts the exit that it chose: training is *consistent* with use. The state is copied up.

    pi_l = sigmoid(v_l . gelu(U_l h_l + a_l) + b_l)        h_l: state after l layers
    P(exit after l) = pi_l prod over m < l of (1 - pi_m)   the last layer takes the rest

When the model is used, a token leaves at the first layer where pi_l > 0.5.

Reward. The *memorized layer* ml of a token is the lowest layer from which on all exits are right
about it; L if the last one is wrong. It is low for easy tokens. Depth costs them more:

    R = log p_l(right token) - alpha (1 - ml / L) l        if the token leaves after l layers

The ablation `hardness = false` of section [head] asks the same price of all tokens: alpha l. So
similar depths need a smaller alpha. With 0.04 in place of 0.1, the best lead over fixed exits of
equal work is smaller, but the intervals overlap, and at equal work the perplexity hardly differs
(tutorials/results/exits-consistent-flat.md): no gain was shown.

Training, by `tinyspec train head --method consistent_ee` from a model with trained exits (section
[exits]; the paper's first phase). Two phases take turns, `rounds` times:

    policy  The model is frozen. K exits are drawn for each token, and
            loss = - mean over k of (R_k - mean of R) log P(exit_k)               (REINFORCE)
    model   The policy is frozen. loss = cross-entropy of the exit that it chooses, and of no other

An exit is drawn layer by layer, with the chance pi' = (1 - eps) pi + eps / 2; eps falls in a phase.

Guarantee: LOSSY in `threshold`; EXACT at inf, where no token leaves.
Pitfall: a supervised classifier called a policy; one price of depth for all tokens; a second phase
that trains all exits, so that nothing is consistent.
Tests: tests/early_exit/test_consistent_ee.py (`choose_exit` against the code that runs; the mean of
the sampled gradient over all outcomes is (K - 1) / K of the exact one; the labels; exits that were
not chosen get no gradient) and laws/exit_laws.py (the exact joint distribution).
Left out: sentences as instances, each with one exit: the paper's encoders. Of the LLaMA code: one
of the four draws must run all layers, in both phases, so the last exit always has a share of the
loss; log P is divided by the exit's layer. Ours: the policy of the BERT code reads the states as
they are (the LLaMA code has one linear layer, after the final norm). eps falls from 0.5 to 0.005
(in the code from 0.1 or 0 to 0), and log P is computed from pi'. The code draws otherwise: with
chance eps a fair coin, else pi > 0.5. The reward above stands in inactive lines of the BERT code;
the active line has no price of a layer. One output matrix serves all exits. Memorized layers are
those of the model before the first phase, found anew for each batch. Not compared: a phase of the
model with losses at all exits, and other numbers of draws.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.exits import (
    ExitPoint,
    ExitRule,
    ExitTarget,
    as_doubles,
    read_exits,
    sigmoid,
)
from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.heads import FrozenTarget, HeadSettings, head_weights, prepare_head
from tinyspec.lm.seq2seq import Seq2Seq, add_ends
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Knob,
    Request,
    Trained,
    TrainedTranslator,
    TrainingBatch,
    TranslatorTraining,
    Tuned,
    Tuning,
    technique,
)

LAST_EXPLORATION = 0.01  # what is left of eps at the end of a phase, as a share


def choose_exit(
    run_layer: Callable[[int, Any], Any],
    state: Any,
    policy: Callable[[int, Any], float],
    depth: int,
    threshold: float = 0.5,
) -> tuple[int, Any]:
    """Return after how many layers a token leaves, and its state there.

    run_layer  (layer from 1 on, state) -> the state after it
    state      the token's embedding
    policy     (layer, state after it) -> pi

    The decoder runs `ExitTarget`. A test compares the two.
    """
    for layer in range(1, depth):
        state = run_layer(layer, state)
        if policy(layer, state) > threshold:
            return layer, state
    return depth, run_layer(depth, state)


# ------------------------------ the policy (section 3.1)


def policy_shapes(config: Config, settings: "PolicySettings") -> dict[str, tuple[int, ...]]:
    """Return the shapes of the policies of all layers but the last, one below another."""
    exits, width = config.n_layers - 1, settings.width
    if not exits:
        raise TinyspecError(
            "consistent_ee: the model has one layer, there is nowhere to exit: use a deeper model"
        )
    return {
        "hidden.weight": (exits * width, config.d_model),
        "hidden.bias": (exits * width,),
        "out.weight": (exits, width),
        "out.bias": (exits,),
    }


def initialize_policy(
    target: FrozenTarget, settings: "PolicySettings", seed: int
) -> dict[str, Tensor]:
    """Return policies that leave with chance 1/2 everywhere; only U is random."""
    generator = torch.Generator().manual_seed(seed)
    shapes = policy_shapes(target.config, settings)
    weights = {name: target.embed.new_zeros(shape) for name, shape in shapes.items()}
    drawn = torch.randn(shapes["hidden.weight"], generator=generator)
    weights["hidden.weight"] = (drawn / target.config.d_model**0.5).to(target.embed)
    return weights


def policy_logits(weights: HeadWeights, layer: int, states: Tensor) -> Tensor:
    """Return the logits of pi after so many layers: states [..., d] -> [...]."""
    width = weights["out.weight"].shape[1]
    rows = slice((layer - 1) * width, layer * width)
    hidden = F.linear(states, weights["hidden.weight"][rows], weights["hidden.bias"][rows])
    out = F.gelu(hidden, approximate="tanh") @ weights["out.weight"][layer - 1]
    return out + weights["out.bias"][layer - 1]


def load_policy(model: Any) -> dict[str, Any]:
    """Return the policy of a model as arrays. Raises TinyspecError if it has none."""
    return {name: as_doubles(w) for name, w in head_weights(model, "consistent_ee").items()}


class PolicyRule(ExitRule):
    """Let a token leave at the first layer where the policy's chance is above the threshold."""

    states = 1

    def __init__(self, weights: Mapping[str, Any], threshold: float):
        self.weights, self.threshold = weights, threshold
        self.exits, self.width = weights["out.weight"].shape
        self.layers = range(1, self.exits + 1)

    def should_exit(self, at: ExitPoint) -> bool:
        return self.chance_to_leave(at.layer, at.states[0]) > self.threshold

    def chance_to_leave(self, layer: int, state: Tensor) -> float:
        """Return pi, computed with numpy: torch would start its threads for it."""
        w, rows = self.weights, slice((layer - 1) * self.width, layer * self.width)
        x = w["hidden.weight"][rows] @ as_doubles(state) + w["hidden.bias"][rows]
        gelu = 0.5 * x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
        return sigmoid(float(w["out.weight"][layer - 1] @ gelu + w["out.bias"][layer - 1]))


# ------------------------------ labels and reward (section 3.3)


def find_memorized_layers(is_right: Tensor) -> Tensor:
    """Return the memorized layer of each token, from 1 to L, by which exits are right [..., L].

    >>> find_memorized_layers(torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0]]).bool()).tolist()
    [1, 3, 3]
    """
    depth = is_right.shape[-1]
    n = torch.arange(1, depth + 1, device=is_right.device)
    last_wrong = (n * ~is_right).amax(dim=-1)
    return (last_wrong + 1).clamp(max=depth)


def reward_exits(
    log_probs: Tensor, layers: Tensor, memorized: Tensor, alpha: float, depth: int
) -> Tensor:
    """Return the reward of tokens that leave after so many layers.

    log_probs  of the right token, at the exit
    memorized  the memorized layers
    """
    return log_probs - alpha * (1 - memorized / depth) * layers


# ------------------------------ training (section 3.2)


@dataclass(frozen=True)
class PolicySettings(HeadSettings):
    """What decides the policy's shape.

    width  of its hidden layer
    """

    width: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab:
            raise TinyspecError("[head] draft_vocab: the policy proposes no tokens: leave it out")


@dataclass(frozen=True)
class ConsistentSettings(PolicySettings):
    """Section [head] of a recipe, or [translator].

    alpha     a layer costs alpha (1 - memorized / L); without hardness alpha
    hardness  whether harder tokens pay less for a layer; if not, all pay alpha
    samples   K, exits drawn for each token
    explore   eps at the beginning of a phase
    rounds    how often both phases take turns
    """

    alpha: float = 0.1
    hardness: bool = True
    samples: int = 4
    explore: float = 0.5
    rounds: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 2:
            raise TinyspecError("[head] samples is 1: the baseline is the mean of two or more")
        if self.explore > 1:
            raise TinyspecError(f"[head] explore is {self.explore}: it must be from 0 to 1")

    def phase_at(self, progress: float) -> tuple[bool, float]:
        """Return whether the model is trained, or else the policy, and the progress in the phase.

        >>> [ConsistentSettings(rounds=2).phase_at(p) for p in (0.0, 0.25, 0.375, 0.5)]
        [(False, 0.0), (True, 0.0), (True, 0.5), (False, 0.0)]
        """
        number, part = divmod(2 * self.rounds * min(progress, 1 - 1e-9), 1)
        return bool(number % 2), part


Decide = Callable[[int, Tensor], Tensor]
"""(layers, states [B, T, d] after them) -> which tokens want to leave, [B, T]."""


def follow_decisions(
    stream: Iterable[Tensor], depths: Tensor, may_leave: Tensor, decide: Decide
) -> Tensor:
    """Run a masked stream in which tokens leave as is decided; return their last states [B, T, d].

    stream     the states after each layer
    depths     [B, T] the stream's own depths: all layers at first, lowered where a token leaves
    may_leave  [B, T] the others run all layers
    """
    depth, x = int(depths.max()), depths
    for layer, x in enumerate(stream, start=1):
        if layer < depth:
            depths[decide(layer, x) & may_leave & (depths == depth)] = layer
    return x


def without_gradient(stream: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the states of a stream that is run without gradients."""
    states = iter(stream)
    while True:
        with torch.no_grad():
            x = next(states, None)
        if x is None:
            return
        yield x


Run = Callable[[Tensor], Iterable[Tensor]]
"""depths [B, T] -> the states [B, T, d] after each layer of a masked stream."""


@dataclass
class PolicyTraining:
    """A batch on which policy or model is trained.

    run       depths -> the masked stream of the texts' states [B, T, d]
    read      states -> logits: final norm and output matrix
    original  `run` and `read` of the model before the first phase: with its exits the memorized
              layers are found
    targets   [B, T] the right tokens; known [B, T]: where they count, and where tokens may leave
    weights   of the policy
    """

    run: Run
    read: Callable[[Tensor], Tensor]
    original: tuple[Run, Callable[[Tensor], Tensor]]
    targets: Tensor
    known: Tensor
    depth: int
    weights: HeadWeights
    settings: ConsistentSettings

    def loss(self, progress: float, generator: torch.Generator) -> Tensor:
        """Return the loss of the phase; without gradients, minus the policy's mean reward."""
        if not self.known.any():
            return self.weights["out.bias"].sum() * 0
        trains_model, done = self.settings.phase_at(progress)
        if not torch.is_grad_enabled():
            return -self.rewards(*self.leave_greedily()).mean()
        if trains_model:
            return -self.log_probs(self.leave_greedily()[0]).mean()
        draw = partial(torch.rand, generator=generator, device=generator.device)
        return self.policy_loss(self.settings.explore * LAST_EXPLORATION**done, draw)

    def leave_greedily(self) -> tuple[Tensor, Tensor]:
        """Return the last states and the depths of the known tokens, as the policy has it."""

        def decide(layer: int, x: Tensor) -> Tensor:
            with torch.no_grad():
                return policy_logits(self.weights, layer, x) > 0

        depths = torch.full_like(self.targets, self.depth)
        x = follow_decisions(self.run(depths), depths, self.known, decide)
        return x[self.known], depths[self.known]

    def log_probs(self, states: Tensor) -> Tensor:
        """Return the log-probabilities of the right tokens at these states of known tokens."""
        rows = self.read(states).float().log_softmax(-1)
        return rows.gather(-1, self.targets[self.known][:, None])[:, 0]

    def rewards(self, states: Tensor, depths: Tensor) -> Tensor:
        """Return the rewards of known tokens that left with these states, after these layers."""
        alpha = self.settings.alpha
        return reward_exits(
            self.log_probs(states), depths, self.memorized_layers(), alpha, self.depth
        )

    def memorized_layers(self) -> Tensor:
        """Return the memorized layers of the known tokens, when all layers are run.

        Without the hardness reward they are 0: a layer costs alpha.
        """
        if not self.settings.hardness:
            return torch.zeros_like(self.targets[self.known])
        run, read = self.original
        whole = without_gradient(run(torch.full_like(self.targets, self.depth)))
        states = (x[self.known] for x in whole)
        is_right = read_exits(states, read, self.targets[self.known]).is_right
        return find_memorized_layers(is_right)

    def policy_loss(self, eps: float, draw: Callable[[torch.Size], Tensor]) -> Tensor:
        """Return minus the mean reward of K draws, with the gradient of REINFORCE.

        draw  shape -> numbers from 0 to 1, which decide who leaves
        """
        rewards, log_chances = list[Tensor](), list[Tensor]()
        memorized = self.memorized_layers()
        for _ in range(self.settings.samples):
            depths = torch.full_like(self.targets, self.depth)
            log_chance = torch.zeros(self.targets.shape, device=self.targets.device)

            def decide(layer: int, x: Tensor, depths: Tensor = depths) -> Tensor:
                nonlocal log_chance
                chance = mix_with_coin(
                    torch.sigmoid(policy_logits(self.weights, layer, x).float()), eps
                )
                leaves = draw(chance.shape).to(chance.device) < chance
                decided = torch.where(leaves, chance, 1 - chance).log()
                log_chance = log_chance + torch.where(depths == self.depth, decided, 0.0)
                return leaves

            stream = without_gradient(self.run(depths))
            x = follow_decisions(stream, depths, self.known, decide)
            with torch.no_grad():
                log_probs, alpha = self.log_probs(x[self.known]), self.settings.alpha
                rewards.append(
                    reward_exits(log_probs, depths[self.known], memorized, alpha, self.depth)
                )
            log_chances.append(log_chance[self.known])
        return reinforce(torch.stack(rewards), torch.stack(log_chances))


def mix_with_coin(chance: Tensor, eps: float) -> Tensor:
    """Return pi' = (1 - eps) pi + eps / 2, kept away from 0 and 1."""
    return ((1 - eps) * chance + eps / 2).clamp(1e-6, 1 - 1e-6)


def reinforce(rewards: Tensor, log_chances: Tensor) -> Tensor:
    """Return minus the mean reward, with the policy's gradient. Both inputs are [K, n].

    The baseline of a token is the mean of its K rewards, each with its own part in it: so the mean
    of the gradient is (K - 1) / K of the exact one.
    """
    advantage = rewards - rewards.mean(dim=0)
    surrogate = -(advantage * log_chances).mean()
    return surrogate - surrogate.detach() - rewards.mean()


def make_text_training(
    blocks: Blocks,
    original: Blocks,
    batch: TrainingBatch,
    weights: HeadWeights,
    settings: ConsistentSettings,
) -> PolicyTraining:
    """Return the `PolicyTraining` of a batch of texts. Tokens that the model wrote count."""
    ids = batch.ids[:, :-1]
    return PolicyTraining(
        lambda depths: blocks.layer_states(ids, depths=depths),
        blocks.compute_logits,
        (lambda depths: original.layer_states(ids, depths=depths), original.compute_logits),
        batch.ids[:, 1:],
        batch.is_answer[:, :-1],
        blocks.config.n_layers,
        weights,
        settings,
    )


def consistent_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the loss of a batch in the phase of the training."""
    original = tuning.original.torch_blocks()
    training = make_text_training(tuning.blocks, original, batch, tuning.beside, tuning.settings)
    return training.loss(tuning.progress, generator)


def policy_phase_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the loss of the policy alone, at the beginning of its phase."""
    blocks, settings = target.blocks, ConsistentSettings()
    assert blocks is not None
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
    return make_text_training(blocks, blocks, batch, weights, settings).loss(0.0, generator)


LEAD = "consistent_ee/"  # leads the names of the policy's weights in an encoder-decoder


def make_translation_training(
    model: Seq2Seq,
    original: Seq2Seq,
    settings: ConsistentSettings,
    source: Tensor,
    target: Tensor,
    dropout: float = 0.0,
    trains_model: bool = False,
) -> PolicyTraining:
    """Return the `PolicyTraining` of translations [B, T] of sources [B, S].

    Words and ends count.
    """
    weights = {name.removeprefix(LEAD): w for name, w in model.weights.items() if LEAD in name}
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains_model):
        given = model.causal_inputs(source, target, dropout)
    targets = add_ends(model.config, target)

    def run_original(depths: Tensor) -> Iterable[Tensor]:
        return original.layer_states(*original.causal_inputs(source, target), depths=depths)

    return PolicyTraining(
        lambda depths: model.layer_states(*given, dropout, depths=depths),
        model.decoder.compute_logits,
        (run_original, original.decoder.compute_logits),
        targets,
        targets != model.config.pad,
        model.config.decoder_layers,
        weights,
        settings,
    )


def consistent_translator_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return the loss of translations in the current phase. A frozen model has no dropout.

    Labels are smoothed in no phase: a reward is the log-probability of the right token.
    """
    source, target = batch
    model, settings, progress = training.model, training.settings, training.progress
    trains_model = settings.phase_at(progress)[0]
    dropout = training.dropout if trains_model else 0.0
    assert training.teacher is not None  # the model as it was at first
    options = source, target, dropout, trains_model
    made = make_translation_training(model, training.teacher, settings, *options)
    return made.loss(progress, generator)


@torch.no_grad()
def measure_policy(
    model: Seq2Seq,
    settings: ConsistentSettings,
    source: Tensor,
    target: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return means over the tokens of a batch, the same for each of its rows.

    held_out  cross-entropy at the policy's exits, plus alpha / 2 for each layer. It stands for
              alpha (1 - ml / L): the model that gives ml is not available here. Without the
              hardness reward a layer costs alpha
    layers    layers that were run
    right     share of right tokens
    """
    made = make_translation_training(model, model, settings, source, target)
    states, depths = made.leave_greedily()
    is_right = made.read(states).argmax(-1) == made.targets[made.known]
    price = settings.alpha / 2 if settings.hardness else settings.alpha
    figures = {
        "held_out": price * depths - made.log_probs(states),
        "layers": depths.float(),
        "right": is_right.float(),
    }
    return {name: values.mean().expand(len(source)).cpu() for name, values in figures.items()}


def equip_with_policy(config: Seq2SeqConfig, settings: ConsistentSettings) -> Seq2SeqConfig:
    """Return the config with the policy's weights."""
    shapes = policy_shapes(config.stack_config(config.decoder_layers), settings)
    return replace(config, heads={f"{LEAD}{name}": shape for name, shape in shapes.items()})


TRANSLATOR = TrainedTranslator(
    consistent_translator_batch_loss,
    None,
    "It writes from left to right, and a policy decides after how many decoder layers a token is "
    "read (`consistent_ee`). Policy and model were trained in {settings.rounds} rounds, from its "
    "teacher's weights, with the price {settings.alpha:g} of a layer. On its teacher's greedy "
    "translations a token is read after {figures[layers]:.2f} layers and right in "
    "{figures[right]:.1%}. Its figure is greedy decoding's with all layers.",
    settings=ConsistentSettings,
    figures=measure_policy,
    best="held_out",
    equip=equip_with_policy,
    extends=True,
)


# ------------------------------ the card


@technique(
    title="ConsistentEE: a policy, and the exit that it chooses",
    summary="a policy trained with its exit decides",
    paper="Zeng et al. 2024, arXiv 2312.11882",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("threshold", math.inf),
    hidden=True,
    trained=Trained(
        PolicySettings,
        lambda config, settings: (),
        policy_shapes,
        initialize_policy,
        lambda weights: 0,
        None,
        policy_phase_loss,
        small=PolicySettings(width=4),
    ),
    tuned=Tuned(
        ConsistentSettings,
        consistent_loss,
        small=ConsistentSettings(width=4, rounds=1),
        initialize=initialize_policy,
        rate=10.0,
    ),
    translator=TRANSLATOR,
    knobs=(
        Knob(
            "threshold",
            0.5,
            "the policy's chance above which a token leaves; inf: no token leaves",
            low=0.0,
            high=1.0,
            beyond=math.inf,
        ),
    ),
)
def consistent_ee(request: Request, *, threshold: float) -> Decoder:
    """Return a decoder whose tokens leave where the policy says."""
    session: Any = request.target
    if threshold == math.inf:
        return request.decoder(BaseDrafter(), verify_tree)
    weights = prepare_head(session.model, "consistent_ee", load_policy)
    target = ExitTarget(session, PolicyRule(weights, threshold), "copy")
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
