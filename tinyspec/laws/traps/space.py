"""SPACE (Yi et al. 2024): the right group of masks, one pass a round, and the right labels."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, card, joint_distribution_of_self_drafting
from tinyspec.laws.traps.bita import ONE_PASS, every_round_drafts
from tinyspec.speculative.integrated.space import SpaceDrafter, SpaceSettings, sar_loss, space
from tinyspec.technique import TrainingBatch, Tuning, find_technique

PLACED = feature_laws.DRAFT_OF_TRAINING
LABELLED = "the text before the cut and k masks behind it have the text's own labels"

Loss = Any
"""(tuning, batch, generator) -> scalar: what a technique minimises."""


@collect_evidence(LABELLED)
def loss_is_of_the_texts_tokens(loss: Loss) -> Iterator[int]:
    """Check the loss of texts that are cut, and of texts that are not.

    The judge asks the model for the row after each text, masks included, one at a time. The target
    wrote so few tokens that the text can be cut in one place.
    """
    text, first, last = [0, 2, 1, 2, 2, 0, 1, 0], 2, 5  # the target wrote the tokens first .. last
    for seed in range(4):
        model = small_network(seed)
        mask = model.config.vocab_size - 1
        is_answer = torch.tensor([[first <= t + 1 <= last for t in range(len(text))]])
        empty = torch.empty(1, len(text), 0)
        batch = TrainingBatch(torch.tensor([text]), is_answer, empty, empty.long(), empty)

        def nats(read: list[int], token: int, model: Any = model) -> float:
            return -float(model.logits(read)[-1].log_softmax(-1)[token])

        plain = [nats(text[:t], text[t]) for t in range(first, last + 1)]
        masked = [nats(text[:first] + [mask] * j, text[first + j]) for j in range(4)]
        for share, expected in ((0.0, plain), (1.0, masked)):
            settings = SpaceSettings(masks=3, mask_prob=share)
            tuning = Tuning(model.torch_blocks(), model, settings, {}, 0.0)
            got = float(loss(tuning, batch, torch.Generator().manual_seed(seed)))
            mean = sum(expected) / len(expected)
            if not math.isclose(got, mean, rel_tol=1e-6):  # the loss is float32
                accuse(LABELLED, mean, got, network=seed, text=text, mask_prob=share)
            yield 1


def check_space_drafts(build: Build) -> Evidence:
    """Check law F2 on random networks."""
    return feature_laws.check_random_heads(find_technique("space"), partial(build, masks=2))


TRAPS = [
    Trap(PLACED, check_space_drafts, card("space")),
    Trap(ONE_PASS, every_round_drafts, card("space")),
    Trap(LABELLED, loss_is_of_the_texts_tokens, lambda: sar_loss),
    Trap(JOINT, partial(joint_distribution_of_self_drafting, masks=2), card("space")),
]

_space = partial(Toy, technique="space")

TOYS = [
    _space(
        "the group behind the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        SpaceDrafter.observe,
        law=PLACED,
    ),
    _space(
        "masks behind the newest token alone",
        "for node in range(ROOT, n)",
        "for node in (ROOT,)",
        SpaceDrafter.propose,
        law=ONE_PASS,
    ),
    _space(
        "tuning without masks",
        "if is_cut and len(cuts):",
        "if False:",
        sar_loss,
        law=LABELLED,
    ),
    _space(
        "a rejected candidate drawn again from p, as in the released code",
        "return request.decoder(SpaceDrafter(ids, positions), verify_tree)",
        """from tinyspec.decoding.verify import Verdict
def redraw(tree, p, rng):
    path, node = (), ROOT
    for child in tree.chain_nodes("SPACE"):
        token, q = tree.tokens[child], tree.draft_probs[child]
        if not rng.accept(min(1, p[node][token] / (1 if q is None else q[token]))):
            break
        path, node = (*path, child), child
    return Verdict(path, rng.draw(p[node]))
return request.decoder(SpaceDrafter(ids, positions), redraw)""",
        space,
        law=JOINT,
    ),
]
