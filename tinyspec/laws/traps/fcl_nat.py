"""FCL-NAT (Guo et al. 2020): a curriculum from own words to copies, in which no answer is read."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.plain_lists import copy_evenly, run_plain_pass, word_logits, word_vector
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.laws.traps.parallel import (
    LENGTHS,
    ONE_PASS,
    best_length_is_chosen,
    small_translator,
    words_of_one_pass,
)
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import fcl_nat, nat
from tinyspec.nonautoregressive.fcl_nat import PACINGS, FclNatSettings, curriculum_states

LEAK = "no position sees the word that it must write (Guo et al. 2020)"
SHARE = "of a sentence that is drawn, a share alpha of the positions reads copies (Guo et al. 2020)"
SCHEDULE = "alpha rises from 0 to 1 by its formula, then the mask is opened (Guo et al. 2020)"
BOTH_ENDS = "the curriculum begins with the teacher's loss and ends with parallel's"

SOURCE = torch.tensor([[4, 6, 5, 7], [7, 5, 0, 0]])
TARGET = torch.tensor([[5, 8, 6, 0, 0], [4, 4, 7, 5, 8]])
GRID = [step / 20 for step in range(21)]  # of the progress
TOLERANCE = 1e-9

Plan = Callable[[FclNatSettings, float], tuple[float, bool]]


@collect_evidence(LEAK)
def no_answer_is_read(plan: Plan) -> Iterator[int]:
    """Change a target word, and check that the logits at its position stay, at any progress."""
    for pacing, progress in product(PACINGS, GRID):
        model, settings = small_translator(0), FclNatSettings(0.8, pacing)
        memory, now = model.encode(SOURCE), plan(settings, progress)

        def logits(target: Tensor, now: Any = now, model: Any = model, memory: Any = memory) -> Any:
            draws = torch.Generator().manual_seed(1)
            states, _ = curriculum_states(model, SOURCE, target, memory, now, draws)
            return model.logits(states)

        before = logits(TARGET)
        for row, length in enumerate((TARGET != 0).sum(dim=1).tolist()):
            for t in range(length):
                changed = TARGET.clone()
                changed[row, t] = 4 + (changed[row, t] - 3) % 5
                moved = float((logits(changed)[row, t] - before[row, t]).abs().max())
                if moved > TOLERANCE:
                    case = {"target": TARGET[row].tolist(), "position": t, "pacing": pacing}
                    case |= {"progress": progress, "alpha": round(now[0], 2), "open": now[1]}
                    accuse(LEAK, 0.0, moved, **case, of="change of its logits")
                yield 0


@collect_evidence(SHARE)
def shares_are_copied(mix: Callable[..., Tensor]) -> Iterator[int]:
    """Check what every row of a padded batch reads, and how often a sentence is drawn."""
    rows, width = 600, 7
    lengths = torch.arange(rows)[:, None] % width + 1
    slots = torch.arange(width) < lengths
    before, copies = torch.zeros(rows, width).long(), torch.ones(rows, width).long()
    for alpha in (0.0, 0.3, 0.5, 0.9, 1.0):
        read = mix(before, copies, slots, alpha, torch.Generator().manual_seed(0))
        drawn, wanted = 0, 0
        for row, (length,) in zip(read.tolist(), lengths.tolist(), strict=True):
            count, case = round(alpha * length), {"alpha": alpha, "words": length}
            if sum(row) not in (0, count) or any(row[length:]):
                accuse(SHARE, f"0 or {count} copies of {length} words", row, **case)
            drawn, wanted = drawn + (sum(row) > 0), wanted + (count > 0)
            yield 0
        spread = 5 * math.sqrt(alpha * (1 - alpha) * wanted)
        if abs(drawn - alpha * wanted) > spread:
            accuse(SHARE, alpha * wanted, drawn, alpha=alpha, of="sentences that are drawn")


def alpha_by_hand(pacing: str, c: float) -> float:
    """Return alpha when a share c of the curriculum is over."""
    units = 1 + 199 * c
    return {
        "log": math.log(units, 200),
        "linear": c,
        "ladder": int(10 * c) / 10,
        "invlog": 1 - math.log(201 - units, 200),
    }[pacing]


@collect_evidence(SCHEDULE)
def alpha_rises(plan: Plan) -> Iterator[int]:
    """Check alpha and the mask over a whole training."""
    for pacing, share, progress in product(PACINGS, (0.0, 0.25, 1.0), GRID):
        over = progress >= share
        expected = 1.0 if over else alpha_by_hand(pacing, progress / share)
        alpha, is_open = plan(FclNatSettings(share, pacing), progress)
        case = {"pacing": pacing, "curriculum": share, "progress": progress}
        if abs(alpha - expected) > TOLERANCE:
            accuse(SCHEDULE, expected, alpha, **case, of="alpha")
        expect_equal(SCHEDULE, over, is_open, **case, of="whether the mask is open")
        yield 0


def nll_by_hand(model: Seq2Seq, source: list[int], target: list[int], is_open: bool) -> float:
    """Return - log p of the words (and of their end, if they are written from left to right)."""
    if is_open:
        inputs, labels = copy_evenly(source, len(target)), target
    else:
        inputs, labels = [model.config.bos, *target], [*target, model.config.eos]
    vectors, total = [word_vector(model, word) for word in inputs], 0.0
    sees = (lambda t, s: t != s) if is_open else (lambda t, s: s <= t)
    for state, label in zip(run_plain_pass(model, source, vectors, sees), labels, strict=True):
        row = torch.tensor(word_logits(model, state), dtype=torch.float64)
        total -= float(row.log_softmax(dim=-1)[label])
    lengths = model.length_logits(model.encode(torch.tensor([source])))[0]
    return total - float(lengths.log_softmax(dim=-1)[len(target)])


@collect_evidence(BOTH_ENDS)
def loss_at_both_ends(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a padded batch against each pair alone."""
    pairs = [
        ([x for x in source if x], [y for y in target if y])
        for source, target in zip(SOURCE.tolist(), TARGET.tolist(), strict=True)
    ]
    for seed, plan in product(range(3), ((0.0, False), (1.0, True))):
        model, labels = small_translator(seed), 8 if plan[1] else 10
        expected = sum(nll_by_hand(model, *pair, plan[1]) for pair in pairs) / labels
        got: Any = float(loss(model, (SOURCE, TARGET), torch.Generator().manual_seed(0), plan))
        if abs(got - expected) > TOLERANCE:
            accuse(BOTH_ENDS, expected, got, alpha=plan[0], pairs=pairs, reader=seed)
        yield 0


TRAPS = [
    Trap(LEAK, no_answer_is_read, lambda: fcl_nat.plan_step),
    Trap(SHARE, shares_are_copied, lambda: fcl_nat.mix_batch),
    Trap(SCHEDULE, alpha_rises, lambda: fcl_nat.plan_step),
    Trap(BOTH_ENDS, loss_at_both_ends, lambda: fcl_nat.fcl_nat_loss),
    Trap(ONE_PASS, words_of_one_pass, refine_card("fcl_nat")),
    Trap(LENGTHS, best_length_is_chosen, refine_card("fcl_nat")),
]

_fcl = partial(Toy, technique="fcl_nat")

TOYS = [
    _fcl(
        "the mask is opened at alpha = .45, as in the released code",
        "alpha >= settings.flip",
        "alpha >= 0.45",
        fcl_nat.plan_step,
        law=LEAK,
    ),
    _fcl(
        "the next position is seen",
        "group_mask(inputs.shape[1], 1, inputs.device)",
        "group_mask(inputs.shape[1], 2, inputs.device)",
        fcl_nat.curriculum_states,
        law=LEAK,
    ),
    _fcl(
        "words that are not shifted",
        "mix_batch(before[:, :-1], copies",
        "mix_batch(target, copies",
        fcl_nat.curriculum_states,
        law=LEAK,
    ),
    _fcl(
        "a share of all positions of a batch, padding included",
        "draws.masked_fill(~slots, 2)",
        "draws",
        fcl_nat.mix_batch,
        law=SHARE,
    ),
    _fcl(
        "every sentence is drawn",
        "(coins < alpha) & (rank < counts)",
        "rank < counts",
        fcl_nat.mix_batch,
        law=SHARE,
    ),
    _fcl(
        "a warm start under the name of a curriculum",
        "if progress >= settings.curriculum:",
        "if True:",
        fcl_nat.plan_step,
        law=SCHEDULE,
    ),
    _fcl(
        "no end while the text is written from left to right",
        "dropout), labels",
        "dropout), labels.masked_fill(labels == model.config.eos, pad)",
        fcl_nat.curriculum_states,
        law=BOTH_ENDS,
    ),
    _fcl(
        "a causal mask to the last",
        "return decode_parallel(model, mixed, slots, memory, dropout), target",
        """causal = torch.ones(mixed.shape[1], mixed.shape[1], dtype=torch.bool).tril()
return model.decode(model.embed(mixed), memory, causal, dropout, slots), target""",
        fcl_nat.curriculum_states,
        law=BOTH_ENDS,
    ),
    _fcl(
        "decoding from left to right",
        "others = ~torch.eye(read.shape[1], dtype=torch.bool, device=read.device)",
        "others = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).tril(-1)",
        nat.decode_parallel,
        law=ONE_PASS,
    ),
    _fcl(
        "the likeliest lengths under the name of those around",
        "teacher, lengths, around)",
        "teacher, lengths)",
        fcl_nat.fcl_nat,
        law=LENGTHS,
    ),
]
