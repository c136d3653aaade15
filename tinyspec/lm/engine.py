"""The compiled path: the layers of `blocks.py` over packed weights, on a CPU.

In float32 and bfloat16 this is what computes. Torch computes on other devices, in other types, with
gradients, and where nothing was compiled. All arithmetic is float32, also between layers; weights,
keys and values may be stored as bfloat16. No bit of a row depends on what is computed beside it.
The packed weights are the only copy: a weight that is read by name is unpacked.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec import _core
from tinyspec.lm.config import Config
from tinyspec.lm.forward import Cache, ForwardBatch, SeenSlots
from tinyspec.lm.host import find_free_memory, trim_heap
from tinyspec.lm.ops import rotary_rows, rotary_tables
from tinyspec.lm.quantised import BLOCK, GROUP, SCALE_BYTES, QuantisedMatrix

NextTokenFn = Callable[[Any], int | None]
"""Logits [V], an array or without compiled layers a tensor -> the next token; None: stop."""

_NOTHING = torch.empty(0, 0, 0)
LINE = 64  # bytes of a cache line
SPARE = 1 << 24  # bytes that may be held twice while weights are packed


def can_pack(config: Config, weights: Mapping[str, Tensor]) -> bool:
    """Return whether the compiled path can run these weights.

    They must be on a CPU, float32 or bfloat16, and not being trained.
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
    return dtypes == {torch.float32} or (dtypes == {torch.bfloat16} and _has_pairs(config))


def can_pack_quantised(config: Config) -> bool:
    """Return whether the compiled path can run a model of quantised and bfloat16 weights."""
    return _core.compute is not None and _has_pairs(config)


def prefers_quantised(config: Config) -> bool:
    """Return whether the quantised weights of a model should stay quantised.

    They should where a product with them is faster, and where bfloat16 weights would not fit into
    free memory. Both forms give the same logits, bit for bit.
    """
    assert _core.compute is not None
    if (left := find_free_memory()) is not None and left < 2 * config.parameters():
        return True
    return is_quantised_faster(_core.compute.kernel(), torch.get_num_threads())


@functools.cache
def is_quantised_faster(kernel: str, threads: int) -> bool:
    """Return whether this kernel multiplies one row by Q4_1 weights faster than by bfloat16 ones.

    With AVX-512 BF16 it does (`tinyspec bench core`). The other kernels are measured once.
    """
    if kernel == "avx512bf16":
        return True
    seconds = time_products(kernel, threads, ("Q4_1",))
    return min(seconds["Q4_1"]) < min(seconds["bfloat16"])


def time_products(
    kernel: str, threads: int, kinds: Sequence[str], rounds: int = 5
) -> dict[str, list[float]]:
    """Return the seconds of one row by a matrix [8192, 4096], in bfloat16 and in these kinds.

    The matrices have 18 to 64 MiB and are used in turn, so few caches can hold them.
    """
    compute, (out, inputs) = _core.compute, (8192, 4096)
    assert compute is not None
    halves = np.full(out * inputs, 0x3F80, np.uint16)
    matrices = {"bfloat16": compute.Packed(halves, out, inputs)}
    for kind in kinds:
        size = out * inputs // GROUP * (SCALE_BYTES[kind] + (32 if kind == "Q8_0" else 16))
        matrices[kind] = compute.Packed(np.full(size, 1, np.uint8), out, inputs, None, kind)
    x, y = np.ones((1, inputs), np.float32), np.empty((1, out), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in matrices}
    before = compute.kernel()
    compute.use(kernel)
    try:
        for _ in range(rounds):
            for name, matrix in matrices.items():
                begun = time.perf_counter()
                matrix.product(x, y, threads)
                seconds[name].append(time.perf_counter() - begun)
    finally:
        compute.use(before)
    return seconds


def _has_pairs(config: Config) -> bool:
    """Return whether the rows of all matrices can be read two numbers at a time."""
    return all(width % 2 == 0 for width in (config.d_model, config.q_dim, config.d_ff))


def pack_matrix(weight: Tensor, room: Tensor | None = None) -> Tensor:
    """Return a matrix [out, in] in the order that the kernels read, padded.

    float32 [blocks, in, 16], bfloat16 [blocks, in / 2, 16, 2]

    room  zeros to write it into, one for each number; None: new memory
    """
    out, inputs = weight.shape
    blocks = -(-out // BLOCK)
    together = 1 if weight.dtype == torch.float32 else 2
    room = aligned_zeros([blocks * BLOCK * inputs], weight.dtype)[0] if room is None else room
    packed = room.view(blocks, inputs // together, BLOCK, together)
    whole = out // BLOCK
    grouped = weight[: whole * BLOCK].view(whole, BLOCK, inputs // together, together)
    packed[:whole] = grouped.transpose(1, 2)
    if whole < blocks:
        rest = weight[whole * BLOCK :].view(-1, inputs // together, together)
        packed[whole, :, : len(rest)] = rest.transpose(0, 1)
    return packed


def unpack_matrix(packed: Tensor, out: int) -> Tensor:
    """Return the matrix [out, in] that `pack_matrix` packed."""
    blocks, steps, _, together = packed.shape
    return packed.transpose(1, 2).reshape(blocks * BLOCK, steps * together)[:out]


def wrap_matrix(packed: Tensor, shape: Sequence[int], bias: Tensor | None = None) -> Any:
    """Return a packed matrix as the kernels take it: `product` multiplies by it.

    shape  [out, in] of the matrix before it was packed

    It keeps the memory of the packed matrix alive.
    """
    assert _core.compute is not None
    out, inputs = shape
    bits = packed.view(torch.uint16) if packed.dtype == torch.bfloat16 else packed
    shift = None if bias is None else bias.float().contiguous().numpy()
    return _core.compute.Packed(bits.numpy(), out, inputs, shift)


def wrap_quantised(
    matrix: QuantisedMatrix, shape: Sequence[int], bias: Tensor | None = None
) -> Any:
    """Return a quantised matrix as the kernels take it, with its groups interleaved."""
    assert _core.compute is not None
    groups = torch.from_numpy(matrix.interleave()).reshape(-1)
    held = aligned_zeros([len(groups)], torch.uint8)[0]
    held.copy_(groups)
    out, inputs = shape
    shift = None if bias is None else bias.float().contiguous().numpy()
    return _core.compute.Packed(held.numpy(), out, inputs, shift, matrix.kind)


def aligned_zeros(sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of zeros of these sizes, in one piece of memory, aligned to cache lines.

    For one large piece numpy asks for large pages: a pass over all weights then has fewer pages to
    look up.
    """
    line = LINE // dtype.itemsize
    starts = [0, *accumulate(-(-size // line) * line for size in sizes)]
    held = np.zeros(starts[-1] * dtype.itemsize + LINE, np.uint8)
    first = -held.ctypes.data % LINE
    whole = torch.from_numpy(held[first : first + starts[-1] * dtype.itemsize]).view(dtype)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class UnpackedWeights(Mapping[str, Tensor]):
    """Weights by name. A packed one is unpacked when it is read, a quantised one to bfloat16."""

    def __init__(
        self,
        packed: Mapping[str, Tensor],
        plain: Mapping[str, Tensor],
        quantised: Mapping[str, Any],
        config: Config,
    ):
        self._packed, self._plain, self._quantised = packed, plain, quantised
        self._shapes = config.shapes()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._packed:
            return unpack_matrix(self._packed[name], self._shapes[name][0])
        if name in self._quantised:
            rows = torch.empty(self._shapes[name])
            self._quantised[name].rows(np.arange(len(rows), dtype=np.int32), rows.numpy())
            return rows.to(torch.bfloat16)
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Engine:
    """Packed weights, and the compiled layers that run over them.

    `weights` is emptied while it is packed, so that each weight is in memory once. If packing
    fails, every weight is put back before the error is raised. `quantised` has the other matrices,
    and is emptied too.

    quantised_bytes  bytes of each quantised matrix
    """

    def __init__(
        self,
        config: Config,
        weights: dict[str, Tensor],
        quantised: dict[str, QuantisedMatrix] | None = None,
    ):
        self.config = config
        self.dtype = weights["norm.weight"].dtype
        self.device = torch.device("cpu")
        packed: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        try:
            self._pack(weights, packed, plain)
            self._compile(packed, plain, quantised or {})
        except BaseException:
            if quantised is not None:  # the caller reads the file again
                raise
            rest = dict(weights)
            weights.clear()
            for name, shape in config.shapes().items():
                if name in rest or name in plain:
                    weights[name] = rest[name] if name in rest else plain[name]
                else:
                    weights[name] = unpack_matrix(packed.pop(name), shape[0])
            raise
        kept = {name: self.matrices[name] for name in self.matrices if name not in packed}
        self.weights = UnpackedWeights(packed, plain, kept, config)

    def _pack(
        self, weights: dict[str, Tensor], packed: dict[str, Tensor], plain: dict[str, Tensor]
    ) -> None:
        """Move matrices into `packed` and all else into `plain`, freeing each as it is moved."""
        shapes = {name: shape for name, shape in self.config.shapes().items() if name in weights}
        matrices = [
            name for name, shape in shapes.items() if len(shape) == 2 and name != "positions"
        ]
        sizes = [-(-shapes[name][0] // BLOCK) * BLOCK * shapes[name][1] for name in matrices]
        room = dict(zip(matrices, aligned_zeros(sizes, self.dtype), strict=True))
        moved = 0
        for name in shapes:
            if name not in room:
                plain[name] = weights.pop(name).detach()
                continue
            packed[name] = pack_matrix(weights[name].detach(), room[name])
            moved += weights.pop(name).nbytes
            if moved > SPARE:
                trim_heap()
                moved = 0
        trim_heap()

    def _compile(
        self,
        packed: dict[str, Tensor],
        plain: dict[str, Tensor],
        quantised: dict[str, QuantisedMatrix],
    ) -> None:
        """Hand the packed matrices to the compiled layers."""
        config = self.config
        self._positions = plain.get("positions")
        assert _core.compute is not None
        shapes = config.shapes()

        def bias_of(name: str) -> Tensor | None:
            return plain.get(name.removesuffix("weight") + "bias")

        self.matrices = ours = {
            name: wrap_matrix(matrix, shapes[name], bias_of(name))
            for name, matrix in packed.items()
        }
        self.quantised_bytes = {name: matrix.rows.nbytes for name, matrix in quantised.items()}
        for name in list(quantised):
            ours[name] = wrap_quantised(quantised.pop(name), shapes[name], bias_of(name))
        trim_heap()
        self._lookup = ours["embed"]
        self._head_ids = np.array(config.head_ids) if config.head_ids else None
        layers = [
            tuple(
                part
                for norm, *names in (("norm1", "qkv", "out"), ("norm2", "up", "down"))
                for part in (
                    *_norm_arrays(plain, f"{i}.{norm}"),
                    *(ours[f"{i}.{name}.weight"] for name in names),
                )
            )
            for i in range(config.distinct_layers)
        ] * config.repeat
        own: dict[str, Any] = {}
        if config.qk_norm:
            pairs = [
                [_norm_arrays(plain, f"{i}.{p}_norm")[0] for p in "qk"]
                for i in range(config.distinct_layers)
            ]
            own["head_norms"] = pairs * config.repeat
        self._make_compiled = functools.partial(
            _core.compute.Engine,
            layers,
            _norm_arrays(plain, "norm"),
            ours["embed" if config.tied else "head"],
            heads=config.n_heads,
            shared=config.n_kv_heads,
            width=config.head_dim,
            hidden=config.d_ff,
            rms=config.norm == "rms",
            gated=config.gated,
            silu=config.activation == "silu",
            half=self.dtype == torch.bfloat16,
            eps=config.norm_eps,
            scale=1 / math.sqrt(config.head_dim),
            **own,
        )
        self._reach = 0
        self._reserve_rotary(1)

    def _reserve_rotary(self, slots: int) -> None:
        """Grow the tables of cos and sin to the slots of a cache: no position is above its slot.

        The compiled layers are made anew, so that a pass in another thread keeps its own tables.
        They only point to the weights.
        """
        if slots <= self._reach:
            return
        config, tables = self.config, dict[str, Any]()
        rows = rotary_rows(config, slots)
        if config.positions == "rope":
            cos, sin = rotary_tables(config, torch.float32, torch.device("cpu"), rows)
            tables = {"cos": cos[:, 0].numpy(), "sin": sin[:, 0].numpy()}
        self._compiled: Any = self._make_compiled(**tables)
        whole = config.positions != "rope" or rows == config.max_positions
        self._reach = sys.maxsize if whole else rows

    def run_full_pass(self, feed: ForwardBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """Run a full pass in one call of the kernels.

        Returns the states after the last layer [n, d], the hidden layers asked for [k, n, d], and
        the logits [heads, V]. None if a state between layers is wanted, or positions are added.
        """
        n, n_layers = len(feed.tokens), self.config.n_layers
        if self._positions is not None or any(tap != n_layers for tap in feed.hidden_layers):
            return None
        x = np.empty((n, self.config.d_model), np.float32)
        self._lookup.rows(feed.tokens, x)
        self.run_layers(x, feed.cache, feed.slots, feed.positions, feed.visible_slots(0, range(n)))
        states = torch.from_numpy(x)
        hidden = _NOTHING
        if feed.hidden_layers:
            hidden = torch.stack([self.apply_final_norm(states)] * len(feed.hidden_layers))
        logits = self.logits_as_array(x if len(feed.heads) == n else x[feed.heads])
        return states, hidden, torch.from_numpy(logits)

    def run_chain(
        self, cache: Cache, token: int, slot: int, most: int, choose: NextTokenFn
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Run one position after another, from `token` in `slot` on, where slots are positions.

        `choose` returns the token of the next position. At most `most` positions are run. Returns
        the tokens that were run, each with its logits [V] and its state [d] after the last layer.
        """
        x = np.empty((most, 1, self.config.d_model), np.float32)
        ran = list[tuple[int, Tensor, Tensor]]()
        for row, at in zip(x, range(slot, slot + most), strict=True):
            self._lookup.rows([token], row)
            if self._positions is not None:
                row += self._positions[at].float().numpy()
            self.run_layers(row, cache, [at], [at], (1, [(at + 1, ())]))
            logits = self.logits_as_array(row)[0]
            ran.append((token, torch.from_numpy(logits), torch.from_numpy(row[0])))
            if (chosen := choose(logits)) is None:
                break
            token = chosen
        return ran

    def run_layers(
        self,
        x: Any,
        cache: Cache,
        slots: list[int],
        positions: list[int],
        seen: tuple[int, list[SeenSlots]],
    ) -> None:
        """Run all layers over rows x [n, d] of one text, in place.

        seen  what `ForwardBatch.visible_slots` returns
        """
        self._reserve_rotary(cache.capacity)
        session = cache.address, cache.capacity, slots, positions, seen, None
        self._compiled.run(x, 0, 2 * self.config.n_layers, [session], torch.get_num_threads())

    def embed_tokens(self, tokens: Sequence[int]) -> Tensor:
        """Return the embeddings [n, d], without positions."""
        x = torch.empty(len(tokens), self.config.d_model)
        self._lookup.rows(tokens, x.numpy())
        return x

    def initial_states(self, feed: ForwardBatch) -> Tensor:
        """Return the state [n, d] that each row starts from."""
        x = self.embed_tokens(feed.tokens_to_embed)
        if feed.entry_states is not None:
            x[torch.tensor(feed.has_state)] = feed.entry_states.float()
        if self._positions is not None and not feed.has_position:
            fresh = torch.tensor([start == 0 for start in feed.starts])[:, None]
            x = x + fresh * self._positions[torch.tensor(feed.positions)].float()
        return x

    def run_sublayers(
        self,
        feeds: Sequence[ForwardBatch],
        active: Sequence[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Run sublayers first..last-1 over the active rows x [n, d] of all feeds."""
        x = x.clone()  # the old states may have been saved
        if len(feeds) == 1:
            self._run_compiled(x, [(feeds[0], active[0])], first, last, feeds[0].copying)
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
                self._run_compiled(x, group, first, last, copying)
            elif group:  # some rows run, others only write keys and values: apart
                own = x[spans[copying]]
                self._run_compiled(own, group, first, last, copying)
                x[spans[copying]] = own
        return x

    def _run_compiled(
        self,
        x: Tensor,
        group: list[tuple[ForwardBatch, Sequence[int]]],
        first: int,
        last: int,
        copying: bool,
    ) -> None:
        numbers = x.numpy()
        # A visible set may change with the layer: then each layer is a call of its own.
        layered = any(feed.plan.visible is not None for feed, _ in group)
        marks = [first, *range(first // 2 * 2 + 2, last, 2), last] if layered else [first, last]
        self._reserve_rotary(max(feed.cache.capacity for feed, _ in group))
        for begin, end in pairwise(marks):
            sessions = [self._describe_session(feed, chosen, begin // 2) for feed, chosen in group]
            self._compiled.run(numbers, begin, end, sessions, torch.get_num_threads(), copying)

    def _describe_session(
        self, feed: ForwardBatch, chosen: Sequence[int], layer: int
    ) -> tuple[Any, ...]:
        lead = None
        if feed.prefix is not None and feed.probes is not None:
            keys, values = (part.float().contiguous().numpy() for part in feed.prefix)
            lead = (feed.probes[list(chosen)].tolist(), keys, values)
        slots, positions = feed.slots, feed.positions
        if len(chosen) != len(slots):
            slots, positions = [slots[row] for row in chosen], [positions[row] for row in chosen]
        seen = feed.visible_slots(layer, chosen)
        return feed.cache.address, feed.cache.capacity, slots, positions, seen, lead

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """Return the final norm of x [n, d], which the head reads."""
        normed = torch.empty_like(x)
        self._compiled.head(x.numpy(), normed.numpy(), None, torch.get_num_threads())
        return normed

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits [n, V], float32, of states x [n, d] before the final norm."""
        return torch.from_numpy(self.logits_as_array(x.contiguous().numpy()))

    def logits_as_array(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `compute_logits` of an array, as an array."""
        logits = np.empty((len(x), len(self.config.head_ids) or self.config.vocab_size), np.float32)
        self._compiled.head(x, np.empty_like(x), logits, torch.get_num_threads())
        if self._head_ids is not None:
            whole = np.full((len(x), self.config.vocab_size), -np.inf, np.float32)
            whole[:, self._head_ids] = logits
            return whole
        return logits


def _norm_arrays(plain: Mapping[str, Tensor], norm: str) -> tuple[Any, Any]:
    """Return gain and bias of a norm as float32 arrays; no bias: None."""
    bias = plain.get(f"{norm}.bias")
    return plain[f"{norm}.weight"].float().numpy(), None if bias is None else bias.float().numpy()
