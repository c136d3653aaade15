"""HashEE: a fixed table says after which layer each token leaves; nothing is asked while decoding.

Paper: Sun, Liu, Zhu, Geng, Wu, He, Ni, Xie, Huang, Qiu, Findings of ACL 2022, arXiv 2203.01670. The
hash functions were read in the authors' code.

Idea. A token's difficulty can hardly be learned. It suffices that a token leaves at the same layer
in training and in use. So a hash function of the token's id decides. There is no classifier and no
threshold, and the cost of a text is known before it runs. A token that has left keeps its state,
and the layers above make its keys and values from that state.

    x_t = layer_l(x_t; keys and values of all tokens)   if l <= h(token t), else x_t stays
    cost of a text = sum over t of h(token t)           layers, beside the keys of tokens that left

The hash assigns the token types that were seen in training to B buckets, and bucket b leaves after
1 + b (L // B) layers. All other ids, and those that end a text, run all layers.

    frequency  the most frequent types are in the first bucket
    random     a permutation decides, the same in training and in use (*consistent*)

The control of the paper is `inconsistent`: a token gets another layer each time that it occurs.

Training. The model is tuned by `tinyspec train head --method hash_ee`, on texts that it wrote, with
these layers: the masked stream of `Blocks.layer_states` and the usual cross-entropy. The table is
counted on the same texts and becomes an extra of the model.

Guarantee: LOSSY in `hash`; EXACT at off, where every token runs all layers.
Pitfall: a hash that is put on a model that was not trained with it; leaving tokens out of the
attention once they have left; Python's `hash`, which differs from process to process. With
buckets of equally many types, the frequency hash puts most tokens of a text into the first one. So
mean depths differ: compare with `balance = "tokens"`, where each bucket holds equally many tokens.
Ablation: `hash = "inconsistent"` of section [head], the control of the paper: a token has no exit
of its own. In a test on made texts a model that was trained with its hash has less than 0.6 of the
control's loss. Its loss is also half a nat lower than that of a model that was not trained for the
hash.
Tests: tests/early_exit/test_hash_ee.py (`decode_with_hash` against the code that runs, on every
outcome; the table; the loss; on made texts, training with the hash and consistency help) and
laws/exit_laws.py (the exact joint distribution).
Left out: the hash by mutual information, which needs the labels of a classification, and the one by
clusters of embeddings. Only the frequency hash has weights in models/: exits-hash/recipe.toml says
how the random one and the control are trained. Not shown: that consistency helps. The held-out loss
of a language model after 1,000 steps is 4.52 nats a token with the frequency hash, 4.57 with the
random one and 4.56 with the control, at the same mean depth. Ours: the paper's models encode a
text; here the id of the newest token decides after how many layers the next one is read. Counts are
of all texts, also of those that the training holds out, as in the authors' code. There `random`
draws a bucket for each id of the vocabulary, seen or not, and the control draws evenly; here unseen
ids run all layers, and the control draws a layer as often as the table has it. A model without a
table has its exits dealt to the ids in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.exits import ExitPoint, ExitRule, ExitTarget, parse_layers
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.heads import FrozenTarget
from tinyspec.technique import (
    Guarantee,
    Knob,
    Request,
    TrainingBatch,
    Tuned,
    Tuning,
    technique,
    tuned_settings,
)

BUCKETS = 6  # of the hash, as in the authors' code
TABLE = "layers"  # the tensor [V] of the layers after which the tokens leave
HASHES = ("frequency", "random", "inconsistent")
BALANCES = ("types", "tokens")


def decode_with_hash(
    embed: Callable[[int], Any],
    make_keys: Callable[[int, Any, int], Any],
    run_layer: Callable[[int, Any, Sequence[Any]], Any],
    read: Callable[[Any], Any],
    text: Sequence[int],
    n_tokens: int,
    exit_of: Mapping[int, int],
    depth: int,
    rng: Any,
) -> list[int]:
    """Return the text after so many new tokens (section 4).

    embed      token -> its state below the first layer
    make_keys  (layer, state, position) -> keys and values
    run_layer  (layer, state, keys and values of the tokens up to this one) -> the state after it
    read       state -> next-token distribution [V]
    exit_of    token -> layers that it runs
    rng        a numpy.random.Generator

    The decoder runs `ExitTarget`, which keeps the keys. A test compares the two on every outcome.
    """
    output = list(text)
    for _ in range(n_tokens):
        states = [embed(token) for token in output]
        for layer in range(depth):
            keys = [make_keys(layer, state, at) for at, state in enumerate(states)]  # of all tokens
            states = [
                run_layer(layer, state, keys[: at + 1]) if layer < exit_of[token] else state
                for at, (token, state) in enumerate(zip(output, states, strict=True))
            ]
        row = read(states[-1])
        output.append(rng.choice(len(row), p=row))
    return output


# ------------------------------ the hash (section 4.1)


def resolve_exits(text: str, depth: int, name: str = "the model") -> tuple[int, ...]:
    """Return the layers of the buckets; an empty text is the paper's.

    >>> resolve_exits("", 12), resolve_exits("", 3), resolve_exits("2,4", 4)
    ((1, 3, 5, 7, 9, 11), (1, 2, 3), (2, 4))
    """
    if text.strip():
        return parse_layers(text, depth, name, top=True)
    buckets = min(BUCKETS, depth)
    return tuple(1 + bucket * (depth // buckets) for bucket in range(buckets))


def assign_layers(
    counts: Tensor, order: Tensor, balance: str, exits: Sequence[int], depth: int
) -> Tensor:
    """Return the layers of all tokens, uint8 [V].

    counts   [V] how often each was seen; those never seen run all layers
    order    [V] ids, the first bucket's first
    balance  types: buckets of equally many types; tokens: of equally many occurrences

    >>> counts, order = torch.tensor([1, 0, 6, 2, 3]), torch.tensor([2, 4, 3, 0, 1])
    >>> assign_layers(counts, order, "types", [1, 3], 4).tolist()
    [3, 4, 1, 3, 1]
    >>> assign_layers(counts, order, "tokens", [1, 3], 4).tolist()
    [3, 4, 1, 3, 3]
    """
    seen = order[counts[order] > 0]
    weights = (counts[seen] if balance == "tokens" else torch.ones_like(seen)).double()
    middles = weights.cumsum(0) - weights / 2
    buckets = (middles * len(exits) / weights.sum()).long()
    table = torch.full_like(counts, depth, dtype=torch.uint8)
    table[seen] = torch.tensor(exits, dtype=torch.uint8, device=table.device)[buckets]
    return table


def hash_to_index(token: int, position: int, size: int) -> int:
    """Return a number below `size` that looks random, the same in every process."""
    digest = blake2b(f"{token} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % size


def look_up_layer(table: Sequence[int], is_mixed: bool, token: int, position: int) -> int:
    """Return the layer of a token: its own, or one that its position decides too (the control)."""
    return table[hash_to_index(token, position, len(table)) if is_mixed else token]


class HashRule(ExitRule):
    """Let each token leave at its own layer, the prompt's tokens too.

    exit_of  (token, position) -> layers that it runs
    exits    all layers that this may be
    """

    prompt = True

    def __init__(self, exit_of: Callable[[int, int], int], exits: Sequence[int], depth: int):
        self.exit_of, self.depth = exit_of, depth
        self.layers = tuple(layer for layer in exits if layer < depth)

    def layers_of(self, token: int, position: int) -> Sequence[int]:
        layer = self.exit_of(token, position)
        return (layer,) if layer < self.depth else ()

    def should_exit(self, at: ExitPoint) -> bool:
        return True


# ------------------------------ training


@dataclass(frozen=True)
class HashSettings:
    """How a model is tuned: section [head] of a recipe.

    hash     frequency, random or inconsistent
    balance  what the buckets hold equally many of: types or tokens
    exits    the layers of the buckets, as 1,3,5; empty: the paper's
    """

    hash: str = "frequency"
    balance: str = "types"
    exits: str = ""

    def __post_init__(self) -> None:
        if self.hash not in HASHES or self.balance not in BALANCES:
            raise TinyspecError(
                f"[head] wants hash to be one of {', '.join(HASHES)}, and balance one of "
                f"{', '.join(BALANCES)}"
            )


def check_exits(target: FrozenTarget, settings: HashSettings, seed: int) -> dict[str, Tensor]:
    """Return no tensors. Raises TinyspecError for exits that the target does not have."""
    resolve_exits(settings.exits, target.config.n_layers, "the target")
    return {}


def build_layer_table(
    config: Config, settings: HashSettings, texts: Sequence[Tensor], seed: int
) -> dict[str, Tensor]:
    """Return the table of the layers, counted on these texts.

    The control has no fixed layer for a token. Its table holds each layer as often as a random hash
    uses it.
    """
    vocabulary, exits = config.vocab_size, resolve_exits(settings.exits, config.n_layers)
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for text in texts:
        counts += torch.bincount(text.cpu().long(), minlength=vocabulary)
    assigned = counts.clone()
    assigned[list(config.eos)] = 0
    order = counts.argsort(descending=True, stable=True)
    if settings.hash != "frequency":
        order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    table = assign_layers(assigned, order, settings.balance, exits, config.n_layers)
    if settings.hash == "inconsistent":
        drawn = torch.repeat_interleave(table, counts)  # the layers of all tokens of the texts
        middles = (torch.arange(vocabulary) + 0.5) * len(drawn) / vocabulary
        table = drawn.sort().values[middles.long()]
    return {TABLE: table}


def hash_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the cross-entropy of what the model wrote, each token through its own layers."""
    blocks, table, ids = tuning.blocks, tuning.beside[TABLE], batch.ids[:, :-1]
    is_answer = batch.is_answer[:, :-1]
    if not is_answer.any():
        return blocks.embed.sum() * 0
    rows = ids
    if tuning.settings.hash == "inconsistent":
        rows = torch.randint(len(table), ids.shape, generator=generator).to(ids.device)
    *_, states = blocks.layer_states(ids, depths=table[rows])
    return F.cross_entropy(blocks.compute_logits(states[is_answer]), batch.ids[:, 1:][is_answer])


# ------------------------------ the card


@technique(
    title="HashEE: each token leaves at the layer of its hash",
    summary="a table assigns each token its depth",
    paper="Sun et al. 2022, arXiv 2203.01670",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("hash", "off"),
    tuned=Tuned(
        HashSettings,
        hash_loss,
        small=HashSettings(exits="1,2"),
        initialize=check_exits,
        tables=build_layer_table,
    ),
    knobs=(
        Knob(
            "hash",
            "own",
            "own: the table that the model was tuned with, else dealt; dealt: token ids take the "
            "exits in turn; off: every token runs all layers",
            choices=("own", "dealt", "off"),
        ),
        Knob(
            "exits",
            "",
            "layers that are dealt, as 1,3,5; empty: those that the model was tuned for, else six "
            "at equal distances",
        ),
    ),
)
def hash_ee(request: Request, *, hash: str, exits: str) -> Decoder:
    """Return a decoder whose tokens leave at the layers of their ids."""
    session: Any = request.target
    model = session.model
    config, settings = model.config, tuned_settings(model, "hash_ee", HashSettings)
    layers = resolve_exits(exits or settings.exits, config.n_layers, model.name)
    if hash == "off":
        return request.decoder(BaseDrafter(), verify_tree)
    table = list(islice(cycle(layers), config.vocab_size))
    own: Tensor | None = getattr(model, "extras", {}).get(f"hash_ee/{TABLE}")
    if hash == "own" and own is not None:
        if exits.strip():
            raise TinyspecError("exits is for hash dealt: the model's own table has its layers")
        table = own.tolist()
        if own.shape != (config.vocab_size,) or not set(table) <= {*range(1, config.n_layers + 1)}:
            raise TinyspecError(
                f"{model.name}: its table hash_ee/{TABLE} must have a layer for each of "
                f"{config.vocab_size} tokens: tune the model again"
            )
    exit_of = partial(look_up_layer, table, hash == "own" and settings.hash == "inconsistent")
    target = ExitTarget(session, HashRule(exit_of, sorted({*table}), config.n_layers), "copy")
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
