"""Laws of assignment A4 on heads: what a head says, what it is trained on, and how.

The oracle computes everything from the definitions, with numbers that are small enough to follow.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from tinyspec.grade.task import Cases, Function, GradedLaw, Task, describe_result, graded_law
from tinyspec.laws.evidence import accuse
from tinyspec.lm.config import Config
from tinyspec.lm.heads import freeze_target
from tinyspec.lm.model import Model

MEDUSA = "Medusa, arXiv 2401.10774"
BEGIN = "a head whose block is zero says what the target's own head says"
BLOCK = f"a head says rows (h + SiLU(W h + b)) ({MEDUSA})"
PERFECT = "heads that are certain of the right tokens have no loss"
LOSS = f"the loss is the sum of 0.8^(depth + 1) times the mean cross-entropy ({MEDUSA}, equation 1)"
SHORT = "a head without any position adds nothing"
FITTED = "heads that are fitted to texts guess all of their tokens"
FROZEN = "training changes the blocks and nothing else"

DECAY = 0.8  # of a head's loss against the head before it
CLOSE = 1e-6  # by how much a number may be off: float32 in between is no mistake
CERTAIN = 60.0  # the logit of a token, the others having 0 or 1
FIT_STEPS, FIT_RATE = 300, 0.02

Weights = dict[str, Tensor]
Text = tuple[Tensor, Tensor]
"""Token ids [T] and states [T, d]."""


# ---------------------------------------------------------------------- tools


def name_block(depth: int, part: str) -> str:
    """Return the name of a head's weight or bias."""
    return f"blocks.{depth}.layers.0.{part}"


def compute_logits(weights: Weights, h: Tensor, depth: int) -> Tensor:
    """Return the logits [..., V] of a head by its definition."""
    inner = h @ weights[name_block(depth, "weight")].T + weights[name_block(depth, "bias")]
    return (h + inner * inner.sigmoid()) @ weights["rows"].T


def make_generator(*named: Any) -> torch.Generator:
    """Return a generator for these names."""
    return torch.Generator().manual_seed(Random(f"{named}").randrange(2**31))


def draw_heads(
    heads: int, d: int, vocabulary: int, generator: torch.Generator, is_zero: bool = False
) -> Weights:
    """Return weights of halves from -2 to 2; blocks that are zero, if so asked."""
    shapes: dict[str, tuple[int, ...]] = {"rows": (vocabulary, d)}
    for depth in range(heads):
        shapes |= {name_block(depth, "weight"): (d, d), name_block(depth, "bias"): (d,)}
    drawn = {name: draw_halves(shape, generator) for name, shape in shapes.items()}
    blank = [name for name in drawn if is_zero and name != "rows"]
    return drawn | {name: torch.zeros_like(drawn[name]) for name in blank}


def draw_halves(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return multiples of 1/2 from -2 to 2, of float64."""
    return torch.randint(-4, 5, tuple(shape), generator=generator).double() / 2


def show_tensor(tensor: Tensor) -> Any:
    """Return a tensor as numbers in lists, rounded for a reader."""
    if tensor.dim():
        return [show_tensor(part) for part in tensor]
    number = tensor.item()
    return round(number, 4) if isinstance(number, float) else number


def show_all(**case: Any) -> dict[str, Any]:
    """Return a case for a counterexample: tensors in lists, a dictionary as its entries."""
    shown: dict[str, Any] = {}
    for name, value in case.items():
        parts = value if isinstance(value, dict) else {name: value}
        shown |= {k: show_tensor(x) if isinstance(x, Tensor) else x for k, x in parts.items()}
    return shown


def expect_tensor(law: str, expected: Tensor, got: Any, **case: Any) -> None:
    """Accuse unless this is a tensor of the expected shape and numbers."""
    what = f"a tensor of shape {list(expected.shape)}"
    if not isinstance(got, Tensor):
        accuse(law, what, describe_result(got), **show_all(**case))
    if got.shape != expected.shape:
        accuse(law, what, f"one of shape {list(got.shape)}", **show_all(**case))
    if not torch.allclose(got.double(), expected, rtol=CLOSE, atol=CLOSE):
        accuse(law, show_tensor(expected), show_tensor(got), **show_all(**case))


# ---------------------------------------------------------------------- what a head says


def draw_head_inputs(cases: Cases, is_zero: bool) -> Iterator[tuple[Weights, Tensor, int]]:
    """Yield weights, states and a head: one state first, then several at once."""
    for number in range(20 * cases.times):
        heads, d, leading = 1 + number // 8 % 3, 1 + number // 4 % 4, [(), (3,), (2, 3)][number % 3]
        generator = make_generator(cases.seed, "states", number)
        weights = draw_heads(heads, d, 2 + number % 3, generator, is_zero)
        for depth in range(heads):
            yield weights, draw_halves((*leading, d), generator), depth


@graded_law(3, BEGIN)
def untrained_head_is_the_targets(head_logits: Function, cases: Cases) -> Iterator[bool]:
    """Check blocks of zeros: there the state itself must come through."""
    for weights, h, depth in draw_head_inputs(cases, is_zero=True):
        got = head_logits(weights, h, depth)
        expect_tensor(BEGIN, h @ weights["rows"].T, got, h=h, depth=depth, weights=weights)
        yield True


@graded_law(7, BLOCK)
def head_adds_its_block(head_logits: Function, cases: Cases) -> Iterator[bool]:
    """Check that a head uses its own block, in the right direction, with bias and SiLU."""
    for weights, h, depth in draw_head_inputs(cases, is_zero=False):
        expected, got = compute_logits(weights, h, depth), head_logits(weights, h, depth)
        expect_tensor(BLOCK, expected, got, h=h, depth=depth, weights=weights)
        yield True


# ---------------------------------------------------------------------- what it is trained on


def make_certain(ids: Sequence[int], heads: int) -> tuple[Weights, Tensor]:
    """Return heads that guess every token of a text of different tokens, and states [T, T] for it.

    State t is 1 at place t, and the target's matrix is the identity. So column t of a block's
    matrix says what its head guesses at position t.
    """
    size = len(ids)
    weights: Weights = {"rows": torch.eye(size, dtype=torch.float64)}
    for depth in range(heads):
        block = torch.zeros(size, size, dtype=torch.float64)
        for position, token in enumerate(ids[depth + 2 :]):
            block[token, position] = CERTAIN
        weights[name_block(depth, "weight")] = block
        weights[name_block(depth, "bias")] = torch.zeros(size, dtype=torch.float64)
    return weights, torch.eye(size, dtype=torch.float64)


@graded_law(6, PERFECT)
def perfect_heads_have_no_loss(medusa_loss: Function, cases: Cases) -> Iterator[bool]:
    """Check which token a position is trained on: any other token costs about `CERTAIN`."""
    for number in range(12 * cases.times):
        random = Random(f"{cases.seed} perfect {number}")
        size = 3 + number % 5
        heads = 1 + number // 4 % min(3, size - 2)
        ids = random.sample(range(size), size)
        weights, states = make_certain(ids, heads)
        guesses = {f"head {i} is certain of": ids[i + 2 :] for i in range(heads)}
        got = medusa_loss(weights, torch.tensor([ids]), states[None])
        expect_tensor(PERFECT, torch.zeros((), dtype=torch.float64), got, text=ids, **guesses)
        yield True


def sum_entropies(weights: Weights, ids: Tensor, states: Tensor, heads: int) -> Tensor:
    """Return the loss [] position by position; heads without any position add nothing."""
    loss = torch.zeros((), dtype=torch.float64)
    for depth in range(heads):
        entropies = [
            -compute_logits(weights, state, depth).log_softmax(-1)[text[position + depth + 2]]
            for text, rows in zip(ids, states, strict=True)
            for position, state in enumerate(rows[: max(len(text) - depth - 2, 0)])
        ]
        if entropies:
            loss = loss + DECAY ** (depth + 1) * torch.stack(entropies).mean()
    return loss


def draw_batches(cases: Cases, is_short: bool) -> Iterator[tuple[Weights, Tensor, Tensor, int]]:
    """Yield weights, ids [B, T], states [B, T, d], and the number of heads.

    Short texts leave the last head, or all, without a position.
    """
    for number in range(12 * cases.times):
        generator = make_generator(cases.seed, "batches", number, is_short)
        heads, texts, d, vocabulary = 1 + number % 3, 1 + number // 3 % 2, 1 + number // 6 % 2, 3
        length = 2 + number // 3 % heads if is_short else 2 + heads + number // 3 % 3
        ids = torch.randint(vocabulary, (texts, length), generator=generator)
        states = draw_halves((texts, length, d), generator)
        yield draw_heads(heads, d, vocabulary, generator), ids, states, heads


def loss_law(points: int, sentence: str) -> GradedLaw:
    """Return the law of the loss: SHORT for texts too short for a head, LOSS for others."""

    @graded_law(points, sentence)
    def look(medusa_loss: Function, cases: Cases) -> Iterator[bool]:
        for weights, ids, states, heads in draw_batches(cases, sentence is SHORT):
            expected = sum_entropies(weights, ids, states, heads)
            got = medusa_loss(weights, ids, states)
            expect_tensor(sentence, expected, got, ids=ids, states=states, weights=weights)
            yield True

    return look


loss_is_the_sum = loss_law(7, LOSS)
short_texts_add_nothing = loss_law(3, SHORT)


# ---------------------------------------------------------------------- training


def plant_texts(seed: int) -> tuple[Weights, list[tuple[Tensor, Tensor]]]:
    """Return untrained heads for a small transformer, and two batches: a text of 8 tokens each.

    The tokens of a text all differ, and the second text is the first one backwards. So the states
    of no two positions are alike, and a state has more numbers than there are positions.
    """
    config = Config(
        vocab_size=8, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48,
        max_positions=16,
    )  # fmt: skip
    model, random = Model.random(config, seed, torch.float64, scale=0.3), Random(seed)
    weights = draw_heads(2, config.d_model, config.vocab_size, make_generator(seed), is_zero=True)
    weights["rows"] = freeze_target(model, layers=False).head
    batches = []
    text = random.sample(range(config.vocab_size), config.vocab_size)
    for order in (text, text[::-1]):
        ids = torch.tensor([order])
        states = model.torch_blocks().hidden_states(ids, (config.n_layers,))[:, 0]
        batches.append((ids, states.detach()))
    return weights, batches


@graded_law(9, FITTED)
def fitted_heads_guess_the_texts(fit_heads: Function, cases: Cases) -> Iterator[bool]:
    """Check every head at every position of both texts, after the training."""
    for seed in range(cases.seed, cases.seed + min(2 * cases.times, 6)):
        weights, batches = plant_texts(seed)
        fitted = read_weights(FITTED, fit_heads(weights, batches, FIT_STEPS, FIT_RATE), weights)
        for ids, states in batches:
            for depth in range(2):
                expected = ids[0, depth + 2 :]
                got = compute_logits(fitted, states[0], depth).argmax(-1)[: len(expected)]
                case = {"text": ids[0].tolist(), "steps": FIT_STEPS, "rate": FIT_RATE}
                if got.tolist() != expected.tolist():
                    case["head"] = depth
                    accuse(FITTED, expected.tolist(), got.tolist(), **case)
                yield True


@graded_law(3, FROZEN)
def training_keeps_the_target(fit_heads: Function, cases: Cases) -> Iterator[bool]:
    """Check that the target's matrix comes back as it was, and that every block moved."""
    for steps in (1, 3):
        weights, batches = plant_texts(cases.seed)
        fitted = read_weights(FROZEN, fit_heads(weights, batches, steps, FIT_RATE), weights)
        for name, before in weights.items():
            has_moved = not torch.equal(fitted[name], before)
            if has_moved is (name == "rows"):
                words = ["changed", "as it was"]
                expected, got = words if name != "rows" else words[::-1]
                accuse(FROZEN, f"{name}: {expected}", f"{name}: {got}", steps=steps)
        yield True


def read_weights(law: str, got: Any, like: Weights) -> Weights:
    """Return what came back if it has the tensors of other weights; accuse it otherwise."""
    if not isinstance(got, dict):
        accuse(law, "weights: a dictionary of tensors", describe_result(got))
    for name, tensor in like.items():
        found, shape = got.get(name), list(tensor.shape)
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            accuse(law, f"{name}: a tensor of shape {shape}", show_all(found=found)["found"])
        if not bool(found.isfinite().all()):
            accuse(law, f"{name}: numbers", f"{name}: a number that is not finite")
    return {name: got[name].to(tensor.dtype) for name, tensor in like.items()}


HEAD_LOGITS_TASK = Task(
    "head_logits", "A4.1 A head", (untrained_head_is_the_targets, head_adds_its_block)
)
MEDUSA_LOSS_TASK = Task(
    "medusa_loss",
    "A4.2 The loss",
    (perfect_heads_have_no_loss, loss_is_the_sum, short_texts_add_nothing),
    uses=("head_logits",),
)
FIT_HEADS_TASK = Task(
    "fit_heads",
    "A4.3 Training",
    (fitted_heads_guess_the_texts, training_keeps_the_target),
    uses=("head_logits", "medusa_loss"),
)
