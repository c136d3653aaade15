"""The compiled path of the transformer: the same blocks, layers at a time, on packed weights, bit
for bit row-invariant.

On a CPU, in float32 and bfloat16, this is what computes; `transformer.py` says in torch what it
computes, and remains the path for other devices and types, for gradients, and where nothing was
compiled. All arithmetic is float32, also between layers: bfloat16 is how weights, keys and values
are stored. The packed weights are the only copy; who asks for a weight by name gets it unpacked.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec import _core
from tinyspec.lm.config import Config
from tinyspec.lm.forward import Cache, ForwardBatch, Seen
from tinyspec.lm.host import trim_heap
from tinyspec.lm.ops import rotations

NextTokenFn = Callable[[NDArray[np.float32]], int | None]
"""The token that comes behind a row of logits [V]; None: no more."""

_NOTHING = torch.empty(0, 0, 0)
BLOCK = 16  # outputs that stand together in a packed matrix
LINE = 64  # bytes of a cache line
SPARE = 1 << 24  # bytes that may be held twice while weights are packed


def packable(config: Config, weights: Mapping[str, Tensor]) -> bool:
    """Whether the compiled path can run these weights: on a CPU, float32 or bfloat16, not being
    trained.
    """
    first = weights["embed"]
    if (
        _core.compute is None
        or first.device.type != "cpu"
        or first.dtype not in (torch.float32, torch.bfloat16)
    ):
        return False
    dtypes = {w.dtype for w in weights.values()}
    if len(dtypes) > 1 or any(w.requires_grad or w.device.type != "cpu" for w in weights.values()):
        return False
    pairs = all(width % 2 == 0 for width in (config.d_model, config.q_dim, config.d_ff))
    return dtypes == {torch.float32} or (dtypes == {torch.bfloat16} and pairs)


def pack(weight: Tensor, room: Tensor | None = None) -> Tensor:
    """[out, in] as the kernels read it: float32 [blocks, in, 16], bfloat16 [blocks, in / 2, 16, 2],
    padded.

    It stands where there is room for it: zeros, as many as it has numbers.
    """
    out, inputs = weight.shape
    blocks = -(-out // BLOCK)
    together = 1 if weight.dtype == torch.float32 else 2
    room = torch.zeros(blocks * BLOCK * inputs, dtype=weight.dtype) if room is None else room
    packed = room.view(blocks, inputs // together, BLOCK, together)
    whole = out // BLOCK
    grouped = weight[: whole * BLOCK].view(whole, BLOCK, inputs // together, together)
    packed[:whole] = grouped.transpose(1, 2)
    if whole < blocks:
        rest = weight[whole * BLOCK :].view(-1, inputs // together, together)
        packed[whole, :, : len(rest)] = rest.transpose(0, 1)
    return packed


def unpack(packed: Tensor, out: int) -> Tensor:
    """What `pack` was given: [out, in]."""
    blocks, steps, _, together = packed.shape
    return packed.transpose(1, 2).reshape(blocks * BLOCK, steps * together)[:out]


def aligned_zeros(sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Zeros, so many of each, in one piece of memory and each at the beginning of a cache line.

    For so much at once numpy asks for large pages, of which a pass over all weights has to look
    fewer up.
    """
    line = LINE // dtype.itemsize
    starts = [0, *accumulate(-(-size // line) * line for size in sizes)]
    held = np.zeros(starts[-1] * dtype.itemsize + LINE, np.uint8)
    first = -held.ctypes.data % LINE
    whole = torch.from_numpy(held[first : first + starts[-1] * dtype.itemsize]).view(dtype)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class UnpackedWeights(Mapping[str, Tensor]):
    """Weights by name, the packed ones unpacked when they are asked for."""

    def __init__(self, packed: Mapping[str, Tensor], plain: Mapping[str, Tensor], config: Config):
        self._packed, self._plain, self._shapes = packed, plain, config.shapes()

    def __getitem__(self, name: str) -> Tensor:
        return (
            unpack(self._packed[name], self._shapes[name][0])
            if name in self._packed
            else self._plain[name]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Engine:
    """Packed weights and the compiled layers that run over them.

    Empties `weights` while packing, so that each weight is in memory once. If packing fails, every
    weight is put back before the error is raised.
    """

    def __init__(self, config: Config, weights: dict[str, Tensor]):
        self.config = config
        packed: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        try:
            self._pack(weights, packed, plain)
            self._compile(packed, plain)
        except BaseException:
            rest = dict(weights)
            weights.clear()
            for name, shape in config.shapes().items():
                if name in rest or name in plain:
                    weights[name] = rest[name] if name in rest else plain[name]
                else:
                    weights[name] = unpack(packed.pop(name), shape[0])
            raise
        self.weights = UnpackedWeights(packed, plain, config)

    def _pack(
        self, weights: dict[str, Tensor], packed: dict[str, Tensor], plain: dict[str, Tensor]
    ) -> None:
        """Move matrices into `packed` and all else into `plain`, freeing each as it is moved."""
        shapes = self.config.shapes()
        matrices = [
            name for name, shape in shapes.items() if len(shape) == 2 and name != "positions"
        ]
        sizes = [-(-shapes[name][0] // BLOCK) * BLOCK * shapes[name][1] for name in matrices]
        room = dict(zip(matrices, aligned_zeros(sizes, weights["embed"].dtype), strict=True))
        moved = 0
        for name in shapes:
            if name not in room:
                plain[name] = weights.pop(name).detach()
                continue
            packed[name] = pack(weights[name].detach(), room[name])
            moved += weights.pop(name).nbytes
            if moved > SPARE:
                trim_heap()
                moved = 0
        trim_heap()

    def _compile(self, packed: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
        """Hand the packed matrices to the compiled layers."""
        config = self.config
        self.embed, self._positions = packed["embed"], plain.get("positions")
        assert _core.compute is not None
        self.matrices = ours = {name: self._matrix(name, packed, plain) for name in packed}
        self._lookup = ours["embed"]
        self._says = np.array(config.says) if config.says else None
        layers = [
            tuple(
                part
                for norm, *names in (("norm1", "qkv", "out"), ("norm2", "up", "down"))
                for part in (
                    *_gain(plain, f"{i}.{norm}"),
                    *(ours[f"{i}.{name}.weight"] for name in names),
                )
            )
            for i in range(config.n_layers)
        ]
        turned = config.positions == "rope"
        cos, sin = rotations(config, torch.float32, torch.device("cpu"))
        own: dict[str, Any] = {}
        if config.qk_norm:
            pairs = [[_gain(plain, f"{i}.{p}_norm")[0] for p in "qk"] for i in range(len(layers))]
            own["head_norms"] = pairs
        self._compiled: Any = _core.compute.Engine(
            layers,
            _gain(plain, "norm"),
            ours["embed" if config.tied else "head"],
            heads=config.n_heads,
            shared=config.n_kv_heads,
            width=config.head_dim,
            hidden=config.d_ff,
            rms=config.norm == "rms",
            gated=config.gated,
            silu=config.activation == "silu",
            half=self.embed.dtype == torch.bfloat16,
            eps=config.norm_eps,
            scale=1 / math.sqrt(config.head_dim),
            cos=cos[:, 0].numpy() if turned else None,
            sin=sin[:, 0].numpy() if turned else None,
            **own,
        )

    def _matrix(self, name: str, packed: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> Any:
        assert _core.compute is not None
        out, inputs = self.config.shapes()[name]
        bias = plain.get(name.removesuffix("weight") + "bias")
        bits = (
            packed[name].view(torch.uint16)
            if packed[name].dtype == torch.bfloat16
            else packed[name]
        )
        return _core.compute.Packed(
            bits.numpy(), out, inputs, None if bias is None else bias.float().numpy()
        )

    def run(self, feed: ForwardBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """A whole pass in as few steps as may be: states behind the last layer [n, d], hidden
        [layers asked for, n, d], logits [heads, V].

        None where a state between layers is wanted, or positions are added.
        """
        n, n_layers = len(feed.tokens), self.config.n_layers
        if self._positions is not None or any(tap != n_layers for tap in feed.hidden_layers):
            return None
        x = np.empty((n, self.config.d_model), np.float32)
        self._lookup.rows(feed.tokens, x)
        self.layers(x, feed.cache, feed.slots, feed.positions, feed.visible_slots(0, range(n)))
        states = torch.from_numpy(x)
        hidden = (
            torch.stack([self.final(states)] * len(feed.hidden_layers))
            if feed.hidden_layers
            else _NOTHING
        )
        return (
            states,
            hidden,
            torch.from_numpy(self.logits(x if len(feed.heads) == n else x[feed.heads])),
        )

    def chain(
        self, cache: Cache, token: int, slot: int, most: int, choose: NextTokenFn
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Rows one behind the other, up to `most`, from `token` in `slot` on, where slots are
        positions; each chooses the next.

        The tokens that were run, each with its logits [V] and the state [d] behind the last layer.
        """
        x, ran = (
            np.empty((most, 1, self.config.d_model), np.float32),
            list[tuple[int, Tensor, Tensor]](),
        )
        for row, at in zip(x, range(slot, slot + most), strict=True):
            self._lookup.rows([token], row)
            if self._positions is not None:
                row += self._positions[at].float().numpy()
            self.layers(row, cache, [at], [at], (1, [(at + 1, ())]))
            said = self.logits(row)[0]
            ran.append((token, torch.from_numpy(said), torch.from_numpy(row[0])))
            if (chosen := choose(said)) is None:
                break
            token = chosen
        return ran

    def layers(
        self,
        x: Any,
        cache: Cache,
        slots: list[int],
        positions: list[int],
        paths: tuple[int, list[Seen]],
    ) -> None:
        """Run all layers over rows x [n, d] of one text, in place. `paths`: what
        `ForwardBatch.visible_slots` returns.
        """
        session = cache.address, cache.capacity, slots, positions, paths, None
        self._compiled.run(x, 0, 2 * self.config.n_layers, [session], torch.get_num_threads())

    def enter(self, feed: ForwardBatch) -> Tensor:
        """The state each row starts from: [n, d]."""
        ids, given = feed.tokens, feed.given
        if given is not None:
            ids = [0 if g else token for token, g in zip(feed.tokens, given, strict=True)]
        x = torch.empty(len(ids), self.config.d_model)
        self._lookup.rows(ids, x.numpy())
        if feed.entering is not None:
            x[torch.tensor(given)] = feed.entering.float()
        if self._positions is not None:
            fresh = torch.tensor([start == 0 for start in feed.starts])[:, None]
            x = x + fresh * self._positions[torch.tensor(feed.positions)].float()
        return x

    def span(
        self,
        feeds: Sequence[ForwardBatch],
        active: Sequence[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Sublayers first..last-1 over the active rows x [n, d] of all feeds: their new states."""
        x = x.clone()  # who took a snapshot holds the old states
        if len(feeds) == 1:
            self._run(x, [(feeds[0], active[0])], first, last, feeds[0].copying)
            return x
        at = 0
        groups: dict[bool, list[tuple[ForwardBatch, Sequence[int]]]] = {False: [], True: []}
        spans: dict[bool, list[int]] = {False: [], True: []}
        for feed, chosen in zip(feeds, active, strict=True):
            if chosen:
                groups[feed.copying].append((feed, chosen))
                spans[feed.copying].extend(range(at, at + len(chosen)))
            at += len(chosen)
        for copying, group in groups.items():
            if len(spans[copying]) == at:
                self._run(x, group, first, last, copying)
            elif group:  # some rows run and others only leave keys and values: apart
                own = x[spans[copying]]
                self._run(own, group, first, last, copying)
                x[spans[copying]] = own
        return x

    def _run(
        self,
        x: Tensor,
        group: list[tuple[ForwardBatch, Sequence[int]]],
        first: int,
        last: int,
        copying: bool,
    ) -> None:
        numbers = x.numpy()
        layered = any(
            feed.plan.visible is not None for feed, _ in group
        )  # what is seen may change with the layer
        marks = [first, *range(first // 2 * 2 + 2, last, 2), last] if layered else [first, last]
        for begin, end in pairwise(marks):
            sessions = [self._session(feed, chosen, begin // 2) for feed, chosen in group]
            self._compiled.run(numbers, begin, end, sessions, torch.get_num_threads(), copying)

    def _session(self, feed: ForwardBatch, chosen: Sequence[int], layer: int) -> tuple[Any, ...]:
        lead = None
        if feed.prefix is not None and feed.probes is not None:
            keys, values = (part.float().contiguous().numpy() for part in feed.prefix)
            lead = (feed.probes[list(chosen)].tolist(), keys, values)
        slots, positions = feed.slots, feed.positions
        if len(chosen) != len(slots):
            slots, positions = [slots[row] for row in chosen], [positions[row] for row in chosen]
        cache = feed.cache
        return (
            cache.address,
            cache.capacity,
            slots,
            positions,
            feed.visible_slots(layer, chosen),
            lead,
        )

    def final(self, x: Tensor) -> Tensor:
        """The final norm of rows x [n, d], as the head reads it."""
        normed = torch.empty_like(x)
        self._compiled.head(x.numpy(), normed.numpy(), None, torch.get_num_threads())
        return normed

    def head(self, x: Tensor) -> Tensor:
        """Logits [n, V], float32, of rows x [n, d] before the final norm."""
        return torch.from_numpy(self.logits(x.contiguous().numpy()))

    def logits(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """`head`, of rows that numpy holds."""
        logits = np.empty((len(x), len(self.config.says) or self.config.vocab_size), np.float32)
        self._compiled.head(x, np.empty_like(x), logits, torch.get_num_threads())
        if self._says is not None:
            said, logits = logits, np.full((len(x), self.config.vocab_size), -np.inf, np.float32)
            logits[:, self._says] = said
        return logits


def _gain(plain: Mapping[str, Tensor], norm: str) -> tuple[Any, Any]:
    """Gain and bias of a norm as float32 arrays; no bias: None."""
    bias = plain.get(f"{norm}.bias")
    return plain[f"{norm}.weight"].float().numpy(), None if bias is None else bias.float().numpy()
