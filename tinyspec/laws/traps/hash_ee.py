"""HashEE (Sun et al. 2022): a layer for each id, the same in training and in use."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.rng import Seeded
from tinyspec.early_exit import hash_ee
from tinyspec.early_exit.exits import ExitTarget
from tinyspec.early_exit.hash_ee import HashRule, HashSettings
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import BY_TOKEN, follows_the_hash
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.technique import TrainingBatch, Tuning, find_technique
from tinyspec.tree import TokenTree

KNOWN_COST = "a token runs in one pass, through as many layers as its id says"
TRAINED = "the loss runs each token through the layers that the decoder runs"
COUNTED = "the table is the hash function's, counted on the training texts"

EXITS, TOKENS = (1, 3), 6
LAYERS = (1, 3, 2, 2, 3, 1)
"""A table for six ids."""


@collect_evidence(KNOWN_COST)
def cost_follows_from_ids(build: Build) -> Iterator[int]:
    """Check the passes of every prompt and of every round against the ids alone."""
    for seed, prompt in product(range(3), ((1,), (0, 1, 2, 3), (2, 2, 1))):
        for model in (TableModel(seed, 4, zeros=False), small_network(seed)):
            knobs: dict[str, Any] = {"hash": "dealt", "exits": "1,3"}
            decoder = begin_decoder(build, [model], prompt, SAMPLED, TOKENS, **knobs)
            case = {"model": repr(model), "prompt": prompt, **knobs}
            ran = sum(call.row_layers for call in decoder.forward_log)
            expected = sum(EXITS[token % 2] for token in prompt[:-1])
            expect_equal(KNOWN_COST, expected, ran, **case, counted="layers of the prompt")
            while not decoder.finished:
                newest = decoder.context[-1]
                calls = decoder.step(Seeded(seed).split("round", decoder.rounds)).calls
                got = [(call.rows, int(call.row_layers)) for call in calls if call.row_layers]
                case["token"] = newest
                expect_equal(
                    KNOWN_COST, [(1, EXITS[newest % 2])], got, **case, counted="rows, layers"
                )
                yield 1


def tuned_network(seed: int) -> Model:
    """Return a small network with a table of its own."""
    plain = small_network(seed, vocabulary=len(LAYERS))
    extras = {f"hash_ee/{hash_ee.TABLE}": torch.tensor(LAYERS, dtype=torch.uint8)}
    return Model(plain.config, plain.weights, name=plain.name, extras=extras)


def training_batch(seed: int, vocabulary: int = len(LAYERS)) -> TrainingBatch:
    """Return three texts, of which the model wrote the ends of two."""
    ids = torch.randint(vocabulary, (3, 9), generator=torch.Generator().manual_seed(seed))
    is_answer = torch.zeros(3, 9, dtype=torch.bool)
    is_answer[0, 2:], is_answer[1, 5:] = True, True
    return TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)


@collect_evidence(TRAINED)
def loss_is_of_what_decodes(build: Build) -> Iterator[int]:
    """Check the loss against the rows of the decoder, on texts that are forced on it."""
    made = find_technique("hash_ee").tuned
    assert made is not None
    for seed in range(3):
        model, batch, losses = tuned_network(seed), training_batch(seed), list[float]()
        for ids, is_answer in zip(batch.ids, batch.is_answer, strict=True):
            first = int(is_answer.int().argmax())
            if not is_answer.any():
                continue
            target = begin_decoder(build, [model], ids[: first + 1].tolist()).target
            for token in ids[first + 1 :].tolist():
                logits = target.score(TokenTree()).logits[0]
                losses.append(float(F.cross_entropy(logits, torch.tensor(token))))
                target.commit((), token)
        beside = {hash_ee.TABLE: torch.tensor(LAYERS, dtype=torch.uint8)}
        tuning = Tuning(model.torch_blocks(), model, HashSettings(), beside, 0.0)
        got, expected = float(made.loss(tuning, batch, torch.Generator())), sum(losses)
        if abs(got - expected / len(losses)) > NETWORK_TOLERANCE:
            accuse(TRAINED, expected / len(losses), got, network=seed)
        yield len(losses)


Count = Callable[[Config, HashSettings, list[Tensor], int], dict[str, Tensor]]


@collect_evidence(COUNTED)
def table_is_counted(count: Count) -> Iterator[int]:
    """Check the tables of all hashes on random texts: order, sizes and shares of the buckets."""
    config = Config(40, 8, 7, 2, 1, 4, 12, 64, eos=(3,))
    exits = (1, 2, 4, 6)
    for seed, balance in product(range(3), hash_ee.BALANCES):
        generator = torch.Generator().manual_seed(seed)
        zipf = 1 / torch.arange(1, 31)  # ids from 30 on are never seen
        texts = [torch.multinomial(zipf, 50, True, generator=generator) for _ in range(20)]
        counts = torch.bincount(torch.cat(texts), minlength=40).tolist()
        tables = {
            kind: count(config, HashSettings(kind, balance, "1,2,4,6"), texts, seed)[hash_ee.TABLE]
            for kind in hash_ee.HASHES
        }
        seen = [id for id in range(40) if counts[id] and id != 3]
        for kind in ("frequency", "random"):
            layers = tables[kind].tolist()
            case = {"hash": kind, "balance": balance, "seed": seed}
            outside = {layers[id] for id in range(40) if id not in seen}
            expect_equal(COUNTED, {7}, outside, **case, of="ids that must run all layers")
            sizes = [
                sum(counts[id] if balance == "tokens" else 1 for id in seen if layers[id] == exit)
                for exit in exits
            ]
            slack = max(counts[id] for id in seen) if balance == "tokens" else 1
            if max(sizes) - min(sizes) > slack:
                accuse(COUNTED, f"buckets of sizes that differ by {slack}", sizes, **case)
            yield 1
        by_count = sorted(seen, key=lambda id: -counts[id])
        for more, fewer in pairwise(by_count):
            pair = [int(tables["frequency"][id]) for id in (more, fewer)]
            if counts[more] > counts[fewer] and pair[0] > pair[1]:
                accuse(COUNTED, "the more frequent id leaves first", pair, counts=(more, fewer))
        given = tables["random"][torch.cat(texts)]
        for exit in (*exits, 7):
            share = float((given == exit).double().mean())
            got = float((tables["inconsistent"] == exit).double().mean())
            if abs(share - got) > 1 / 40:
                accuse(COUNTED, share, got, counted=f"share of the tokens with layer {exit}")


def count_real() -> Any:
    """Return the counting function of the technique itself."""
    made = find_technique("hash_ee").tuned
    assert made is not None
    return made.tables


TRAPS = [
    Trap(BY_TOKEN, follows_the_hash, card("hash_ee")),
    Trap(KNOWN_COST, cost_follows_from_ids, card("hash_ee")),
    Trap(TRAINED, loss_is_of_what_decodes, card("hash_ee")),
    Trap(COUNTED, table_is_counted, count_real),
]

_hash = partial(Toy, technique="hash_ee")

TOYS = [
    _hash(
        "a hash in use only", "depths=table[rows]", "depths=None", hash_ee.hash_loss, law=TRAINED
    ),
    _hash(
        "keys of layers that were run after all",
        '"copy"',
        '"recompute"',
        hash_ee.hash_ee,
        law=BY_TOKEN,
    ),
    _hash(
        "a prompt that runs all layers",
        "if self.rule.prompt:",
        "if False:",
        ExitTarget.extend,
        law=BY_TOKEN,
    ),
    _hash(
        "the layer of the place",
        "else token]",
        "else position % len(table)]",
        hash_ee.look_up_layer,
        law=BY_TOKEN,
    ),
    _hash(
        "a rule that is asked at every layer",
        "return (layer,) if layer < self.depth else ()",
        "self.last = layer\nreturn tuple(range(1, min(layer, self.depth - 1) + 1))",
        HashRule.layers_of,
        also=(Patch(HashRule.should_exit, "return True", "return at.layer == self.last"),),
        law=KNOWN_COST,
    ),
    _hash(
        "rare tokens leave first",
        "descending=True",
        "descending=False",
        hash_ee.build_layer_table,
        law=COUNTED,
    ),
    _hash(
        "ids that were never seen leave first",
        "order[counts[order] > 0]",
        "order",
        hash_ee.assign_layers,
        law=COUNTED,
    ),
]
