"""Muon: momentum whose update is made orthogonal, for matrices inside the network.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); the step is scaled to AdamW's as in
Liu et al. 2025, arXiv 2502.16982, so that both share one learning rate. torch has a Muon of its
own, which iterates in bfloat16: on a processor that only emulates bfloat16 that costs more than the
step it improves, so here it runs in float32, all layers of one shape at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic whose iteration drives singular values towards 1


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix of each g [n, out, in], roughly: singular values end
    between 0.7 and 1.2.
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
    """For matrices [out, in] only; embeddings, gains and biases belong to AdamW."""

    def __init__(
        self,
        params: Iterable[Tensor],
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
                for w, update in zip(weights, orthogonal(torch.stack(ahead)), strict=True):
                    w.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)
