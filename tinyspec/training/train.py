"""Train anything: models, drafts, exits, heads. They differ in loss and batches; the loop is this.

The optimizer is AdamW with weight decay on matrices only (or Muon for the matrices inside the
network). The learning rate has a warm-up, then a cosine or a plateau with a linear end (WSD).
Gradients are clipped. An average of the weights (EMA) is optional. The result is the best weights
by validation. The schedule follows the progress, which is the larger of the share of the steps and
the share of the minutes. So a clock budget shortens a training, and the learning rate still
decreases to its end.

Batches and dropout of step s are drawn from generators seeded with (seed, s). So a training that
was interrupted continues bit for bit as if it had not been, if the arithmetic is deterministic and
there is no clock budget. Each piece of a batch has a seed of its own, so it does not matter which
process computes it: see ranks.py.
"""

import json
import math
import os
import signal
import threading
import time
from collections import defaultdict
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
from tinyspec.training import ranks
from tinyspec.training.muon import Muon
from tinyspec.training.schedule import TrainSettings, learning_rate, training_progress
from tinyspec.training.text_cache import write_part

Batch = tuple[Tensor, ...]
Batches = Callable[[torch.Generator], Batch]
Loss = Callable[..., Tensor]  # loss(*batch) -> scalar, the mean over the batch


@dataclass
class TrainingResult:
    """How a training ended.

    A finished training has put the best weights by validation in place (without validation, the
    last ones).

    finished  False: it was stopped by Ctrl-C and saved; the same call continues it
    best      the lowest first figure of a validation
    """

    finished: bool
    step: int
    tokens: int
    seconds: float
    best: float | None
    log: list[dict[str, Any]] = field(default_factory=list)

    def curve(self, figure: str) -> list[tuple[float, float]]:
        """Return (tokens seen, figure) of each line of the log that has the figure."""
        return [(entry["tokens"], entry[figure]) for entry in self.log if figure in entry]


def count_batch_rows(batch: Batch) -> int:
    """Return how many samples a batch has."""
    return len(batch[0])


def train(
    weights: Mapping[str, Tensor],
    batches: Batches,
    loss: Loss,
    settings: TrainSettings,
    folder: str | Path,
    *,
    validate: Callable[[], Mapping[str, float]] | None = None,
    before_step: Callable[[int, float], None] | None = None,
    rates: Mapping[str, float] | None = None,
    weigh: Callable[[Batch], Any] = count_batch_rows,
    console: Console | None = None,
    title: str = "train",
) -> TrainingResult:
    """Train `weights` in place, with state and log in `folder` (state.pt, log.jsonl).

    Under torchrun every process calls this; rank 0 validates and writes.

    weights      float32 leaf tensors, on the device where everything runs
    batches      samples a batch with a generator: a tuple of tensors [B, ...]
    loss         of a batch: a scalar
    validate     returns figures to log; the first decides which weights are best, lower is better
    before_step  is called with the number of each step and the progress before it
    rates        learning rate of single weights, by name, as a multiple of the settings'
    weigh        how many things of a batch its loss is the mean of: so much a piece of it counts

    Raises TinyspecError if the loss is no longer finite, or if the state in `folder` belongs to
    another training.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = _TrainingState(dict(weights), settings, folder, rates or {})
    with ranks.main_rank_first():
        run.resume()
    bar = progress_bar(console, TextColumn("{task.fields[note]}"))
    cuda = [run.device] if run.device.type == "cuda" else []
    generator = torch.Generator(run.device)
    # On a CPU the time that other processes take does not count: a busy machine trains longer.
    clock = time.monotonic if run.device.type == "cuda" else time.thread_time
    now = logged_at = clock()
    started, logged_tokens = now - run.seconds, run.tokens
    saved_at = time.monotonic()
    with _catch_stop_signals() as stop, bar, torch.random.fork_rng(devices=cuda):
        task = bar.add_task(title, total=settings.steps, completed=run.step, note="")
        while True:
            decided = run.progress < 1 and not stop.is_set(), run.seconds
            goes_on, run.seconds = ranks.share_decision(*decided)
            if not goes_on:
                break
            # 1. Step: all random numbers of a step come from its own seed.
            seed = settings.seed * 1_000_003 + run.step
            torch.manual_seed(seed)
            generator.manual_seed(seed)
            if before_step is not None:
                before_step(run.step, run.progress)
            batch = batches(generator)
            value = _accumulate_gradients(loss, batch, weigh, settings.pieces, seed)
            run.losses.append(ranks.add_gradients(run.tensors, value))
            run.apply_gradients(batch[0].numel())
            run.seconds = clock() - started
            # 2. Log: the mean loss and the pace since the last line.
            if run.step % settings.log_every == 0 or run.progress >= 1:
                mean = float(torch.stack(run.losses).mean())  # waits for the device
                if not math.isfinite(mean):
                    raise TinyspecError(
                        f"the loss is {mean} at step {run.step}: lower [train] lr, or raise warmup"
                    )
                now = clock()
                pace = round((run.tokens - logged_tokens) / (now - logged_at))
                run.losses, logged_tokens, logged_at = [], run.tokens, now
                run.seconds = now - started
                run.append_log(loss=mean, lr=run.lr, tokens_per_second=pace)
                done = round(run.progress * settings.steps)  # by the clock, if that is more
                bar.update(task, completed=done, note=f"loss {mean:.3f}  {pace:,} tokens/s")
            # 3. Validate: with the average of the weights. Its time is no part of the pace.
            is_due = run.step % settings.valid_every == 0 or run.progress >= 1
            if validate and run.checked < run.step and is_due and run.is_main:
                with run.use_average():
                    run.record_validation(validate())
                if console is not None:
                    bar.console.print(_format_log_entry(run.log[-1]), highlight=False)
                logged_at += clock() - started - run.seconds
                run.seconds = clock() - started
            # 4. Save.
            if run.is_main and time.monotonic() - saved_at > 60 * settings.save_minutes:
                run.save()
                saved_at = time.monotonic()
        if run.is_main:
            run.save()
    if finished := run.progress >= 1:
        run.restore_best()
    return TrainingResult(finished, run.step, run.tokens, run.seconds, run.best, run.log)


def autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 if the device multiplies it.

    A processor that emulates bfloat16 is slower with it than in float32.
    """
    fast = device.type != "cpu"
    if not fast:
        # Absent before torch 2.12: then float32.
        able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        fast = any(able.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def _accumulate_gradients(
    loss: Loss, batch: Batch, weigh: Callable[[Batch], Any], pieces: int, seed: int
) -> Tensor:
    """Compute gradients of the batch's mean loss piece by piece, and return the loss.

    With several ranks, each computes its share of the pieces.
    """
    total = torch.zeros((), device=batch[0].device)
    parts = [*zip(*(t.chunk(max(pieces, ranks.count_processes())) for t in batch), strict=True)]
    for number, part in enumerate(parts):
        if number % ranks.count_processes() != ranks.this_rank():
            continue
        torch.manual_seed(seed + (number << 40))  # of dropout
        share = float(weigh(part) / weigh(batch)) if len(parts) > 1 else 1.0
        value = loss(*part) * share
        value.backward()  # type: ignore[no-untyped-call]
        total += value.detach()
    return total


def _format_log_entry(entry: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in entry.items()
    )


class _TrainingState:
    """The state of a training between two steps, in memory and on disk."""

    SAVED = ("average", "best", "best_weights", "step", "tokens", "checked", "seconds", "losses")

    def __init__(
        self,
        weights: dict[str, Tensor],
        settings: TrainSettings,
        folder: Path,
        rates: Mapping[str, float],
    ):
        self.weights, self.settings, self.folder = weights, settings, folder
        self.is_main = ranks.this_rank() == 0  # only this rank writes files
        self.tensors = [w.requires_grad_() for w in weights.values()]
        self.device = self.tensors[0].device
        sorts: dict[tuple[str, float], list[Tensor]] = defaultdict(list)
        for name, w in weights.items():
            sort = "matrix" if w.ndim >= 2 else "vector"
            if w.ndim == 2 and "." in name and settings.optimizer == "muon":
                sort = "inner matrix"
            sorts[sort, rates.get(name, 1.0)].append(w)

        def make_groups(sort: str, weight_decay: float) -> list[dict[str, Any]]:
            """Return a group of the weights of this sort for each learning rate."""
            return [
                {"params": own, "rate": rate, "weight_decay": weight_decay}
                for (known, rate), own in sorts.items()
                if known == sort
            ]

        groups = [*make_groups("matrix", settings.weight_decay), *make_groups("vector", 0.0)]
        inner = make_groups("inner matrix", settings.weight_decay)
        fused = self.device.type == "cuda"
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, betas=settings.betas, fused=fused)
        ]
        if inner:
            self.optimizers.append(Muon(inner, weight_decay=settings.weight_decay))
        self.average = [w.detach().clone() for w in self.tensors] if settings.ema else []
        self.best: float | None = None
        self.best_weights: list[Tensor] = []
        self.step = self.tokens = 0
        self.checked = -1  # the step of the last validation
        self.seconds = self.lr = 0.0
        self.losses: list[Tensor] = []  # since the last line of the log
        self.log: list[dict[str, Any]] = []

    @property
    def progress(self) -> float:
        return training_progress(self.settings, self.step, self.seconds)

    def apply_gradients(self, tokens: int) -> None:
        """Take one step of the optimizers, and one of the average."""
        self.lr = learning_rate(self.settings, self.step, self.seconds)
        torch.nn.utils.clip_grad_norm_(self.tensors, self.settings.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # The state of an older version has no rates.
                group["lr"] = self.lr * group.get("rate", 1.0)
            with autocast(self.device):  # Muon multiplies matrices
                optimizer.step()
            optimizer.zero_grad()
        if self.average:
            # A lower share at the beginning: the first weights are soon forgotten.
            keep = min(self.settings.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.average, [w.detach() for w in self.tensors], 1 - keep)
        self.step += 1
        self.tokens += tokens

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Replace the weights by their average, if there is one, until the context ends."""
        live = [w.detach().clone() for w in self.tensors] if self.average else []
        self._copy_weights(self.average)
        try:
            yield
        finally:
            self._copy_weights(live)

    def _copy_weights(self, values: Sequence[Tensor]) -> None:
        for w, value in zip(self.tensors, values, strict=False) if values else ():
            w.data.copy_(value)

    def record_validation(self, figures: Mapping[str, float]) -> None:
        """Log the figures of a validation; keep the weights if the first figure is the lowest."""
        figure = next(iter(figures.values()))
        if self.best is None or figure < self.best:
            self.best, self.best_weights = figure, [w.detach().clone() for w in self.tensors]
        self.checked = self.step
        self.append_log(**figures)

    def restore_best(self) -> None:
        """Put the best weights by validation in place; without validation, the average."""
        self._copy_weights(self.best_weights or self.average)

    def append_log(self, **figures: float) -> None:
        """Append a line to the log."""
        self.log.append(
            {"step": self.step, "tokens": self.tokens, **figures, "seconds": round(self.seconds, 2)}
        )
        if self.is_main:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.log[-1]) + "\n")

    def save(self) -> None:
        """Write state.pt."""
        if not all(bool(w.isfinite().all()) for w in self.weights.values()):
            raise TinyspecError(
                f"weights are no longer finite at step {self.step}: "
                "lower [train] lr, or raise warmup"
            )
        state = {
            "names": list(self.weights),
            "weights": [w.detach() for w in self.tensors],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **{name: getattr(self, name) for name in self.SAVED},
        }
        with write_part(self.folder / "state.pt") as part:
            torch.save(state, part)

    def resume(self) -> None:
        """Load state.pt if there is one, and remove later lines from the log."""
        path, log = self.folder / "state.pt", self.folder / "log.jsonl"
        if not path.exists():
            if self.is_main:
                log.unlink(missing_ok=True)
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            names, shapes = state["names"], [w.shape for w in state["weights"]]
            same = shapes == [w.shape for w in self.tensors]
            is_averaged = bool(state["average"])
        except Exception as error:  # the reader fails anywhere in a damaged file
            raise TinyspecError(
                f"{path}: damaged ({type(error).__name__}); --restart begins anew"
            ) from error
        if names != list(self.weights) or not same or is_averaged != bool(self.average):
            raise TinyspecError(
                f"{path} is of a training with other weights: --restart begins anew"
            )
        self._copy_weights(state["weights"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        for name in self.SAVED:
            setattr(self, name, state.get(name, getattr(self, name)))  # an older one lacks some
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a run that was killed while it wrote
                break
            if entry["step"] <= self.step:
                self.log.append(entry)
        if self.is_main:
            part = self.folder / "log.jsonl.part"
            text = "".join(json.dumps(entry) + "\n" for entry in self.log)
            part.write_text(text, encoding="utf-8")
            os.replace(part, log)


@contextmanager
def _catch_stop_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, so that the current step is completed.

    A second Ctrl-C interrupts at once.
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
