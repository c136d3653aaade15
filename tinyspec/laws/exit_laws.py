"""Early exits against their rule, written out again: which layer each row was read from, and what
later tokens saw of it.

The oracle knows no session, no cache and no fill: it runs a whole text layer by layer, and a token
that has left keeps its state from there on, so that the keys above are made from it. On tables that
is exact; on transformers it is the dense pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.calm import ConfidenceRule, decay_threshold, find_measure
from tinyspec.laws.accused import Evidence
from tinyspec.laws.dense import logits_of_states, run_dense
from tinyspec.laws.exact import JointLaw, Reference, compare_laws, exact_law
from tinyspec.laws.network import NETWORK_TOLERANCE, small_network
from tinyspec.laws.parts import Parts
from tinyspec.laws.suites import register_oracle
from tinyspec.laws.tables import TableModel
from tinyspec.lm.transformer import Model
from tinyspec.technique import Card, Request

EXIT_RULE = (
    "a token leaves at the first layer that is sure, and is copied up (CALM, arXiv 2207.07061)"
)
EXIT_MEASURES = "each measure is its own (CALM, arXiv 2207.07061, section 3.5)"
EXIT_LAYERS, EXIT_VOCABULARY = 3, 3

Build = Callable[..., Decoder]


@dataclass(frozen=True)
class ExitSetting:
    """What a user chose, and how long the text may become."""

    threshold: float
    decay: str = "constant"
    measure: str = "softmax"
    min_exit: int = 1
    interval: int = 1
    tau: float = 4.0
    tokens: int = 3

    @property
    def knobs(self) -> dict[str, Any]:
        """As the technique takes them."""
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def due(self, step: int) -> float:
        """The threshold of a new token, by the formulas of the paper and of its code."""
        fade = math.exp(-self.tau * step / self.tokens)
        if self.decay == "paper":
            return min(1.0, max(0.0, 0.9 * self.threshold + 0.1 * fade))
        return self.threshold * (0.9 + 0.1 * fade) if self.decay == "t5x" else self.threshold

    def asked(self, layer: int) -> bool:
        """Whether a token may leave behind so many layers."""
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
ON_NETWORKS = (
    *(ExitSetting(x, "constant", measure, tokens=2) for measure, xs in
      (("softmax", (0.1, 0.4)), ("saturation", (0.0, 0.6, 0.9)), ("classifier", (0.3, 0.6))) for x in xs),
    ExitSetting(0.2, "paper", "softmax", tokens=2), ExitSetting(0.5, "paper", "classifier", tokens=2),
)  # fmt: skip
EXIT_PROMPT = (0, 1)


def exit_tables() -> Iterator[TableModel]:
    yield from (
        TableModel(seed, EXIT_VOCABULARY, EXIT_LAYERS, zeros=bool(seed % 2)) for seed in (1, 4)
    )


@lru_cache(maxsize=4)
def with_classifier(seed: int) -> Model:
    """A small transformer beside whose weights a classifier stands that nobody trained."""
    plain = small_network(seed, vocabulary=4)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(plain.config.d_model, generator=generator)
    extras = {"exits.weight": weight, "exits.bias": torch.tensor(0.1)}
    return Model(plain.config, plain.weights, name=plain.name, extras=extras)


# ---------------------------------------------------------------------- the rule, written out again


def exit_row_on_table(
    model: TableModel, text: Sequence[int], first: int, setting: ExitSetting
) -> Any:
    """The row after a text in which the tokens from position `first` on may leave: [V]
    Fractions.
    """
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
    """The same on a transformer, by any measure: logits [V]."""
    may = np.arange(len(text)) >= first
    due = np.array([setting.due(max(at - first, 0)) for at in range(len(text))])

    def leaves(layer: int, states: Any, below: Any) -> Any:
        if not setting.asked(layer):
            return np.zeros(len(text), dtype=np.bool_)
        return may & (confidence_of(model, setting.measure, layer, states, below) >= due)

    return run_dense(model, text, leaves=leaves).logits[-1]


def confidence_of(model: Model, measure: str, layer: int, states: Any, below: Any) -> Any:
    """The confidence of every token: [n]."""
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


def follows_exit_rule(
    build: Build, on_tables: Sequence[ExitSetting] = ON_TABLES, networks: Sequence[ExitSetting] = ()
) -> Evidence:
    """The exact joint law of whole texts at thresholds that bite."""
    began, cases, branches = perf_counter(), 0, 0
    for model in exit_tables():
        for setting in on_tables:
            got = _compare_exit_law(
                build, model, exit_row_on_table, setting, SamplingParams(), 0.0, EXIT_RULE
            )
            cases, branches = cases + 1, branches + got.branches
    for setting in networks:
        got = _compare_exit_law(
            build,
            with_classifier(3),
            exit_row_on_network,
            setting,
            SamplingParams(top_k=2),
            NETWORK_TOLERANCE,
            EXIT_RULE,
        )
        cases, branches = cases + 1, branches + got.branches
    return Evidence(EXIT_RULE, cases, branches, perf_counter() - began)


def each_measure(build: Build) -> Evidence:
    """The same on transformers alone, for all three measures."""
    began, branches = perf_counter(), 0
    for setting in ON_NETWORKS:
        branches += _compare_exit_law(
            build,
            with_classifier(3),
            exit_row_on_network,
            setting,
            SamplingParams(top_k=2),
            NETWORK_TOLERANCE,
            EXIT_MEASURES,
        ).branches
    return Evidence(EXIT_MEASURES, len(ON_NETWORKS), branches, perf_counter() - began)


def _compare_exit_law(
    build: Build,
    model: Any,
    rows: Any,
    setting: ExitSetting,
    sampling: SamplingParams,
    within: float,
    name: str,
) -> JointLaw:
    stop = StoppingCriteria(max_new_tokens=setting.tokens)

    def make() -> Decoder:
        forward_log: list[Any] = []
        return build(
            Request(
                model.session(forward_log), sampling=sampling, stop=stop, forward_log=forward_log
            ),
            **setting.knobs,
        )

    first = len(EXIT_PROMPT) - 1  # the last of the prompt decides the first new token
    expected = Reference(lambda text: rows(model, text, first, setting), sampling, stop).law(
        setting.tokens, EXIT_PROMPT
    )
    got = exact_law(make, setting.tokens, EXIT_PROMPT, outside=lambda decoder: (model,))
    compare_laws(
        dict(expected),
        dict(got),
        within,
        name,
        model=repr(model),
        sampling=sampling,
        prompt=EXIT_PROMPT,
        **setting.knobs,
    )
    return got


@register_oracle("calm")
def calm_oracle(card: Card) -> Evidence:
    """Away from its neutral value too, CALM has a law that can be written down."""
    return follows_exit_rule(card.make, networks=ON_NETWORKS)


def build_exits(parts: Parts) -> Build:
    """CALM on another exit target."""

    def build(request: Request, **knobs: Any) -> Decoder:
        session: Any = request.target
        limit = request.stop.max_new_tokens or math.inf
        layers = range(knobs["min_exit"], session.model.config.n_layers, knobs["interval"])

        def due(step: int) -> float:
            return decay_threshold(knobs["decay"], knobs["threshold"], knobs["tau"], step, limit)

        rule = ConfidenceRule(find_measure(knobs["measure"], session.model), due, layers)
        target = parts.exits(session, rule, "copy")
        return parts.decoder(
            target,
            BaseDrafter(),
            parts.walk,
            sampling=request.sampling,
            stop=request.stop,
            forward_log=request.forward_log,
        )

    return build


EXIT_RULE_LAWS = {EXIT_RULE: lambda parts: follows_exit_rule(build_exits(parts))}
