"""Train your heads for the storyteller: python train.py, less than five minutes on two cores.

The storyteller writes texts, and its states on them are kept. Your `fit_heads` trains on most of them, your `rank_table`
measures on the others. The heads are saved twice. The grader reads heads.pt, and tinyspec loads the folder head/:

    tinyspec generate --model storyteller --method medusa --head head "Once upon a time" --stats

Change the numbers if you like. Texts are written anew in every run; fewer of them are a quicker trial.
"""

import importlib
from pathlib import Path

import torch

from tinyspec import models
from tinyspec.grade.a4_trained import initialize_weights, save_heads, write_texts

TEXTS = 1000
HELD = 40  # texts that are measured on
BATCH = 16  # texts a step
HEADS = 3
STEPS = 800
RATE = 1e-3
RANKS = 10  # candidates of each head that are measured


def main() -> None:
    submission = importlib.import_module("submission")
    target = models.load("storyteller")
    print(f"the storyteller writes {TEXTS} texts")
    texts = write_texts(target, TEXTS, seed=0)
    held, seen = texts[:HELD], texts[HELD:]
    batches = []
    for at in range(0, len(seen) - BATCH + 1, BATCH):
        ids, states = zip(*seen[at : at + BATCH], strict=True)
        batches.append((torch.stack(ids), torch.stack(states)))
    print(f"{STEPS} steps on {len(batches)} batches")
    weights = submission.fit_heads(initialize_weights(target, HEADS), batches, STEPS, RATE)
    with torch.no_grad():
        table = submission.rank_table(weights, held, RANKS)
    for depth, row in enumerate(table):
        first, five = row[0], sum(row[:5])
        print(f"head {depth}: first candidate right {first:.1%}, among the first five {five:.1%}")
    save_heads(Path(), target, weights, table)
    print("saved: heads.pt for the grader, head/ for tinyspec")


if __name__ == "__main__":
    main()
