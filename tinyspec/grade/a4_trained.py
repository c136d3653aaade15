"""Laws of assignment A4 on trained heads, and what a training needs: texts, and a place to save.

The submission's training runs on the student's machine. The grader reads the heads that were saved
and measures them on texts that the storyteller writes for the grader alone.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyspec import models
from tinyspec.grade.a4_heads import Text, Weights, read_weights
from tinyspec.grade.task import Cases, Function, GradedLaw, Task, describe_result, graded_law
from tinyspec.laws.evidence import accuse
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.heads import RANKED, RANKS, FrozenTarget, HeadFile, freeze_target, write_head
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.medusa import MedusaSettings, count_heads, initialize_heads
from tinyspec.technique import TrainingBatch, find_technique
from tinyspec.training.heads import measure_ranks
from tinyspec.training.outputs import OutputSettings, TargetPrompt, sample_outputs

TRAINED = "the heads were trained for the storyteller"
FIRST_RIGHT = "head 0 has learned: its first candidate is right often enough on new texts"
SECOND_RIGHT = "head 1 has learned, too"

TARGET = "storyteller"
CHECKSUM = "target"  # the name of the checksum among the tensors
TOKENS = 96  # of a text
BATCH = 16  # texts that are written, or measured on, together
HELD_OUT = 64  # texts that heads are measured on in the public run
HELD_OUT_SEED = 1_000_000  # of the first of them; a training uses small seeds
LEAST_RIGHT = (0.11, 0.085)  # of head 0 and head 1
MAX_HEADS = 8


# ---------------------------------------------------------------------- what a training needs


def write_texts(target: Model, count: int, seed: int) -> list[Text]:
    """Return texts that a target writes from nothing, and its states on them.

    Both are cut to equal lengths: ids [T] and states [T, d] in float32. Texts that end early are
    left out, and others are written in their place.
    """
    prompt = TargetPrompt([next(iter(target.config.eos), 0)])
    asking = OutputSettings(tokens=TOKENS, top=1, seed=seed)
    texts, number, layers = list[Text](), 0, (target.config.n_layers,)
    while len(texts) < count:
        for output in sample_outputs(target, [prompt] * BATCH, asking, number):
            if len(output.ids) == TOKENS + 1:
                session = target.session()
                states = session.extend(output.ids.tolist(), layers).hidden[0]
                texts.append((output.ids[:-1].long(), states.float().clone()))
        number += BATCH
    return texts[:count]


def initialize_weights(target: Model, heads: int) -> Weights:
    """Return untrained heads for a target: blocks of zeros, and its output matrix in float32."""
    frozen = freeze_target(target, dtype=torch.float32, layers=False)
    settings = MedusaSettings(heads=heads, shared_rows=True)
    return {"rows": frozen.head, **initialize_heads(frozen, settings, 0)}


def save_heads(
    folder: Path, target: Model, weights: Weights, table: Sequence[Sequence[float]]
) -> None:
    """Write heads.pt, which the grader reads, and head/, which `--head` loads, into a folder.

    table  [heads][ranks] how often each candidate is right
    """
    blocks = {name: w.to(torch.bfloat16) for name, w in weights.items() if name != "rows"}
    check = embedding_checksum(target.weights["embed"])
    torch.save({**blocks, CHECKSUM: torch.tensor(check)}, folder / "heads.pt")
    ranks = torch.zeros(count_heads(blocks), RANKED)
    for depth, row in enumerate(table):
        ranks[depth, : len(row)] = torch.tensor([float(x) for x in row[:RANKED]])
    settings = vars(MedusaSettings(heads=count_heads(blocks), shared_rows=True))
    file = HeadFile("medusa", target.name, check, settings, {}, {**blocks, RANKS: ranks})
    write_head(folder / "head", file)


# ---------------------------------------------------------------------- the laws


@lru_cache(maxsize=2)
def load_held_out(cases: Cases) -> tuple[int, FrozenTarget, list[TrainingBatch]]:
    """Return the storyteller's checksum, its parts, and the texts that heads are measured on."""
    target = models.load_once(TARGET)
    batches = list[TrainingBatch]()
    texts = write_texts(target, HELD_OUT * cases.times, HELD_OUT_SEED + cases.seed)
    for at in range(0, len(texts), BATCH):
        ids, states = (torch.stack(x) for x in zip(*texts[at : at + BATCH], strict=True))
        nothing = ids.new_zeros(len(ids), 0)
        is_answer = torch.ones_like(ids, dtype=torch.bool)
        batches.append(TrainingBatch(ids, is_answer, states[:, None], nothing, nothing))
    frozen = freeze_target(target, dtype=torch.float32, layers=False)
    return embedding_checksum(target.weights["embed"]), frozen, batches


def read_heads(law: str, got: Any, cases: Cases) -> Weights:
    """Return the blocks of heads that came back; accuse what is none, or is another target's."""
    check, target, _ = load_held_out(cases)
    found: Any = got.get(CHECKSUM) if isinstance(got, dict) else None
    if not isinstance(found, Tensor):
        accuse(law, f"tensors, and among them {CHECKSUM!r}", describe_result(got))
    if found.numel() != 1 or int(found) != check:
        accuse(law, f"{CHECKSUM}: {check}", f"{CHECKSUM}: {found.tolist()}")
    heads = count_heads({name: w for name, w in got.items() if isinstance(w, Tensor)})
    if not 2 <= heads <= MAX_HEADS:
        accuse(law, f"2 to {MAX_HEADS} heads", f"heads: {heads}")
    like = initialize_heads(target, MedusaSettings(heads=heads, shared_rows=True), 0)
    return read_weights(law, got, like)


@graded_law(3, TRAINED)
def heads_fit_the_target(trained_heads: Function, cases: Cases) -> Iterator[bool]:
    """Check names, shapes and the checksum."""
    yield bool(read_heads(TRAINED, trained_heads(), cases))


def learned_law(points: int, sentence: str, depth: int) -> GradedLaw:
    """Return the law that a head is right often enough."""

    @graded_law(points, sentence, TRAINED)
    def look(trained_heads: Function, cases: Cases) -> Iterator[bool]:
        weights = read_heads(sentence, trained_heads(), cases)
        _, target, batches = load_held_out(cases)
        trained = find_technique("medusa").trained
        assert trained is not None
        with torch.no_grad():
            table, _ = measure_ranks(trained, weights, target, batches)
        share, least = float(table[depth, 0]), LEAST_RIGHT[depth]
        if not share >= least:
            what = f"first candidate of head {depth} right: "
            texts = sum(len(batch.ids) for batch in batches)
            case = {"texts of the storyteller": texts, "heads": len(table)}
            accuse(sentence, f"{what}{least:.1%} at least", f"{what}{share:.1%}", **case)
        yield True

    return look


first_head_has_learned = learned_law(6, FIRST_RIGHT, 0)
second_head_has_learned = learned_law(3, SECOND_RIGHT, 1)


TRAINED_HEADS_TASK = Task(
    "trained_heads",
    "A4.8 Heads of the storyteller",
    (heads_fit_the_target, first_head_has_learned, second_head_has_learned),
)
