"""CALM, Confident Adaptive Language Modeling: a token leaves at the first layer that is confident
enough.

Schuster et al., NeurIPS 2022, arXiv 2207.07061. After each layer the state is measured; where the
confidence reaches a threshold lambda, the word is read from that layer by the shared head, and the
state is copied up: every layer above makes *its own* keys and values from it, so that later tokens
miss nothing. What makes it CALM: three measures (the gap of the two likeliest words; the cosine
with the state one layer below, "saturation"; a trained linear classifier that all layers share); a
threshold that is stricter at the beginning of a text, where an error spoils all that follows; and a
threshold that is not chosen but *calibrated*, so that whole texts stay within delta of the full
model's, with probability 1 - epsilon (`early_exit/calibrate.py`; the command is `tinyspec
calibrate`).

Two published forms of the threshold for token t of N: clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1),
the paper's, and lambda (0.9 + 0.1 exp(-tau t / N)), its code's (t5x); they agree at lambda = 1.
"constant" is lambda for every token.

Trained: the classifier alone, by `tinyspec train exits`; the model is frozen. Label: does this
layer's likeliest word agree with the top layer's (not with the text). Loss: cross-entropy, in each
layer as much for those that agree as for those that do not, averaged over the layers below the top.
The paper's models were also fine-tuned so that each layer can speak (losses weighted by depth);
that is `tinyspec train lm` with exit losses, and not needed to run this.

Guarantee: LOSSY in `threshold`; at inf no token leaves, whatever the other knobs, and that is
EXACT. Tested in tests/early_exit/test_calm.py and laws/exit_laws.py: the exact joint law against
the rule written out again, on tables and transformers, for thresholds that bite; the copied keys
and values; both ends; and, exactly, without simulation, that the calibrated risk is at most delta
with probability 1 - epsilon. Left out: the encoder, which the paper's T5 runs in full, is the
prompt here; the classifier trained by a geometric-like loss, an ablation of the paper.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.exits import ExitPoint, ExitRule, ExitTarget
from tinyspec.errors import TinyspecError
from tinyspec.lm.transformer import Model
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.training.schedule import Settings
from tinyspec.training.train import Trained, train
from tinyspec.tree import Probs

# ---------------------------------------------------------------------- the measures (section 3.5)


class ConfidenceMeasure(NamedTuple):
    """A confidence, and what it reads: the row of the exit, so many states."""

    of: Callable[[ExitPoint], Any]
    row: bool = False
    states: int = 0


def _saturated(at: ExitPoint) -> float:
    """Below the second layer there is nothing to compare with, so that only a threshold of 0 lets a
    token leave there.
    """
    return hidden_saturation(*at.states) if at.layer > 1 else 0.0


def find_measure(name: str, model: Any) -> ConfidenceMeasure:
    """The measure of this name on a model."""
    if name == "classifier":
        weight, bias = load_exit_classifier(getattr(model, "extras", {}), model.name)
        return ConfidenceMeasure(
            lambda at: classifier_confidence(at.states[0], weight, bias), states=1
        )
    if name == "saturation":
        return ConfidenceMeasure(_saturated, states=2)
    return ConfidenceMeasure(lambda at: softmax_response(at.logits), row=True)


WEIGHT, BIAS = "exits.weight", "exits.bias"  # of the exit classifier, among a model's extras


def probability_gap(row: Probs) -> Any:
    """The greatest probability of a law less the second greatest. Not the greatest alone: two
    likely words are a doubt.

    >>> float(probability_gap([0.5, 0.125, 0.375]))
    0.125
    """
    ids = top_k_tokens(row, 2)
    return row[ids[0]] - row[ids[1]] if len(ids) > 1 else row[ids[0]]


def softmax_response(logits: Any) -> Any:
    """The gap under the model's own law, before the user's settings sharpen or cut it."""
    return probability_gap(SamplingParams().probs(logits))


def hidden_saturation(state: Any, below: Any) -> float:
    """The cosine between what came out of a layer and out of the layer below; 0 where it is
    negative.
    """
    a, b = _doubles(state), _doubles(below)
    return max(0.0, float(a @ b) / (math.sqrt(float(a @ a) * float(b @ b)) or 1.0))


def classifier_confidence(state: Any, weight: Any, bias: float) -> float:
    """What a linear classifier of the state says: the probability that the top layer would choose
    the same word.
    """
    x = float(_doubles(state) @ weight) + bias
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def load_exit_classifier(extras: Mapping[str, Tensor], name: str) -> tuple[Any, float]:
    """A model's trained exit classifier as numbers: weight [d] and bias. TinyspecError where it has
    none.
    """
    if WEIGHT not in extras or BIAS not in extras:
        raise TinyspecError(
            f"{name} has no exit classifier: `tinyspec train exits --model {name}` trains one, or choose the measure "
            "softmax or saturation"
        )
    return _doubles(extras[WEIGHT]), float(extras[BIAS])


def _doubles(vector: Any) -> Any:
    return vector.detach().double().cpu().numpy()


# ---------------------------------------------------------------------- the threshold (section 3.4, equation 5)


def decay_threshold(form: str, threshold: float, tau: float, t: int, n: float) -> float:
    """The threshold of new token t (from 0) of at most n.

    >>> [round(decay_threshold("paper", 0.5, 4.0, t, 10), 3) for t in (0, 5, 10)]
    [0.55, 0.464, 0.452]
    >>> [round(decay_threshold("t5x", 0.5, 4.0, t, 10), 3) for t in (0, 5, 10)]
    [0.5, 0.457, 0.451]
    """
    fade = math.exp(-tau * t / n)
    if form == "paper":
        return min(max(0.9 * threshold + 0.1 * fade, 0.0), 1.0)
    return threshold * (0.9 + 0.1 * fade) if form == "t5x" else threshold


class ConfidenceRule(ExitRule):
    """A token leaves where its confidence reaches the threshold of its place in the text."""

    def __init__(
        self, measure: ConfidenceMeasure, threshold: Callable[[int], float], layers: range
    ):
        self.measure, self.threshold, self.layers = measure, threshold, layers
        self.row, self.states = measure.row, measure.states

    def should_exit(self, at: ExitPoint) -> bool:
        return bool(self.measure.of(at) >= self.threshold(at.step))


@technique(
    title="CALM: confident adaptive language modeling",
    summary="confident tokens leave early",
    paper="Schuster et al. 2022, arXiv 2207.07061",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("threshold", math.inf),
    knobs=(
        Knob(
            "threshold",
            0.9,
            "confidence at which a token leaves; inf: never",
            low=0.0,
            high=1.0,
            beyond=math.inf,
        ),
        Knob(
            "measure", "softmax", "the confidence", choices=("softmax", "saturation", "classifier")
        ),
        Knob(
            "decay",
            "paper",
            "how the threshold falls along the text",
            choices=("paper", "t5x", "constant"),
        ),
        Knob("tau", 4.0, "how fast it falls; 0: not at all", low=0.0),
        Knob("min_exit", 1, "the lowest layer where a token may leave", low=1, small=(1,)),
        Knob("interval", 1, "it is asked at every so many layers", low=1, small=(1,)),
    ),
)
def calm(
    request: Request,
    *,
    threshold: float,
    measure: str,
    decay: str,
    tau: float,
    min_exit: int,
    interval: int,
) -> Decoder:
    """Each token runs as many layers as it needs to be sure."""
    session: Any = request.target
    model, limit = session.model, request.stop.max_new_tokens or request.positions or math.inf
    depth = model.config.n_layers
    if min_exit > depth:
        raise TinyspecError(f"min_exit is {min_exit}: {model.name} has {depth} layers")
    rule = ExitRule()
    if threshold < math.inf:
        layers = range(min_exit, depth, interval)
        rule = ConfidenceRule(
            find_measure(measure, model),
            lambda t: decay_threshold(decay, threshold, tau, t, limit),
            layers,
        )
    return replace(request, target=ExitTarget(session, rule, "copy")).decoder(
        BaseDrafter(), verify_tree
    )


# ---------------------------------------------------------------------- the classifier (section 3.5)


def agreement_labels(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of a text [B, T]: where a layer's likeliest word is the top's [B, T, L-1]; the states below
    the top [B, T, L-1, d].
    """
    path = model.dense()
    with torch.no_grad():
        states = list(path.stream(ids))
        words = torch.stack([path.head(state).argmax(-1) for state in states], dim=-1)  # [B, T, L]
    return words[..., :-1] == words[..., -1:], torch.stack(states[:-1], dim=-2)


def balanced_loss(agrees: Tensor, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Cross-entropy of the classifier on [..., L-1] and [..., L-1, d]: the mean over layers, in
    which each kind counts half.

    A layer where one kind is missing counts by the other alone.
    """
    each = F.binary_cross_entropy_with_logits(
        states @ weight + bias, agrees.to(states.dtype), reduction="none"
    )
    each, agrees = each.flatten(0, -2), agrees.flatten(0, -2)  # [n, L-1]
    kinds = torch.stack([agrees, ~agrees])  # [2, n, L-1]
    counts = kinds.sum(1)
    means = (each * kinds).sum(1) / counts.clamp(min=1)  # [2, L-1]
    return ((means * (counts > 0)).sum(0) / (counts > 0).sum(0)).mean()


def train_exit_classifier(
    model: Model,
    crops: Callable[[torch.Generator], tuple[Tensor, ...]],
    settings: Settings,
    folder: Path,
    **watch: Any,
) -> tuple[Trained, Mapping[str, Tensor]]:
    """Train the classifier of a frozen model; `crops` draws texts [B, T]. Its state lives in
    `folder`, as `train` keeps it.
    """
    frozen = model.to(dtype=torch.float32)
    weights = {WEIGHT: torch.zeros(model.config.d_model), BIAS: torch.zeros(())}

    def batches(generator: torch.Generator) -> tuple[Tensor, ...]:
        return agreement_labels(frozen, crops(generator)[0])

    held = agreement_labels(
        frozen,
        torch.cat(
            [crops(torch.Generator().manual_seed(settings.seed - i))[0] for i in range(1, 5)]
        ),
    )

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"held_out": float(balanced_loss(*held, weights[WEIGHT], weights[BIAS]))}

    def loss(agrees: Tensor, states: Tensor) -> Tensor:
        return balanced_loss(agrees, states, weights[WEIGHT], weights[BIAS])

    ended = train(
        weights,
        batches,
        loss,
        settings,
        folder,
        validate=validate,
        title="exit classifier",
        **watch,
    )
    return ended, {name: weight.detach() for name, weight in weights.items()}
