"""Let a draft write the texts that it is trained on, while it is trained (DistillSpec's on-policy).

Every few steps the draft writes new texts with the weights that it has then, and the target gives
its probabilities at every token. The texts lie beside the state of the training. So an interrupted
training goes on with the same ones, although the weights that wrote them are gone.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tinyspec.lm.model import Model
from tinyspec.training.outputs import OutputSettings, TargetOutput, TargetPrompt, sample_outputs
from tinyspec.training.text_cache import cache_batches


class DraftTexts:
    """The newest texts of a draft, with the target's probabilities.

    make_draft  returns the draft as it is now
    every       steps between two refreshes
    count       texts of a refresh
    folder      where they lie
    """

    def __init__(
        self,
        target: Model,
        make_draft: Callable[[], Model],
        prompts: Sequence[TargetPrompt],
        asking: OutputSettings,
        every: int,
        count: int,
        folder: Path,
    ):
        self.target, self.make_draft, self.prompts, self.asking = (
            target,
            make_draft,
            prompts,
            asking,
        )
        self.every, self.count, self.folder = every, count, folder
        self.begun = -1  # the step at which the texts were written
        self.texts: list[TargetOutput] = []

    def refresh(self, step: int) -> None:
        """Take the texts of this step: written now, or read if they were written before."""
        begun = step - step % self.every
        if begun == self.begun:
            return
        rng = random.Random(f"{self.asking.seed} {begun}")
        chosen = [rng.choice(self.prompts) for _ in range(self.count)]
        files = cache_batches(
            self.folder / str(begun),
            chosen,
            self.asking.batch,
            lambda first, batch: self._write(begun + first, batch),
            name_file=lambda first: f"{first:05d}.pt",
            title="texts of the draft",
        )
        self.begun = begun
        self.texts = [TargetOutput(*parts) for content in files for parts in content]

    def _write(
        self, number: int, prompts: Sequence[TargetPrompt]
    ) -> list[tuple[torch.Tensor, ...]]:
        texts = sample_outputs(self.make_draft(), prompts, self.asking, number)
        return [tuple(add_target_probs(self.target, text, self.asking.top)) for text in texts]


@torch.no_grad()
def add_target_probs(target: Model, text: TargetOutput, top: int) -> TargetOutput:
    """Return a text that somebody else wrote with the target's probabilities in it."""
    rows = target.logits(text.ids.tolist())[text.positions].softmax(-1)
    best = rows.topk(min(top, rows.shape[1]))
    return text._replace(top_ids=best.indices.int().cpu(), top_probs=best.values.half().cpu())
