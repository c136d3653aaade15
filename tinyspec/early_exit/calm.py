"""CALM (confident adaptive language modeling): stop a token at the first layer that is confident.

Paper: Schuster et al., NeurIPS 2022, arXiv 2207.07061.

Idea. After each layer the confidence of the hidden state is measured. Where it reaches a threshold,
the shared head reads the next token from that layer, and the layers above are skipped. The state is
copied up: each skipped layer makes its own keys and values from it, so that later tokens can attend
to them. The threshold is stricter at the beginning of a text, because an error there spoils all
that follows. It is not chosen but *calibrated* (early_exit/calibrate.py, `tinyspec calibrate`):
with probability 1 - epsilon, whole texts stay within delta of the full model's.

    softmax      c = p(1) - p(2)                    the two greatest probabilities at the layer
    saturation   c = cos(h_l, h_(l-1))              from layer 2 on
    classifier   c = sigmoid(w . h_l + b)           one linear classifier for all layers

    paper        lambda_t = clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1)       token t of at most N
    t5x          lambda_t = lambda (0.9 + 0.1 exp(-tau t / N))                 the authors' code
    constant     lambda_t = lambda

N is the greatest number of new tokens that the text can get: the limit of the request, or the rest
of the context, whichever is less. The paper has a fixed output length for each task. Where nothing
limits a text, the threshold does not fall.

Training. The classifier alone, by `tinyspec train exits`; the model is frozen. Label: does this
layer's likeliest token agree with the last layer's (not with the text)? Loss: cross-entropy, where
in each layer those that agree weigh as much as those that do not, averaged over the layers below
the last. The paper also fine-tuned its models with losses at every exit (`tinyspec train lm`).

Guarantee: LOSSY in `threshold`; EXACT at inf, where no token leaves, whatever the other knobs.
Pitfall: the greatest probability in place of the gap; copying the keys and values of the exit's
layer instead of the state; a threshold that only looked best on the examples.
Ablation: a calibration that goes on after the first threshold that fails its test. It errs with 38
% where 5 % are allowed (tests/early_exit/test_calibrate.py). Without a measure of confidence it is
a fixed exit: those have rows in tutorials/results/exits.md.
Tests: tests/early_exit/test_calm.py (`run_until_confident` against the code that runs, layer by
layer; both ends; the classifier) and laws/exit_laws.py (the exact joint distribution at thresholds
that bite).
Left out: T5's encoder, which the paper runs in full, as the prompt runs here; the classifier
trained by a geometric-like loss, an ablation of the paper. The default threshold, 0.9, is ours: the
paper calibrates one for each task and tolerance, as `tinyspec calibrate` does. Ours: all layers
have the same weight in the classifier's loss. In the authors' code it is 2 p (1 - p), with p the
layer's share of agreeing tokens: 0 if all agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import UNCHANGED, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.exits import ExitPoint, ExitRule, ExitTarget, as_doubles, sigmoid
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import Probs


def run_until_confident(
    state: Any,
    caches: Sequence[list[Any]],
    project: Callable[[int, Any], Any],
    run_layer: Callable[[int, Any, list[Any]], Any],
    read: Callable[[Any], Any],
    confidence: Callable[[Any], Any],
    threshold: float,
    min_exit: int = 1,
    interval: int = 1,
) -> tuple[Any, int]:
    """Return a token's next-token row and the number of layers that it ran (section 3).

    state       the token's embedding
    caches      keys and values of all tokens so far, one list for each layer; they are extended
    project     (layer, state) -> the token's keys and values in that layer
    run_layer   (layer, state, cache) -> the state after the layer
    read        state -> row: final norm and output matrix
    confidence  state -> a number from 0 to 1
    threshold   lambda_t of this token
    min_exit    the lowest layer where a token may leave; then every `interval` layers

    The decoder runs `ExitTarget`. A test compares the two on tables, token by token.
    """
    depth, exit = len(caches), 0
    for layer, cache in enumerate(caches):
        cache.append(project(layer, state))  # above the exit: from the state that was copied up
        if exit:
            continue
        state = run_layer(layer, state, cache)
        may_leave = min_exit <= layer + 1 < depth and (layer + 1 - min_exit) % interval == 0
        if may_leave and confidence(state) >= threshold:
            exit = layer + 1
    return read(state), exit or depth


# ------------------------------ the measures (section 3.5)


class ConfidenceMeasure(NamedTuple):
    """A measure of confidence, and what it reads.

    of            the confidence at an exit, from 0 to 1
    reads_logits  whether it reads the logits of the exit: one product with the output matrix
    states        how many hidden states it reads
    """

    of: Callable[[ExitPoint], Any]
    reads_logits: bool = False
    states: int = 0


def _saturated(at: ExitPoint) -> float:
    """Return the saturation; 0 below layer 2, where there is no state to compare with."""
    return hidden_saturation(*at.states) if at.layer > 1 else 0.0


def find_measure(name: str, model: Any) -> ConfidenceMeasure:
    """Return the measure of this name on a model."""
    if name == "classifier":
        weight, bias = load_exit_classifier(getattr(model, "extras", {}), model.name)
        return ConfidenceMeasure(
            lambda at: classifier_confidence(at.states[0], weight, bias), states=1
        )
    if name == "saturation":
        return ConfidenceMeasure(_saturated, states=2)
    return ConfidenceMeasure(lambda at: softmax_response(at.logits), reads_logits=True)


WEIGHT, BIAS = "exits.weight", "exits.bias"  # of the exit classifier, among a model's extras


def probability_gap(row: Probs) -> Any:
    """Return the greatest probability less the second greatest: two likely tokens are a doubt.

    >>> float(probability_gap([0.5, 0.125, 0.375]))
    0.125
    """
    ids = top_k_tokens(row, 2)
    return row[ids[0]] - row[ids[1]] if len(ids) > 1 else row[ids[0]]


def softmax_response(logits: Any) -> Any:
    """Return the gap under the model's own distribution, before temperature and filters."""
    return probability_gap(UNCHANGED.probs(logits))


def hidden_saturation(state: Any, below: Any) -> float:
    """Return the cosine between the states after a layer and the one below; 0 if it is negative."""
    a, b = as_doubles(state), as_doubles(below)
    return max(0.0, float(a @ b) / (math.sqrt(float(a @ a) * float(b @ b)) or 1.0))


def classifier_confidence(state: Any, weight: Any, bias: float) -> float:
    """Return the classifier's probability that the last layer would choose the same token."""
    return sigmoid(float(as_doubles(state) @ weight) + bias)


def load_exit_classifier(extras: Mapping[str, Tensor], name: str) -> tuple[Any, float]:
    """Return the weight [d] and the bias of a model's exit classifier.

    Raises TinyspecError if the model has none.
    """
    if WEIGHT not in extras or BIAS not in extras:
        raise TinyspecError(
            f"{name} has no exit classifier: `tinyspec train exits --model {name}` trains one of a "
            "language model, or choose the measure softmax or saturation"
        )
    return as_doubles(extras[WEIGHT]), float(extras[BIAS])


# ------------------------------ the threshold (section 3.4, equation 5)


def find_longest_output(request: Request, prompt: int) -> float:
    """Return N, the most new tokens that a text of `prompt` tokens can get; inf if nothing limits.

    >>> from tinyspec.decoding.stopping import StoppingCriteria
    >>> request = Request(None, stop=StoppingCriteria(max_new_tokens=64), positions=100)
    >>> find_longest_output(request, 20), find_longest_output(request, 60)
    (64, 40)
    """
    room = None if request.positions is None else request.positions - prompt
    left = request.stop.tokens_left(0, room)
    return math.inf if left is None else left[0]


def decay_threshold(form: str, threshold: float, tau: float, t: int, n: float) -> float:
    """Return the threshold lambda_t of new token t (from 0) of at most n.

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
    """Let a token leave where its confidence reaches the threshold of its position."""

    def __init__(
        self, measure: ConfidenceMeasure, threshold: Callable[[int], float], layers: range
    ):
        self.measure, self.threshold, self.layers = measure, threshold, layers
        self.reads_logits, self.states = measure.reads_logits, measure.states

    def should_exit(self, at: ExitPoint) -> bool:
        return bool(self.measure.of(at) >= self.threshold(at.step))


# ------------------------------ the classifier (section 3.5)


def agreement_labels(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels of a text [B, T], and the states after each layer but the last.

    labels  [B, T, L - 1] whether the layer's likeliest token is the last layer's
    states  [B, T, L - 1, d]
    """
    path = model.torch_blocks()
    with torch.no_grad():
        states = list(path.layer_states(ids))
        tokens = [path.compute_logits(state).argmax(-1) for state in states]
        words = torch.stack(tokens, dim=-1)  # [B, T, L]
    return words[..., :-1] == words[..., -1:], torch.stack(states[:-1], dim=-2)


def balanced_loss(agrees: Tensor, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the classifier's cross-entropy, averaged over layers; each label weighs one half.

    agrees  [..., L - 1] labels
    states  [..., L - 1, d]

    In a layer where all labels are equal, that one weighs all.
    """
    each = F.binary_cross_entropy_with_logits(
        states @ weight + bias, agrees.to(states.dtype), reduction="none"
    )
    each, agrees = each.flatten(0, -2), agrees.flatten(0, -2)  # [n, L-1]
    kinds = torch.stack([agrees, ~agrees])  # [2, n, L-1]
    counts = kinds.sum(1)
    means = (each * kinds).sum(1) / counts.clamp(min=1)  # [2, L-1]
    return ((means * (counts > 0)).sum(0) / (counts > 0).sum(0)).mean()


# ------------------------------ the card


@technique(
    title="CALM: confident adaptive language modeling",
    summary="confident tokens leave early",
    paper="Schuster et al. 2022, arXiv 2207.07061",
    reported="up to 3x (abstract)",
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
        Knob("tau", 4.0, "how fast it falls; 0: not at all", low=0.0, high=1000.0),
        Knob(
            "min_exit", 1, "the lowest layer where a token may leave", low=1, high=1024, small=(1,)
        ),
        Knob(
            "interval", 1, "layers from one possible exit to the next", low=1, high=1024, small=(1,)
        ),
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
    """Return a decoder that runs for each token only the layers that it needs."""
    session: Any = request.target
    model, depth = session.model, session.model.config.n_layers
    if min_exit > depth:
        raise TinyspecError(
            f"min_exit is {min_exit}: {model.name} has {depth} layers: set min_exit to at most "
            f"{depth}"
        )
    rule = ExitRule()
    if threshold < math.inf:
        layers = range(min_exit, depth, interval)

        def threshold_of(t: int) -> float:
            return decay_threshold(
                decay, threshold, tau, t, find_longest_output(request, target.start)
            )

        rule = ConfidenceRule(find_measure(measure, model), threshold_of, layers)
    target = ExitTarget(session, rule, "copy")
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
