"""Train on several processes: each computes a part of every batch, and all add their gradients.

    torchrun --nproc-per-node 2 -m tinyspec train head --recipe recipe.toml --out FOLDER

torchrun starts the processes and tells each its rank. All of them have the same weights, draw the
same batches, and take the same steps. Rank 0 decides when to stop, validates, and writes all files;
the others end with the training. Without torchrun there is one rank, and nothing here does
anything. It was run on processors alone, not on several GPUs.

Two ranks give the weights of two pieces (`train.pieces`), bit for bit. Techniques whose loss writes
weights are an exception (`latent_transformer`, `flowseq`): of what the ranks write, rank 0's stays.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

PATIENCE = timedelta(days=1)  # rank 0 may write texts for hours before the others go on


def join_ranks() -> None:
    """Meet the other processes, if torchrun started this one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)


def leave_ranks() -> None:
    """Part from the other processes. From here on this one is alone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def this_rank() -> int:
    """Return the number of this process: 0 is the one that writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def count_processes() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Run the block on rank 0, and after that on the others, who find the files that it wrote."""
    if this_rank() != 0:
        dist.barrier()
    try:
        yield
    finally:
        if count_processes() > 1:
            if this_rank() == 0:
                dist.barrier()
            dist.barrier()


def share_decision(goes_on: bool, seconds: float) -> tuple[bool, float]:
    """Return what rank 0 decides: whether the training goes on, and its clock."""
    if count_processes() == 1:
        return goes_on, seconds
    decision = torch.tensor([float(goes_on), seconds], dtype=torch.float64)
    dist.broadcast(decision, src=0)
    return bool(decision[0]), float(decision[1])


def add_gradients(tensors: Sequence[Tensor], loss: Tensor) -> Tensor:
    """Add the gradients of all ranks, in place, and return the sum of their losses.

    All ranks have the weights of rank 0 afterwards.
    """
    if count_processes() == 1:
        return loss
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in tensors]
    flat = torch.cat([*(grad.flatten() for grad in grads), loss.reshape(1).to(grads[0])])
    dist.all_reduce(flat)
    parts = torch.split(flat[:-1], [w.numel() for w in tensors])
    for w, part in zip(tensors, parts, strict=True):
        if w.grad is not None or part.any():  # else no rank had a gradient for it
            w.grad = part.view_as(w).clone()
        dist.broadcast(w.data, src=0)  # a loss may write weights, on each rank from its own part
    return flat[-1]
