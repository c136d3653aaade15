"""The parts a decoder is made of, as one record: a mutant is the record with one part replaced.

A law that judges parts takes a `Parts` and builds what it needs from it, so the same law judges the
library, every mutant, and a reader's own part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, Tensor

from tinyspec import _core
from tinyspec._core import Forest, NgramIndex
from tinyspec.decoding import trace
from tinyspec.decoding.decode import Decoder, Drafter, Round, Target, Verifier
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.refine import Refinement, refine, score_candidates
from tinyspec.decoding.rng import Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams, exponential_race
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics
from tinyspec.decoding.verify import residual, verify_tree
from tinyspec.early_exit.calibrate import Calibration, PValue, calibrate, hoeffding_p_value
from tinyspec.early_exit.exits import ExitTarget
from tinyspec.early_exit.ppd import PipelinedTarget
from tinyspec.lm.forward import ForwardBatch, Scores
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import ConditionedDecoder
from tinyspec.lm.session import Session
from tinyspec.lm.view import View
from tinyspec.nonautoregressive.jacobi import JacobiDrafter, solve_blocks
from tinyspec.nonautoregressive.mask_predict import MaskPredictRefiner, hide_tokens
from tinyspec.nonautoregressive.nat import NatRefiner, nat_loss, reinforce_surrogate
from tinyspec.speculative.integrated.speculative_contrastive import JointTarget
from tinyspec.speculative.nested import NestedDrafter
from tinyspec.speculative.treedraft import Shape, TreeDrafter
from tinyspec.speculative.verification.bild import rollback_verifier
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.gumbel_coupling import (
    GumbelCouplingDrafter,
    verify_tree_by_race,
)
from tinyspec.speculative.verification.spectr import verify_tree_k_seq
from tinyspec.training.aligner import Alignment, align_words
from tinyspec.training.exit_losses import ExitLossSchedule
from tinyspec.tree import ROOT, Probs

Forward = Callable[[Sequence[ForwardBatch]], list[Scores]]


def make_tree_drafter(model: Target, shape: Shape, replace: bool) -> TreeDrafter:
    """Return a drafter of trees of this shape from a model."""
    return TreeDrafter(model, shape, replace=replace)


class Siblings(TreeDrafter):
    """Proposes k tokens side by side from a model's next distribution.

    They are drawn independently, or without replacement.
    """

    def __init__(self, model: Target, k: int, replace: bool, positions: int | None = None):
        super().__init__(model, (ROOT,) * k, positions=positions, replace=replace)


def pass_through(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    """Run the forward pass as it is: the part that stands between sessions and their model."""
    return forward(feeds)


def make_session(model: Model) -> Session:
    """Return a session on a model, as `model.session()` makes it."""
    return Session(model)


KERNELS: Mapping[str, Callable[..., Any]] = {
    name: getattr(_core, name)
    for name in (
        "sample_inverse_cdf", "sample_without_replacement", "exponential_race", "apply_sampling",
        "residual", "exclude_token", "verify_tree", "ancestors", "depths", "unique_paths",
        "suffix_order", "retrieve",
    )
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """Every part that a law judges and a mutant may replace; the defaults are the library's.

    walk        the verifier
    residual    the distribution after a rejection
    sampling    from logits to a distribution
    drafter     (model, gamma, ends): a chain drawn from a model
    siblings    (model, k, replace): tokens drawn side by side
    trees       (model, shape, replace): a tree drawn from a model
    index       the n-gram index of the drafters that copy;  forest  (depth, bound): the counted
                tries of those that remember
    nested      (decoder, gamma): a decoder as the drafter of another
    joint       (members, make): a target whose rows are made of its members'
    rollback    (distance, rule): what a large model takes back of a small one's text
    block       a chain judged as a whole;  k_seq  independent drafts judged together
    pipeline    (session, layer, k): a target that begins with its next token
    racing      (model, gamma): a chain raced by a model;  match  the target's race, which follows
                it
    jacobi      (size, parallel): sweeps over blocks in the loop;  solve  the same as published
    course      (exits, layers, steps): what a training of exits counts and leaves out, step by step
    given       (model, source): an encoder-decoder that has read a source;  judge  a teacher's
                judgement of candidates
    refine      the loop that rewrites a canvas
    decoder     the loop;  stop  where a text ends
    replay, seeded   where decisions come from;  race  the exponential race on given noise
    kernels     the compiled functions of one row and one tree, by name
    statistics, origins, logprobs   what is reported of a round
    session, view    text, nodes and cache on a model
    forward     what stands between sessions and the model
    exits       (session, rule, fill): a target whose tokens may leave early
    calibrate   (candidates, losses, delta, epsilon, p_value): fixed-sequence testing;  p_value
                (total, n, delta)
    mask_predict  (model, iterations, lengths): a refiner;  hide  (slots, generator): the masks of a
                  training batch
    fertile     (model, teacher, fertility, samples, temperature): a refiner;  fertile_loss,
                reinforce  what it is trained by
    align       (source, target): who produced which word
    """

    walk: Verifier = verify_tree
    residual: Callable[[Probs, Probs], Probs] = residual
    sampling: Callable[..., SamplingParams] = SamplingParams
    drafter: Callable[[Target, int, frozenset[int]], Drafter] = ModelDrafter
    siblings: Callable[[Target, int, bool], Drafter] = Siblings
    trees: Callable[[Target, Shape, bool], Drafter] = make_tree_drafter
    index: Callable[[int], Any] = NgramIndex
    forest: Callable[[int, int], Any] = Forest
    nested: Callable[..., NestedDrafter] = NestedDrafter
    joint: type[JointTarget] = JointTarget
    rollback: Callable[[float, str], Verifier] = rollback_verifier
    block: Verifier = verify_tree_by_block
    k_seq: Verifier = verify_tree_k_seq
    pipeline: Callable[[Any, int, int], PipelinedTarget] = PipelinedTarget
    racing: Callable[[Target, int], Drafter] = GumbelCouplingDrafter
    match: Verifier = verify_tree_by_race
    jacobi: Callable[..., JacobiDrafter] = JacobiDrafter
    solve: Callable[..., Any] = solve_blocks
    course: Callable[..., ExitLossSchedule] = ExitLossSchedule
    given: Callable[..., Model] = ConditionedDecoder
    judge: Callable[..., Any] = score_candidates
    refine: Callable[..., Refinement] = refine
    decoder: type[Decoder] = Decoder
    stop: Callable[..., StoppingCriteria] = StoppingCriteria
    replay: Callable[[Sequence[Any]], Replay] = Replay
    seeded: Callable[[int], Seeded] = Seeded
    race: Callable[[Probs, Any], int] = exponential_race
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: KERNELS)
    statistics: Callable[[], Statistics] = Statistics
    origins: Callable[[Round], tuple[str, ...]] = trace.token_origins
    logprobs: Callable[[Round], list[float]] = trace.compute_logprobs
    session: Callable[[Model], Session] = make_session
    view: Callable[..., View] = View
    forward: Callable[[Forward, Sequence[ForwardBatch]], list[Scores]] = pass_through
    exits: Callable[..., ExitTarget] = ExitTarget
    calibrate: Callable[..., Calibration] = calibrate
    p_value: PValue = hoeffding_p_value

    mask_predict: type[MaskPredictRefiner] = MaskPredictRefiner
    hide: Callable[[Tensor, Generator], Tensor] = hide_tokens
    fertile: type[NatRefiner] = NatRefiner
    fertile_loss: Callable[..., Tensor] = nat_loss
    reinforce: Callable[..., Tensor] = reinforce_surrogate
    align: Callable[..., Alignment] = align_words


PARTS = Parts()
"""The library's own."""
