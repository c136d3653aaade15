"""Medusa (Cai et al. 2024): heads that guess the right position, and a tree of their candidates."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.lm.config import Config
from tinyspec.lm.heads import RANKS, head_weights
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.medusa import MedusaDrafter
from tinyspec.speculative.treedraft import fill_static_tree
from tinyspec.technique import TrainingBatch, find_technique
from tinyspec.tree import ROOT

PLANTED = "heads that are fitted to a text draft all of it"
PLACED = feature_laws.DRAFT_OF_TRAINING
SPREAD = "the tree has the best paths of ranks, given how often each rank is right"

TOKENS = 26  # of the text that heads are fitted to: fewer than a state has numbers


def fitted_target(method: str, seed: int, draws: int = 1) -> tuple[Model, tuple[int, ...]]:
    """Return a network with a head that is fitted to a random text, and the text.

    draws  as `fit_head` takes them
    """
    config = Config(
        vocab_size=4, d_model=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48,
        max_positions=64,
    )  # fmt: skip
    model = Model.random(config, seed, torch.float64, scale=0.3)
    text = (0, 1, *random.Random(seed).choices(range(4), k=TOKENS - 2))  # 0, 0 has equal states
    return feature_laws.fit_head(find_technique(method), model, text, draws=draws), text


@collect_evidence(PLANTED)
def fitted_heads_draft_the_text(
    build: Build, method: str = "medusa", draws: int = 1
) -> Iterator[int]:
    """Check that heads that their loss has fitted to a text draft it, after every part of it."""
    for seed in (1, 2):
        model, text = fitted_target(method, seed, draws)
        for n in range(2, TOKENS - 1):
            decoder = begin_decoder(build, [model], text[:n])
            sampling = decoder.sampling
            tree = decoder.drafter.propose(decoder.context, 2, sampling, Seeded(0))
            expect_equal(PLANTED, text[n : n + 2], tuple(tree.tokens), text=text[:n])
            yield 1


@collect_evidence(SPREAD)
def tree_follows_the_ranks(build: Build) -> Iterator[int]:
    """Check the paths of the tree: those of the greatest products of chances, by trying all."""
    medusa = find_technique("medusa")
    for seed in range(4):
        model = add_random_head(small_network(seed), medusa, seed)
        chances = head_weights(model, "medusa")[RANKS].tolist()
        worth: dict[tuple[int, ...], float] = {(a,): chances[0][a] for a in range(4)}
        worth |= {(a, b): chances[0][a] * chances[1][b] for a in range(4) for b in range(4)}
        for nodes in (1, 3, 6):
            got = spelled_ranks(begin_decoder(build, [model], (0, 1), nodes=nodes))
            best = sum(sorted(worth.values(), reverse=True)[:nodes])
            value = sum(worth[path] for path in got)
            if len(set(got)) != nodes or abs(value - best) > 1e-12:
                case = {"nodes": nodes, "paths of ranks": got}
                accuse(SPREAD, f"worth {best:.4f}", f"worth {value:.4f}", **case)
            yield nodes


def spelled_ranks(decoder: Decoder) -> list[tuple[int, ...]]:
    """Return the path of each node of a draft, as the ranks of its tokens at their depths."""
    sampling = SamplingParams(0.0)
    tree = decoder.drafter.propose(decoder.context, 2, sampling, Seeded(0))
    drafter: Any = decoder.drafter
    rows = drafter.heads.logits(drafter.states[-1][0], 2)
    paths = list[tuple[int, ...]]()
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = () if parent == ROOT else paths[parent]
        order = rank_tokens(sampling, rows[len(above)].numpy(), (), rows.shape[1])
        paths.append((*above, order.index(token)))
    return paths


def check_medusa_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads."""
    return feature_laws.check_random_heads(find_technique("medusa"), partial(build, nodes=3))


TRAPS = [
    Trap(PLANTED, fitted_heads_draft_the_text, card("medusa")),
    Trap(PLACED, check_medusa_drafts, card("medusa")),
    Trap(SPREAD, tree_follows_the_ranks, card("medusa")),
]

_medusa = partial(Toy, technique="medusa")

TOYS = [
    _medusa(
        "heads trained one token early",
        "self.ids[:, first:]",
        "self.ids[:, first - 1 : -1]",
        TrainingBatch.known_tokens,
        law=PLANTED,
    ),
    _medusa(
        "heads that read one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        MedusaDrafter.propose,
        law=PLACED,
    ),
    _medusa(
        "one candidate of each head",
        "rank_tokens(sampling, rows[depth], history, widths[depth])",
        "rank_tokens(sampling, rows[depth], history, 1)",
        fill_static_tree,
        law=SPREAD,
    ),
]
