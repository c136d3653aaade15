"""Guess by probes: what PaSS, BiTA, SPACE and their like share in training and in drafting.

Probe j after the token at position t stands at position t + 1 + j. It is trained to predict the
token t + 2 + j, which is j + 1 places after the token that the target itself predicts from t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.lm.heads import FrozenTarget, HeadSettings, mean_cross_entropy
from tinyspec.lm.probes import run_probe_groups
from tinyspec.technique import TrainingBatch
from tinyspec.tree import ROOT, Probs

ANCHORS = 32  # positions of a text at which a step trains


@dataclass(frozen=True)
class ProbeSettings(HeadSettings):
    """The section [head] of a recipe of probes. The target's own output matrix reads the probes.

    METHOD  the method's name, as errors say it
    """

    METHOD: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab:
            raise TinyspecError(
                f"[head] draft_vocab: {self.METHOD} uses the target's whole output matrix: leave "
                "draft_vocab out"
            )


def init_probe_embeddings(target: FrozenTarget, n: int, seed: int) -> Tensor:
    """Return embeddings [n, d] near the mean embedding, each a little different."""
    noise = torch.randn(n, target.config.d_model, generator=torch.Generator().manual_seed(seed))
    return target.embed.mean(0) + 0.1 * target.embed.std() * noise.to(target.embed)


def predict_by_probes(
    target: FrozenTarget, ids: Tensor, embeddings: Tensor, depth: int, prefix: Tensor | None = None
) -> Tensor:
    """Return the logits [B, T, V] of probe `depth` after every position of a text.

    embeddings  [n, d] of the probes;  prefix  [2, L, KV, P, hd], which only probes attend to
    """
    assert target.blocks is not None
    anchors = torch.arange(ids.shape[1], device=ids.device)
    states = run_probe_groups(target.blocks, ids, anchors, embeddings[: depth + 1], prefix)
    return F.linear(states[:, :, -1], target.head)


def draw_anchors(batch: TrainingBatch, n: int) -> Tensor:
    """Return random positions of a batch: n more tokens follow the next token of each.

    On held-out texts, where no gradient is wanted, they are the same each time.
    """
    width, device = batch.ids.shape[1], batch.ids.device
    fixed = None if torch.is_grad_enabled() else torch.Generator(device).manual_seed(0)
    return torch.randperm(max(width - 1 - n, 1), device=device, generator=fixed)[:ANCHORS]


def probe_loss(
    target: FrozenTarget, batch: TrainingBatch, embeddings: Tensor, prefix: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy of all probes after random positions."""
    assert target.blocks is not None
    n, anchors = len(embeddings), draw_anchors(batch, len(embeddings))
    states = run_probe_groups(target.blocks, batch.ids, anchors, embeddings, prefix)
    total = states.new_zeros(())
    for depth in range(n):
        is_known, rows = batch.known_tokens(target, depth)
        inside = anchors[anchors < is_known.shape[1]]
        known = is_known[:, inside]
        logits = F.linear(states[:, : len(inside), depth][known], target.head)
        total = total + mean_cross_entropy(logits, rows[:, inside][known]) / n
    return total


def sample_chain(
    rows: Sequence[Any], context: Sequence[int], sampling: SamplingParams, rng: RandomSource
) -> tuple[list[int], list[Probs | None]]:
    """Return a token for each row of logits, and the distribution that it was drawn from.

    At temperature 0 on a CPU a token is the likeliest one, and a point mass.
    """
    tokens, draft_probs = list[int](), list[Probs | None]()
    for row in rows:
        history = [*context, *tokens]
        token = sampling.greedy_token(row, history)
        q = None if token is not None else sampling.probs(row, history)
        tokens.append(rng.draw(q) if token is None else token)
        draft_probs.append(q)
    return tokens, draft_probs


class ProbeGroupDrafter(BaseDrafter):
    """Draft from the group of probes after the last accepted token.

    A group stands after the newest token and after every draft token. So whatever is accepted,
    the pass that verifies has run the group that the next draft is read from.

    ids        of a group's probes
    positions  tokens that the target's context holds
    logits     rows of the group after the last accepted token; none after forced text
    group_of   draft token or ROOT -> its probes in the last tree
    """

    def __init__(self, ids: Sequence[int], positions: int):
        self.ids, self.positions = tuple(ids), positions
        self.logits: Sequence[Any] = ()
        self.group_of: dict[int, list[int]] = {}

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.logits = ()

    def add_groups(
        self, tokens: list[int], parents: list[int], depths: Mapping[int, int], length: int
    ) -> None:
        """Append a group of probes after every node of a draft, as far as the context holds them.

        depths  of every draft token and of ROOT
        length  of the text
        """
        self.group_of = {}
        for node, depth in depths.items():
            above, self.group_of[node] = node, []
            for probe in self.ids[: max(self.positions - length - depth, 0)]:
                tokens.append(probe)
                parents.append(above)
                above = len(tokens) - 1
                self.group_of[node].append(above)

    def observe(self, round: Round) -> None:
        path = (ROOT, *round.verdict.accepted)
        before_newest = path[len(round.tokens) - 1]  # the token that the newest one follows
        rows = kernels_of(round.scores.logits).as_rows(round.scores.logits)
        self.logits = [rows[probe + 1] for probe in self.group_of.get(before_newest, ())]

    def rewind(self, length: int) -> None:
        self.logits = ()

    def end(self) -> None:
        self.logits = ()
