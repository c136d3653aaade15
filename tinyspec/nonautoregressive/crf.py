"""A linear-chain CRF over a whole sentence, with k candidate words at each place.

`nar_crf` and `nag_bert` write with it. A sentence of T words has the probability

    p(y | x) = exp(sum over i of s(y_i, i) + sum over i < T of t(y_i, y_i+1, i)) / Z(x)
    t(a, b, i) = (E1[a] M_i) . E2[b]              M_i [r, r], E1 and E2 [V, r]

s(y_i, i), the emission, is what the network says of a word at a place. t, the transition, says
which word likes to follow which. The matrix of all transitions has V x V entries and the rank r.
It is *static* if M_i is the identity. It is *dynamic* if M_i depends on the network's states h:

    M_i = I + f([h_i; h_i+1])                     f: two layers

Z sums over all V^T sentences. Here only the k likeliest words of each place are candidates, so the
forward algorithm and Viterbi take T k^2 steps. In training the right word is forced among the
candidates. Else p(y | x) could exceed 1, because y itself would be missing in Z.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

E1, E2 = "crf_from", "crf_to"
"""Names of the tables. Without a dot they are trained as embeddings."""

UP, DOWN = "crf.up", "crf.down"  # the two layers of f, each with .weight and .bias
WIDTH = 3  # of f's inner layer, in ranks: 96 at rank 32


class Lattice(NamedTuple):
    """The candidates of B sentences, and the scores that connect them.

    words      [B, T, k] token ids
    emissions  [B, T, k] -inf: never written
    left       [B, T - 1, k, r] candidates of the places 0 to T - 2 as first words of a pair
    right      [B, T - 1, k, r] candidates of the places 1 to T - 1 as second words of a pair
    slots      [B, T] False at padding, which stands at the end; each row has at least one slot
    """

    words: Tensor
    emissions: Tensor
    left: Tensor
    right: Tensor
    slots: Tensor

    def transitions(self, i: int) -> Tensor:
        """Return t(a, b, i) of the candidates a of place i and b of the next one: [B, k, k]."""
        return self.left[:, i] @ self.right[:, i].mT

    def tokens(self, chosen: Tensor) -> Tensor:
        """Return the token ids of chosen candidates [B, T]: [B, T]."""
        return self.words.gather(-1, chosen[..., None])[..., 0]


def static_transition_shapes(vocab_size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of E1 and E2."""
    return {E1: (vocab_size, rank), E2: (vocab_size, rank)}


def dynamic_transition_shapes(d_model: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of f."""
    width = WIDTH * rank
    return {
        f"{UP}.weight": (width, 2 * d_model),
        f"{UP}.bias": (width,),
        f"{DOWN}.weight": (rank * rank, width),
        f"{DOWN}.bias": (rank * rank,),
    }


def transition_matrices(weights: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """Return M_i of each pair of neighbours: [B, T - 1, r, r].

    states  [B, T, d]
    """
    pairs = torch.cat((states[:, :-1], states[:, 1:]), dim=-1)  # [B, T - 1, 2 d]
    inner = F.relu(F.linear(pairs, weights[f"{UP}.weight"], weights[f"{UP}.bias"]))
    mixed = F.linear(inner, weights[f"{DOWN}.weight"], weights[f"{DOWN}.bias"])
    rank = weights[E1].shape[1]
    identity = torch.eye(rank, dtype=mixed.dtype, device=mixed.device)
    return identity + mixed.view(*mixed.shape[:-1], rank, rank)


def build_lattice(
    weights: Mapping[str, Tensor],
    emissions: Tensor,
    slots: Tensor,
    beam: int,
    transitions: str = "static",
    states: Tensor | None = None,
    forced: Tensor | None = None,
) -> Lattice:
    """Return the lattice of the `beam` likeliest words of each place.

    weights      E1, E2, and f where the transitions are dynamic
    emissions    [B, T, V]
    slots        [B, T]
    transitions  none (t = 0), static or dynamic
    states       [B, T, d] that f reads
    forced       [B, T] words that are candidate 0 of their places, however unlikely
    """
    ranked = emissions.detach()
    if forced is not None:
        ranked = ranked.scatter(-1, forced[..., None], torch.inf)
    words = ranked.topk(min(beam, emissions.shape[-1]), dim=-1).indices
    if transitions == "none":
        left = right = emissions.new_zeros(*words[:, 1:].shape, 0)
    else:
        left, right = weights[E1][words[:, :-1]], weights[E2][words[:, 1:]]
    if transitions == "dynamic":
        assert states is not None
        left = left @ transition_matrices(weights, states)
    return Lattice(
        words, emissions.gather(-1, words), left.to(emissions), right.to(emissions), slots
    )


def forward_scores(lattice: Lattice) -> Tensor:
    """Return log of the summed exp(score) of all paths that end in each candidate: [B, T, k].

    At padding it is what it was at the last slot.
    """
    score = lattice.emissions[:, 0]
    scores = [score]
    for i in range(1, lattice.words.shape[1]):
        reached = (score[..., None] + lattice.transitions(i - 1)).logsumexp(dim=1)
        longer = reached + lattice.emissions[:, i]
        score = torch.where(lattice.slots[:, i, None], longer, score)
        scores.append(score)
    return torch.stack(scores, dim=1)


def log_partition(lattice: Lattice) -> Tensor:
    """Return log Z of the candidates: [B]. Its gradient in an emission is that word's marginal."""
    return forward_scores(lattice)[:, -1].logsumexp(dim=-1)


def score_choice(lattice: Lattice, chosen: Tensor) -> Tensor:
    """Return the sum of emissions and transitions of chosen candidates [B, T]: [B]."""
    emissions = lattice.emissions.gather(-1, chosen[..., None])[..., 0]
    pairs = (_pick(lattice.left, chosen[:, :-1]) * _pick(lattice.right, chosen[:, 1:])).sum(dim=-1)
    return emissions.masked_fill(~lattice.slots, 0).sum(dim=1) + pairs.masked_fill(
        ~lattice.slots[:, 1:], 0
    ).sum(dim=1)


def log_likelihood(lattice: Lattice) -> Tensor:
    """Return log p of the forced words: [B]. It is never above 0."""
    gold = torch.zeros_like(lattice.words[..., 0])
    return score_choice(lattice, gold) - log_partition(lattice)


def find_best_path(lattice: Lattice) -> Tensor:
    """Return the candidates of the likeliest sentence [B, T], by Viterbi.

    At padding it is 0.
    """
    score = lattice.emissions[:, 0]
    stay = torch.arange(score.shape[-1], device=score.device).expand_as(score)
    pointers = list[Tensor]()
    for i in range(1, lattice.words.shape[1]):
        best = (score[..., None] + lattice.transitions(i - 1)).max(dim=1)
        slot = lattice.slots[:, i, None]
        score = torch.where(slot, best.values + lattice.emissions[:, i], score)
        pointers.append(torch.where(slot, best.indices, stay))
    chosen = [score.argmax(dim=-1)]
    for pointer in reversed(pointers):
        chosen.append(pointer.gather(-1, chosen[-1][:, None])[:, 0])
    return torch.stack(chosen[::-1], dim=1).masked_fill(~lattice.slots, 0)


def word_logprobs(lattice: Lattice, chosen: Tensor) -> Tensor:
    """Return log p(y_i | all later words) of chosen candidates [B, T]: [B, T], 0 at padding.

    Their sum is log p(y | x).
    """
    after = (lattice.left * _pick(lattice.right, chosen[:, 1:])[:, :, None]).sum(dim=-1)
    after = F.pad(after.masked_fill(~lattice.slots[:, 1:, None], 0), (0, 0, 0, 1))
    logprobs = (forward_scores(lattice) + after).log_softmax(dim=-1)  # [B, T, k]
    return logprobs.gather(-1, chosen[..., None])[..., 0].masked_fill(~lattice.slots, 0)


def _pick(vectors: Tensor, chosen: Tensor) -> Tensor:
    """Return the vectors [B, n, r] of chosen candidates [B, n] among [B, n, k, r]."""
    shape = (*chosen.shape, 1, vectors.shape[-1])
    return vectors.gather(2, chosen[..., None, None].expand(shape))[:, :, 0]
