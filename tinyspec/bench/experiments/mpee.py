"""`tinyspec bench mpee`: ask who wrote a passage, with fewer layers, fewer tokens, or both.

The passages are those of the classics' authors with three books or more. One book of each is held
out. A classifier is trained on the others; the share rho of the tokens that go on is drawn anew in
each step. It is trained again without each of three parts:

    no memory        each classifier reads its own layer alone
    no distillation  each classifier learns from the labels alone
    whole texts      rho is 1 in each step

On the held-out books, all thresholds tau and shares rho are tried. Operations are counted by
`mpee.count_flops`, as shares of the whole encoder's. For a budget, the best setting within it
is chosen on every second passage and judged on the others: by layers alone (rho = 1), by tokens
alone (tau = 1), and by both.
"""

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec import data, models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.report import Column, Grid, make_grid
from tinyspec.bench.settings import MpeeSettings
from tinyspec.early_exit.mpee import (
    ALPHA,
    MpeeClassifier,
    count_flops,
    count_tokens,
    mpee_loss,
)
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training.corpus import clean_book
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import train

BOOKS = 3  # of an author, at least: two to train on, one held out
CHARACTERS = 300_000  # of each book
SHORTEST = 10_000  # characters of a book that is held out
BATCH = 64  # passages that are classified together
WAYS = ("layers", "tokens", "both")
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "MPEE": {},
    "no memory": {"is_recycled": False},
    "no distillation": {"alpha": 0.0},
    "whole texts": {"rhos": (1.0,)},
}
INFERENCES: Mapping[str, Mapping[str, Any]] = {
    "fused, by the memory": {},
    "dropped, by the memory": {"is_fused": False},
    "fused, by the layer's attention": {"beta": 0.0},
}
"""How tokens are cut at inference, in the classifier that was trained as MPEE."""


class Passages(NamedTuple):
    """Passages of some authors, [n, passage], and who wrote each, [n]."""

    ids: Tensor
    labels: Tensor


class AuthorshipTask(NamedTuple):
    """Who wrote a passage: names of the authors, and the passages of their books."""

    authors: Sequence[str]
    training: Sequence[Tensor]  # of each author, [n, passage]
    held: Passages


def make_authorship_task(
    given: MpeeSettings, books: Sequence[data.Book], tokenizer: Tokenizer
) -> AuthorshipTask:
    """Return the task on these books. Raises TinyspecError if a book has too few passages."""
    by_author = defaultdict[str, list[data.Book]](list)
    for book in books:
        by_author[book.author].append(book)
    authors = sorted(name for name, own in by_author.items() if len(own) >= BOOKS)
    if len(authors) < 2:
        raise TinyspecError(f"two authors must have {BOOKS} books or more")
    training, held = list[Tensor](), list[Tensor]()

    def cut(book: data.Book) -> Tensor:
        ids = torch.tensor(tokenizer.encode(clean_book(book.text)[:CHARACTERS]))
        n = len(ids) // given.passage
        return ids[: n * given.passage].view(n, given.passage)

    for author in authors:
        *others, last = sorted(by_author[author], key=lambda book: book.title)
        training.append(torch.cat([cut(book) for book in others]))
        passages = cut(last)
        if len(passages) < given.tests:
            raise TinyspecError(
                f"{last.title} has {len(passages)} passages of {given.passage} tokens: ask for "
                "fewer --tests"
            )
        held.append(passages[torch.linspace(0, len(passages) - 1, given.tests).long()])
    labels = torch.arange(len(authors)).repeat_interleave(given.tests)
    return AuthorshipTask(authors, training, Passages(torch.cat(held), labels))


def fit_classifier(
    given: MpeeSettings, task: AuthorshipTask, vocabulary: int, folder: Path, **changes: Any
) -> MpeeClassifier:
    """Train a classifier.

    changes  alpha and rhos of the training, and what `MpeeClassifier` takes
    """
    alpha, rhos = changes.pop("alpha", ALPHA), changes.pop("rhos", given.rhos)
    config = Config(
        vocab_size=vocabulary,
        d_model=given.width,
        n_layers=given.layers,
        n_heads=given.width // 32,
        n_kv_heads=given.width // 32,
        head_dim=32,
        d_ff=2 * given.width,
        max_positions=given.passage + 1,
        positions="learned",
    )
    model = MpeeClassifier.create(config, len(task.authors), given.seed, **changes)

    def batches(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw as many passages of each author, so that none is the likelier answer."""
        labels = torch.randint(len(task.authors), (given.batch,), generator=generator)
        shares = torch.rand(given.batch, generator=generator)
        rows = [
            task.training[author][int(share * len(task.training[author]))]
            for author, share in zip(labels.tolist(), shares.tolist(), strict=True)
        ]
        return torch.stack(rows), labels

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        rho = rhos[int(torch.randint(len(rhos), ()))]  # the trainer has seeded torch for this step
        return mpee_loss(list(model.layer_logits(ids, rho)), labels, alpha)

    settings = TrainSettings(
        given.steps, given.lr, warmup=max(1, given.steps // 20), floor=0.0, seed=given.seed
    )
    if not train(model.weights, batches, loss, settings, folder).finished:
        raise KeyboardInterrupt
    for weight in model.weights.values():
        weight.requires_grad_(False)
    return model


class Answers(NamedTuple):
    """What a classifier says of all held-out passages when a share of the tokens goes on.

    sure    [L, n] the greatest probability after each layer
    right   [L, n] whether its class is the author
    costs   [L] operations of a text that leaves after each layer
    """

    sure: Tensor
    right: Tensor
    costs: Sequence[int]

    def judge(self, tau: float, rows: slice) -> dict[str, float]:
        """Return accuracy, layers and operations of the passages in `rows` at a threshold."""
        leaves = self.sure[:, rows] > tau
        leaves[-1] = True
        layers = leaves.int().argmax(dim=0)  # the first
        right = self.right[:, rows].gather(0, layers[None])[0]
        return {
            "accuracy": float(right.double().mean()),
            "layers": float((layers + 1).double().mean()),
            "operations": mean(self.costs[layer] for layer in layers.tolist()),
        }


@torch.no_grad()
def answer_passages(model: MpeeClassifier, held: Passages, rho: float) -> Answers:
    """Return what the classifiers of all layers say."""
    classes, depth = int(held.labels.max()) + 1, model.config.n_layers
    sure, right = list[Tensor](), list[Tensor]()
    for at in range(0, len(held.ids), BATCH):
        logits = torch.stack(list(model.layer_logits(held.ids[at : at + BATCH], rho)))
        probs, label = logits.softmax(dim=-1).max(dim=-1)
        sure.append(probs)
        right.append(label == held.labels[at : at + BATCH])
    tokens = count_tokens(held.ids.shape[1] + 1, rho, depth)
    costs = [count_flops(model.config, classes, tokens[: n + 1]) for n in range(depth)]
    return Answers(torch.cat(sure, dim=1), torch.cat(right, dim=1), costs)


CHOSEN, JUDGED = slice(0, None, 2), slice(1, None, 2)  # passages


def list_settings(given: MpeeSettings, way: str) -> list[tuple[float, float]]:
    """Return the pairs of rho and tau that a way may choose from."""
    rhos = (1.0,) if way == "layers" else given.rhos
    taus = (1.0,) if way == "tokens" else given.taus
    return [(rho, tau) for rho in rhos for tau in taus]


def choose_within(
    answers: Mapping[float, Answers], settings: Sequence[tuple[float, float]], most: float
) -> dict[str, Any]:
    """Return what the best setting within so many operations gives, judged on other passages.

    The accuracy is None where no setting is cheap enough.
    """
    tried = {(rho, tau): answers[rho].judge(tau, CHOSEN) for rho, tau in settings}
    cheap = [key for key, found in tried.items() if found["operations"] <= most]
    if not cheap:
        return {"accuracy": None}
    rho, tau = max(cheap, key=lambda key: (tried[key]["accuracy"], -tried[key]["operations"]))
    return {"rho": rho, "tau": tau, **answers[rho].judge(tau, JUDGED)}


def measure_mpee(given: MpeeSettings, quiet: bool = False) -> dict[str, Any]:
    """Return the accuracy of every training by budget and way, and of the ways to cut tokens.

    Raises TinyspecError for settings without a meaning.
    """
    check_settings(given)
    tokenizer = models.load(given.tokenizer).tokenizer
    task = make_authorship_task(given, data.read_books("train"), tokenizer)
    found: dict[str, Any] = {}
    cuts: dict[str, Any] = {}
    with (
        show_progress_bar("MPEE", len(TRAININGS), quiet) as tick,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name, changes in TRAININGS.items():
            where = Path(folder) / name.replace(" ", "-")
            model = fit_classifier(given, task, tokenizer.vocab_size, where, **changes)
            answers = {rho: answer_passages(model, task.held, rho) for rho in given.rhos}
            whole = answers[1.0].costs[-1]
            found[name] = {
                "whole": answers[1.0].judge(1.0, JUDGED),
                **{
                    way: {
                        str(budget): choose_within(
                            answers, list_settings(given, way), budget * whole
                        )
                        for budget in given.budgets
                    }
                    for way in WAYS
                },
            }
            if not changes:
                cuts = compare_cuts(given, model, task.held)
            tick()
    settings = asdict(given) | {"authors": list(task.authors), "operations": whole}
    return stamp_result({"settings": settings, "trainings": found, "cuts": cuts})


def compare_cuts(given: MpeeSettings, model: MpeeClassifier, held: Passages) -> dict[str, Any]:
    """Return the accuracy over all passages at every rho, by how tokens are cut."""
    return {
        name: {
            str(rho): answer_passages(
                MpeeClassifier(model.config, model.weights, **changes), held, rho
            ).judge(1.0, slice(None))["accuracy"]
            for rho in given.rhos
        }
        for name, changes in INFERENCES.items()
    }


def check_settings(given: MpeeSettings) -> None:
    """Raise TinyspecError unless the settings have a meaning."""
    if given.width % 32:
        raise TinyspecError(f"--width is {given.width}: it must be a multiple of 32")
    for name, values in (("rhos", given.rhos), ("taus", given.taus)):
        if 1.0 not in values or not all(0 <= value <= 1 for value in values):
            raise TinyspecError(f"--{name} must be numbers from 0 to 1, with 1 among them")
    if not given.budgets:
        raise TinyspecError("--budgets must have a number, such as 0.5")


# ------------------------------------------------------------------ what is shown


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def tabulate_mpee(result: dict[str, Any]) -> list[Grid]:
    """Return a table of every training by budget, and one of the ways to cut tokens."""
    settings, grids = result["settings"], list[Grid]()
    budgets = [
        Column(f"at {budget:.0%}", (str(budget), "accuracy"), _percent)
        for budget in settings["budgets"]
    ]
    for name, found in result["trainings"].items():
        rows = {f"by {way}": found[way] for way in WAYS}
        title = f"{name}: {_percent(found['whole']['accuracy'])} with all operations"
        grids.append(make_grid(title, rows, budgets, "early exit"))
    columns = [Column(f"rho {rho:g}", str(rho), _percent) for rho in settings["rhos"]]
    grids.append(make_grid("all layers, fewer tokens", result["cuts"], columns, "tokens"))
    return grids


def write_notes(result: dict[str, Any]) -> list[str]:
    """Return what the figures are of."""
    settings = result["settings"]
    return [
        f"Who of {len(settings['authors'])} wrote a passage of {settings['passage']} tokens: "
        f"chance is {_percent(1 / len(settings['authors']))}. {settings['tests']} passages of a "
        "held-out book of each. The setting of a cell was chosen on every second passage and is "
        "judged on the others; the share is of the whole encoder's operations."
    ]


EXPERIMENT = Experiment(measure_mpee, tabulate_mpee, notes=write_notes)
