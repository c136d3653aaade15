"""Blockwise parallel decoding: one layer on the last state guesses a block, one pass verifies it.

Paper: Stern, Shazeer, Uszkoreit, NeurIPS 2018, arXiv 1811.03115. The layer is trained; the target
is not.

Idea. The target p_1 predicts the next token, and further predictors p_2 to p_k the tokens after it.
All of them read one state h, and share the target's output matrix V:

    z    = h + W_out relu(W_in h + b_in) + b_out       h is added to each of the k - 1 parts    [d]
    p_i  = softmax(V z_i)                              W_in [(k-1) f, d], W_out [(k-1) d, (k-1) f]

f is the width of the target's own feedforward layers, as in the authors' code. A step *predicts* a
block of k tokens, *verifies* it by p_1 in one pass, and *accepts* the longest prefix in which every
token is the likeliest one. The pass that verifies also computes the states that the next block is
predicted from. So m tokens take about m / k + 1 passes, and not 2m / k.

Training: cross-entropy of one predictor, drawn at random for each batch, as in the authors' code,
which saves memory by it. The texts are the target's own. On the encoder-decoder, where the paper
translates, they are what a teacher wrote, and the layer is trained alone or with the model.

Guarantee: EXACT, at any temperature: the guesses are point masses. The paper relaxes acceptance in
three ways. `rule` picks one, and `slack` says how far it goes; at 0 all of them are exact:

    top       accept x if it is among the slack + 1 likeliest tokens
    distance  accept x if its id is at most slack away from the likeliest token's id
    block     accept the first slack guesses in any case; the paper's l is slack + 1

Above temperature 0, which the paper does not treat, a guess that the rule does not allow is
verified by the exact rule. So no rule accepts less than the exact one.
Pitfall: a pass to predict and another one to verify. The text is the same, for twice the passes.
Tests: tests/speculative/test_blockwise.py (`extend_by_block` against the code that runs; the count
of passes; an untrained layer repeats the target's head; each rule accepts more as slack grows; the
same on translations, against a dense pass).
Additions of ours: p_1 is the target's own head, so the layer has k - 1 parts and not k. W_out and
b_out begin as zero, so an untrained predictor says what that head says. For `draft_vocab`, see
`HeadSettings`.
Training the target with the layer, the paper's "fine tuning", is `blockwise_tuned`.
Left out: pictures, for which the rule by distance was made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.features import FeatureDrafter, rank_tokens
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of, top_k_tokens
from tinyspec.decoding.verify import Verdict, exclude_token, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.heads import (
    TOKEN_MAP,
    FrozenTarget,
    HeadMatrix,
    HeadSettings,
    OutputMatrix,
    head_weights,
    prepare_head,
)
from tinyspec.lm.ops import scatter_logits
from tinyspec.lm.seq2seq import BLOCK, Seq2Seq, add_ends
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Knob,
    Request,
    Trained,
    TrainedTranslator,
    TrainingBatch,
    TranslatorTraining,
    technique,
)
from tinyspec.tree import ROOT, TokenTree


def extend_by_block(predict: Callable[[list[int]], list[int]], text: list[int]) -> list[int]:
    """Return the text after one step: predict, verify, accept.

    predict  text -> [k] tokens, the likeliest under p_1 to p_k after it

    The decoder verifies the whole block in one pass, which also predicts the next one. A test
    compares the two.
    """
    block = predict(text)
    for i in range(1, len(block)):
        if predict([*text, *block[:i]])[0] != block[i]:
            return [*text, *block[:i]]
    return [*text, *block]


# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class BlockwiseSettings(HeadSettings):
    """The section [head] of a recipe.

    heads  how many tokens are guessed after the next one: the paper's k - 1
    """

    heads: int = 3


def block_shapes(config: Config, settings: BlockwiseSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the layer's two matrices and two biases."""
    inner, outer = settings.heads * config.d_ff, settings.heads * config.d_model
    return {
        "hidden.weight": (inner, config.d_model),
        "hidden.bias": (inner,),
        "out.weight": (outer, inner),
        "out.bias": (outer,),
    }


def initialize_block(
    target: FrozenTarget, settings: BlockwiseSettings, seed: int
) -> dict[str, Tensor]:
    """Return a layer that adds nothing to the state; only its first matrix is random."""
    generator = torch.Generator().manual_seed(seed)
    shapes = block_shapes(target.config, settings)
    weights = {name: target.head.new_zeros(shape) for name, shape in shapes.items()}
    drawn = torch.randn(shapes["hidden.weight"], generator=generator)
    weights["hidden.weight"] = (drawn / target.config.d_model**0.5).to(target.head)
    return weights


def count_parts(weights: HeadWeights) -> int:
    """Return how many tokens the layer guesses."""
    return len(weights["out.bias"]) // weights["hidden.weight"].shape[1]


def predict_by_block(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of a predictor, for all positions of a text at once."""
    h = states[:, 0]
    rows = slice(depth * h.shape[-1], (depth + 1) * h.shape[-1])
    hidden = F.relu(F.linear(h, weights["hidden.weight"], weights["hidden.bias"]))
    part = F.linear(hidden, weights["out.weight"][rows], weights["out.bias"][rows])
    return F.linear(h + part, target.head)


def draw_predictors(n: int, generator: torch.Generator | None = None) -> range:
    """Return one of n predictors, drawn at random; all of them where no gradient is wanted."""
    if not torch.is_grad_enabled():
        return range(n)
    where = None if generator is None else generator.device
    drawn = int(torch.randint(n, (), generator=generator, device=where))
    return range(drawn, drawn + 1)


def guess_loss(
    weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch, depth: int
) -> Tensor:
    """Return the cross-entropy of one predictor of the layer on what the target wrote."""
    logits = predict_by_block(weights, target, batch.ids, batch.states, depth)
    return batch.cross_entropy(target, depth, logits)


def block_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the cross-entropy of a random predictor on what the target wrote.

    Where no gradient is wanted, it is the mean over all predictors.
    """
    depths = draw_predictors(count_parts(weights))
    return torch.stack([guess_loss(weights, target, batch, depth) for depth in depths]).mean()


# ------------------------------------------------------------------ on an encoder-decoder


def translation_logits(model: Seq2Seq, states: Tensor, i: int) -> Tensor:
    """Return the logits [B, T, V] of predictor i on the decoder's states [B, T, d]; 0 is p_1."""
    if i == 0:
        return model.logits(states)
    layer = {
        name.removeprefix(BLOCK): w for name, w in model.weights.items() if name.startswith(BLOCK)
    }
    target = FrozenTarget(model.decoder.config, model.embedding, model.embedding)
    return predict_by_block(layer, target, torch.empty(0), states[:, None], i - 1)


def translation_labels(config: Seq2SeqConfig, target: Tensor, i: int) -> Tensor:
    """Return what predictor i must say at each state, [B, T + 1]; padding where nothing is known.

    target  [B, T] translations without their ends, padded
    """
    return F.pad(add_ends(config, target), (0, i), value=config.pad)[:, i:]


def translation_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, Tensor],
    generator: torch.Generator,
    frozen: bool = False,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of one predictor, drawn at random, on translations.

    Where no gradient is wanted, it is the mean over all k of them.

    batch   sources [B, S] and targets [B, T], padded at the end
    frozen  only the layer is trained: p_1 is not drawn, and the states have no gradient
    """
    source, target = batch
    n, first = model.config.block, int(frozen)
    drawn = [first + i for i in draw_predictors(n + 1 - first, generator)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
        states = model.causal_states(source, target, dropout)
    losses = []
    for i in drawn:
        labels = translation_labels(model.config, target, i)
        known = labels != model.config.pad
        logits = translation_logits(model, states[known][None], i)[0]
        losses.append(
            F.cross_entropy(logits.float(), labels[known], label_smoothing=smoothing)
            if len(logits)
            else logits.sum()
        )
    return torch.stack(losses).mean()


@torch.inference_mode()
def count_tokens_per_pass(model: Seq2Seq, source: Tensor, target: Tensor) -> list[list[int]]:
    """Return how many tokens each pass accepts, one list for each of the model's translations.

    target  [B, T] what the model writes greedily, without ends, padded

    The first pass has no draft: no state is known before it.
    """
    n, states = model.config.block, model.causal_states(source, target)
    right = []
    for i in range(1, n + 1):
        labels = translation_labels(model.config, target, i)
        guesses = translation_logits(model, states, i).argmax(-1)
        right.append((guesses == labels) & (labels != model.config.pad))
    is_right = torch.stack(right, dim=-1).cpu()  # [B, T + 1, n] at the state of each token
    found = []
    for row, length in zip(is_right, (target != model.config.pad).sum(1).tolist(), strict=True):
        run = row.long().cumprod(dim=-1).sum(dim=-1).tolist()  # right guesses one after another
        blocks, at = [1], 0
        while at < length:  # `at` is the state that the newest token was predicted from
            blocks.append(min(1 + run[at], length - at))
            at += blocks[-1]
        found.append(blocks)
    return found


@dataclass(frozen=True)
class BlockwiseTranslatorSettings:
    """The section [translator] of a recipe.

    k       tokens of a block, the next one among them
    frozen  only the layer is trained, and the other weights stay the teacher's
    """

    k: int = 4
    frozen: bool = False

    def __post_init__(self) -> None:
        if type(self.k) is not int or not 2 <= self.k <= 64:
            raise TinyspecError(
                f"k is {self.k}: it must be a whole number from 2 to 64, the next token and its "
                "guesses"
            )
        if not isinstance(self.frozen, bool):
            raise TinyspecError(f"frozen is {self.frozen}: it must be true or false")

    @property
    def guesses(self) -> int:
        """Return how many tokens the layer guesses."""
        return self.k - 1

    @property
    def about(self) -> str:
        """Return what was trained, in words."""
        if self.frozen:
            return "The layer alone was trained: all else is its teacher's"
        return "Both were trained together, from its teacher's weights"


def blockwise_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `translation_loss` of a batch of the trainer; a frozen model drops nothing out."""
    source, target = batch
    frozen = training.settings.frozen
    dropout = 0.0 if frozen else training.dropout
    options = generator, frozen, dropout, training.smoothing
    return translation_loss(training.model, (source, target), *options)


def measure_held_out_loss(
    model: Seq2Seq,
    settings: BlockwiseTranslatorSettings,
    source: Tensor,
    target: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the mean loss of all predictors, the same for every row of the batch."""
    with torch.no_grad():
        return {
            "held_out": translation_loss(model, (source, target), generator).expand(len(source))
        }


def count_accepted_tokens(
    model: Seq2Seq, settings: BlockwiseTranslatorSettings, source: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Return the tokens of the model's own translations, and the passes that they take: [2, B]."""
    blocks = count_tokens_per_pass(model, source, target)
    return {"accepted": torch.tensor([[sum(row) for row in blocks], [len(row) for row in blocks]])}


TRANSLATOR = TrainedTranslator(
    blockwise_batch_loss,
    None,
    "It writes from left to right, and a layer on its last state guesses the {settings.guesses} "
    "tokens after the next one (`blockwise`). {settings.about}. Its figure is greedy decoding's. "
    "Of its own greedy text it accepts {figures[accepted]:.2f} tokens in a pass. `held_out`, the "
    "mean loss of all predictors on its teacher's greedy translations, is {figures[held_out]:.3f}.",
    settings=BlockwiseTranslatorSettings,
    figures=measure_held_out_loss,
    own_text=count_accepted_tokens,
    best="held_out",
    equip=lambda config, settings: replace(config, block=settings.guesses),
    extends=True,
    updates=lambda settings: BLOCK if settings.frozen else "",
)


# ------------------------------------------------------------------ the draft


class BlockLayer:
    """The layer of a target as it runs: on one state."""

    def __init__(self, model: Any):
        weights = head_weights(model, "blockwise")
        self.token_map, self.vocabulary = weights.get(TOKEN_MAP), model.config.vocab_size
        self.hidden = HeadMatrix(model, weights["hidden.weight"], weights["hidden.bias"])
        self.out = HeadMatrix(model, weights["out.weight"], weights["out.bias"])
        self.rows = OutputMatrix(model, self.token_map)
        self.n = count_parts(weights)

    def logits(self, h: Tensor, n: int) -> Tensor:
        """Return the logits [n, V] of the first n predictors on a state [d]."""
        parts = self.out(F.relu(self.hidden(h[None]))).view(self.n, -1)
        logits = self.rows(h + parts[:n])
        return scatter_logits(logits, self.token_map, self.vocabulary)


class BlockwiseDrafter(FeatureDrafter):
    """Draft a chain of the predictors' likeliest tokens.

    n     how many predictors are used, at most
    ends  tokens that nothing follows
    """

    def __init__(self, block: BlockLayer, layer: int, n: int, ends: frozenset[int]):
        super().__init__((layer,))
        self.block, self.n, self.ends = block, min(n, block.n), ends

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        n = min(self.n, max_draft_depth)
        if not self.states or n <= 0:
            return TokenTree()
        logits = self.block.logits(self.states[-1][0], n)
        tokens = list[int]()
        for row in kernels_of(logits).as_rows(logits):
            tokens += rank_tokens(sampling, row, [*context, *tokens], 1)
            if tokens[-1] in self.ends:
                break
        return TokenTree.chain(tokens)


# ------------------------------------------------------------------ relaxed acceptance


def relaxed_verifier(rule: str, slack: int) -> Verifier:
    """Return a verifier of chains that accepts what a rule allows, and else as the exact rule does.

    The likeliest tokens are those after the repetition penalty, before temperature and filters. It
    raises TinyspecError if the draft branches.
    """

    def is_allowed(place: int, token: int, scores: Any) -> bool:
        if rule == "block":
            return place < slack
        if rule == "distance":
            return abs(token - top_k_tokens(scores, 1)[0]) <= slack
        return token in top_k_tokens(scores, slack + 1)

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        path: tuple[int, ...] = ()
        at = ROOT
        for place, node in enumerate(tree.chain_nodes("the relaxed rule")):
            token = tree.tokens[node]
            allowed = is_allowed(place, token, p.ranking_scores(at))
            if not allowed and not rng.accept(p[at][token]):
                return Verdict(path, rng.draw(exclude_token(p[at], token)), (node,))
            path, at = (*path, node), node
        return Verdict(path, rng.draw(p[at]))

    return judge


TRAINED = Trained(
    BlockwiseSettings,
    lambda config, settings: (config.n_layers,),
    block_shapes,
    initialize_block,
    count_parts,
    predict_by_block,
    block_loss,
    small=BlockwiseSettings(heads=2),
)
KNOBS = (
    Knob(
        "k",
        10,
        "tokens of a block, at most: the next one and k - 1 guesses; 1 is plain decoding",
        low=1,
        high=64,
        small=(3, 2, 1),
    ),
    Knob("slack", 0, "how far the rule relaxes acceptance; 0 is exact", low=0, high=64),
    Knob("rule", "top", "what may be accepted", choices=("top", "distance", "block")),
)


@technique(
    title="Blockwise parallel decoding",
    summary="one layer guesses a block of tokens",
    paper="Stern et al. 2018, arXiv 1811.03115",
    reported="up to 2x fewer passes (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    lossy=("slack", 0),
    trained=TRAINED,
    translator=TRANSLATOR,
    knobs=KNOBS,
)
def blockwise(request: Request, *, k: int, slack: int, rule: str) -> Decoder:
    """Return a decoder that drafts a block by the target's block layer."""
    model = request.target.model  # type: ignore[attr-defined]
    block = prepare_head(model, "blockwise", BlockLayer)
    drafter = BlockwiseDrafter(block, model.config.n_layers, k - 1, request.stop.eos)
    return request.decoder(drafter, relaxed_verifier(rule, slack) if slack else verify_tree)
