"""A normalizing flow over the latent vectors of a translation, given its source.

`flowseq` has it as its prior. The latent vectors of a text of T words are z [T, d]. An invertible
map f turns them into noise, which is standard normal; so their density is known exactly:

    log p(z | x) = log N(f(z); 0, I) + log |det df/dz|

f is a chain of *steps*. In the direction from z to noise a step is

    actnorm     z * exp(s) + b                  s and b of each channel
    mix         each head of channels times W   one matrix [d/h, d/h] for all h heads
    couplings   z * sigmoid(a + 2) + t          at some entries, from the others: four of them

A coupling's a and t come from a transformer layer that reads the entries that stay, and the source.
What stays is the first half of the channels, the other half, the even positions, the odd ones. So a
coupling is inverted by running the same layer on the same entries. At first a = t = 0.

After the steps of a *level* half of the channels are noise; the others go on at half the length,
two neighbours as one position. A length is a multiple of 2^(levels - 1).

    log |det|   actnorm: T sum of s     mix: T h log |det W|     coupling: sum of log sigmoid(a + 2)
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.ops import linear
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq

COUPLINGS = 4  # of a step
LEAST_SPREAD = 1e-3  # a channel's standard deviation in the first batch is taken to be no less


def coupling_stacks(steps: int) -> dict[str, int]:
    """Return the further decoder stacks of so many steps: a layer for each coupling."""
    return {f"flow_{n}": 1 for n in range(COUPLINGS * steps)}


def flow_heads(config: Seq2SeqConfig, steps: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the further weights of so many steps."""
    d, heads = config.d_model, dict[str, tuple[int, ...]]()
    for k in range(steps):
        heads |= {f"flow_scale_{k}": (d,), f"flow_shift_{k}": (d,)}
        heads[f"flow_mix_{k}"] = (d // config.n_heads, d // config.n_heads)
    for n in range(COUPLINGS * steps):
        heads |= {
            f"coupling.{n}.in.weight": (d, d),
            f"coupling.{n}.out.weight": (2 * d, d),
            f"coupling.{n}.out.bias": (2 * d,),
        }
    return heads


def initialize_couplings(weights: Mapping[str, Tensor]) -> None:
    """Let all couplings begin alike: a and t are 0, whatever they read."""
    for name, weight in weights.items():
        if name.startswith("coupling.") and name.endswith(".out.weight"):
            weight.zero_()


def kept_entries(number: int, length: int, width: int) -> Tensor:
    """Return which entries [length, width] a coupling reads and leaves as they are.

    >>> [kept_entries(n, 2, 2).int().tolist() for n in range(4)]
    [[[1, 0], [1, 0]], [[0, 1], [0, 1]], [[1, 1], [0, 0]], [[0, 0], [1, 1]]]
    """
    kind = number % COUPLINGS
    if kind < 2:
        row = (torch.arange(width) < width // 2) == (kind == 0)
        return row.expand(length, width)
    column = torch.arange(length) % 2 == kind - 2
    return column[:, None].expand(length, width)


def fold_positions(x: Tensor) -> Tensor:
    """Return x [B, T, d] with two neighbours as one position: [B, T / 2, 2 d]."""
    return x.reshape(len(x), x.shape[1] // 2, -1)


def unfold_positions(x: Tensor) -> Tensor:
    """Return x [B, T / 2, 2 d] with every position as two again: [B, T, d]."""
    return x.reshape(len(x), 2 * x.shape[1], -1)


class Flow:
    """The flow of a model's weights, over the latent vectors of translations of these sources.

    memory   of B sources, or of one that all share
    begins   whether `to_noise` chooses actnorm's weights, so that each channel of the batch has
             mean 0 and variance 1 after it, and makes the matrices of the mixes orthogonal
    """

    def __init__(
        self,
        model: Seq2Seq,
        memory: EncoderOutput,
        levels: int,
        steps: int,
        dropout: float = 0.0,
        begins: bool = False,
    ):
        self.model, self.memory, self.weights = model, memory, model.weights
        self.levels, self.steps = levels, steps
        self.dropout, self.begins = dropout, begins

    def to_noise(self, z: Tensor, slots: Tensor, level: int = 0) -> tuple[Tensor, Tensor]:
        """Return the noise [B, T, d] of latent vectors, and log |det d noise / d z| [B].

        slots  [B, T] False at padding, where the noise is 0
        """
        x = z.masked_fill(~slots[..., None], 0)
        logdet, count = x.new_zeros(len(x)), slots.sum(dim=1)
        for k in self._steps_of(level):
            if self.begins:
                self._begin_step(k, x, slots)
            scale = self.weights[f"flow_scale_{k}"]
            x = x * scale.exp() + self.weights[f"flow_shift_{k}"]
            logdet = logdet + count * scale.sum()
            x = self._mix(x, self.weights[f"flow_mix_{k}"], k)
            volume = torch.linalg.slogdet(self._read_mix(k))[1]
            logdet = logdet + count * self.model.config.n_heads * volume
            for n in range(COUPLINGS * k, COUPLINGS * (k + 1)):
                kept, log_scale, shift = self._run_coupling(n, x, slots)
                x = torch.where(kept, x, x * log_scale.exp() + shift)
                changed = ~kept & slots[..., None]
                logdet = logdet + log_scale.masked_fill(~changed, 0).sum(dim=(1, 2))
        if level + 1 < self.levels:
            done, rest = x.chunk(2, dim=-1)
            deeper, more = self.to_noise(fold_positions(rest), slots[:, ::2], level + 1)
            x, logdet = torch.cat((done, unfold_positions(deeper)), dim=-1), logdet + more
        return x.masked_fill(~slots[..., None], 0), logdet

    def from_noise(self, noise: Tensor, slots: Tensor, level: int = 0) -> Tensor:
        """Return the latent vectors [B, T, d] of noise: the inverse of `to_noise`."""
        x = noise.masked_fill(~slots[..., None], 0)
        if level + 1 < self.levels:
            done, deeper = x.chunk(2, dim=-1)
            rest = self.from_noise(fold_positions(deeper), slots[:, ::2], level + 1)
            x = torch.cat((done, unfold_positions(rest)), dim=-1)
        for k in reversed(self._steps_of(level)):
            for n in reversed(range(COUPLINGS * k, COUPLINGS * (k + 1))):
                kept, log_scale, shift = self._run_coupling(n, x, slots)
                x = torch.where(kept, x, (x - shift) * (-log_scale).exp())
            x = self._mix(x, torch.linalg.inv(self._read_mix(k)).to(x.dtype), k)
            scale = self.weights[f"flow_scale_{k}"]
            x = (x - self.weights[f"flow_shift_{k}"]) * (-scale).exp()
        return x.masked_fill(~slots[..., None], 0)

    def log_density(self, z: Tensor, slots: Tensor) -> Tensor:
        """Return log p(z | x) [B]."""
        noise, logdet = self.to_noise(z, slots)
        return normal_log_density(noise, slots) + logdet

    def count_row_layers(self, rows: int) -> float:
        """Return the layer evaluations of one pass through the flow, summed over positions.

        rows  positions at the first level, padding included
        """
        per_level = COUPLINGS * self.steps * rows
        return float(sum(per_level >> level for level in range(self.levels)))

    def _steps_of(self, level: int) -> range:
        return range(level * self.steps, (level + 1) * self.steps)

    def _read_mix(self, step: int) -> Tensor:
        """Return the matrix of a mix, in float32 at least: torch inverts nothing in bfloat16."""
        matrix = self.weights[f"flow_mix_{step}"]
        return matrix.to(torch.promote_types(matrix.dtype, torch.float32))

    def _mix(self, x: Tensor, matrix: Tensor, step: int) -> Tensor:
        """Multiply every head of x [B, T, d] by the matrix.

        A head is neighbouring channels in even steps, and every h-th channel in odd ones.
        """
        heads, each = self.model.config.n_heads, len(matrix)
        if step % 2:
            return (matrix @ x.reshape(*x.shape[:-1], each, heads)).flatten(-2)
        return (x.reshape(*x.shape[:-1], heads, each) @ matrix.T).flatten(-2)

    def _run_coupling(self, number: int, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which entries stay [T, d], and log scale and shift of the others [B, T, d]."""
        kept = kept_entries(number, *x.shape[1:]).to(x.device)
        name, stack = f"coupling.{number}", f"flow_{number}"
        read = linear(x.masked_fill(~kept, 0), self.weights[f"{name}.in.weight"])
        inputs = self.model.place(read)
        options = self.memory, None, self.dropout, slots, stack
        state = self.model.decode(inputs, *options, is_pass=False)
        weight, bias = self.weights[f"{name}.out.weight"], self.weights[f"{name}.out.bias"]
        a, shift = linear(state, weight, bias).chunk(2, dim=-1)
        return kept, F.logsigmoid(a + 2), shift

    @torch.no_grad()
    def _begin_step(self, step: int, x: Tensor, slots: Tensor) -> None:
        """Choose the weights of actnorm by the batch, and an orthogonal matrix for the mix."""
        seen = x.detach()[slots]
        spread = seen.std(dim=0, correction=0).clamp(min=LEAST_SPREAD)
        self.weights[f"flow_scale_{step}"].copy_(-spread.log())
        self.weights[f"flow_shift_{step}"].copy_(-seen.mean(dim=0) / spread)
        matrix = self.weights[f"flow_mix_{step}"]
        matrix.copy_(torch.linalg.qr(matrix)[0])


def normal_log_density(x: Tensor, slots: Tensor, log_std: Tensor | None = None) -> Tensor:
    """Return log N(x std; 0, std^2) [B] of standardized values x [B, T, d], over the slots.

    log_std  [B, T, d]; None: 0
    """
    each = -0.5 * (x.square() + math.log(2 * math.pi))
    each = each if log_std is None else each - log_std
    return each.masked_fill(~slots[..., None], 0).sum(dim=(1, 2))
