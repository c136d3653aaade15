"""DistillSpec (Zhou et al. 2024): a choice of divergences, and texts of the current draft."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training import outputs
from tinyspec.training.imitation import imitation_loss
from tinyspec.training.on_policy import DraftTexts

NAMED = "the loss of a draft is the divergence that the recipe names"
CURRENT = "texts of the draft are written by the draft as it is at that step"

TOP = ((0.5, 0.25), (0.125, 0.625), (0.75, 0.25))  # probabilities that are known; the rest is more
OWN = ((0.25, 0.25), (0.5, 0.125), (0.5, 0.125))


def _kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / max(b, 1e-8)) for a, b in zip(p, q, strict=True) if a)


def _expected(kind: str, p: Sequence[float], q: Sequence[float]) -> float:
    """Return the divergence of two distributions, by its formula."""
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    formulas = {
        "kl": _kl(p, q),
        "rkl": _kl(q, p),
        "jsd": (_kl(p, m) + _kl(q, m)) / 2,
        "tv": 1 - sum(map(min, p, q)),
    }
    return formulas[kind]


@collect_evidence(NAMED)
def loss_is_the_divergence(loss: Any) -> Iterator[int]:
    """Check the loss on distributions of three tokens, of which two are known."""
    for kind in ("kl", "rkl", "jsd", "tv"):
        for known, own in zip(TOP, OWN, strict=True):
            p, q = (*known, 1 - sum(known)), (*own, 1 - sum(own))
            got = float(loss(kind, torch.tensor([known]), torch.tensor([own]).log()))
            expected = _expected(kind, p, q)
            if not math.isclose(got, expected, rel_tol=1e-4, abs_tol=1e-6):
                accuse(NAMED, expected, got, loss=kind, p=p, q=q)
            yield 1


@collect_evidence(CURRENT)
def draft_writes_its_texts(make: Any) -> Iterator[int]:
    """Check the texts of three steps against those that the draft of each step writes."""
    config = Config(40, 16, 1, 2, 1, 8, 24, 64)
    models = [Model.random(config, seed, scale=0.5) for seed in range(4)]
    asking = outputs.OutputSettings(texts=2, tokens=8, top=4, batch=2)
    prompts = [outputs.TargetPrompt([1, 2, 3])]
    now = [models[1]]
    with tempfile.TemporaryDirectory() as folder:
        texts = make(models[0], lambda: now[0], prompts, asking, 10, 2, Path(folder))
        for step, draft in ((0, models[1]), (10, models[2]), (20, models[3])):
            now[0] = draft
            texts.refresh(step)
            now[0] = models[1]
            texts.refresh(step + 9)
            written = outputs.sample_outputs(draft, prompts * 2, asking, step)
            expected = [text.ids.tolist() for text in written]
            expect_equal(CURRENT, expected, [text.ids.tolist() for text in texts.texts], step=step)
            yield 1


TRAPS = [
    Trap(NAMED, loss_is_the_divergence, lambda: imitation_loss),
    Trap(CURRENT, draft_writes_its_texts, lambda: DraftTexts),
]

_distill = partial(Toy, technique="distillspec")

TOYS = [
    _distill(
        "one divergence for all names",
        "DIVERGENCES[kind]",
        'DIVERGENCES["kl"]',
        imitation_loss,
        law=NAMED,
    ),
    _distill(
        "texts that the first draft wrote",
        "begun = step - step % self.every",
        "begun = 0",
        DraftTexts.refresh,
        law=CURRENT,
    ),
]
