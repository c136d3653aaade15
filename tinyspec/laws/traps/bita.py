"""BiTA (Lin et al. 2024): the right group of masks, one pass a round, and rows left alone."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, run_all_rounds
from tinyspec.laws.traps.pass_sampling import Loss, check_probe_loss
from tinyspec.lm.forward import ForwardBatch
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated.bita import BitaDrafter, bita_loss
from tinyspec.technique import find_technique
from tinyspec.tree import ROOT

PLACED = feature_laws.DRAFT_OF_TRAINING
ONE_PASS = "every round but the first has a draft, from masks of the round before"
AIMED = "mask j, which sees the prefix, is trained on the token j + 2 places on"
ALONE = "masks and their prefix change no row of the target"


def masked_network(seed: int, vocabulary: int = 4) -> Model:
    """Return a small network with random masks."""
    return add_random_head(small_network(seed, vocabulary), find_technique("bita"), seed)


@collect_evidence(ONE_PASS)
def every_round_drafts(
    build: Build, network: Callable[[int], Model] = masked_network
) -> Iterator[int]:
    """Check that no round is spent on masks alone, and that a round is one pass.

    network  (seed) -> a model with what the technique needs
    """
    for seed in range(4):
        decoder = begin_decoder(build, [network(seed)], (0, 1, 2), max_new_tokens=12)
        rounds = run_all_rounds(decoder)
        # The last token leaves no place for a draft.
        drafted = [not all(round.tree.probe) for round in rounds if round.tree.tokens]
        expect_equal(ONE_PASS, [False] + [True] * (len(drafted) - 1), drafted, network=seed)
        passes = [len(round.calls) + len(round.draft_calls) for round in rounds]
        expect_equal(ONE_PASS, [1] * len(rounds), passes, network=seed, counted="passes")
        yield len(rounds)


@collect_evidence(ALONE)
def rows_stay_as_they_are(
    build: Build, network: Callable[[int], Model] = masked_network
) -> Iterator[int]:
    """Check the rows of the newest token and of every draft token against a dense pass."""
    for seed in range(4):
        model = network(seed)
        decoder = begin_decoder(build, [model], (0, 1, 2), max_new_tokens=12)
        text = list(decoder.context)
        for round in run_all_rounds(decoder):
            nodes = [node for node, probe in enumerate(round.tree.probe) if not probe]
            for node in (ROOT, *nodes):
                path = round.tree.tokens_on(round.tree.path(node)) if node != ROOT else ()
                row, expected = round.scores.logits[node + 1], model.logits([*text, *path])[-1]
                if not torch.allclose(row, expected, rtol=0, atol=NETWORK_TOLERANCE):
                    case = {"network": seed, "text": (*text, *path)}
                    accuse(ALONE, expected.tolist(), row.tolist(), **case)
                yield 1
            text += round.tokens


@collect_evidence(AIMED)
def masks_are_trained_with_the_prefix(loss: Loss) -> Iterator[int]:
    """Check the loss of masks and prefix against the rows of one mask at a time."""
    yield from check_probe_loss("bita", AIMED, loss)


def check_bita_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads."""
    return feature_laws.check_random_heads(find_technique("bita"), partial(build, candidates=2))


TRAPS = [
    Trap(PLACED, check_bita_drafts, card("bita")),
    Trap(ONE_PASS, every_round_drafts, card("bita")),
    Trap(AIMED, masks_are_trained_with_the_prefix, lambda: bita_loss),
    Trap(ALONE, rows_stay_as_they_are, lambda: partial(card("bita")(), candidates=2)),
]

_bita = partial(Toy, technique="bita")

TOYS = [
    _bita(
        "the group after the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        BitaDrafter.observe,
        law=PLACED,
    ),
    _bita(
        "masks after the newest token alone",
        "for node, depth in depths.items():",
        "for node, depth in [(ROOT, 0)]:",
        BitaDrafter.add_groups,
        law=ONE_PASS,
    ),
    _bita(
        "masks that are trained without the prefix",
        "weights[MASKS], weights[PREFIX]",
        "weights[MASKS]",
        bita_loss,
        law=AIMED,
    ),
    _bita(
        "a prefix that all rows see",
        "mask[:, :, :lead] = self.probes[list(rows)].cpu().numpy()[:, None, None]",
        "mask[:, :, :lead] = True",
        ForwardBatch.attention_mask,
        law=ALONE,
    ),
]
