"""`tinyspec bench peer`: compare greedy tokens with transformers', or with our own torch path's.

The comparison is in float32, on real questions. Two programs that sum in another order may still
part where the two best logits are nearly equal. So a mismatch is allowed only if the gap between
our two best logits is under `GAP`. It is listed, the peer's token is forced, and the comparison
goes on after it. The torch path runs under TINYSPEC_PURE=1 and where nothing is compiled. It sums
as torch does, so it is a peer like any other.
"""

from collections.abc import Callable
from typing import Any

import torch

from tinyspec import data, models
from tinyspec.bench.arms import decode_to_length
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.plain import decode_by_transformers
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.measure import count_agreeing
from tinyspec.bench.peers import load_transformers
from tinyspec.bench.plan import BenchSettings
from tinyspec.bench.settings import PeerSettings
from tinyspec.bench.tasks import spread_evenly, tokenize_question
from tinyspec.lm.model import Model

GAP = 1e-3  # logits closer than this count as a tie between two float32 programs
MOST_TIES = 0.01  # of all tokens that may be ties


Peer = Callable[[list[int], int], list[int]]
"""Decode greedily by another program: a prompt, and how many tokens."""


class TorchPathModel(Model):
    """A model that stays on the torch path."""

    def pack_weights(self) -> "TorchPathModel":
        return self


def load_transformers_decoder(model: Model, name: str) -> Peer:
    """Return a decoder of the same weights by transformers."""
    theirs = load_transformers(name, BenchSettings(name, dtype="float32"), model)
    return lambda ids, tokens: decode_by_transformers(theirs, ids, tokens)


def load_torch_decoder(model: Model, name: str) -> Peer:
    """Return a decoder of the same weights on our own torch path."""
    fresh = models.load(name, dtype="float32")
    weights = {key: weight.clone() for key, weight in fresh.weights.items()}
    unpacked = TorchPathModel(model.config, weights, name=name)
    return lambda ids, tokens: decode_to_length(unpacked, ids, tokens)[0]


PEERS = {"transformers": load_transformers_decoder, "torch": load_torch_decoder}


def list_mismatches(
    model: Model, theirs: Peer, ids: list[int], tokens: int, method: str
) -> list[dict[str, Any]]:
    """Return the mismatches: where, both tokens, and the gap of our two best logits there."""
    expected = theirs(ids, tokens)
    mismatches: list[dict[str, Any]] = []
    done = 0
    while done < tokens:
        got, _ = decode_to_length(model, [*ids, *expected[:done]], tokens - done, method)
        same = count_agreeing(got, expected[done:])
        if same == len(got):
            break
        at = done + same
        best = torch.topk(model.logits([*ids, *expected[:at]])[-1].double(), 2).values
        gap = float(best[0] - best[1])
        mismatches.append({"at": at, "ours": got[same], "theirs": expected[at], "gap": gap})
        done = at + 1  # force the peer's token and go on
    return mismatches


def measure_peer(given: PeerSettings, quiet: bool = False) -> dict[str, Any]:
    """Compare on questions of Spec-Bench, spread over it. `passed`: GAP and MOST_TIES hold."""
    name, tokens, methods = given.model, given.tokens, given.methods
    model = models.load(name, dtype="float32")
    theirs = PEERS[given.against](model, name)
    chosen = spread_evenly(data.read_spec_bench(), given.questions)
    rows: list[dict[str, Any]] = []
    title = f"{name} against {given.against}"
    with show_progress_bar(title, len(chosen) * len(methods), quiet) as tick:
        for question in chosen:
            ids = tokenize_question(model, question, tokens)
            for method in methods:
                rows.append(
                    {
                        "question": question.id,
                        "category": question.category,
                        "method": method,
                        "prompt": len(ids),
                        "mismatches": list_mismatches(model, theirs, ids, tokens, method),
                    }
                )
                tick()
    wrong = [m for row in rows for m in row["mismatches"]]
    total = tokens * len(rows)
    return stamp_result(
        {
            "model": name,
            "peer": given.against,
            "questions": len(chosen),
            "tokens": total,
            "gap": GAP,
            "identical": sum(not row["mismatches"] for row in rows),
            "mismatches": len(wrong),
            "passed": all(m["gap"] < GAP for m in wrong) and len(wrong) <= MOST_TIES * total,
            "rows": rows,
        }
    )


EXPERIMENT = Experiment(measure_peer)
