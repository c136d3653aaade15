"""One trainer for everything that is trained here: models, drafts, exits, heads.

What differs is the loss. The loop is the same: AdamW with weight decay on matrices only (or Muon
for the matrices inside), a warm-up, then a cosine or a plateau with a linear end (WSD), clipped
gradients, an optional average of the weights (EMA), the best weights by validation. The schedule
runs on progress, the larger of the share of the steps and the share of the minutes, so a clock
budget shortens a training without leaving it half annealed.

Batches and dropout of step s are drawn from generators seeded with (seed, s). A training that was
interrupted and goes on is therefore the training that was never interrupted, bit for bit where the
arithmetic is deterministic and no clock is set.
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TextColumn
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.progress import progress_bar
from tinyspec.training.muon import Muon
from tinyspec.training.schedule import Settings, progress, rate

Batch = tuple[Tensor, ...]
Batches = Callable[[torch.Generator], Batch]
Loss = Callable[..., Tensor]  # loss(*batch) -> scalar, the mean over the batch


@dataclass
class Trained:
    """How a training ended. The weights now hold the best ones by validation (the last where there
    is none).
    """

    finished: bool  # False: stopped by Ctrl-C, saved, goes on with the same call
    step: int
    tokens: int
    seconds: float
    best: float | None
    log: list[dict[str, Any]] = field(default_factory=list)


def train(
    weights: Mapping[str, Tensor],
    batches: Batches,
    loss: Loss,
    settings: Settings,
    folder: str | Path,
    *,
    validate: Callable[[], Mapping[str, float]] | None = None,
    before: Callable[[int, float], None] | None = None,
    console: Console | None = None,
    title: str = "train",
) -> Trained:
    """Train `weights` in place; state and log live in `folder` (state.pt, log.jsonl).

    weights   float32 leaf tensors, on the device where everything runs
    batches   draws a batch from a generator: a tuple of tensors [B, ...]
    loss      of a batch: a scalar
    validate  figures to log; the first is what "best" means, lower is better
    before    told the number of each step and the progress before it, for what changes in the
              course of a training

    Raises TinyspecError when the loss is no longer finite, or when the state in `folder` is of
    another training.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = _Run(dict(weights), settings, folder)
    run.resume()
    shown = progress_bar(console, TextColumn("{task.fields[note]}"))
    cuda = [run.device] if run.device.type == "cuda" else []
    generator = torch.Generator(run.device)
    recent: list[Tensor] = []
    started = time.monotonic() - run.seconds
    saved, since, mark = started + run.seconds, run.tokens, started + run.seconds
    with _stop_signals() as stop, shown, torch.random.fork_rng(devices=cuda):
        task = shown.add_task(title, total=settings.steps, completed=run.step, note="")
        while run.progress < 1 and not stop.is_set():
            seed = settings.seed * 1_000_003 + run.step
            torch.manual_seed(seed)
            generator.manual_seed(seed)
            if before is not None:
                before(run.step, run.progress)
            batch = batches(generator)
            recent.append(_backward(loss, batch, settings.pieces))
            run.update(batch[0].numel())
            run.seconds = time.monotonic() - started
            if run.step % settings.log_every == 0 or run.progress >= 1:
                mean = float(torch.stack(recent).mean())  # waits for the device
                if not math.isfinite(mean):
                    raise TinyspecError(
                        f"the loss is {mean} at step {run.step}: lower [train] lr, or raise warmup"
                    )
                now = time.monotonic()
                pace = round((run.tokens - since) / (now - mark))
                recent, since, mark, run.seconds = [], run.tokens, now, now - started
                run.write(loss=mean, lr=run.lr, tokens_per_second=pace)
                done = round(run.progress * settings.steps)  # by the clock, if that is further
                shown.update(task, completed=done, note=f"loss {mean:.3f}  {pace:,} tokens/s")
            if (
                validate
                and run.checked < run.step
                and (run.step % settings.valid_every == 0 or run.progress >= 1)
            ):
                with run.averaged():
                    run.check(validate())
                if console is not None:
                    shown.console.print(_line(run.log[-1]), highlight=False)
                mark += time.monotonic() - started - run.seconds
                run.seconds = time.monotonic() - started
            if time.monotonic() - saved > 60 * settings.save_minutes:
                run.save()
                saved = time.monotonic()
        run.save()
    if finished := run.progress >= 1:
        run.use_best()
    return Trained(finished, run.step, run.tokens, run.seconds, run.best, run.log)


def _backward(loss: Loss, batch: Batch, pieces: int) -> Tensor:
    """Gradients of the batch's mean loss, computed piece by piece; returns the loss, detached."""
    total = torch.zeros((), device=batch[0].device)
    for part in zip(*(t.chunk(pieces) for t in batch), strict=True):
        share = len(part[0]) / len(batch[0])
        value = loss(*part) * share
        value.backward()  # type: ignore[no-untyped-call]
        total += value.detach()
    return total


def _line(entry: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in entry.items()
    )


class _Run:
    """What a training remembers between two steps, on disk and in memory."""

    kept = ("average", "best", "best_weights", "step", "tokens", "checked", "seconds")

    def __init__(self, weights: dict[str, Tensor], settings: Settings, folder: Path):
        self.weights, self.settings, self.folder = weights, settings, folder
        self.tensors = [w.requires_grad_() for w in weights.values()]
        self.device = self.tensors[0].device
        inner = [
            w
            for name, w in weights.items()
            if w.ndim == 2 and "." in name and settings.optimizer == "muon"
        ]
        outer = [w for w in self.tensors if all(w is not other for other in inner)]
        groups = [
            {"params": [w for w in outer if w.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [w for w in outer if w.ndim < 2], "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW([g for g in groups if g["params"]], betas=settings.betas, fused=fused)
        ]
        if inner:
            self.optimizers.append(Muon(inner, weight_decay=settings.weight_decay))
        self.average = [w.detach().clone() for w in self.tensors] if settings.ema else []
        self.best: float | None = None
        self.best_weights: list[Tensor] = []
        self.step = self.tokens = 0
        self.checked = -1  # the step of the last validation
        self.seconds = self.lr = 0.0
        self.log: list[dict[str, Any]] = []

    @property
    def progress(self) -> float:
        return progress(self.settings, self.step, self.seconds)

    def update(self, tokens: int) -> None:
        """One optimizer step, and one of the average."""
        self.lr = rate(self.settings, self.step, self.seconds)
        torch.nn.utils.clip_grad_norm_(self.tensors, self.settings.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            optimizer.step()
            optimizer.zero_grad()
        if self.average:
            keep = min(
                self.settings.ema, (1 + self.step) / (10 + self.step)
            )  # the first steps are soon forgotten
            torch._foreach_lerp_(self.average, [w.detach() for w in self.tensors], 1 - keep)
        self.step += 1
        self.tokens += tokens

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the weights are their average (where one is kept)."""
        live = [w.detach().clone() for w in self.tensors] if self.average else []
        self._put(self.average)
        try:
            yield
        finally:
            self._put(live)

    def _put(self, values: Sequence[Tensor]) -> None:
        for w, value in zip(self.tensors, values, strict=False) if values else ():
            w.data.copy_(value)

    def check(self, figures: Mapping[str, float]) -> None:
        """Log the figures of a validation; remember the weights if the first figure is the lowest
        so far.
        """
        figure = next(iter(figures.values()))
        if self.best is None or figure < self.best:
            self.best, self.best_weights = figure, [w.detach().clone() for w in self.tensors]
        self.checked = self.step
        self.write(**figures)

    def use_best(self) -> None:
        self._put(self.best_weights or self.average)

    def write(self, **figures: float) -> None:
        """Append a line to the log."""
        self.log.append(
            {"step": self.step, "tokens": self.tokens, **figures, "seconds": round(self.seconds, 2)}
        )
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.log[-1]) + "\n")

    def save(self) -> None:
        """Write the state beside its place, then move it there: a reader sees the old one or the
        new one.
        """
        if not all(bool(w.isfinite().all()) for w in self.weights.values()):
            raise TinyspecError(
                f"weights are no longer finite at step {self.step}: lower [train] lr, or raise warmup"
            )
        state = {
            "names": list(self.weights),
            "weights": [w.detach() for w in self.tensors],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **{name: getattr(self, name) for name in self.kept},
        }
        part = self.folder / "state.pt.part"
        torch.save(state, part)
        os.replace(part, self.folder / "state.pt")

    def resume(self) -> None:
        """Go on from state.pt if there is one, and take back what the log says beyond it."""
        path, log = self.folder / "state.pt", self.folder / "log.jsonl"
        if not path.exists():
            log.unlink(missing_ok=True)
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        same = [w.shape for w in state["weights"]] == [w.shape for w in self.tensors]
        if (
            state["names"] != list(self.weights)
            or not same
            or bool(state["average"]) != bool(self.average)
        ):
            raise TinyspecError(
                f"{path} is of a training with other weights: --restart begins anew"
            )
        self._put(state["weights"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        for name in self.kept:
            setattr(self, name, state[name])
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a run that was killed while it wrote
                break
            if entry["step"] <= self.step:
                self.log.append(entry)
        part = self.folder / "log.jsonl.part"
        part.write_text("".join(json.dumps(entry) + "\n" for entry in self.log), encoding="utf-8")
        os.replace(part, log)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event, so that the step in hand is completed; a second Ctrl-C
    interrupts at once.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return

    def handle(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
