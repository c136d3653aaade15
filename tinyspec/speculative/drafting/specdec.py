"""SpecDec: a translation model that fills in masks drafts a block, and the translator verifies it.

Paper: Xia et al., Findings of EMNLP 2023, arXiv 2203.16487. The drafter is trained; the translator
is not. The training and the constants were read in the authors' code
(github.com/hemingkx/SpecDec, commit 1ae8018).

Idea. The drafter is a translation model of its own, not a head and not a smaller copy. It reads the
source once. After the translation so far it gets a block of k masks, and one pass fills all of
them: every position attends to every other. The translator, which writes from left to right, reads
the block in one pass. Its own likeliest token need not be the drafted one:

    accept x  if  x is among the beta likeliest tokens, and  log p(x_1) - log p(x) <= tau

p is the translator's distribution after the block's tokens before x, and x_1 its likeliest token.
The first token that is not accepted is dropped, with all tokens after it. x_1 takes its place, and
the next block of masks follows x_1. With beta = 1 the text is the translator's greedy text.

Training. Of each target the teacher wrote, y_1 .. y_L with its end, a prefix of 0 to L - 1 tokens
stays, each length equally likely; k masks follow. The loss is the cross-entropy at the masks, with
smoothed labels. Masks beyond the end have no label. *Glancing*: a pass without gradients fills the
masks first. Of n wrong ones, share * n masks are then replaced by their tokens, at random places,
and count no more. The more of a block is wrong, the more of it is shown. The share falls in a
straight line from 0.5 to 0.3. The encoder begins as the translator's; in our recipe the decoder
does so too.

Guarantee: LOSSY in beta. At 1 it is EXACT: drafts are point masses.
Pitfall: a small model that writes from left to right under the same name, which takes k passes; one
of the two conditions without the other.
Tests: tests/speculative/test_specdec.py (`verify_top_beta` against the code that runs; one pass of
the drafter a round; each condition rejects alone; a larger beta or tau accepts no fewer tokens; a
fitted drafter drafts its sentences; the masks, the labels and the glancing of the loss).
Additions of ours: above temperature 0, which the authors do not treat, a token that the rule does
not allow is accepted with probability p(x), and else another one is drawn. So the rule accepts no
less than the exact one.
Defaults: k, beta and tau are those of the authors' command (inference.sh). A drafter's own card
advises its k.
Left out: their drafter's input at a mask is a mixture of the source's embeddings, ours a mask
token; their positions are learned, ours sinusoidal, and our prefix begins with bos, as the
translator's does. Batches of translations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of, top_k_tokens
from tinyspec.decoding.verify import Verdict, exclude_token, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.technique import (
    Guarantee,
    Knob,
    Request,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)
from tinyspec.tree import ROOT, TokenTree

FIRST_GLANCE = 0.5  # share of the wrong masks that are replaced by their tokens, in the beginning
LAST_GLANCE = 0.3  # and in the end


def verify_top_beta(p: Any, draft: Sequence[int], beta: int, tau: float) -> list[int]:
    """Accept a prefix of the block, then add the translator's likeliest token.

    p      [k + 1, V] the translator's probabilities, one row for each draft token and one more
    draft  [k] tokens, one for each mask

    The decoder runs `top_beta_verifier`, the same at temperature 0. A test compares the two.

    >>> verify_top_beta([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]], [1], beta=2, tau=1.0)
    [1, 2]
    >>> verify_top_beta([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]], [1], beta=2, tau=0.5)
    [0]
    """
    for i, token in enumerate(draft):
        likeliest = sorted(range(len(p[i])), key=lambda x: (-p[i][x], x))[:beta]
        gap = math.log(p[i][likeliest[0]] / p[i][token]) if p[i][token] > 0 else math.inf
        if token not in likeliest or gap > tau:
            return [*draft[:i], likeliest[0]]
    return [*draft, max(range(len(p[-1])), key=lambda x: (p[-1][x], -x))]


# ------------------------------------------------------------------ what is trained


class MaskedBlocks(NamedTuple):
    """Targets of which a block is masked.

    inputs  [B, W] bos, the prefix, then the masks; padding after them
    labels  [B, W] the token of each mask; padding where there is none
    """

    inputs: Tensor
    labels: Tensor


def mask_blocks(
    config: Seq2SeqConfig, target: Tensor, block: int, generator: torch.Generator
) -> MaskedBlocks:
    """Return targets [B, T] with a prefix of random length, and `block` masks after it."""
    lengths = (target != config.pad).sum(dim=1, keepdim=True) + 1  # [B, 1] with the end
    share = torch.rand(lengths.shape, generator=generator, device=target.device)
    prefix = (share * lengths).long()  # [B, 1] 0 to L - 1, for share < 1
    width = int(prefix.max()) + block
    text = F.pad(target, (0, block + 1), value=config.pad).scatter(1, lengths - 1, config.eos)
    text, place = text[:, :width], torch.arange(width, device=target.device)
    is_mask = (place >= prefix) & (place < prefix + block)
    inputs = text.masked_fill(place >= prefix, config.pad).masked_fill(is_mask, config.mask)
    labels = text.masked_fill(~is_mask, config.pad)
    return MaskedBlocks(
        F.pad(inputs, (1, 0), value=config.bos), F.pad(labels, (1, 0), value=config.pad)
    )


def block_states(
    model: Seq2Seq, inputs: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """Return the decoder's states [B, W, d] of one pass over prefixes and masks."""
    slots = inputs != model.config.pad
    return model.decode(model.embed(inputs), memory, None, dropout, slots)


def glance_at_labels(
    model: Seq2Seq,
    masked: MaskedBlocks,
    memory: EncoderOutput,
    share: float,
    generator: torch.Generator,
    dropout: float = 0.0,
) -> MaskedBlocks:
    """Replace some masks of each row by their true tokens. These are no labels then.

    share  the number of masks to replace in a row, over the number that the model fills wrongly
    """
    inputs, labels = masked
    known = labels != model.config.pad
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():  # the loss drops the same out
        states = block_states(model, inputs, memory, dropout)[known]
        wrong = known.masked_scatter(known, model.logits(states).argmax(-1) != labels[known])
    count = (share * wrong.sum(dim=1, keepdim=True)).long()  # [B, 1]
    order = torch.rand(labels.shape, generator=generator, device=labels.device)
    rank = order.masked_fill(~known, torch.inf).argsort(dim=1).argsort(dim=1)
    shown = known & (rank < count)
    return MaskedBlocks(
        torch.where(shown, labels, inputs), labels.masked_fill(shown, model.config.pad)
    )


def block_filling_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, Tensor],
    block: int,
    share: float,
    generator: torch.Generator,
    dropout: float = 0.0,
    smoothing: float = 0.1,
) -> Tensor:
    """Return the mean cross-entropy of the masks that have a label, after glancing.

    batch  sources [B, S] and targets [B, T], padded at the end
    share  see `glance_at_labels`
    """
    source, target = batch
    memory = model.encode(source, dropout)
    masked = mask_blocks(model.config, target, block, generator)
    inputs, labels = glance_at_labels(model, masked, memory, share, generator, dropout)
    states, known = block_states(model, inputs, memory, dropout), labels != model.config.pad
    return F.cross_entropy(
        model.logits(states[known]).float(), labels[known], label_smoothing=smoothing
    )


def glancing_share(progress: float) -> float:
    """Return the share of glancing after this part of the training.

    >>> glancing_share(0.0), glancing_share(0.5), glancing_share(1.0)
    (0.5, 0.4, 0.3)
    """
    return FIRST_GLANCE + (LAST_GLANCE - FIRST_GLANCE) * progress


@torch.inference_mode()
def count_right_tokens(
    model: Seq2Seq, batch: tuple[Tensor, Tensor], block: int, generator: torch.Generator
) -> Tensor:
    """Return how many tokens at the head of a block are the target's, [B], at a random place."""
    source, target = batch
    inputs, labels = mask_blocks(model.config, target, block, generator)
    filled = model.logits(block_states(model, inputs, model.encode(source))).argmax(-1)
    is_wrong = (inputs == model.config.mask) & (filled != labels)
    known = labels != model.config.pad
    return (known & (is_wrong.cumsum(dim=1) == 0)).sum(dim=1)


@torch.inference_mode()
def translate_by_blocks(model: Seq2Seq, source: Tensor, block: int) -> list[list[int]]:
    """Return translations of sources [B, S] that the drafter writes alone, block after block."""
    config, memory = model.config, model.encode(source)
    text = torch.full((len(source), 1), config.bos, device=source.device)
    masks = torch.full((len(source), block), config.mask, device=source.device)
    is_done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    while text.shape[1] + block <= config.max_positions and not is_done.all():
        inputs = torch.cat((text, masks), dim=1)
        filled = model.logits(model.decode(model.embed(inputs), memory)[:, -block:]).argmax(-1)
        text, is_done = torch.cat((text, filled), dim=1), is_done | (filled == config.eos).any(1)
    rows = text[:, 1:].tolist()
    return [row[: row.index(config.eos)] if config.eos in row else row for row in rows]


# ------------------------------------------------------------------ the draft and its verifier


class SpecDecDrafter(ModelDrafter):
    """Fill a block of masks after the text in one pass, and draft its likeliest tokens.

    The draft model is a `MaskFiller`, or whatever scores probes: the logits at the i-th mask are
    those of the i-th draft token.

    mask  id of the mask
    """

    def __init__(self, model: Any, k: int, ends: frozenset[int], positions: int, mask: int):
        super().__init__(model, k, ends, positions)
        self.mask = mask

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        assert self.positions is not None
        k = min(self.gamma, self.positions - self.length)
        if self.left_behind or min(k, max_draft_depth) <= 0:
            return TokenTree()
        masks = TokenTree.chain([self.mask] * k)._replace(probe=(True,) * k)
        logits = self.model.score(masks).logits
        tokens = list[int]()
        for row in kernels_of(logits).as_rows(logits)[1 : max_draft_depth + 1]:
            tokens += rank_tokens(sampling, row, [*context, *tokens], 1)
            if tokens[-1] in self.ends:  # nothing follows the end of a text
                break
        return TokenTree.chain(tokens)


def top_beta_verifier(beta: int, tau: float) -> Verifier:
    """Return a verifier of chains that accepts what both conditions allow, and else as the exact
    rule does.

    The conditions look at the distribution after the repetition penalty, before temperature and
    filters. The verifier raises TinyspecError if the draft branches.
    """
    least = math.exp(-tau)  # log p(x_1) - log p(x) <= tau if and only if p(x) / p(x_1) >= least

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        path: tuple[int, ...] = ()
        at = ROOT
        unsharpened = SamplingParams(repetition_penalty=p.sampling.repetition_penalty)
        for node in tree.chain_nodes("the rule of beta and tau"):
            token, row = tree.tokens[node], p.probs_under(at, unsharpened)
            likeliest = top_k_tokens(row, min(beta, len(row)))
            is_allowed = token in likeliest and row[token] / row[likeliest[0]] >= least
            if not is_allowed and not rng.accept(p[at][token]):
                return Verdict(path, rng.draw(exclude_token(p[at], token)), (node,))
            path, at = (*path, node), node
        return Verdict(path, rng.draw(p[at]))

    return judge


@dataclass(frozen=True)
class SpecDecSettings:
    """What a drafter is trained for.

    k  masks of a block, which the card of the drafter advises
    """

    k: int = 25

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise TinyspecError(f"k is {self.k}: it must be a whole number of at least 1")


def specdec_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `block_filling_loss` of a batch of the trainer."""
    source, target = batch
    share = glancing_share(training.progress)
    options = share, generator, training.dropout, training.smoothing
    return block_filling_loss(training.model, (source, target), training.settings.k, *options)


def fits_positions(
    config: Seq2SeqConfig, settings: SpecDecSettings, source: int, target: int
) -> bool:
    """Return whether a block of masks fits after a whole target."""
    return target <= config.max_positions - settings.k - 1


@technique(
    title="SpecDec",
    summary="fills a block of masks at once",
    paper="Xia et al. 2023, arXiv 2203.16487",
    reported="about 5x, translation (survey)",
    family="drafting",
    guarantee=Guarantee.LOSSY,
    drafts=1,
    fills_masks=True,
    translator=TrainedTranslator(
        specdec_batch_loss,
        lambda model, settings, sources: translate_by_blocks(model, sources, settings.k),
        "It fills a block of {settings.k} masks after a translation, and so drafts for its "
        "teacher (`specdec`). Its figure is that of the translations that it writes alone, block "
        "after block; what counts for its teacher is how many tokens at the head of a block are "
        "right: {figures[right_tokens]:.2f}.",
        settings=SpecDecSettings,
        fits=fits_positions,
        figures=lambda model, settings, source, target, generator: {
            "right_tokens": count_right_tokens(model, (source, target), settings.k, generator)
        },
    ),
    lossy=("beta", 1),
    knobs=(
        Knob("k", 25, "masks of a block", low=1, high=256, small=(3, 1), advised=True),
        Knob(
            "beta",
            5,
            "how many of the likeliest tokens may be accepted; 1 is exact",
            low=1,
            high=64,
        ),
        Knob(
            "tau",
            3.0,
            "greatest distance log p(x_1) - log p(x) of an accepted token",
            low=0.0,
            high=100.0,
        ),
    ),
)
def specdec(request: Request, *, k: int, beta: int, tau: float) -> Decoder:
    """Return a decoder that drafts with the model that fills in masks."""
    draft: Any = request.drafts[0]
    config = draft.model.config
    positions = request.draft_max_length or config.max_positions
    mask = getattr(config, "mask", 0)  # a model of the laws has none: any token stands for it
    drafter = SpecDecDrafter(draft, k, request.stop.eos, positions, mask)
    return request.decoder(drafter, verify_tree if beta == 1 else top_beta_verifier(beta, tau))
