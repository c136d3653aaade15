"""SPACE: a model tuned to fill masks verifies its candidates and guesses the next ones in one pass.

Paper: Yi et al., Findings of ACL 2024, arXiv 2402.11809 (smart parallel auto-correct decoding). The
whole model is tuned.

Idea. k masks stand after the newest token, and k more after *every* candidate. All masks are one
token of the vocabulary:

    newest M M M   c_1 M M M   c_2 M M M   ...        each group sees its own path only

The rows of newest, c_1, c_2, ... verify the candidates, and the first row that rejects one gives
the right token in its place (auto-correct). The masks after the last accepted candidate have been
run in the same pass: their rows are the next candidates. So a step is one pass and gives 1 to k + 1
tokens. The mask at place j after the token at position t predicts the token t + 2 + j.

Training (SAR-SFT). Some of the texts are cut at a random place of the answer, and masks follow:

    with probability mask_prob   y_1 .. y_s M M M      labels  y_1 .. y_s y_(s+1) .. y_(s+1+k)
    else                         y_1 .. y_n            labels  y_1 .. y_n

The loss is the mean cross-entropy over all labels: the label of the row of y_s is y_(s+1), and that
of mask j is y_(s+2+j).

Guarantee: EXACT, at any temperature, for the tuned model: its output is not that of the model that
was tuned. Above temperature 0 candidates are sampled from the rows of the masks and declare their
distributions; a rejected one is replaced by a sample from the residual distribution.
Pitfall: the released code accepts with probability p(c) / q(c), but after a rejection it samples
from p, which changes the distribution (laws/museum). The group after the wrong token: the output
stays right, and law F2 (laws/feature_laws.py) detects it. Masks that later rows can see.
Tests: tests/speculative/test_space.py (`decode_by_groups` against the code that runs, step by step;
the loss against the rows of single masks; one pass a step; the rows of the text stay as they are).
Left out: a mask token that is added to the vocabulary (the authors' id is 32002, beyond LLaMA's
32,000; here it is a token that exists, by default the last one); several different masks, an option
of their code; instructions by people as training texts; another option, to keep the loss of the
whole text and to append the masks beside it. Their code appends k + 1 masks, of which the last has
no label. A text gives one group of masks, so short trainings show few of them: our recipe about
12,000 labels of masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.heads import FrozenTarget, mean_cross_entropy
from tinyspec.lm.probes import run_probe_groups
from tinyspec.speculative.probing import ProbeGroupDrafter, sample_chain
from tinyspec.technique import (
    Guarantee,
    Knob,
    Request,
    TrainingBatch,
    Tuned,
    Tuning,
    technique,
    tuned_settings,
)
from tinyspec.tree import ROOT, TokenTree

# ------------------------------------------------------------------ the algorithm as published


def decode_by_groups(
    predict: Callable[[Sequence[int]], int], text: Sequence[int], n: int, k: int, mask: int
) -> list[list[int]]:
    """Return the tokens of each step until there are n of them, at temperature 0.

    predict  a text -> its greedy next token. A step asks for texts that do not see each other's
             masks, so one pass with k + 1 groups answers all that it asks
    """
    text, candidates, steps = list(text), list[int](), list[list[int]]()
    while n > 0:
        new = list[int]()
        for candidate in candidates[: n - 1]:
            if predict([*text, *new]) != candidate:
                break
            new.append(candidate)
        # Both are read after the last accepted candidate: the masks, and the right token itself.
        candidates = [predict([*text, *new, *[mask] * (j + 1)]) for j in range(k)]
        new.append(predict([*text, *new]))
        text, n = [*text, *new], n - len(new)
        steps.append(new)
    return steps


# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class SpaceSettings:
    """The section [head] of a recipe.

    masks      masks of a group, and candidates of a draft (k)
    mask_prob  probability that a text is cut and continued by masks
    mask_id    the token that is the mask; -1: the last one of the vocabulary
    """

    masks: int = 5
    mask_prob: float = 0.5
    mask_id: int = -1

    def __post_init__(self) -> None:
        for name, least in (("masks", 1), ("mask_id", -1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TinyspecError(
                    f"[head] {name} is {value!r}: it must be a whole number of at least {least}"
                )
        if type(self.mask_prob) not in (int, float) or not 0 <= self.mask_prob <= 1:
            raise TinyspecError(
                f"[head] mask_prob is {self.mask_prob!r}: it must be a number from 0 to 1"
            )


def find_mask_token(settings: SpaceSettings, config: Config) -> int:
    """Return the id of the mask. Raises TinyspecError if the vocabulary has none of this id."""
    if settings.mask_id >= config.vocab_size:
        raise TinyspecError(
            f"[head] mask_id is {settings.mask_id}, but the vocabulary has {config.vocab_size} "
            f"tokens: give an id below {config.vocab_size}, or -1 for the last token"
        )
    return settings.mask_id % config.vocab_size


def check_mask_token(target: FrozenTarget, settings: SpaceSettings, seed: int) -> dict[str, Tensor]:
    """Return no further tensors, after a look at the mask's id."""
    find_mask_token(settings, target.config)
    return {}


def predict_by_masks(blocks: Blocks, settings: SpaceSettings, ids: Tensor, depth: int) -> Tensor:
    """Return the logits [B, T, V] of mask `depth` after every position of a text."""
    mask = blocks.embed[find_mask_token(settings, blocks.config)].expand(depth + 1, -1)
    anchors = torch.arange(ids.shape[1], device=ids.device)
    return blocks.apply_head(run_probe_groups(blocks, ids, anchors, mask)[:, :, -1])


def find_cuts(is_answer: Tensor, masks: int) -> Tensor:
    """Return the positions [n] of a text after which masks can stand: each of them has a label.

    is_answer  [T] whether the target wrote the token after each position

    >>> find_cuts(torch.tensor([False, True, True, True, False]), 2).tolist()
    [1]
    """
    if len(is_answer) <= masks:
        return torch.empty(0, dtype=torch.long)
    return is_answer.unfold(0, masks + 1, 1).all(dim=-1).nonzero().flatten()


def sar_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the mean cross-entropy of texts of which some are cut and continued by masks.

    A mask takes the place of the token that would stand there. So a row has the label that it has
    anyway, the next token of the text, and only the input is another.
    """
    settings: SpaceSettings = tuning.settings
    mask = find_mask_token(settings, tuning.blocks.config)
    inputs, is_counted = batch.ids.clone(), batch.is_answer.clone()
    for row, is_answer in enumerate(batch.is_answer.cpu()):
        is_cut = float(torch.rand((), generator=generator)) < settings.mask_prob
        cuts = find_cuts(is_answer, settings.masks)
        if is_cut and len(cuts):
            cut = int(cuts[int(torch.randint(len(cuts), (), generator=generator))])
            end = cut + 1 + settings.masks
            inputs[row, cut + 1 : end] = mask
            is_counted[row, end:] = False  # these rows would see the masks
    logits = tuning.blocks.training_logits(inputs)[:, :-1]
    known = is_counted[:, :-1]
    return mean_cross_entropy(logits[known], batch.ids[:, 1:][known])


# ------------------------------------------------------------------ the draft


class SpaceDrafter(ProbeGroupDrafter):
    """Draft a chain from the group of masks after the last accepted token."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, draft_probs = sample_chain(self.logits[:max_draft_depth], context, sampling, rng)
        n, parents = len(tokens), list(range(ROOT, len(tokens) - 1))
        depths = {node: node + 1 for node in range(ROOT, n)} if max_draft_depth > 0 else {}
        self.add_groups(tokens, parents, depths, len(context))
        n_masks = len(tokens) - n
        probe = [False] * n + [True] * n_masks
        return TokenTree(tokens, parents, [*draft_probs, *[None] * n_masks], probe)


@technique(
    title="SPACE: smart parallel auto-correct decoding",
    summary="masks draft in a tuned model",
    paper="Yi et al. 2024, arXiv 2402.11809",
    reported="2.7x to 4.0x, HumanEval-X (survey)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    keeps="the tuned model's distribution",
    tuned=Tuned(
        SpaceSettings,
        sar_loss,
        small=SpaceSettings(masks=2),
        initialize=check_mask_token,
        predict=predict_by_masks,
    ),
    knobs=(Knob("masks", 16, "masks that are used, at most", low=1, high=16, small=(2, 1)),),
)
def space(request: Request, *, masks: int) -> Decoder:
    """Return a decoder that drafts with the target's masks."""
    model = request.target.model  # type: ignore[attr-defined]
    settings = tuned_settings(model, "space", SpaceSettings)
    ids = [find_mask_token(settings, model.config)] * min(settings.masks, masks)
    positions = request.positions or model.config.max_positions
    return request.decoder(SpaceDrafter(ids, positions), verify_tree)
