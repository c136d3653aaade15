"""EE-LLM: exit early and keep the cache exact, in two ways; train the exits by pipeline stages.

Paper: Chen, Pan, Li, Ding, Zhou, ICML 2024, arXiv 2312.04916. What the code does beyond the paper
was read in the authors' repository (github.com/pan-x-c/EE-LLM).

Idea. A token leaves at the first exit where its greatest probability reaches a threshold. The
layers above are still due, because later tokens attend to their keys and values.

    recompute  The tokens that lack keys are kept in a list. Each pass runs the list and the newest
               token as one block, from layer 1. A pass that reaches the top clears the list. When
               `cap` tokens wait, the next one may not leave.
    pipeline   The layers stand on stages that work at the same time. The token that left enters the
               first stage as the next input, while the later stages finish the old one.

Both give the tokens of a decoder that runs the layers above at once and ignores their logits
(`recompute` of early_exit/exits.py; the paper's `recompute` is `restart` there).

Training. The loss L is the weighted sum of the exits' losses; l_i is the part of the exits of stage
i. Stage i gets g_i, the gradient of all later stages' losses with respect to its output x_i. It
backpropagates the scalar

    l_i + <g_i, x_i>        g_i is a constant

whose gradients with respect to its weights and its input are those of L. Only x_i and g_i cross
between stages. Tied weights are copies, and their gradients are added up at the end.
`stage_gradients` is that, and `tinyspec train lm` (section [exits]) trains such exits in one
process.

Guarantee: LOSSY in `threshold`; EXACT at inf, where no token leaves. The keys and values are those
of the whole model (*cache-exact*).
Pitfall: a list without a cap; running only the last token again; one process that adds up all
losses and is called a pipeline. The list is run from layer 1, so `recompute` runs more layers than
FREE's waiting states do.
Ablation: threshold = inf, where no token leaves: 10 layers in a row for each token. At 0.4
`recompute` has 9.28 and the clock of `pipeline` 9.69, but no setting is above fixed exits at equal
work (tutorials/results/exits.md). The list itself shows no gain: in a test states that wait, as in
FREE, give the same tokens for less work.
Tests: tests/early_exit/test_ee_llm.py (`decode_with_list` against the code that runs; both ways
against a decoder without a cache; the list; the clock; the gradients of the whole model to 1e-12)
and laws/exit_laws.py (the exact joint distribution).
Left out: tensor and data parallelism, and the bubbles of a schedule that further microbatches fill:
they need several machines. The stages of `pipeline` are simulated: `count_pipeline_steps` tells the
time that they would take. Exit heads with layers of their own, and a temperature of the exits.
No model is trained for other weights of the exits, for a warm-up of these weights, or with a frozen
backbone (EE-Tuning). Ours: the defaults of threshold and cap. The authors' code has no cap; the
paper has one. There the prompt may leave early too, and waits as a token does; an exit has a norm
only by an option. Here the prompt runs all layers, and an exit has the model's final norm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import UNCHANGED, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.exits import ExitPoint, ExitRule, ExitTarget, parse_layers
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.technique import Guarantee, Knob, Request, technique


def decode_with_list(
    run_block: Callable[[list[tuple[int, int]], int], Any],
    text: Sequence[int],
    n_tokens: int,
    exits: Sequence[int],
    depth: int,
    threshold: float,
    cap: int,
    rng: Any,
) -> tuple[list[int], list[int]]:
    """Return the text, and the layers after which each new token was read (section 4).

    run_block  ((position, token) pairs, layers) -> next-token distribution [V] after the last of
               them; it runs the block from layer 1 and keeps the keys and values
    exits      numbers of layers, from the lowest up
    rng        a numpy.random.Generator

    The decoder runs `ExitTarget`, which goes on from exit to exit. A test compares the two on every
    outcome.
    """
    output, waiting, layers_run = list(text), list[tuple[int, int]](), list[int]()
    for _ in range(n_tokens):
        block = [*waiting, (len(output) - 1, output[-1])]
        for layers in [*(exits if len(waiting) < cap else ()), depth]:
            row = run_block(block, layers)
            if layers == depth or max(row) >= threshold:
                break
        waiting = [] if layers == depth else block
        layers_run.append(layers)
        output.append(rng.choice(len(row), p=row))
    return output, layers_run


class ProbableRule(ExitRule):
    """Let a token leave where its greatest probability reaches the threshold.

    cap  tokens that may wait; the one after them runs all layers
    """

    reads_logits = True

    def __init__(self, layers: Sequence[int], threshold: float, cap: float = math.inf):
        self.layers, self.threshold, self.cap = layers, threshold, cap
        self.waiting = dict[int, int]()  # how many wait after the token at each position

    def n_waiting(self, position: int) -> int:
        """Return how many tokens before this position wait. A rewind does not change it."""
        return next((n for at, n in reversed(self.waiting.items()) if at < position), 0)

    def forget_text(self, length: int) -> None:
        self.waiting = {at: n for at, n in self.waiting.items() if at < length}

    def begin(self, session: Any) -> None:
        self.waiting[len(session) - 2] = 0  # forced text is run with those that waited

    def layers_of(self, token: int, position: int) -> Sequence[int]:
        self.newest, self.waiting[position] = position, 0
        return self.layers if self.n_waiting(position) < self.cap else ()

    def should_exit(self, at: ExitPoint) -> bool:
        row = UNCHANGED.probs(at.logits)
        leaves = bool(row[top_k_tokens(row, 1)[0]] >= self.threshold)
        if leaves:
            self.waiting[self.newest] = self.n_waiting(self.newest) + 1
        return leaves


def parse_exits(text: str, depth: int, name: str = "the model") -> tuple[int, ...]:
    """Return the layers of the exits; an empty text is a quarter and a half of the depth.

    Raises TinyspecError for what is no list of layers below the top.

    >>> parse_exits("", 24), parse_exits("2, 5", 6)
    ((6, 12), (2, 5))
    """
    if not text.strip():
        return tuple(sorted({layer for layer in (depth // 4, depth // 2) if layer}))
    return parse_layers(text, depth, name)


# ------------------------------ the pipeline's clock (section 4)


def split_layers(depth: int, stages: int) -> list[range]:
    """Return the layers of each stage, as equally many as can be.

    >>> split_layers(10, 4)
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    """
    bounds = [depth * stage // stages for stage in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def count_pipeline_steps(exits: Sequence[int], depth: int, stages: int) -> list[int]:
    """Return when each token is known, in layer-steps, if all stages work at the same time.

    exits  after how many layers each token was read

    A token enters the first stage when the one before it is known. It leaves keys and values in
    all stages, and a stage works on one token at a time.

    >>> count_pipeline_steps([4, 4, 4], 4, 2), count_pipeline_steps([2, 2, 4], 4, 2)
    ([4, 8, 12], [2, 4, 8])
    """
    free, known, times = [0] * stages, 0, list[int]()
    for exit in exits:
        arrives = known
        for stage, layers in enumerate(split_layers(depth, stages)):
            begins = max(arrives, free[stage])
            if layers.start < exit <= layers.stop:
                known = begins + exit - layers.start
            arrives = free[stage] = begins + len(layers)
        times.append(known)
    return times


# ------------------------------ training by stages (section 3.1)


def backpropagate_stage(
    loss: Tensor, output: Tensor, received: Tensor, gradient: Tensor | None
) -> Tensor:
    """Backpropagate through one stage. Return the gradient with respect to what it received.

    loss      of the stage's own exits
    output    its last state, which the next stage received; received: its first state
    gradient  of all later losses with respect to the output; None: there is no later stage
    """
    auxiliary = loss if gradient is None else loss + (gradient.detach() * output).sum()
    auxiliary.backward()  # type: ignore[no-untyped-call]
    assert received.grad is not None
    return received.grad


def stage_gradients(
    config: Config,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    targets: Tensor,
    exit_weights: Sequence[float],
    stages: int,
) -> dict[str, Tensor]:
    """Return the gradient of sum_l w_l CE_l for every weight, computed stage by stage.

    ids, targets  [B, T]
    exit_weights  w_l of the exit after each layer

    Each stage has copies of its weights, and of the embedding, norm and head that stages share. The
    rows of an exit exist only while its own stage is backpropagated. There are at most as many
    stages as layers.
    """
    stages = min(stages, config.n_layers)
    layers_of = split_layers(config.n_layers, stages)
    copies = [
        {
            name: weight.detach().clone().requires_grad_()
            for name, weight in weights.items()
            if not name[0].isdigit() or int(name.split(".")[0]) in layers
        }
        for layers in layers_of
    ]
    blocks = [Blocks(config, own) for own in copies]
    received, states = list[Tensor](), list[list[Tensor]]()
    x = blocks[0].embed_text(ids)
    for stage, layers in enumerate(layers_of):  # forward: only states cross to the next stage
        received.append(x if stage == 0 else x.detach().requires_grad_())
        states.append(list(blocks[stage].stage_states(received[-1], layers)))
        x = states[-1][-1]
    received[0].retain_grad()
    gradient: Tensor | None = None
    for stage in reversed(range(stages)):  # backward: only gradients cross to the stage before
        loss = states[stage][-1].sum() * 0  # a stage may have no exit of its own
        for layer, state in zip(layers_of[stage], states[stage], strict=True):
            if exit_weights[layer]:
                rows = blocks[stage].compute_logits(state).flatten(0, 1)
                loss = loss + exit_weights[layer] * F.cross_entropy(rows, targets.flatten())
        gradient = backpropagate_stage(loss, states[stage][-1], received[stage], gradient)
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for own in copies:
        for name, copy in own.items():
            total[name] += 0 if copy.grad is None else copy.grad
    return total


# ------------------------------ the card


@technique(
    title="EE-LLM: early exits with recomputed keys, or in a pipeline",
    summary="finishes early tokens together, or pipelined",
    paper="Chen et al. 2024, arXiv 2312.04916",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("threshold", math.inf),
    knobs=(
        Knob(
            "threshold",
            0.8,
            "greatest probability at which a token leaves; inf: never",
            low=0.0,
            high=1.0,
            beyond=math.inf,
        ),
        Knob("exits", "", "layers where a token may leave, as 4,8; empty: a quarter and a half"),
        Knob(
            "inference",
            "recompute",
            "how the layers above are run",
            choices=("recompute", "pipeline"),
        ),
        Knob(
            "cap",
            8,
            "tokens that may wait for the layers above, if they are recomputed",
            low=1,
            high=1024,
            small=(1, 2),
        ),
    ),
)
def ee_llm(request: Request, *, threshold: float, exits: str, inference: str, cap: int) -> Decoder:
    """Return a decoder whose tokens leave where they are probable, and are finished later."""
    session: Any = request.target
    model = session.model
    layers = parse_exits(exits, model.config.n_layers, model.name)
    if threshold == math.inf:
        return request.decoder(BaseDrafter(), verify_tree)
    recomputes = inference == "recompute"
    rule = ProbableRule(layers, threshold, cap if recomputes else math.inf)
    # The paper's recomputation is our `restart`: waiting tokens run again from layer 1. A pipeline
    # gives the text of our `recompute`, which runs the layers above at once.
    target = ExitTarget(session, rule, "restart" if recomputes else "recompute")
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
