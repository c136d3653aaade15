"""Laws of early exits: the rule, the training of exits, calibrated thresholds, pipelines.

The oracle of the rule knows no session, no cache and no fill: it runs a whole text layer by layer,
and a token that has left keeps its state from there on, so that the keys above are made from it. On
tables that is exact; on transformers it is the dense pass. The losses are the papers' formulas in
another form. Calibration is judged over every outcome of a small sample, pipelines by their forward
logs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import product
from math import comb
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder, Drafter
from tinyspec.decoding.pipeline import PipelineDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.calm import ConfidenceRule, decay_threshold, find_measure
from tinyspec.early_exit.ppd import count_layer_steps
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import Reference, compare_distributions, exact_distribution
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, logits_of_states, run_dense, small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.parts import Parts
from tinyspec.laws.suites import register_oracle
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.lm.model import Model
from tinyspec.technique import Card, Request
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule

EXIT_RULE = (
    "a token leaves at the first layer that is sure, and is copied up (CALM, arXiv 2207.07061)"
)
EXIT_MEASURES = "each measure is its own (CALM, arXiv 2207.07061, section 3.5)"
EXIT_LAYERS, EXIT_VOCABULARY = 3, 3

Build = Callable[..., Decoder]


@dataclass(frozen=True)
class ExitSetting:
    """The settings that a user chose, and how long the text may become."""

    threshold: float
    decay: str = "constant"
    measure: str = "softmax"
    min_exit: int = 1
    interval: int = 1
    tau: float = 4.0
    tokens: int = 3

    @property
    def knobs(self) -> dict[str, Any]:
        """Return the settings as the technique takes them."""
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def due(self, step: int) -> float:
        """Return the threshold of a new token, by the formulas of the paper and of its code."""
        fade = math.exp(-self.tau * step / self.tokens)
        if self.decay == "paper":
            return min(1.0, max(0.0, 0.9 * self.threshold + 0.1 * fade))
        return self.threshold * (0.9 + 0.1 * fade) if self.decay == "t5x" else self.threshold

    def asked(self, layer: int) -> bool:
        """Return whether a token may leave after so many layers."""
        return self.min_exit <= layer < EXIT_LAYERS and (layer - self.min_exit) % self.interval == 0


ON_TABLES = (
    ExitSetting(0.0),
    ExitSetting(0.3),
    ExitSetting(0.5),
    ExitSetting(1.0),
    ExitSetting(0.3, min_exit=2),
    ExitSetting(0.25, interval=2),
    ExitSetting(0.2, "paper"),
    ExitSetting(0.34, "t5x"),
    ExitSetting(0.5, "t5x", tau=0.0),
    ExitSetting(1.0, min_exit=3),
)
THRESHOLDS = {"softmax": (0.1, 0.4), "saturation": (0.0, 0.6, 0.9), "classifier": (0.3, 0.6)}
ON_NETWORKS = (
    *(
        ExitSetting(x, "constant", measure, tokens=2)
        for measure, thresholds in THRESHOLDS.items()
        for x in thresholds
    ),
    ExitSetting(0.2, "paper", "softmax", tokens=2),
    ExitSetting(0.5, "paper", "classifier", tokens=2),
)
EXIT_PROMPT = (0, 1)


def exit_tables() -> Iterator[TableModel]:
    yield from (
        TableModel(seed, EXIT_VOCABULARY, EXIT_LAYERS, zeros=bool(seed % 2)) for seed in (1, 4)
    )


@lru_cache(maxsize=4)
def with_classifier(seed: int) -> Model:
    """Return a small transformer with an untrained exit classifier beside its weights."""
    plain = small_network(seed, vocabulary=4)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(plain.config.d_model, generator=generator)
    extras = {"exits.weight": weight, "exits.bias": torch.tensor(0.1)}
    return Model(plain.config, plain.weights, name=plain.name, extras=extras)


# ---------------------------------------------------------------------- the rule, written out again


def exit_row_on_table(
    model: TableModel, text: Sequence[int], first: int, setting: ExitSetting
) -> Any:
    """Return the row [V] after a text in which tokens from position `first` on may leave."""
    net, n = model.network, len(text)
    states, left = [net.embed(token) for token in text], [False] * n
    for layer in range(EXIT_LAYERS):
        keys = [net.keys(layer, state, position) for position, state in enumerate(states)]
        for at in range(n):
            if left[at]:
                continue
            states[at] = net.feed_forward(layer, net.attend(layer, states[at], keys[: at + 1]))
            if at >= first and setting.asked(layer + 1):
                row = sorted(model.head(states[at]), reverse=True)
                left[at] = row[0] - row[1] >= setting.due(at - first)
    return model.head(states[-1])


def exit_row_on_network(model: Model, text: Sequence[int], first: int, setting: ExitSetting) -> Any:
    """Return the same on a transformer, by any measure: logits [V]."""
    may = np.arange(len(text)) >= first
    due = np.array([setting.due(max(at - first, 0)) for at in range(len(text))])

    def leaves(layer: int, states: Any, below: Any) -> Any:
        if not setting.asked(layer):
            return np.zeros(len(text), dtype=np.bool_)
        return may & (confidence_of(model, setting.measure, layer, states, below) >= due)

    return run_dense(model, text, leaves=leaves).logits[-1]


def confidence_of(model: Model, measure: str, layer: int, states: Any, below: Any) -> Any:
    """Return the confidence of every token: [n]."""
    if measure == "softmax":
        logits = logits_of_states(model, states)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        top = np.sort(p / p.sum(axis=1, keepdims=True), axis=1)
        return top[:, -1] - top[:, -2]
    if measure == "saturation":
        lengths = np.linalg.norm(states, axis=1) * np.linalg.norm(below, axis=1)
        return np.maximum((states * below).sum(axis=1) / lengths, 0) * (layer > 1)
    weight, bias = (model.extras[name].double().numpy() for name in ("exits.weight", "exits.bias"))
    return 1 / (1 + np.exp(-(states @ weight + bias)))


# ---------------------------------------------------------------------- the law


@collect_evidence(EXIT_RULE)
def follows_exit_rule(
    build: Build, on_tables: Sequence[ExitSetting] = ON_TABLES, networks: Sequence[ExitSetting] = ()
) -> Iterator[int]:
    """Check the exact joint distribution of whole texts at thresholds that have an effect."""
    for model, setting in product(exit_tables(), on_tables):
        yield _compare_calm(EXIT_RULE, build, model, setting)
    for setting in networks:
        yield _compare_calm(EXIT_RULE, build, with_classifier(3), setting)


@collect_evidence(EXIT_MEASURES)
def each_measure(build: Build) -> Iterator[int]:
    """Check the exit rule on transformers alone, for all three confidence measures."""
    for setting in ON_NETWORKS:
        yield _compare_calm(EXIT_MEASURES, build, with_classifier(3), setting)


def _compare_calm(law: str, build: Build, model: Any, setting: ExitSetting) -> int:
    """Compare a technique with CALM's rule. Returns the outcomes walked."""
    find_row = exit_row_on_table if isinstance(model, TableModel) else exit_row_on_network
    first = len(EXIT_PROMPT) - 1  # the last of the prompt decides the first new token
    return compare_exit_law(
        law,
        build,
        model,
        lambda text: find_row(model, text, first, setting),
        setting.tokens,
        setting.knobs,
    )


def compare_exit_law(
    law: str,
    build: Build,
    model: Any,
    find_row: Callable[[Sequence[int]], Any],
    tokens: int,
    knobs: dict[str, Any],
) -> int:
    """Compare a technique with a rule: exactly on tables. Returns the outcomes walked.

    find_row  text -> the row after it, when tokens after EXIT_PROMPT may leave early
    """
    sampling, within = SamplingParams(), 0.0
    if not isinstance(model, TableModel):
        sampling, within = SamplingParams(top_k=2), NETWORK_TOLERANCE
    stop = StoppingCriteria(max_new_tokens=tokens)

    def make() -> Decoder:
        log: list[Any] = []
        request = Request(model.session(log), sampling=sampling, stop=stop, forward_log=log)
        return build(request, **knobs)

    expected = Reference(find_row, sampling, stop).distribution(tokens, EXIT_PROMPT)
    got = exact_distribution(make, tokens, EXIT_PROMPT, outside=lambda decoder: (model,))
    case = {"model": repr(model), "sampling": sampling, "prompt": EXIT_PROMPT, **knobs}
    compare_distributions(expected, got, within, law, **case)
    return got.branches


# ---------------------------------------------------------------------- cache-exact exits

TWO_DEPTHS = "a token in doubt runs all layers, over true keys (FREE, arXiv 2310.05424)"


def row_after_layers(model: Any, text: Sequence[int], layers: int) -> Any:
    """Return the row [V] of the model cut off after so many layers, by a pass of its own."""
    if isinstance(model, TableModel):
        return model.row(text, Plan(last=layers))
    return run_dense(model, text, Plan(last=layers)).logits[-1]


def likely_tokens(model: Any, row: Any) -> list[Any]:
    """Return the probabilities of a row, from the greatest down."""
    if not isinstance(model, TableModel):
        row = np.exp(row - row.max())
        row = row / row.sum()
    return sorted(row, reverse=True)


def gap_after_layers(model: Any, text: Sequence[int], layers: int) -> Any:
    """Return the two greatest probabilities' difference, read after so many layers."""
    first, second, *_ = likely_tokens(model, row_after_layers(model, text, layers))
    return first - second


def row_of_two_depths(model: Any, text: Sequence[int], layers: int, threshold: float) -> Any:
    """Return the row after a text: of the first layers if they are sure, else of all.

    Keys are true, so it does not matter which tokens before have left.
    """
    is_sure = gap_after_layers(model, text, layers) > threshold
    return row_after_layers(model, text, layers if is_sure else model.config.n_layers)


@collect_evidence(TWO_DEPTHS)
def follows_two_depths(build: Build) -> Iterator[int]:
    """Check the exact joint distribution at fixed thresholds, on tables and on transformers."""
    on_tables = product(exit_tables(), (1, 2), (0.0, 0.25, 1.0), (3,))
    on_networks = product([with_classifier(3)], (1, 2), (0.5, 0.75), (5,))
    for model, layers, threshold, tokens in (*on_tables, *on_networks):
        knobs = {"shallow": layers, "threshold": threshold, "adaptive": False}
        find_row = partial(row_of_two_depths, model, layers=layers, threshold=threshold)
        yield compare_exit_law(TWO_DEPTHS, build, model, find_row, tokens, knobs)


@register_oracle("free")
def free_oracle(card: Card) -> Evidence:
    """Check FREE away from its neutral value, where its distribution can be written down too."""
    return follows_two_depths(card.make)


@register_oracle("calm")
def calm_oracle(card: Card) -> Evidence:
    """Check CALM away from its neutral value, where its distribution can be written down too."""
    return follows_exit_rule(card.make, networks=ON_NETWORKS)


SURE_EXITS = "a token leaves at the first exit that is sure, over true keys (arXiv 2312.04916)"


def exit_of_token(
    model: Any, text: Sequence[int], exits: Sequence[int], threshold: float, cap: int | None
) -> int:
    """Return after how many layers the newest token of a text is read.

    cap  tokens in a row that may leave; None: all. The prompt's last token is the first that may
    """
    leaves = waiting = 0
    for n in range(len(EXIT_PROMPT), len(text) + 1):
        leaves = model.config.n_layers
        for layers in exits if cap is None or waiting < cap else ():
            row = row_after_layers(model, text[:n], layers)
            if likely_tokens(model, row)[0] >= threshold:
                leaves = layers
                break
        waiting = 0 if leaves == model.config.n_layers else waiting + 1
    return leaves


@collect_evidence(SURE_EXITS)
def follows_sure_exits(build: Build) -> Iterator[int]:
    """Check the exact joint distribution of both ways to finish, on tables and on transformers."""
    cases = [
        (model, exits, threshold, cap, 3 if isinstance(model, TableModel) else 4)
        for models, thresholds in (
            (list(exit_tables()), (0.0, 0.5, 0.75)),
            ([with_classifier(3)], (0.6, 0.8)),
        )
        for model, exits, threshold, cap in product(
            models, ((1,), (1, 2)), thresholds, (None, 1, 2, 9)
        )
    ]
    for model, exits, threshold, cap, tokens in cases:

        def find_row(
            text: Sequence[int],
            model: Any = model,
            rule: tuple[Any, ...] = (exits, threshold, cap),
        ) -> Any:
            return row_after_layers(model, text, exit_of_token(model, text, *rule))

        knobs = {"threshold": threshold, "exits": ",".join(map(str, exits))}
        knobs |= {"inference": "pipeline"} if cap is None else {"cap": cap}
        yield compare_exit_law(SURE_EXITS, build, model, find_row, tokens, knobs)


@register_oracle("ee_llm")
def ee_llm_oracle(card: Card) -> Evidence:
    """Check EE-LLM away from its neutral value, where its distribution is written down too."""
    return follows_sure_exits(card.make)


# ---------------------------------------------------------------------- layers by place

BY_PLACE = "a token runs the first and the top layers of its place (SkipDecode, arXiv 2307.02628)"


class PlaceSetting(NamedTuple):
    """The knobs of a schedule on a model of so many layers, and its sets S(t), worked out by hand.

    sets  S(0), S(1), ...; the last one goes on, and the prompt has the first
    """

    layers: int
    speedup: float
    warmup: int
    horizon: int
    sets: tuple[tuple[int, ...], ...]

    @property
    def knobs(self) -> dict[str, Any]:
        """Return the settings as the technique takes them."""
        return {"speedup": self.speedup, "warmup": self.warmup, "horizon": self.horizon}

    def runs_of(self, n: int, first: int) -> list[tuple[int, ...]]:
        """Return the layers of n tokens, the first of which that decides a new token is `first`."""
        last = len(self.sets) - 1
        return [self.sets[min(max(at - first, 0), last)] for at in range(n)]


PLACE_SETTINGS = (
    PlaceSetting(3, 1.2, 1, 1, ((0, 1, 2), (0, 2))),  # both = 5: 3 layers, then 2
    PlaceSetting(3, 2.0, 0, 2, ((1, 2), (1, 2), (2,))),  # both = 3: 2, round(1.5), 1
    PlaceSetting(4, 1.6, 1, 2, ((0, 2, 3), (0, 3))),  # both = 5: 3, round(2.5), 2
    PlaceSetting(4, 4 / 3, 1, 2, ((0, 1, 2, 3), (0, 2, 3), (0, 3))),  # both = 6: 4, 3, 2
    PlaceSetting(4, 8.0, 2, 1, ((0, 1, 3),)),  # the warm-up and one layer are the least
)


def row_by_place(model: Any, text: Sequence[int], setting: PlaceSetting) -> Any:
    """Return the row after a text whose tokens run the layers of their places."""
    n, depth = len(text), setting.layers
    sets = setting.runs_of(n, len(EXIT_PROMPT) - 1)
    if not isinstance(model, TableModel):
        runs = np.array([[layer in chosen for chosen in sets] for layer in range(depth)])
        return run_dense(model, text, runs=runs).logits[-1]
    net = model.network
    states = [net.embed(token) for token in text]
    for layer in range(depth):
        reach = sum(layer in chosen for chosen in sets)  # a prefix: the sets are nested
        keys = [net.keys(layer, states[at], at) for at in range(reach)]
        for at in range(reach):
            states[at] = net.feed_forward(layer, net.attend(layer, states[at], keys[: at + 1]))
    return model.head(states[-1])


@collect_evidence(BY_PLACE)
def follows_the_places(build: Build) -> Iterator[int]:
    """Check the exact joint distribution of schedules, on tables and on transformers."""
    for seed, setting in product((1, 4), PLACE_SETTINGS):
        table = TableModel(seed, EXIT_VOCABULARY, setting.layers, zeros=bool(seed % 2))
        for model, tokens in ((table, 4), (small_network(seed, layers=setting.layers), 4)):
            find_row = partial(row_by_place, model, setting=setting)
            yield compare_exit_law(BY_PLACE, build, model, find_row, tokens, setting.knobs)


@register_oracle("skip_decode")
def skip_oracle(card: Card) -> Evidence:
    """Check SkipDecode away from its neutral value, where its distribution is written down too."""
    return follows_the_places(card.make)


def build_exits(parts: Parts) -> Build:
    """Return a builder of CALM on another exit target."""

    def build(request: Request, **knobs: Any) -> Decoder:
        session: Any = request.target
        limit = request.stop.max_new_tokens or math.inf
        layers = range(knobs["min_exit"], session.model.config.n_layers, knobs["interval"])

        def due(step: int) -> float:
            return decay_threshold(knobs["decay"], knobs["threshold"], knobs["tau"], step, limit)

        rule = ConfidenceRule(find_measure(knobs["measure"], session.model), due, layers)
        return _decode_with_parts(parts, request, parts.exits(session, rule, "copy"), BaseDrafter())

    return build


def _decode_with_parts(parts: Parts, request: Request, target: Any, drafter: Drafter) -> Decoder:
    """Return a decoder of these parts on another target."""
    return parts.decoder(
        target,
        drafter,
        parts.walk,
        sampling=request.sampling,
        stop=request.stop,
        forward_log=request.forward_log,
    )


EXIT_RULE_LAWS = {EXIT_RULE: lambda parts: follows_exit_rule(build_exits(parts))}


EXIT_WEIGHTS = "what an exit's loss counts"
LAYER_DROPOUT = "how often a layer is left out"
ONE_HEAD = "all exits speak through one norm and one head"

MakeSchedule = Callable[[ExitLosses, int, int], ExitLossSchedule]
SCHEDULE_SHAPES = [(3, 12), (4, 40), (10, 60)]
"""Layers, steps."""
EXIT_SECTIONS = [
    ExitLosses("linear"),
    ExitLosses("uniform"),
    ExitLosses("uniform", e_scale=0.5, curriculum="gradual"),
    ExitLosses("sum", e_scale=0.25),
    ExitLosses("sum", curriculum="rotational", rotation=3),
    ExitLosses("linear", curriculum="gradual"),
    ExitLosses("sum", curriculum="gradual", p_max=0.2),
    ExitLosses("linear", curriculum="rotational", rotation=2, p_max=0.1),
    ExitLosses("none", p_max=0.3, scratch=False),
]
EXIT_CONFIG = Config(
    vocab_size=7,
    d_model=8,
    n_layers=3,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    d_ff=12,
    max_positions=8,
)


def _counted_layers(exits: ExitLosses, layers: int, step: int, steps: int) -> list[int]:
    """Return the layers whose exits count at a step."""
    if exits.curriculum == "rotational":
        return sorted({*range(step % exits.rotation, layers, exits.rotation), layers - 1})
    if exits.curriculum == "gradual":
        on = 1 + step * 2 * layers // steps  # the last, and one more each T / (2 L) steps
        return list(range(max(layers - on, 0), layers))
    return list(range(layers))


def published_weights(exits: ExitLosses, layers: int, step: int, steps: int) -> list[float]:
    """Return the weight of every exit at a step, as published."""
    last = layers - 1
    if exits.weights == "linear":
        e = [exits.e_scale * (layer + 1) for layer in range(last)] + [float(layers)]
    elif exits.weights == "uniform":
        e = [1.0 if layer == last else exits.e_scale for layer in range(layers)]
    elif exits.weights == "sum":
        e = [exits.e_scale * sum(range(layer + 1)) for layer in range(last)]
        e.append(last + exits.e_scale * sum(range(last)))
    else:
        e = [0.0] * last + [1.0]
    counted = _counted_layers(exits, layers, step, steps)
    return [
        e[layer] / sum(e[k] for k in counted) if layer in counted else 0.0
        for layer in range(layers)
    ]


def published_dropout(exits: ExitLosses, layers: int, step: int, steps: int) -> list[float]:
    """Return how likely each layer is left out for a sample at a step, as published."""
    rise = math.exp(step * math.log(2) / (steps - 1)) - 1 if exits.scratch else 1.0
    return [
        rise * (math.exp(layer * math.log(2) / (layers - 1)) - 1) * exits.p_max
        for layer in range(layers)
    ]


def _compare_schedule(
    law: str, make: MakeSchedule, publish: Callable[..., list[float]], figures: str
) -> Iterator[int]:
    """Compare figures of every layer at every step with the published ones."""
    for exits, (layers, steps) in product(EXIT_SECTIONS, SCHEDULE_SHAPES):
        schedule = make(exits, layers, steps)
        for step in range(steps):
            schedule.begin_step(step, step / steps)
            expected, got = publish(exits, layers, step, steps), getattr(schedule, figures)
            if any(abs(a - b) > 1e-9 for a, b in zip(expected, got, strict=True)):
                accuse(law, expected, got, section=exits, layers=layers, step=step, steps=steps)
            yield 0


@collect_evidence(EXIT_WEIGHTS)
def exit_loss_weights(make: MakeSchedule) -> Iterator[int]:
    """Check e(t, l) at every step; the weights sum to 1."""
    yield from _compare_schedule(EXIT_WEIGHTS, make, published_weights, "loss_weights")


@collect_evidence(LAYER_DROPOUT)
def layer_dropout(make: MakeSchedule) -> Iterator[int]:
    """Check p(t, l) at every step: 0 at the bottom, p_max at the top of the last step."""
    yield from _compare_schedule(LAYER_DROPOUT, make, published_dropout, "dropout_rates")


def _cut_model(model: Model, layers: int) -> Model:
    """Return the model of the first layers, with the norm and the head of the whole."""
    above = tuple(f"{layer}." for layer in range(layers, model.config.n_layers))
    below = {name: weight for name, weight in model.weights.items() if not name.startswith(above)}
    return Model(replace(model.config, n_layers=layers), below)


@collect_evidence(ONE_HEAD)
def one_head(make: MakeSchedule) -> Iterator[int]:
    """Check that the loss is the weighted sum of the cross-entropies of truncated models."""
    model = Model.random(EXIT_CONFIG, seed=1, dtype=torch.float64, scale=0.5)
    cut = [_cut_model(model, layers) for layers in range(1, 4)]
    for exits, step in product([exits for exits in EXIT_SECTIONS if not exits.p_max], range(4)):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(EXIT_CONFIG.vocab_size, (2, 6), generator=generator)
        inputs, outputs = ids[:, :-1], ids[:, 1:]
        logits = [smaller.training_logits(inputs).flatten(0, 1) for smaller in cut]
        losses = [float(F.cross_entropy(rows, outputs.flatten())) for rows in logits]
        weights = published_weights(exits, 3, step, 10)
        expected = sum(e * loss for e, loss in zip(weights, losses, strict=True))
        schedule = make(exits, 3, 10)
        schedule.begin_step(step, step / 10)
        got = float(schedule.loss(model.torch_blocks(), inputs, outputs))
        if abs(got - expected) > 1e-6:
            accuse(ONE_HEAD, expected, got, section=exits, step=step, losses_of_the_exits=losses)
        yield 0


EXIT_LOSS_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    EXIT_WEIGHTS: lambda parts: exit_loss_weights(parts.course),
    LAYER_DROPOUT: lambda parts: layer_dropout(parts.course),
    ONE_HEAD: lambda parts: one_head(parts.course),
}


CALIBRATED = (
    "calibrated risk <= delta with probability 1 - epsilon (Learn then Test, arXiv 2110.01052)"
)
SEQUENCE = "the candidates in front of the first that fails are accepted (fixed-sequence testing)"
SUPER = (
    "where the risk is delta or more, a p-value is at most u with probability at most u "
    "(arXiv 2110.01052)"
)

HALF_RISK = Fraction(1, 2)
JUST_ABOVE = Fraction(51, 100)
EPSILON = Fraction(1, 20)
SAFE = Fraction(1, 10)
EXAMPLES = 5  # the fewest with which five tosses show anything: 2^-5 < 1/20
CURVES = {
    "a plateau just above delta": (SAFE, *[JUST_ABOVE] * 3),
    "not monotone": (JUST_ABOVE, SAFE, JUST_ABOVE, JUST_ABOVE),
    "above from the start": (JUST_ABOVE,) * 3,
    "a last step that fails surely": (SAFE, SAFE, Fraction(1)),
}


@cache
def binomial_probability(losses: int, n: int, risk: Fraction) -> Fraction:
    """Return P(Bin(n, risk) = losses)."""
    return comb(n, losses) * risk**losses * (1 - risk) ** (n - losses)


@cache
def binomial_tail(losses: int, n: int, delta: Fraction) -> Fraction:
    """Return P(Bin(n, delta) <= losses), the sharpest p-value of losses 0 and 1."""
    return sum((binomial_probability(k, n, delta) for k in range(losses + 1)), Fraction(0))


def chosen_candidate(
    procedure: Callable[..., Any], counts: Sequence[int], n: int, delta: Fraction, p_value: Any
) -> Any:
    """Return the candidate, by number, that a procedure chooses for these numbers of losses."""
    losses = lambda at: [1] * counts[at] + [0] * (n - counts[at])  # noqa: E731
    return procedure(range(len(counts)), losses, delta, EPSILON, p_value).choice


def violation_probability(
    procedure: Callable[..., Any], risks: Sequence[Fraction], p_value: Any = binomial_tail
) -> tuple[Fraction, int]:
    """Return the probability that the chosen risk is above delta, and the outcomes walked."""
    mass, outcomes = Fraction(0), 0
    for counts in product(range(EXAMPLES + 1), repeat=len(risks)):
        outcomes += 1
        at = chosen_candidate(procedure, counts, EXAMPLES, HALF_RISK, p_value)
        if at is not None and risks[at] > HALF_RISK:
            probability = Fraction(1)
            for count, risk in zip(counts, risks, strict=True):
                probability *= binomial_probability(count, EXAMPLES, risk)
            mass += probability
    return mass, outcomes


CALIBRATION_CASE = {"delta": HALF_RISK, "epsilon": EPSILON, "examples": EXAMPLES}


@collect_evidence(CALIBRATED)
def controls_its_risk(procedure: Callable[..., Any]) -> Iterator[int]:
    """Check on every curve that the probability of a wrong choice is at most epsilon."""
    for name, risks in CURVES.items():
        mass, outcomes = violation_probability(procedure, risks)
        if mass > EPSILON:
            limit, got = f"a wrong choice with at most {EPSILON}", f"with {float(mass):.4f}"
            accuse(CALIBRATED, limit, got, risks=risks, **CALIBRATION_CASE, curve=name)
        yield outcomes


@collect_evidence(SEQUENCE)
def accepts_what_passed(procedure: Callable[..., Any]) -> Iterator[int]:
    """Check that all candidates before the first failure count.

    A procedure that never accepts anything is safe, and useless.
    """
    for counts in product((0, 1, 3), repeat=4):
        passed = [binomial_tail(count, EXAMPLES, HALF_RISK) <= EPSILON for count in counts]
        front = passed.index(False) if False in passed else len(passed)
        expected = front - 1 if front else None
        got = chosen_candidate(procedure, counts, EXAMPLES, HALF_RISK, binomial_tail)
        expect_equal(SEQUENCE, expected, got, losses=counts, **CALIBRATION_CASE)
        yield 0


@collect_evidence(SUPER)
def is_a_p_value(p_value: Callable[..., Any]) -> Iterator[int]:
    """Check the p-value by the exact distribution of the number of losses.

    The risk is delta or more.
    """
    for n, delta in product((1, 2, 5, 12), (Fraction(1, 10), Fraction(1, 3), HALF_RISK)):
        for risk in (delta, (1 + delta) / 2, Fraction(1)):
            values = [
                (p_value(k, n, delta), binomial_probability(k, n, risk)) for k in range(n + 1)
            ]
            for u, _ in values:
                mass = sum((w for p, w in values if p <= u), Fraction(0))
                if mass > u and float(mass) > float(u) + 1e-12:
                    case = {"examples": n, "delta": delta, "risk": risk}
                    accuse(SUPER, f"at most {float(u):.4f}", float(mass), **case)
                yield 0


CALIBRATION_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    CALIBRATED: lambda parts: controls_its_risk(parts.calibrate),
    SEQUENCE: lambda parts: accepts_what_passed(parts.calibrate),
    SUPER: lambda parts: is_a_p_value(parts.p_value),
}


PIPELINE_CLOCK = "a pipeline's clock"
PIPELINE_WORK = "a pipeline's work"

PIPELINE_VOCABULARY = 4
PIPELINE_PROMPT = (0, 1)
PIPELINE_TOKENS = 6
PIPELINE_SHAPES = [(3, 2, 1), (3, 2, 2), (4, 2, 2), (6, 4, 1), (6, 4, 3), (6, 6, 2), (5, 3, 9)]
"""Layers, the layer that drafts, branches."""


class RoundCost(NamedTuple):
    """The cost of a round: was its token begun before, layer-steps, (row, layer) pairs."""

    begun: bool
    steps: float
    work: float


def likeliest_drafts(model: TableModel, text: tuple[int, ...], layer: int, k: int) -> list[int]:
    """Return the k likeliest tokens of the model truncated after a layer, after a text."""
    row = model.row(text, Plan(last=layer))
    return sorted(range(model.vocabulary), key=lambda token: (-row[token], token))[:k]


def expected_costs(
    model: TableModel, prompt: tuple[int, ...], new: list[int], layer: int, k: int
) -> list[RoundCost]:
    """Return the cost that each round of this text must have."""
    depth, found = model.config.n_layers, list[RoundCost]()
    for at in range(len(new)):
        text = (*prompt, *new[: at - 1])
        begun = at > 0 and layer < depth and new[at - 1] in likeliest_drafts(model, text, layer, k)
        ran = depth - begun * (depth - layer)
        more = min(k, model.vocabulary) * (depth - layer) if at + 1 < len(new) else 0
        found.append(RoundCost(begun, ran, ran + more))
    return found


def _pipeline_rounds(
    build: Build,
) -> Iterator[tuple[dict[str, Any], RoundCost, tuple[ForwardRecord, ...]]]:
    """Yield rounds of pipelines: the case, the expected cost, the forward passes."""
    stop = StoppingCriteria(max_new_tokens=PIPELINE_TOKENS)
    for (depth, layer, k), seed, temperature in product(PIPELINE_SHAPES, range(3), (1.0, 0.0)):
        model = TableModel(seed, PIPELINE_VOCABULARY, depth, zeros=False)
        log, sampling = list[ForwardRecord](), SamplingParams(temperature)
        request = Request(model.session(log), sampling=sampling, stop=stop, forward_log=log)
        decoder = build(request, layer=layer, k=k)
        decoder.extend(PIPELINE_PROMPT)
        calls = []
        while not decoder.finished:
            round = decoder.step(Seeded(seed).split("round", decoder.rounds))
            calls.append((*round.draft_calls, *round.calls))
        costs = expected_costs(model, PIPELINE_PROMPT, decoder.new, layer, k)
        case = {"model": model, "layers": depth, "drafting layer": layer, "k": k}
        case["text"] = [*PIPELINE_PROMPT, *decoder.new]
        for at, (cost, passes) in enumerate(zip(costs, calls, strict=True)):
            yield {**case, "round": at}, cost, passes


@collect_evidence(PIPELINE_CLOCK)
def pipeline_clock(build: Build) -> Iterator[int]:
    """Check that a round takes all layers, less those that a correct draft has already run."""
    for case, cost, calls in _pipeline_rounds(build):
        case["its token was drafted"] = cost.begun
        got = count_layer_steps(calls)
        expect_equal(PIPELINE_CLOCK, cost.steps, got, **case, counted="layer-steps")
        yield 0


@collect_evidence(PIPELINE_WORK)
def pipeline_work(build: Build) -> Iterator[int]:
    """Check that a round runs what its token lacks, and the branches' first layers.

    The last round of a text has no branches.
    """
    for case, cost, calls in _pipeline_rounds(build):
        ran = sum(call.row_layers for call in calls)
        expect_equal(PIPELINE_WORK, cost.work, ran, **case, counted="layers of a row")
        yield 0


def build_pipeline(parts: Parts) -> Build:
    """Return a builder of a pipeline of these parts."""

    def build(request: Request, layer: int, k: int) -> Decoder:
        pipeline: Any = parts.pipeline(request.target, layer, k)
        return _decode_with_parts(parts, request, pipeline, PipelineDrafter(pipeline))

    return build


PIPELINE_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    PIPELINE_CLOCK: lambda parts: pipeline_clock(build_pipeline(parts)),
    PIPELINE_WORK: lambda parts: pipeline_work(build_pipeline(parts)),
}
