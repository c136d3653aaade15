"""Depth-adaptive transformer: a predictor chooses after how many layers a token is read.

Paper: Elbayad, Gu, Grave, Auli, ICLR 2020, arXiv 1910.10073. There is no public code.

Idea. Every decoder layer has an exit, and all of them share the output matrix. A small predictor,
trained beside the model, chooses the exit: once for a text, or for each token. The state is copied
up: each skipped layer makes its own keys and values from it. There are four predictors:

    sequence     q(n)   = softmax(W s + b)_n                      s: mean state of the source
    multinomial  q_t(n) = softmax(W h_t^1 + b)_n                  h_t^n: state of token t after n
    geometric    x_t^n  = sigmoid(w . h_t^n + b)                  layers; one w for all layers
                 q_t(n) = x_t^n prod over m < n of (1 - x_t^m)    the last layer takes the rest
    confidence   the greatest probability after n layers          nothing is trained

The first two take the likeliest n. The others leave at the first n whose value is above a
threshold: 0.5 for x_t^n, and a tuned one, perhaps one for each exit, for the confidence.

Training. The predictors learn from an *oracle*, the exit that scores best once each layer has its
price lambda. A score is the log-probability of the right token (*likelihood*), or 1 if it is the
likeliest one (*correctness*). A token's exit also matters to those around it, so scores are
smoothed over the text. For a whole text they are averaged:

    k(t, t') = exp(-(t - t')^2 / sigma)
    q*_t = argmax over n of  (sum over t' of k(t, t') score_t'^n) / (sum of k(t, t'))  -  lambda n
    q*   = argmax over n of  mean over t of score_t^n  -  lambda n
    loss = -log q(q*) - log q_t(q*_t)      of every predictor; no gradient enters the model

The model comes with trained exits: `tinyspec train lm` or `train mt`, section [exits]. With
weights = "uniform" all losses of the exits weigh the same, one of the paper's settings.

Guarantee: LOSSY in `threshold`; EXACT at inf, where no token leaves, whatever the predictor.
Pitfall: thresholds on the greatest probability alone, under this name; exits without an oracle; a
gradient of the predictors in the decoder.
Ablation: random exits of the same mean depth. On made-up tokens, easy and hard ones, trained
predictors agree with the last layer more often (a test).
Tests: tests/early_exit/test_depth_adaptive.py (`predict_exit` against the code that runs, token by
token; the oracles; predictors trained on made-up states, against random exits of the same depths)
and laws/exit_laws.py (the exact joint distribution of all four).
Left out: exits and predictors that are trained together (the paper's), where the model is frozen
here; "mixed" training, which samples exits; one output matrix for each exit; random exits on a real
model: the training prints layers and agreement only of the predictors and oracle.
Ours: the smoothed score is divided by the sum of k, so that one lambda serves all predictors and
texts of any length (the paper sums); the three predictors are trained at once, since none changes
another; without an encoder, s is the mean last state of the prompt, its last token left out. The
formulas, the settings and the section numbers are from memory: of the paper's text we could read no
more than the beginning.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import UNCHANGED, top_k_tokens
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
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.heads import (
    FrozenTarget,
    HeadSettings,
    head_weights,
    mean_cross_entropy,
    prepare_head,
)
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
    technique,
)

TIE = 1e-5  # difference of scores that rounding makes: correctness has many equal ones
LEAD = "depth_adaptive/"  # leads the names of the predictors' weights beside a model's


def predict_exit(
    predictor: str,
    source: Any,
    states: Sequence[Any],
    read: Callable[[Any], Any],
    weights: Mapping[str, Any],
    threshold: float,
) -> int:
    """Return after how many layers a token is read (sections 4.1 and 4.2).

    source   mean state of the source [d]
    states   the token's states [d] after each layer, if all were run
    read     state -> next-token distribution [V]
    weights  of the predictors, by name

    The decoder runs `ExitTarget`, which runs no layer above the exit. A test compares the two.
    """
    if predictor in ("sequence", "multinomial"):
        seen = source if predictor == "sequence" else states[0]
        scores = weights[f"{predictor}.weight"] @ seen + weights[f"{predictor}.bias"]
        return 1 + int(np.argmax(scores))
    for n, state in enumerate(states[:-1], start=1):
        if predictor == "geometric":
            score = sigmoid(weights["geometric.weight"] @ state + weights["geometric.bias"][0])
        else:
            score = max(read(state))
        if score > threshold:
            return n
    return len(states)


# ------------------------------ the predictors as they run


class SequenceRule(ExitRule):
    """Let all tokens of a text leave after the same number of layers, chosen by the source."""

    def __init__(self, weights: Mapping[str, Any], depth: int):
        self.weight, self.bias = weights["sequence.weight"], weights["sequence.bias"]
        self.layers, self.text_layers = range(1, depth), (depth,)
        self.read = dict[int, Any]()  # states of the given text, by position
        self.of_encoder: Any = None  # those of an encoder, if the model has one

    def read_text(self, states: Tensor, first: int) -> None:
        self.read.update(enumerate(as_doubles(states[0]), first))

    def forget_text(self, length: int) -> None:
        self.read = {at: state for at, state in self.read.items() if at < length}
        self._choose_exit()

    def begin(self, session: Any) -> None:
        self.of_encoder = getattr(session.model, "source_states", None)
        self._choose_exit()

    def _choose_exit(self) -> None:
        """Choose the exit by the mean state of the source as it is now."""
        states = [*self.read.values()] if self.of_encoder is None else as_doubles(self.of_encoder)
        source = np.mean(states, axis=0) if len(states) else 0 * self.weight[0]
        self.exit = 1 + int(np.argmax(self.weight @ source + self.bias))

    def layers_of(self, token: int, position: int) -> Iterable[int]:
        return [self.exit] if self.exit in self.layers else []

    def should_exit(self, at: ExitPoint) -> bool:
        return True


class MultinomialRule(ExitRule):
    """Let a token leave where its state after the first layer says. No later state is read."""

    states = 1

    def __init__(self, weights: Mapping[str, Any], depth: int):
        self.weight, self.bias = weights["multinomial.weight"], weights["multinomial.bias"]
        self.layers, self.exit = range(1, depth), depth

    def layers_of(self, token: int, position: int) -> Iterator[int]:
        yield from self.layers[:1]
        if self.exit in self.layers:  # by now `should_exit` has seen the first layer
            yield self.exit

    def should_exit(self, at: ExitPoint) -> bool:
        if at.layer == 1:
            self.exit = 1 + int(np.argmax(self.weight @ as_doubles(at.states[0]) + self.bias))
        return at.layer == self.exit


class GeometricRule(ExitRule):
    """Let a token leave at the first layer whose chance to stop is above the threshold."""

    states = 1

    def __init__(self, weights: Mapping[str, Any], depth: int, threshold: float):
        self.weight, self.bias = weights["geometric.weight"], float(weights["geometric.bias"][0])
        self.layers, self.threshold = range(1, depth), threshold

    def should_exit(self, at: ExitPoint) -> bool:
        return sigmoid(float(self.weight @ as_doubles(at.states[0])) + self.bias) > self.threshold


class GreatestProbabilityRule(ExitRule):
    """Let a token leave at the first layer whose greatest probability is above its threshold."""

    reads_logits = True

    def __init__(self, thresholds: Sequence[float]):
        self.thresholds, self.layers = thresholds, range(1, len(thresholds) + 1)

    def should_exit(self, at: ExitPoint) -> bool:
        row = UNCHANGED.probs(at.logits)
        return bool(row[top_k_tokens(row, 1)[0]] > self.thresholds[at.layer - 1])


def load_predictors(model: Any) -> dict[str, Any]:
    """Return the trained predictors of a model, as arrays. Raises TinyspecError if it has none."""
    if not any(name.startswith(LEAD) for name in model.extras):
        raise TinyspecError(
            f"{model.name} has no trained predictors: name their folder with --head (head=...), "
            f"train them (tinyspec train head --for {model.name} --method depth_adaptive --out "
            "FOLDER; a translator: tinyspec train mt, method depth_adaptive), or choose the "
            "predictor confidence"
        )
    return {name: as_doubles(w) for name, w in head_weights(model, "depth_adaptive").items()}


def parse_thresholds(text: str, threshold: float, exits: int, name: str) -> list[float]:
    """Return the threshold of each exit; an empty text gives all of them the same.

    Raises TinyspecError unless there are as many as exits below the last layer.

    >>> parse_thresholds("0.9, 0.8", 0.5, 2, "m"), parse_thresholds("", 0.5, 2, "m")
    ([0.9, 0.8], [0.5, 0.5])
    """
    if not text.strip():
        return [threshold] * exits
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) != exits or any(math.isnan(x) or x < 0 for x in found):
        raise TinyspecError(
            f"thresholds is {text!r}: it must be {exits} numbers from 0 on, one of each exit below "
            f"the last layer of {name}, such as 0.9,0.8"
        )
    return found


# ------------------------------ the oracles (section 4)


@dataclass(frozen=True)
class DepthAdaptiveSettings(HeadSettings):
    """Section [head] of a recipe, or [translator].

    oracle   likelihood or correctness
    penalty  lambda, the price of a layer
    width    sigma, how far scores are smoothed; 0: not at all
    """

    oracle: str = "likelihood"
    penalty: float = 0.05
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle not in ("likelihood", "correctness"):
            raise TinyspecError(
                f"[head] oracle is {self.oracle!r}: it must be likelihood or correctness"
            )
        if self.draft_vocab:
            raise TinyspecError(
                "[head] draft_vocab: the predictors propose no tokens: leave it out"
            )


def smooth_scores(scores: Tensor, known: Tensor, width: float) -> Tensor:
    """Return the mean of the scores around each token, weighted by k(t, t').

    scores  [B, T, L]
    known   [B, T] where the right token is known; the others do not count
    """
    if not width:
        return scores
    places = torch.arange(scores.shape[1], device=scores.device)
    kernel = torch.exp(-((places[:, None] - places) ** 2) / width) * known[:, None]  # [B, T, T]
    return kernel @ scores / kernel.sum(-1, keepdim=True).clamp_min(1e-30)


def choose_best_exits(scores: Tensor, penalty: float) -> Tensor:
    """Return the exits with the best scores [..., L] less lambda n, counted from 0.

    Of equal scores the lowest exit wins. Scores that differ by rounding alone count as equal.

    >>> scores = torch.tensor([-3.0, -1.0, -0.5])
    >>> [int(choose_best_exits(scores, price)) for price in (0.0, 0.75, 5.0)]
    [2, 1, 0]
    """
    n = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    worth = scores - penalty * n
    return (worth >= worth.amax(dim=-1, keepdim=True) - TIE).int().argmax(dim=-1)


def geometric_log_probs(logits: Tensor) -> Tensor:
    """Return log q(n) [..., L] of the stops [..., L - 1], which are logits of x^n.

    >>> geometric_log_probs(torch.zeros(2)).exp().tolist()
    [0.5, 0.25, 0.25]
    """
    stay = F.pad(F.logsigmoid(-logits).cumsum(-1), (1, 0))
    return stay + F.pad(F.logsigmoid(logits), (0, 1))


class KnownTokens:
    """Known tokens of a batch: what the predictors read of them, and what the oracles say.

    source     [B, d] mean state of each source
    states     [n, d] of the tokens, after each layer
    text_of    [n] the text of each token
    best       [n] the oracle's exit of each token
    best_text  [B] that of each text; has_tokens [B]: which of them have a known token
    words      [n, L] likeliest token of each exit
    """

    def __init__(
        self,
        source: Tensor,
        states: Sequence[Tensor],
        compute_logits: Callable[[Tensor], Tensor],
        targets: Tensor,
        known: Tensor,
        settings: DepthAdaptiveSettings,
    ):
        """Ask the oracles. States [B, T, d] after each layer; targets and known [B, T]."""
        self.source, self.states = source, [state[known] for state in states]
        self.text_of = known.nonzero()[:, 0]
        found = read_exits(self.states, compute_logits, targets[known])
        is_likelihood = settings.oracle == "likelihood"
        scores = torch.zeros(*known.shape, len(states), device=known.device)
        scores[known] = found.log_probs if is_likelihood else found.is_right.float()
        count = known.sum(1, keepdim=True)
        self.best_text = choose_best_exits(scores.sum(1) / count.clamp(min=1), settings.penalty)
        self.has_tokens = count[:, 0] > 0
        smoothed = smooth_scores(scores, known, settings.width)[known]
        self.best, self.words = choose_best_exits(smoothed, settings.penalty), found.words

    def stop_logits(self, weights: HeadWeights) -> Tensor:
        """Return the logits of the geometric predictor's stops: [n, L - 1]."""
        w, b = weights["geometric.weight"], weights["geometric.bias"]
        return torch.stack([state @ w for state in self.states[:-1]], dim=-1) + b

    def choice_logits(self, weights: HeadWeights, predictor: str) -> Tensor:
        """Return the logits of the exits: [B, L] of texts (sequence), [n, L] of tokens."""
        seen = self.source if predictor == "sequence" else self.states[0]
        return F.linear(seen, weights[f"{predictor}.weight"], weights[f"{predictor}.bias"])

    def loss(self, weights: HeadWeights) -> Tensor:
        """Return the sum of the predictors' cross-entropies to the oracles, a scalar."""
        of_texts = self.choice_logits(weights, "sequence")[self.has_tokens]
        geometric = geometric_log_probs(self.stop_logits(weights))
        return (
            mean_cross_entropy(of_texts, self.best_text[self.has_tokens])
            + mean_cross_entropy(self.choice_logits(weights, "multinomial"), self.best)
            + mean_cross_entropy(geometric, self.best)
        )

    @torch.no_grad()
    def count_exits(self, weights: HeadWeights) -> dict[str, Tensor]:
        """Return the layers that each predictor runs, and the exits that agree with the last layer.

        Each is [2]: the sum over all tokens, and their number. States are those of a full
        pass, as if no token had left. "best" are the oracle's own exits.
        """
        stops = F.pad(self.stop_logits(weights) > 0, (0, 1), value=True)
        exits = {
            "sequence": self.choice_logits(weights, "sequence").argmax(-1)[self.text_of],
            "multinomial": self.choice_logits(weights, "multinomial").argmax(-1),
            "geometric": stops.int().argmax(-1),
            "best": self.best,
        }
        agrees, found = self.words == self.words[:, -1:], dict[str, Tensor]()
        n = torch.tensor(float(len(self.best)))
        for name, chosen in exits.items():
            right = agrees.gather(1, chosen[:, None])
            found[f"{name}_layers"] = torch.stack([(chosen + 1).sum().cpu(), n])
            found[f"{name}_agreement"] = torch.stack([right.sum().cpu(), n])
        return found


# ------------------------------ training


def predictor_shapes(config: Config, settings: DepthAdaptiveSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the three predictors that are trained."""
    depth, d = config.n_layers, config.d_model
    if depth < 2:
        raise TinyspecError(
            "depth_adaptive: the model has one layer, there is nowhere to exit: use a deeper model"
        )
    choices = {
        f"{name}.{part}": shape
        for name in ("sequence", "multinomial")
        for part, shape in (("weight", (depth, d)), ("bias", (depth,)))
    }
    return {**choices, "geometric.weight": (d,), "geometric.bias": (1,)}


def initialize_predictors(
    target: FrozenTarget, settings: DepthAdaptiveSettings, seed: int
) -> dict[str, Tensor]:
    """Return zeros: all choices are equally likely at first, and each stop has chance 1/2."""
    shapes = predictor_shapes(target.config, settings)
    return {name: target.embed.new_zeros(shape) for name, shape in shapes.items()}


def read_batch(target: FrozenTarget, batch: TrainingBatch) -> KnownTokens:
    """Return the tokens that the target wrote.

    Its source is all text before the answer but for the last token. A chat's question is source,
    also if the target wrote it.
    """
    blocks, known = target.blocks, batch.is_answer[:, :-1]
    assert blocks is not None
    begins = known & ~F.pad(known, (1, 0))[:, :-1]  # the next token is the first of its kind
    places = torch.arange(known.shape[1], device=known.device)
    is_source = places < (places * begins).amax(dim=1, keepdim=True)
    with torch.no_grad():
        states = list(blocks.layer_states(batch.ids[:, :-1]))
        source = average_states(blocks.apply_final_norm(states[-1]), is_source)
    settings, targets = target.settings, batch.ids[:, 1:]
    return KnownTokens(source, states, blocks.compute_logits, targets, known, settings)


def average_states(states: Tensor, counted: Tensor) -> Tensor:
    """Return the mean [B, d] of the states [B, T, d] that are counted [B, T]; 0 of none."""
    total = (states * counted[..., None]).sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1)


def predictor_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the loss of all predictors on what the target wrote."""
    return read_batch(target, batch).loss(weights)


def count_batch_exits(
    weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch
) -> dict[str, Tensor]:
    """Return `KnownTokens.count_exits` on what the target wrote."""
    return read_batch(target, batch).count_exits(weights)


TRAINED = Trained(
    DepthAdaptiveSettings,
    lambda config, settings: (),
    predictor_shapes,
    initialize_predictors,
    lambda weights: 0,
    None,
    predictor_loss,
    small=DepthAdaptiveSettings(),
    figures=count_batch_exits,
    needed=False,
)


def equip_with_predictors(config: Seq2SeqConfig, settings: DepthAdaptiveSettings) -> Seq2SeqConfig:
    """Return the config with the predictors' weights."""
    shapes = predictor_shapes(config.stack_config(config.decoder_layers), settings)
    return replace(config, heads={f"{LEAD}{name}": shape for name, shape in shapes.items()})


@torch.no_grad()
def read_translations(
    model: Seq2Seq, settings: DepthAdaptiveSettings, source: Tensor, target: Tensor
) -> KnownTokens:
    """Return the tokens of translations [B, T] of sources [B, S], and their ends."""
    inputs, memory, causal = model.causal_inputs(source, target)
    states = list(model.layer_states(inputs, memory, causal))
    targets = add_ends(model.config, target)
    known = targets != model.config.pad
    seen = average_states(memory.states, memory.mask)
    return KnownTokens(seen, states, model.decoder.compute_logits, targets, known, settings)


def translator_weights(model: Seq2Seq) -> dict[str, Tensor]:
    """Return the predictors of an encoder-decoder."""
    return {name.removeprefix(LEAD): w for name, w in model.weights.items() if LEAD in name}


def translator_predictors_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return the loss of all predictors on translations; nothing is dropped out."""
    known = read_translations(training.model, training.settings, *batch)
    return known.loss(translator_weights(training.model))


def measure_translator_predictors(
    model: Seq2Seq,
    settings: DepthAdaptiveSettings,
    source: Tensor,
    target: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the loss and `KnownTokens.count_exits` of a batch, the same for each of its rows."""
    known, weights = read_translations(model, settings, source, target), translator_weights(model)
    means = {name: count / by for name, (count, by) in known.count_exits(weights).items()}
    figures = {"held_out": known.loss(weights).cpu(), **means}
    return {name: figure.expand(len(source)) for name, figure in figures.items()}


TRANSLATOR = TrainedTranslator(
    translator_predictors_batch_loss,
    None,
    "It writes from left to right, as its teacher does, whose weights it has. Beside them are the "
    "predictors of `depth_adaptive`, trained to say after how many decoder layers a token is read: "
    "oracle {settings.oracle}, lambda {settings.penalty:g}, sigma {settings.width:g}. On its "
    "teacher's greedy translations, with all layers run before: the oracle reads a token after "
    "{figures[best_layers]:.2f} layers, sequence after {figures[sequence_layers]:.2f} "
    "({figures[sequence_agreement]:.1%} are the last layer's words), multinomial after "
    "{figures[multinomial_layers]:.2f} ({figures[multinomial_agreement]:.1%}), geometric after "
    "{figures[geometric_layers]:.2f} ({figures[geometric_agreement]:.1%}). Its figure is greedy "
    "decoding's with all layers.",
    settings=DepthAdaptiveSettings,
    figures=measure_translator_predictors,
    best="held_out",
    equip=equip_with_predictors,
    extends=True,
    updates=lambda settings: LEAD,
)


# ------------------------------ the card


@technique(
    title="Depth-adaptive transformer",
    summary="a predictor chooses each token's last layer",
    paper="Elbayad et al. 2020, arXiv 1910.10073",
    reported="a tuned baseline's quality with under a quarter of the decoder layers (abstract)",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("threshold", math.inf),
    hidden=True,
    trained=TRAINED,
    translator=TRANSLATOR,
    knobs=(
        Knob(
            "predictor",
            "geometric",
            "what chooses the exit",
            choices=("geometric", "multinomial", "sequence", "confidence"),
        ),
        Knob(
            "threshold",
            0.5,
            "chance to stop (geometric) or greatest probability (confidence) above which a token "
            "leaves; inf: no token leaves, whatever the predictor",
            low=0.0,
            high=1.0,
            beyond=math.inf,
        ),
        Knob(
            "thresholds",
            "",
            "thresholds of confidence, lowest exit first, as 0.9,0.8; empty: threshold for all",
        ),
    ),
)
def depth_adaptive(
    request: Request, *, predictor: str, threshold: float, thresholds: str
) -> Decoder:
    """Return a decoder whose tokens run as many layers as the predictor says."""
    session: Any = request.target
    model, depth = session.model, session.model.config.n_layers
    if thresholds.strip() and predictor != "confidence":
        raise TinyspecError(
            f"thresholds is for predictor confidence, not for {predictor}: leave it empty"
        )
    each = parse_thresholds(thresholds, threshold, depth - 1, model.name)
    if threshold == math.inf:
        return request.decoder(BaseDrafter(), verify_tree)
    rule: ExitRule
    if predictor == "confidence":
        rule = GreatestProbabilityRule(each)
    else:
        weights = prepare_head(model, "depth_adaptive", load_predictors)
        if predictor == "geometric":
            rule = GeometricRule(weights, depth, threshold)
        else:
            rule = (SequenceRule if predictor == "sequence" else MultinomialRule)(weights, depth)
    target = ExitTarget(session, rule, "copy")
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
