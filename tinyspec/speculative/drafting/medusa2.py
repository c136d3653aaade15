"""Medusa-2: Medusa's heads, trained together with the model that they read.

Paper: Cai et al., ICML 2024, arXiv 2401.10774 (Medusa-2). The heads and the whole model are tuned.

Idea. A model that is trained with its heads learns states from which the next tokens can be
guessed. So the heads are right more often than on a frozen model (`medusa`). But the heads' loss is
large at first, and its gradient would spoil the model. Three measures protect it: the loss keeps
the model's own term, the learning rate of the heads is 4 times that of the model, and the heads are
trained alone at first:

    L = L_0 + 0.2 c(progress) sum over i = 1..K of 0.8^i CE_i

    L_0   cross-entropy of the model's own next token
          or, with self-distillation, KL(original model || model in training)
    CE_i  cross-entropy of head i on the token i places after the next one
    c     1 ("constant"), or rising to 1: r ("linear"), sin(r pi / 2) ("sine"); r = progress / rise

Self-distillation is for texts that the model wrote itself, as ours are.

Guarantee: EXACT, at any temperature, for the tuned model: its output is not that of the model that
was tuned. Candidates are point masses, as in `medusa`, whose tree and drafter are used.
Pitfall: the heads' loss with its full weight, or without L_0. The heads become good, and the model
forgets to write. The page of a tuned model shows its perplexity before and after.
Tests: tests/speculative/test_medusa2.py (the loss against its formula; no gradient of the model
while the heads are trained alone; a model that is trained by a recipe drafts and writes its text).
The weight 0.2, the factor 4 and the schedules were read in public copies of the authors' training
code.
Ours: the authors train the heads alone in a run of its own; here it is the first share of one run
(`heads_first`). Of the original's distributions the most probable tokens are known, and the others
count as one.
Left out: low-rank adapters, by which the authors train large models; quantized models.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.errors import TinyspecError
from tinyspec.lm.heads import FrozenTarget, mean_cross_entropy
from tinyspec.speculative.drafting.distillspec import append_rest, kl_divergence
from tinyspec.speculative.drafting.medusa import (
    TRAINED,
    MedusaSettings,
    initialize_heads,
    medusa,
    medusa_loss,
)
from tinyspec.technique import (
    Guarantee,
    Knob,
    Request,
    TrainingBatch,
    Tuned,
    Tuning,
    technique,
)

SCHEDULES = ("constant", "linear", "sine")

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class Medusa2Settings(MedusaSettings):
    """The section [head] of a recipe.

    heads_weight  weight of the heads' losses against the model's own
    schedule      how that weight rises: constant, linear or sine
    rise          share of the training in which it rises
    heads_first   share of the training at its beginning in which the heads are trained alone
    self_distill  whether L_0 is the divergence from the original model, not a cross-entropy
    """

    heads_weight: float = 0.2
    schedule: str = "constant"
    rise: float = 1.0
    heads_first: float = 0.3
    self_distill: bool = True

    def __post_init__(self) -> None:
        inherited = {name: vars(self)[name] for name in vars(MedusaSettings())}
        MedusaSettings(**inherited)  # checks them
        if self.draft_vocab:
            raise TinyspecError(
                "[head] draft_vocab: the heads of Medusa-2 propose from the whole vocabulary: "
                "leave draft_vocab out"
            )
        for name, least, most in (
            ("heads_weight", 0.0, math.inf),
            ("rise", 0.0, 1.0),
            ("heads_first", 0.0, 1.0),
        ):
            value = vars(self)[name]
            if type(value) not in (int, float) or not least <= value <= most or value == math.inf:
                span = "at least 0" if most == math.inf else "from 0 to 1"
                raise TinyspecError(f"[head] {name} is {value!r}: it must be a number {span}")
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise TinyspecError(f"[head] schedule is {self.schedule!r}: it must be one of {known}")


def schedule_weight(settings: Medusa2Settings, progress: float) -> float:
    """Return c, the share of the heads' weight that counts so far.

    >>> [schedule_weight(Medusa2Settings(schedule="linear", rise=0.5), x) for x in (0.0, 0.25, 0.9)]
    [0.0, 0.5, 1.0]
    """
    share = 1.0 if progress >= settings.rise else progress / settings.rise
    curve = {"constant": 1.0, "linear": share, "sine": math.sin(share * math.pi / 2)}
    return curve[settings.schedule]


def medusa2_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return L_0 and the heads' weighted losses; the latter alone while the heads come first."""
    settings: Medusa2Settings = tuning.settings
    blocks, are_heads_first = tuning.blocks, tuning.progress < settings.heads_first
    with torch.set_grad_enabled(torch.is_grad_enabled() and not are_heads_first):
        states = blocks.final_states(batch.ids)
    target = FrozenTarget(blocks.config, blocks.embed, blocks.vocabulary)
    if are_heads_first:
        target = target._replace(embed=target.embed.detach(), head=target.head.detach())
    of_heads = medusa_loss(tuning.beside, target, batch._replace(states=states[:, None]))
    if are_heads_first:
        return of_heads
    known = batch.is_answer[:, :-1]
    logits = F.linear(states[:, :-1][known], blocks.vocabulary).float()
    if settings.self_distill:
        q = logits.softmax(-1).gather(-1, batch.top_ids[:, :-1][known])
        p = batch.top_probs[:, :-1][known]
        own = kl_divergence(append_rest(p), append_rest(q)).sum() / max(len(p), 1)
    else:
        own = mean_cross_entropy(logits, batch.ids[:, 1:][known])
    return own + settings.heads_weight * schedule_weight(settings, tuning.progress) * of_heads


@technique(
    title="Medusa-2",
    summary="Medusa in a model tuned with it",
    paper="Cai et al. 2024, arXiv 2401.10774",
    reported="2.83x, Vicuna-7B (arXiv 2401.10774)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    keeps="the tuned model's distribution",
    trained=TRAINED,
    head_of="medusa",
    tuned=Tuned(
        Medusa2Settings,
        medusa2_loss,
        small=Medusa2Settings(heads=2),
        initialize=initialize_heads,
        rate=4.0,
    ),
    knobs=(
        Knob("nodes", 63, "nodes of the tree", low=1, high=1024, small=(3, 1), ours=5),
        Knob("heads", 16, "heads that are used, at most", low=1, high=16, small=(2, 1)),
    ),
)
def medusa2(request: Request, *, nodes: int, heads: int) -> Decoder:
    """Return a decoder that drafts with the heads of a model that was tuned with them."""
    return medusa(request, nodes=nodes, heads=heads)
