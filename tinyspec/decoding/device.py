"""Sampling and verification as torch operations: no distribution is copied to the host.

They decide as the compiled kernels do, unless a uniform or a knob lies within V * eps of a
boundary: a device sums in its own order. Everything is computed in float64.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.decoding.kernels import Kernels, Outcome, TokenSampler
from tinyspec.errors import TinyspecError
from tinyspec.tree import TokenTree

if TYPE_CHECKING:  # both import this file
    from tinyspec.decoding.rng import RandomSource
    from tinyspec.decoding.sampling import SamplingParams

NO_MASS = (
    "cannot draw from a row without finite mass: if the logits contain NaN or inf, check the "
    "weights, or compute in a wider dtype"
)


class LogitCheck(NamedTuple):
    """Whether logits define a distribution, asked when they are needed.

    top  the highest logit; NaN if any logit is
    """

    top: float

    def check(self) -> None:
        """Raise TinyspecError if the logits define no distribution."""
        if self.top != self.top:
            raise TinyspecError(
                "the logits contain NaN: check the weights, or compute in a wider dtype"
            )
        if abs(self.top) == float("inf"):
            what = "contain +inf" if self.top > 0 else "are all -inf: no token is allowed"
            raise TinyspecError(f"the logits {what}, so they define no distribution")


def apply_sampling_to_rows(
    logits: Tensor,
    histories: Sequence[Sequence[int]],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> tuple[Tensor, Tensor]:
    """Return logits [n, V] as distributions, float64 [n, V], and the highest logit of each row [n].

    histories  one for each row; not read without a penalty

    Nothing is copied to the host: `LogitCheck` reads the highest logits when a row is needed.
    """
    scores = penalize_repetition(logits.detach(), histories, penalty).to(torch.float64)
    if not scores.shape[1]:
        return scores, scores.new_full((len(scores),), -torch.inf)
    first, tops = highest_ids(scores)
    if temperature == 0:
        return torch.zeros_like(scores).scatter_(1, first[:, None], 1.0), tops
    rows = ((scores - tops[:, None]) / temperature).exp()
    if (top_k is not None and top_k < rows.shape[1]) or (top_p is not None and top_p < 1):
        # The sort is stable: ties go to the lowest id.
        ordered, ids_by_weight = rows.sort(dim=1, descending=True, stable=True)
        if top_k is not None:
            ordered[:, top_k:] = 0
        if top_p is not None and top_p < 1:
            mass = ordered.cumsum(1)
            ordered = torch.where((mass - ordered) >= top_p * mass[:, -1:], 0.0, ordered)
        rows = torch.zeros_like(rows).scatter_(1, ids_by_weight, ordered)
    if min_p is not None and min_p > 0:
        rows = torch.where(rows >= min_p, rows, 0.0)
    return rows / rows.sum(dim=1, keepdim=True), tops


def penalize_repetition(
    logits: Tensor, histories: Sequence[Sequence[int]], penalty: float
) -> Tensor:
    """Return the logits after the repetition penalty, each row with its own history.

    They are float64, or what was given if there is no penalty.
    """
    if penalty == 1.0:
        return logits
    scores = logits.to(torch.float64, copy=True)
    seen = [
        (i, token)
        for i, ids in enumerate(histories)
        for token in set(ids)
        if 0 <= token < scores.shape[1]
    ]
    if seen:
        at = torch.tensor(seen, device=scores.device).unbind(1)
        found = scores[at]
        scores[at] = torch.where(found < 0, found * penalty, found / penalty)
    return scores


def sample_rows(rows: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return a token sampled from each row [n, V] by inverse CDF, [n]; -1 from a row without mass.

    Nothing is copied to the host.
    """
    mass, at = rows.cumsum(1), torch.arange(rows.shape[1], device=rows.device)
    u = torch.tensor(uniforms, device=rows.device, dtype=mass.dtype)
    reached = (rows > 0) & (mass > (u * mass[:, -1])[:, None])
    last = torch.where(rows > 0, at, -1).amax(dim=1)  # where rounding puts u after all intervals
    return torch.where(reached, at, last[:, None]).amin(dim=1)


def highest_ids(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest id of each row's highest score, and that score: [n] each; NaN stays."""
    tops = scores.amax(dim=1)
    at = torch.arange(scores.shape[1], device=scores.device)
    highest = scores == tops[:, None]
    return torch.where(highest, at, scores.shape[1] - 1).amin(dim=1), tops


def first_true(mask: Tensor) -> Tensor:
    """Return the index of the first True, or the length if there is none."""
    at = torch.arange(len(mask), device=mask.device)
    return torch.where(mask, at, len(mask)).min()


# --- verifying a tree with one synchronisation


def fetch_to_host(*columns: Tensor) -> list[list[float]]:
    """Copy columns of numbers to the host: the one place where the host waits for the device."""
    sizes = [len(column) for column in columns]
    flat: list[float] = torch.cat([column.to(torch.float64) for column in columns]).cpu().tolist()
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def verify_on_device(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Sequence[Tensor | None],
    probe: Sequence[bool],
    rows: Tensor,
    tops: Tensor | None,
    uniforms: Sequence[float],
) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    """Decide as `reference.verify_tree`, with one synchronisation; also return the uniforms used.

    All that a verification could ask is computed at once. The distribution that a node meets
    depends only on the decisions that lead there: its place among its siblings says which of them
    were rejected before it. So the acceptance ratios of all nodes, and the token sampled if the
    path ends at each node, are computed side by side, one sibling rank after the other. The host
    then decides over numbers. How many uniforms were used up on the way is known beforehand too.

    rows  [n + 1, V] the target's distributions
    tops  [n + 1] the highest logit of each row, for `LogitCheck`; None: the rows are distributions
    """
    for token, is_probe in zip(tokens, probe, strict=True):
        if not is_probe and not 0 <= token < rows.shape[1]:
            raise TinyspecError(
                f"drafted token {token} is outside of the target's vocabulary of {rows.shape[1]}: "
                "use a draft with the target's tokenizer"
            )
    place, ends, used = _plan_tests(tokens, parents, probe)
    left, ratios, own = rows.clone(), rows.new_zeros(len(tokens)), rows.new_ones(len(tokens))
    for rank in range(1 + max((rank for rank, _ in place.values()), default=-1)):
        nodes = [node for node in place if place[node][0] == rank]
        columns = [nodes, [place[node][1] + 1 for node in nodes], [tokens[node] for node in nodes]]
        which, above, token_ids = torch.tensor(columns, device=rows.device)
        here = left[above]
        q = torch.zeros_like(here).scatter_(
            1, token_ids[:, None], here.gather(1, token_ids[:, None])
        )
        drawn = [i for i, node in enumerate(nodes) if draft_probs[node] is not None]
        if drawn:
            at = torch.tensor(drawn, device=rows.device)
            q[at] = torch.stack([_check_draft_probs(draft_probs[nodes[i]], rows) for i in drawn])
            own[which[at]] = q[at].gather(1, token_ids[at][:, None])[:, 0]
        ratios[which] = here.gather(1, token_ids[:, None])[:, 0] / own[which]
        rest = (here - q).clamp(min=0)
        mass = rest.sum(dim=1, keepdim=True)
        left[above] = torch.where(mass > 0, rest / mass, here)
    last = [uniforms[min(used[end], len(uniforms) - 1)] for end in ends]
    sampled = sample_rows(left[torch.tensor(ends, device=rows.device) + 1], last)
    passing, declared, sampled_there, highest = fetch_to_host(
        ratios, own, sampled, rows.new_zeros(len(rows)) if tops is None else tops
    )
    return _verify_numbers(tokens, place, ends, passing, declared, sampled_there, highest, uniforms)


def _check_draft_probs(q: Tensor | None, rows: Tensor) -> Tensor:
    assert q is not None
    if len(q) != rows.shape[1]:
        raise TinyspecError(
            f"the draft's distribution has {len(q)} tokens, the target's {rows.shape[1]}: "
            "pad it with zeros"
        )
    return torch.as_tensor(q).to(rows)  # a draft on the CPU declares arrays


Place = dict[int, tuple[int, int]]


def _plan_tests(
    tokens: Sequence[int], parents: Sequence[int], probe: Sequence[bool]
) -> tuple[Place, list[int], dict[int, int]]:
    """Return when each node is tested, where a path may end, and the uniforms used by then.

    A node is tested at a rank after an accepted node. Children of equal siblings are tested after
    the first of them: only that one can be accepted, as rejecting it leaves the token no mass.
    """
    first: dict[tuple[int, int], int] = {}  # (parent, token) -> the first of equal siblings
    stands_for, place, ranks, begun = {-1: -1}, Place(), dict[int, int](), {-1: 0}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not probe[node] and parent in stands_for:  # nothing below a probe is ever tested
            above = stands_for[parent]
            rank = ranks[above] = ranks.get(above, -1) + 1
            place[node] = rank, above
            stands_for[node] = first.setdefault((above, token), node)
    for node, (rank, above) in place.items():
        begun.setdefault(stands_for[node], begun[above] + rank + 1)
    used = {node: n + ranks.get(node, -1) + 1 for node, n in begun.items()}
    return place, list(begun), used


def _verify_numbers(
    tokens: Sequence[int],
    place: Place,
    ends: Sequence[int],
    ratios: Sequence[float],
    own: Sequence[float],
    sampled: Sequence[float],
    tops: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    """Decide as `reference.verify_tree` does, over numbers that are on the host."""
    below: dict[int, list[int]] = {}
    for node, (_, above) in place.items():
        below.setdefault(above, []).append(node)
    accepted, rejected, here, used = list[int](), list[int](), -1, 0
    LogitCheck(tops[0]).check()
    untested = list(below.get(-1, ()))
    while untested:
        node = untested.pop(0)
        if not own[node] > 0:
            raise TinyspecError(
                f"drafted token {tokens[node]} has probability {own[node]} "
                "under its declared distribution (declare None)"
            )
        used += 1
        if used < len(uniforms) and uniforms[used - 1] < ratios[node]:
            LogitCheck(tops[node + 1]).check()
            accepted.append(node)
            here, untested = node, list(below.get(node, ()))
        else:
            rejected.append(node)
    if used >= len(uniforms):
        raise TinyspecError(
            "the given uniforms are used up: "
            "give one for each tested node and one for the last draw"
        )
    token = int(sampled[ends.index(here)])
    if token < 0:
        raise TinyspecError(NO_MASS)
    return tuple(accepted), token, tuple(rejected), used + 1


class DeviceKernels(Kernels):
    """Torch operations over tensors of a device, [V] float64. They decide as the host does."""

    def probs(self, logits: Tensor, history: Sequence[int], settings: "SamplingParams") -> Tensor:
        rows, tops = apply_sampling_to_rows(logits[None], [history], *settings.as_floats())
        LogitCheck(*tops.tolist() if logits.shape[0] else [float("-inf")]).check()  # one number
        return rows[0]

    def greedy_token(
        self, logits: Tensor, history: Sequence[int], settings: "SamplingParams"
    ) -> int | None:
        if settings.temperature != 0:
            return None
        scores = penalize_repetition(logits[None], [history], settings.repetition_penalty)
        (token,), (top,) = fetch_to_host(*highest_ids(scores))
        LogitCheck(top).check()
        return int(token)

    def sample_inverse_cdf(self, p: Tensor, u: float) -> int:
        p = p.to(torch.float64)
        (token,), (mass,) = fetch_to_host(sample_rows(p[None], [u]), p.sum()[None])
        if token < 0 or not math.isfinite(mass):
            raise TinyspecError(NO_MASS)
        return int(token)

    def sample_without_replacement(self, p: Tensor, uniforms: Any) -> list[int]:
        left, drawn = p.to(torch.float64, copy=True)[None], list[Tensor]()
        for u in uniforms:
            drawn.append(sample_rows(left, [float(u)]))  # -1 if nothing is left
            left.scatter_(1, drawn[-1].clamp(min=0)[:, None], 0.0)
        tokens = fetch_to_host(*drawn) if drawn else []
        return [int(token) for (token,) in tokens if token >= 0]

    def exponential_race(self, p: Tensor, noise: Any) -> int:
        time = torch.as_tensor(noise, dtype=torch.float64).to(p.device) / p.to(torch.float64)
        positive = p > 0
        if not bool(positive.any()):
            raise TinyspecError("cannot race a row without mass")
        time = torch.where(positive, time, float("inf"))
        return int(first_true(positive & (time == time.min())))

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        if len(p) != len(q):
            raise TinyspecError(
                f"the draft's distribution has {len(q)} tokens, the target's {len(p)}: "
                "pad it with zeros"
            )
        left = (p - torch.as_tensor(q).to(p)).clamp(min=0)
        mass = left.sum()
        return torch.where(mass > 0, left / mass, p)

    def exclude_token(self, p: Tensor, token: int) -> Tensor:
        left = p.clone()
        left[token] = 0
        mass = left.sum()
        return torch.where(mass > 0, left / mass, p)

    def top_k_rows(self, logits: Any, rows: Sequence[int], k: int) -> list[list[int]]:
        table = logits if isinstance(logits, Tensor) else torch.stack(list(logits))
        if len(rows) < len(table):
            table = table[list(rows)]
        if k == 1:
            return [[token] for token in table.argmax(dim=-1).tolist()]
        best, ids = table.topk(min(k, table.shape[-1]), dim=-1)
        order = ids.argsort(dim=-1)  # `topk` promises no order among equals: the lowest id first
        ids, best = ids.gather(-1, order), best.gather(-1, order)
        found: list[list[int]] = ids.gather(
            -1, best.argsort(dim=-1, descending=True, stable=True)
        ).tolist()
        return found

    def as_vector(self, p: Any, like: Tensor | None = None) -> Tensor:
        return torch.as_tensor(p) if like is None else torch.as_tensor(p).to(like)

    def token_sampler(self, tree: TokenTree, p: Any, rng: "RandomSource") -> TokenSampler:
        """Return the token after any node; all of them are sampled with one synchronisation."""
        if getattr(p, "scores", None) is None:  # not a decoder's: distributions one by one
            return super().token_sampler(tree, p, rng)
        if p.sampling.temperature == 0:
            penalty = p.sampling.repetition_penalty
            tokens, tops = highest_ids(penalize_repetition(p.scores.logits, p.histories(), penalty))
        else:
            depths = [0, *(len(tree.path(node)) for node in range(len(tree.tokens)))]
            uniforms: list[Any] = [rng.uniform_at(len(p.context) + depth) for depth in depths]
            tokens, tops = sample_rows(p.block[0], uniforms), p.block[1]
        ids, highest = fetch_to_host(tokens, tops)

        def token_after(node: int, depth: int) -> int:
            LogitCheck(highest[node + 1]).check()
            return int(ids[node + 1])

        return token_after

    def verify_tree(self, tree: TokenTree, p: Any, rng: "RandomSource") -> Outcome:
        """Verify with one synchronisation if p has the distributions of all nodes on the device."""
        block = getattr(p, "block", None)
        if block is None:
            return super().verify_tree(tree, p, rng)
        uniforms = rng.uniforms(len(tree.tokens) + 1)
        if uniforms is None:
            raise TinyspecError(
                "every outcome of a verification is enumerated on the host: use a model on the CPU"
            )
        probs, tops = block
        accepted, token, rejected, used = verify_on_device(
            tree.tokens, tree.parents, tree.draft_probs, tree.probe, probs, tops, uniforms.tolist()
        )
        rng.push_back(len(uniforms) - used)
        return accepted, token, rejected
