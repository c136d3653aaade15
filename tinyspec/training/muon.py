"""Optimize matrices inside the network by Muon: momentum whose update is made orthogonal.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon). The step is scaled to AdamW's as in
Liu et al. 2025, arXiv 2502.16982, so that both optimizers share one learning rate. torch's own Muon
iterates in bfloat16, which is slow on a processor that only emulates it. Here autocast decides (see
train.py), and all matrices of one shape are iterated at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Coefficients of the quintic polynomial whose iteration drives singular values towards 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrix of each g [n, out, in].

    The singular values of the result are between 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    wide = g.shape[-2] <= g.shape[-1]
    x: Tensor = g if wide else g.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """The optimizer of matrices [out, in]. Embeddings, gains and biases belong to AdamW."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for w in group["params"]:
                if w.grad is not None:
                    alike[w.shape].append(w)
            for shape, weights in alike.items():
                for w in weights:
                    state = self.state[w]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(w)
                    state["momentum"].lerp_(w.grad, 1 - group["momentum"])
                ahead = [
                    w.grad.lerp(self.state[w]["momentum"], group["momentum"])
                    for w in weights
                    if w.grad is not None
                ]
                scale = 0.2 * max(shape) ** 0.5 * group["lr"]
                for w, update in zip(weights, orthogonalize(torch.stack(ahead)), strict=True):
                    w.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)
