"""What happened, as plain data: statistics of a request and the trace that replays it."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource

Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass
class Statistics:
    """Figures of a request, counted after the cut at a stop.

    The prefill is not counted. Each round is one target call; plain decoding: one token a call.
    Where streams of one answer share a pass, it is one call.
    """

    target_calls: int = 0
    draft_calls: int = 0
    drafted: int = 0  # nodes proposed for verification
    accepted: int = 0  # nodes committed
    emitted: int = 0
    row_layers: float = 0.0  # (row, layer) evaluations of the target
    seconds: float = 0.0

    def count(self, round: Round) -> None:
        """Count a round."""
        self.target_calls += not round.is_shared
        self.draft_calls += len(round.draft_calls)
        self.drafted += sum(not probe for probe in round.tree.probe)
        self.accepted += len(round.verdict.accepted)
        self.emitted += len(round.tokens)
        self.row_layers += sum(call.row_layers for call in round.calls)

    @property
    def tokens_per_call(self) -> float:
        """Return tau, the tokens committed per target call; 0 if there was none."""
        return self.emitted / self.target_calls if self.target_calls else 0.0

    @property
    def layers_per_token(self) -> float:
        """Return layers run per committed token: the depth of the model for plain decoding."""
        return self.row_layers / self.emitted if self.emitted else 0.0

    @property
    def acceptance(self) -> float:
        """Return the share of drafted nodes that were accepted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def describe(self, finish_reason: str, layers: str = "") -> str:
        """Return the figures of a request on one line; `layers` is put among them as it is.

        >>> Statistics(target_calls=2, emitted=2, seconds=0.5).describe("eos")
        '2 tokens in 2 target calls (1.00 a call), 0.50 s, 4.0 tokens/s; ended by eos'
        """
        pace = f", {self.emitted / self.seconds:.1f} tokens/s" if self.seconds else ""
        drafts = (
            f", {self.accepted} of {self.drafted} drafted tokens accepted" if self.drafted else ""
        )
        return (
            f"{self.emitted} tokens in {self.target_calls} target calls "
            f"({self.tokens_per_call:.2f} a call{drafts}){layers}, "
            f"{self.seconds:.2f} s{pace}; ended by {finish_reason}"
        )

    def as_dict(self) -> dict[str, float]:
        """Return every figure by name, for --json."""
        return {
            **asdict(self),
            "tokens_per_call": self.tokens_per_call,
            "layers_per_token": self.layers_per_token,
            "acceptance": self.acceptance,
        }


def decode(
    decoder: Decoder, prompt: Sequence[int], rng: RandomSource
) -> tuple[list[int], Statistics]:
    """Decode a request from its prompt to its end: return the new tokens and what was counted."""
    decoder.extend(prompt)
    stats = Statistics()
    for round in decoder.run(rng):
        stats.count(round)
    return decoder.new, stats


def token_origins(round: Round) -> tuple[Origin, ...]:
    """Return where each token of a round came from.

    "accepted" from the draft; "recovered" after a rejection; "bonus" after a fully accepted draft;
    "plain" if there was no draft.
    """
    kinds: list[Origin] = ["accepted"] * len(round.verdict.accepted)
    if round.verdict.next is not None:
        if all(round.tree.probe):
            kinds.append("plain")
        else:  # no rejection at the next depth: the whole path down to a leaf was accepted
            depths = round.tree.depths()
            rejected = any(depths[node] == len(kinds) + 1 for node in round.verdict.rejected)
            kinds.append("recovered" if rejected else "bonus")
    return tuple(kinds)


@dataclass
class TraceRound:
    """One round as plain data. The names of its fields are those of the JSON of a replay.

    path     accepted nodes;  refused: rejected nodes
    emitted  tokens committed;  origins: where each of them came from
    layers   layers run for each row of the scores;  ran: for the row of each emitted token
    p        in a detailed trace: the target's probability of each draft token, before the sampling
             settings
    q        its probability under the distribution it was drawn from, with the sampling settings
             (None: a point mass)
    said     as p, of each emitted token
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    refused: list[int]
    emitted: list[int]
    origins: list[str]
    layers: list[int]
    target_calls: int
    draft_calls: int
    probe: list[bool] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    p: list[float] = field(default_factory=list)
    q: list[float | None] = field(default_factory=list)
    said: list[float] = field(default_factory=list)


@dataclass
class Trace:
    """A request as plain data, to replay it: the prompt and every round.

    detailed  keep probabilities too, which takes time
    """

    prompt: list[int] = field(default_factory=list)
    rounds: list[TraceRound] = field(default_factory=list)
    detailed: bool = False

    def add(self, round: Round) -> None:
        """Add a round as plain data, without its tensors."""
        self.rounds.append(
            TraceRound(
                list(round.tree.tokens),
                list(round.tree.parents),
                list(round.verdict.accepted),
                list(round.verdict.rejected),
                list(round.tokens),
                list(token_origins(round)),
                list(round.scores.layers),
                len(round.calls),
                len(round.draft_calls),
                list(round.tree.probe),
                [round.scores.layers[row] for row in _rows(round)],
            )
        )
        if self.detailed:
            self._detail(round, self.rounds[-1])

    def _detail(self, round: Round, entry: TraceRound) -> None:
        """Add probabilities of the target's own distribution, before sampling settings."""
        probs = round.scores.logits.detach().double().cpu().softmax(dim=-1)  # [n + 1, V]
        tree = round.tree
        for token, parent, q in zip(tree.tokens, tree.parents, tree.draft_probs, strict=True):
            is_token = token < probs.shape[-1]  # a probe may be none
            entry.p.append(float(probs[parent + 1, token]) if is_token else 0.0)
            entry.q.append(None if q is None else float(q[token]))
        entry.said = [
            float(probs[row, token]) for row, token in zip(_rows(round), round.tokens, strict=True)
        ]

    @property
    def origins(self) -> list[str]:
        """Return the origin of every emitted token."""
        return [kind for round in self.rounds for kind in round.origins]

    @property
    def layers_run(self) -> list[int]:
        """Return how many layers ran for each emitted token."""
        return [layers for round in self.rounds for layers in round.ran]

    def to_json(self) -> str:
        """Return the trace as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """Return the trace that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        rounds = [TraceRound(**round) for round in data["rounds"]]
        return cls(data["prompt"], rounds, data.get("detailed", False))


def _rows(round: Round) -> list[int]:
    """Return the row of the scores that gave each emitted token: the root's, then the path's."""
    return [0, *(node + 1 for node in round.verdict.accepted)][: len(round.tokens)]


def compute_logprobs(round: Round) -> list[float]:
    """Return log p of each token of a round, from the target's raw rows."""
    if round.scores.logits.device.type != "cpu":
        return [float(x) for x in compute_logprobs_on_device(round).tolist()]
    rows = _rows(round)
    values, logprobs = round.scores.logits.numpy(), list[float]()
    room = np.empty_like(values[0])  # one for all: fresh pages cost as much as the sums
    for row, token in zip(rows, round.tokens, strict=True):
        logits = values[row]
        most = logits.max()
        np.exp(np.subtract(logits, most, out=room), out=room)
        logprobs.append(float(logits[token] - most) - math.log(float(room.sum(dtype=np.float64))))
    return logprobs


def compute_logprobs_on_device(round: Round) -> torch.Tensor:
    """Return `compute_logprobs` where the logits lie on a device, without waiting for it."""
    rows = _rows(round)
    logits = round.scores.logits[rows].double()
    return logits[
        torch.arange(len(rows)), torch.tensor(round.tokens, device=logits.device)
    ] - logits.logsumexp(dim=-1)


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of distinct n-grams: text that loops flatters every drafter.

    >>> distinct_share([1, 2, 1, 2, 1, 2], n=2)
    0.4
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
