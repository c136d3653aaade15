"""FREE: exit after a few layers if sure; else run all layers, also of the tokens that exited.

Paper: Bae, Ko, Song, Yun, EMNLP 2023, arXiv 2310.05424. Constants and the comparison with the
threshold were read in the authors' code (github.com/raymin0223/fast_robust_early_exit).

Idea. There are two depths. Every token runs the first L_S layers. If its confidence exceeds a
threshold, the token is drawn there, and its state waits. If not, it runs the other layers, and all
tokens that wait run them along with it, in one causal block (*synchronised parallel decoding*). So
later tokens attend to true keys and values: no state is copied. The block also shows what the whole
model predicts at the tokens that left. From these pairs an estimator learns, without labels, which
confidence can be trusted (*adaptive threshold*).

    c        = p(1) - p(2)                           the two greatest probabilities after L_S layers
    match    = [argmax after L_S layers = argmax after all layers]

The confidences of the matches, and of the others, are fitted by a beta distribution each, from
their mean m and variance s^2. In the next text, theta is the least grid value such that at each
grid value c >= theta a match is likelier than zeta:

    a = m (m (1 - m) / s^2 - 1),    b = a (1 - m) / m
    Beta(c; a, b of the matches) / (Beta(c; matches) + Beta(c; others)) > zeta

Training. The model is tuned by `tinyspec train head --method free`, on texts that it wrote. The
losses of both exits are weighted by their depth, and each of L_S layers of the whole model teaches
the nearest of the first layers (*layerwise distillation*):

    loss = (L_S CE_S + L CE_L) / (L_S + L) + alpha mean over i of MSE(t_i, s_a(i))

t_i are the states of L_S layers at equal distances, as constants; s_j are those of the first L_S
layers; all after the final norm. The partners a(i) are chosen from the last t_i to the first: a(i)
is the j < a(i + 1) whose s_j is nearest to t_i; if no j is left, a(i) = a(i + 1).

Guarantee: LOSSY in `threshold`; EXACT at inf, where no token leaves. A token that left keeps the
row of its exit, but the keys and values are those of the whole model (*cache-exact*).
Pitfall: copying states up and calling it FREE; a block without a causal mask inside, which the
authors' code makes an option; a threshold that is never fitted. States that are compared *before*
the final norm: later states have larger norms, the first layers imitate them, the later norms grow
again, and the loss diverges. FREE runs as many layers as the full model, but in fewer passes: it
saves the reading of weights. The estimator costs a product with the output matrix for each waiting
token.
State: the pairs outlive a request (`persistent`), one list per set of knobs, the last 8 of a model,
while it lives. So the text of a seed depends on earlier requests; with `adaptive` off it does not.
In a batch no text may depend on other requests, so the threshold stays as it is given.
Ablation: `adaptive` off. On made-up confidences the estimator moves a threshold that is too low or
too high to where both depths agree, and without it the threshold stays (a test).
Tests: tests/early_exit/test_free.py (`decode_in_two_depths` against the code that runs; the cache;
the fit; the loss) and laws/exit_laws.py (the exact joint distribution at thresholds that bite).
Left out: the rollback of tokens, the trained confidence head, and the fixed mappings of layers, all
options of the authors' code. There the component with the greater mean is taken for the matches;
here it is the one that was fitted to them. With fewer than two pairs of a kind, or equal ones,
nothing can be fitted: the threshold stays as it was. Ours: L_S is a third of the layers unless the
model was tuned for another; a model with trained exits (section [exits]) may stand in for a tuned
one; states are compared at the tokens that the model wrote. Not trained for a comparison: a model
without the distillation (alpha = 0), and other depths L_S.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import UNCHANGED, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.calm import probability_gap, softmax_response
from tinyspec.early_exit.exits import ExitPoint, ExitRule, ExitTarget
from tinyspec.errors import TinyspecError
from tinyspec.technique import (
    Guarantee,
    Knob,
    Request,
    TrainingBatch,
    Tuned,
    Tuning,
    per_model_state,
    technique,
    tuned_settings,
)

GRID_POINTS = 10  # thresholds that a fit chooses from, as in the authors' code
HIGHEST_THRESHOLD = 0.9  # the greatest of them, and the threshold of the first text
MARGIN = 1e-4  # confidences are clipped so far from 0 and 1, where a beta density may be infinite
MAX_FITS = 300  # fits at most, one before each text; after them the threshold is fixed


def decode_in_two_depths(
    run_shallow: Callable[[int], Any],
    run_deep: Callable[[list[Any]], list[Any]],
    read: Callable[[Any], Any],
    text: Sequence[int],
    n_tokens: int,
    threshold: float,
    rng: Any,
) -> tuple[list[int], list[int]]:
    """Return the text, and how many tokens each deep pass ran (section 4.2).

    run_shallow  token -> its state after L_S layers, which keep its keys and values
    run_deep     states of tokens in a row -> their states after the other layers, as a causal block
    read         state -> next-token distribution [V]
    rng          a numpy.random.Generator

    The last token of the text is the first that runs. The decoder runs `ExitTarget`. A test
    compares the two on every outcome.
    """
    output, waiting, blocks = list(text), list[Any](), list[int]()
    for _ in range(n_tokens):
        waiting.append(run_shallow(output[-1]))
        row = read(waiting[-1])
        if probability_gap(row) <= threshold:  # in doubt: all that wait go deep with it
            row = read(run_deep(waiting)[-1])
            blocks.append(len(waiting))
            waiting = []
        output.append(rng.choice(len(row), p=row))
    return output, blocks


# ------------------------------ the adaptive threshold (section 4.3)


def fit_beta(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a and b of the beta distribution with the mean and variance of some values in (0, 1).

    None: there are fewer than two values, or all are equal.

    >>> fit_beta([0.25, 0.75])
    (1.5, 1.5)
    """
    if len(values) < 2 or min(values) == max(values):
        return None
    mean, variance = float(np.mean(values)), float(np.var(values))
    a = mean * (mean * (1 - mean) / variance - 1)
    return a, a * (1 - mean) / mean


def beta_log_density(x: float, a: float, b: float) -> float:
    """Return the logarithm of the density of Beta(a, b) at x in (0, 1).

    >>> round(math.exp(beta_log_density(0.5, 2, 2)), 6)
    1.5
    """
    log_scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return log_scale + (a - 1) * math.log(x) + (b - 1) * math.log1p(-x)


def choose_threshold(
    matches: Sequence[float], others: Sequence[float], zeta: float, grid: Sequence[float]
) -> float | None:
    """Return the least value of a rising grid from which on all are likely a match; else the last.

    None: one of the two kinds cannot be fitted.

    >>> choose_threshold([0.5, 0.9], [0.1, 0.3], 0.4, [0.2, 0.4, 0.6, 0.8])
    0.4
    """
    fits = fit_beta(matches), fit_beta(others)
    if fits[0] is None or fits[1] is None:
        return None
    chosen = grid[-1]
    for c in reversed(grid):
        log_odds = beta_log_density(c, *fits[1]) - beta_log_density(c, *fits[0])
        if 1 / (1 + math.exp(min(log_odds, 700.0))) <= zeta:
            break
        chosen = c
    return chosen


class ThresholdEstimator:
    """The confidences of tokens that the whole model has confirmed or not, over all texts.

    threshold  for the next text
    """

    def __init__(self, threshold: float, zeta: float, lowest: float):
        self.threshold, self.zeta, self.fits = threshold, zeta, 0
        step = (max(HIGHEST_THRESHOLD, lowest) - lowest) / (GRID_POINTS - 1)
        self.grid = [lowest + step * i for i in range(GRID_POINTS)]
        self.confidences: tuple[list[float], list[float]] = ([], [])  # of others, of matches

    @property
    def is_learning(self) -> bool:
        """Return whether a later text may have another threshold."""
        return self.fits < MAX_FITS

    def add_pair(self, confidence: float, is_match: bool) -> None:
        """Add a token that the whole model has judged."""
        clipped = min(max(confidence, MARGIN), 1 - MARGIN)
        self.confidences[is_match].append(clipped)

    def refit(self) -> float:
        """Return the threshold of a text that begins."""
        others, matches = self.confidences
        if self.is_learning and (others or matches):
            self.fits += 1
            fitted = choose_threshold(matches, others, self.zeta, self.grid)
            self.threshold = self.threshold if fitted is None else fitted
        return self.threshold


class TwoDepthRule(ExitRule):
    """Let a token leave after L_S layers if its confidence exceeds the threshold of the text."""

    reads_logits = True

    def __init__(
        self, layer: int, threshold: float, estimator: Callable[[], ThresholdEstimator] | None
    ):
        self.layers, self.threshold = (layer,), threshold
        self.find_estimator, self.compares = estimator, estimator is not None

    def begin(self, session: Any) -> None:
        if self.find_estimator is not None:
            estimator = self.find_estimator()
            self.threshold, self.compares = estimator.refit(), estimator.is_learning

    def should_exit(self, at: ExitPoint) -> bool:
        return bool(softmax_response(at.logits) > self.threshold)

    def learn_from_pairs(self, pairs: Sequence[tuple[ExitPoint, Any]]) -> None:
        assert self.find_estimator is not None
        estimator = self.find_estimator()
        for point, row in pairs:
            early, full = UNCHANGED.probs(point.logits), UNCHANGED.probs(row)
            is_match = top_k_tokens(early, 1)[0] == top_k_tokens(full, 1)[0]
            estimator.add_pair(float(probability_gap(early)), is_match)


def resolve_shallow_depth(shallow: int, depth: int, name: str = "the model") -> int:
    """Return L_S; 0 is a third of the layers. Raises TinyspecError if the model has fewer.

    >>> resolve_shallow_depth(0, 6), resolve_shallow_depth(0, 10), resolve_shallow_depth(4, 6)
    (2, 3, 4)
    """
    if shallow > depth:
        raise TinyspecError(
            f"shallow is {shallow}: {name} has {depth} layers: set shallow to at most {depth}"
        )
    return shallow or max(1, depth // 3)


# ------------------------------ training (section 4.1)


@dataclass(frozen=True)
class FreeSettings:
    """How a model is tuned: section [head] of a recipe.

    shallow  L_S; 0: a third of the layers
    alpha    weight of the distillation
    """

    shallow: int = 0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.shallow < 0 or self.alpha < 0:
            raise TinyspecError("[head] wants shallow >= 0 and alpha >= 0")


def align_layers(distances: Sequence[Sequence[float]]) -> list[int]:
    """Return the student layer that each teacher layer draws to itself.

    distances  [teachers, students] between their states

    From the last teacher to the first, each takes the nearest student below the one taken last. If
    none is below, it takes that student again.

    >>> align_layers([[1, 3, 9], [5, 2, 1], [4, 1, 3]])
    [0, 0, 1]
    """
    aligned, limit = list[int](), len(distances[0])
    for row in reversed(distances):
        below = range(limit)
        limit = min(below, key=lambda student: row[student]) if below else limit
        aligned.append(limit)
    return aligned[::-1]


def distill_layers(states: Sequence[Tensor], shallow: int) -> Tensor:
    """Return the mean squared distance of the first layers to those of the whole model, a scalar.

    states  [n, d] after each layer and the final norm; those that are aimed at get no gradient
    """
    teachers = [states[(i + 1) * len(states) // shallow - 1].detach() for i in range(shallow)]
    distances = torch.stack(
        [torch.stack([F.mse_loss(s, t) for s in states[:shallow]]) for t in teachers]
    )
    chosen = align_layers(distances.tolist())
    return distances[torch.arange(shallow), torch.tensor(chosen)].mean()


def free_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the loss of both exits, with the distillation of the layers, a scalar."""
    blocks, settings = tuning.blocks, tuning.settings
    depth, is_answer = blocks.config.n_layers, batch.is_answer[:, :-1]
    if not is_answer.any():
        return blocks.embed.sum() * 0
    shallow = resolve_shallow_depth(settings.shallow, depth)
    states = [blocks.apply_final_norm(x[is_answer]) for x in blocks.layer_states(batch.ids[:, :-1])]
    targets = batch.ids[:, 1:][is_answer]
    early, full = (
        F.cross_entropy(blocks.apply_head(states[layers - 1]), targets)
        for layers in (shallow, depth)
    )
    exit_loss = (shallow * early + depth * full) / (shallow + depth)
    distillation: Tensor = settings.alpha * distill_layers(states, shallow)
    return exit_loss + distillation


# ------------------------------ the card


@technique(
    title="FREE: fast and robust early exiting",
    summary="finishes early tokens with a deep one",
    paper="Bae et al. 2023, arXiv 2310.05424",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("threshold", math.inf),
    persistent=True,
    tuned=Tuned(FreeSettings, free_loss, small=FreeSettings(shallow=1)),
    knobs=(
        Knob(
            "threshold",
            HIGHEST_THRESHOLD,
            "confidence above which a token leaves, in the first text; inf: never",
            low=0.0,
            high=1.0,
            beyond=math.inf,
        ),
        Knob(
            "shallow",
            0,
            "layers that every token runs (L_S); 0: what the model was tuned for, else a third",
            low=0,
            high=1024,
            small=(1, 2),
        ),
        Knob("adaptive", True, "fit the threshold of each further text to the texts before"),
        Knob("zeta", 0.4, "how likely a match must be at the threshold", low=0.0, high=1.0),
        Knob(
            "lowest",
            0.3,
            "the least threshold that a fit may choose",
            low=0.0,
            high=1.0,
        ),
    ),
)
def free(
    request: Request,
    *,
    threshold: float,
    shallow: int,
    adaptive: bool,
    zeta: float,
    lowest: float,
) -> Decoder:
    """Return a decoder whose tokens leave after L_S layers, or run all with those that wait."""
    session: Any = request.target
    model = session.model
    wanted = shallow or tuned_settings(model, "free", FreeSettings).shallow
    layer = resolve_shallow_depth(wanted, model.config.n_layers, model.name)
    rule = ExitRule()
    if threshold < math.inf:

        def find_estimator() -> ThresholdEstimator:
            key = ("free", layer, threshold, zeta, lowest)
            return per_model_state(
                session, key, lambda: ThresholdEstimator(threshold, zeta, lowest)
            )

        is_alone = request.clock is not None  # a batch gives its requests no clock
        rule = TwoDepthRule(layer, threshold, find_estimator if adaptive and is_alone else None)
    target = ExitTarget(session, rule, "postpone")
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
