"""`tinyspec bench peer`: greedy tokens equal to transformers', in float32, on real questions; or to
our own torch path's.

Greedy equality against a peer is a float32 property, and two programs that sum in another order may
still part where the two best logits all but tie. A mismatch is therefore allowed only where the gap
between our two best logits is under `GAP`; it is listed, the peer's token is forced, and the
comparison goes on behind it. The torch path is a peer like any other: it is what runs under
TINYSPEC_PURE=1 and where nothing is compiled, and it sums as torch does.
"""

from collections.abc import Callable
from typing import Any

import torch

from tinyspec import data, models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.plain import (
    decode,
    find_model_folder,
    load_transformers_model,
    peer_decode,
)
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.settings import PeerSettings
from tinyspec.generation import prompt_ids
from tinyspec.lm.model import Model

GAP = 1e-3  # logits closer than this count as a tie between two float32 programs
SHARE = 0.01  # of all tokens that may be ties


Peer = Callable[[list[int], int], list[int]]
"""Greedy decoding by somebody else: a prompt and how many tokens."""


class TorchPathModel(Model):
    """A model that stays on the torch path."""

    def pack(self) -> "TorchPathModel":
        return self


def load_transformers_decoder(name: str) -> Peer:
    """transformers' model of the same folder."""
    theirs = load_transformers_model(find_model_folder(name), torch.float32)
    return lambda ids, tokens: peer_decode(theirs, ids, tokens)


def load_torch_decoder(name: str) -> Peer:
    """Our own model by torch's products."""
    model = models.load(name, dtype="float32")
    unpacked = TorchPathModel(
        model.config, {key: weight.clone() for key, weight in model.weights.items()}, name=name
    )
    return lambda ids, tokens: decode(unpacked, ids, tokens)


PEERS = {"transformers": load_transformers_decoder, "torch": load_torch_decoder}


def list_mismatches(
    model: Model, theirs: Peer, ids: list[int], tokens: int, method: str
) -> list[dict[str, Any]]:
    """The mismatches over `tokens` greedy tokens: where, both tokens, and the gap of our two best
    logits there.
    """
    expected = theirs(ids, tokens)
    mismatches: list[dict[str, Any]] = []
    done = 0
    while done < tokens:
        got = decode(model, [*ids, *expected[:done]], tokens - done, method)
        same = next(
            (i for i, (a, b) in enumerate(zip(got, expected[done:], strict=True)) if a != b), None
        )
        if same is None:
            break
        at = done + same
        best = torch.topk(model.logits([*ids, *expected[:at]])[-1].double(), 2).values
        gap = float(best[0] - best[1])
        mismatches.append({"at": at, "ours": got[same], "theirs": expected[at], "gap": gap})
        done = at + 1  # force the peer's token and go on
    return mismatches


def measure_peer(given: PeerSettings, quiet: bool = False) -> dict[str, Any]:
    """Compare on Spec-Bench questions, spread over its categories. `passed` is the verdict under
    the rule above.
    """
    name, questions, tokens, methods = given.model, given.questions, given.tokens, given.methods
    model = models.load(name, dtype="float32")
    theirs = PEERS[given.against](name)
    bank = data.read_spec_bench()
    step = len(bank) / questions
    chosen = [bank[int(i * step)] for i in range(questions)]
    rows: list[dict[str, Any]] = []
    with show_progress(f"{name} against {given.against}", questions * len(methods), quiet) as tick:
        for question in chosen:
            ids = prompt_ids(model, question.turns[0], chat=model.tokenizer.has_chat)
            ids = ids[-(model.config.max_positions - tokens) :]
            for method in methods:
                row = {
                    "question": question.id,
                    "category": question.category,
                    "method": method,
                    "prompt": len(ids),
                }
                rows.append(
                    {**row, "mismatches": list_mismatches(model, theirs, ids, tokens, method)}
                )
                tick()
    wrong = [m for row in rows for m in row["mismatches"]]
    total = tokens * len(rows)
    return stamp_result(
        {
            "model": name,
            "peer": given.against,
            "questions": questions,
            "tokens": total,
            "gap": GAP,
            "identical": sum(not row["mismatches"] for row in rows),
            "mismatches": len(wrong),
            "passed": all(m["gap"] < GAP for m in wrong) and len(wrong) <= SHARE * total,
            "rows": rows,
        }
    )


EXPERIMENT = Experiment(measure_peer)
