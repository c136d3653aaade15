"""NAG-BERT (Su et al. 2021): the encoder's positions get labels, and two ends close them.

The oracle enumerates all label sequences of one source, without a batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, run_refinement
from tinyspec.laws.rewriting_laws import numbers_differ, random_translator
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.laws.traps.nar_crf import score_sentences, sum_in_logs
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.crf import E1, static_transition_shapes
from tinyspec.nonautoregressive.nag_bert import (
    NagBertRefiner,
    NagBertSettings,
    add_masks,
    append_ends,
    context_aware_loss,
    nag_bert_batch_loss,
    nag_bert_loss,
)
from tinyspec.technique import RefineRequest, TranslatorLoss, TranslatorTraining

LABELLED = "the likeliest labels of the source and its masks are written, up to the first eos"
RATIO = "only the first places of a ratio get labels"
ENDS = "the labels are the target's words, and eos twice"
CONTEXT = "a neighbour's word is made less likely, unless it is the right one"
LOSS = "the loss is that of the right labels among the candidates, and half the context-aware one"
PRETRAINED = "first the encoder fills in hidden words of either language"

MASK, EOS = 3, 2
LABELS = (EOS, 4, 5, 6)
SIZES = Seq2SeqConfig(7, 8, 2, 12, 2, 0, 5)
SOURCES = ((4,), (6, 5), (4, 6, 5), (5, 5, 4, 6))
RATIOS = (1.0, 0.5, 0.3, 0.0)
PAIRS = (((4, 6), (5, 5, 6)), ((6,), (4,)), ((5, 5), (6, 4)))


def random_labeller(seed: int, positions: int = 5) -> Seq2Seq:
    """Return a random float64 encoder with a CRF of rank 2 and large weights."""
    heads = static_transition_shapes(SIZES.vocab_size, 2)
    config = replace(SIZES, max_positions=positions, heads=heads)
    return random_translator(config, seed, 3, "labeller")


# ---------------------------------------------------------------------- the rule, by itself


def count_places(model: Seq2Seq, source: Sequence[int]) -> int:
    """Return how many positions the encoder reads."""
    return min(model.config.max_positions, len(source) * 3 // 2 + 13)


def read_places(model: Seq2Seq, source: Sequence[int], places: int) -> list[list[float]]:
    """Return the scores of all tokens at the first places."""
    read = [*source, *[MASK] * (count_places(model, source) - len(source))]
    memory = model.encode(torch.tensor([read]))
    return model.logits(model.decode(memory.states[:, :places], memory))[0].tolist()


def likeliest_labels(row: Sequence[float], count: int, forced: int | None = None) -> list[int]:
    """Return the `count` likeliest labels of a place, the forced one first."""
    ranked = sorted(LABELS, key=lambda label: (label != forced, -row[label]))
    return ranked[:count]


def score_labels(
    model: Seq2Seq, emissions: Sequence[Sequence[float]], candidates: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], float]:
    """Return the score of every sequence of these labels."""
    return score_sentences(model.weights, emissions, torch.empty(0), "static", candidates)


# ---------------------------------------------------------------------- the laws


@collect_evidence(LABELLED)
def likeliest_labels_are_written(build: Build) -> Iterator[int]:
    """Check the words and their log-probabilities, given all later labels."""
    for seed, source, ratio, beam in product(range(3), SOURCES, RATIOS, (9, 2)):
        model = random_labeller(seed)
        n = count_places(model, source)
        places = min(n, int(ratio * n) + 2)
        emissions = read_places(model, source, places)
        emissions[0][EOS] = -math.inf  # a translation has at least one word
        candidates = [likeliest_labels(row, beam) for row in emissions]
        scores = score_labels(model, emissions, candidates)
        best = max(scores, key=scores.__getitem__)
        end = best.index(EOS) if EOS in best else places
        expected = list[float]()
        for i in range(end):
            right, later = (
                sum_in_logs([s for labels, s in scores.items() if labels[at:] == best[at:]])
                for at in (i, i + 1)
            )
            expected.append(right - later)
        run = run_refinement(build, RefineRequest(model), source, ratio=ratio, beam=beam)
        case = {"model": seed, "source": source, "ratio": ratio, "beam": beam}
        expect_equal(LABELLED, list(best[:end]), run.tokens, **case)
        if numbers_differ(expected, run.scores):
            accuse(LABELLED, expected, run.scores, **case, of="log-probabilities")
        yield len(scores)


@collect_evidence(RATIO)
def ratio_saves_labels(build: Build) -> Iterator[int]:
    """Check by the forward log how many positions the head reads."""
    for source, ratio, positions in product(SOURCES, RATIOS, (5, 30)):
        model = random_labeller(0, positions)
        run = run_refinement(build, RefineRequest(model), source, ratio=ratio)
        n = count_places(model, source)
        rows = [call.head_rows for call in run.forward_log]
        case = {"source": source, "ratio": ratio, "positions": n}
        expect_equal(RATIO, [0, min(n, int(ratio * n) + 2)], rows, **case, of="head rows")
        yield 0


@collect_evidence(ENDS)
def two_ends_close_the_labels(append: Callable[[Tensor, int, int], Tensor]) -> Iterator[int]:
    """Check the labels of targets of several lengths."""
    target = torch.tensor([[4, 5, 6], [6, 0, 0], [5, 4, 0]])
    expected = [[4, 5, 6, EOS, EOS], [6, EOS, EOS, 0, 0], [5, 4, EOS, EOS, 0]]
    got = append(target, 0, EOS).tolist()
    expect_equal(ENDS, expected, got, targets=target.tolist())
    yield 0


def context_by_hand(rows: Sequence[Sequence[float]], labels: Sequence[int], window: int) -> float:
    """Return L_CA of one sentence, summed over its places."""
    total = 0.0
    for i, row in enumerate(rows):
        norm = sum_in_logs(row)
        total -= row[labels[i]] - norm
        for j in range(max(0, i - window), min(len(rows), i + window + 1)):
            if labels[j] != labels[i]:
                total -= math.log1p(-math.exp(row[labels[j]] - norm))
    return total


@collect_evidence(CONTEXT)
def neighbours_are_made_unlikely(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the value, and the signs of its gradient at the words of neighbours."""
    labels = torch.tensor([[4, 5, 5, 6, 4], [6, 6, 6, 0, 0]])
    for seed, window in product(range(4), (0, 1, 3)):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
        logits.requires_grad_()
        with torch.enable_grad():
            value = loss(logits, labels, labels > 0, window)
            (slope,) = torch.autograd.grad(value, logits)
        rows = logits.tolist()
        parts = (
            context_by_hand(row[: sum(label > 0 for label in y)], [x for x in y if x], window)
            for row, y in zip(rows, labels.tolist(), strict=True)
        )
        expected, case = sum(parts), {"labels": labels.tolist(), "window": window}
        if numbers_differ([expected], [value.item()]):
            accuse(CONTEXT, expected, value.item(), **case, of="the loss")
        own = slope.gather(-1, labels[..., None])[..., 0][labels > 0]
        if bool((own >= 0).any()):
            accuse(CONTEXT, "a right word is made likelier", own.tolist(), **case)
        yield labels.numel()


@collect_evidence(LOSS)
def loss_has_two_terms(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a batch, sentence by sentence."""
    longest = max(len(y) for _, y in PAIRS)
    source = torch.tensor([[*x, *[0] * (2 - len(x))] for x, _ in PAIRS])
    target = torch.tensor([[*y, *[0] * (longest - len(y))] for _, y in PAIRS])
    for seed, beam, window in product(range(3), (2, 9), (0, 3)):
        model, total, count = random_labeller(seed), 0.0, 0
        for x, y in PAIRS:
            labels = (*y, EOS, EOS)
            emissions = read_places(model, x, len(labels))
            candidates = [
                likeliest_labels(row, beam, label)
                for row, label in zip(emissions, labels, strict=True)
            ]
            scores = score_labels(model, emissions, candidates)
            total += sum_in_logs(list(scores.values())) - scores[labels]
            total += 0.5 * context_by_hand(emissions, labels, window)
            count += len(labels)
        got = float(loss(model, (source, target), window=window, beam=beam))
        if not math.isclose(total / count, got, rel_tol=1e-9, abs_tol=1e-9):
            case = {"model": seed, "pairs": PAIRS, "beam": beam, "window": window}
            accuse(LOSS, total / count, got, **case)
        yield len(PAIRS)


@collect_evidence(PRETRAINED)
def encoder_is_pretrained(train: TranslatorLoss) -> Iterator[int]:
    """Check that transitions are trained after the first part alone, and the encoder in both."""
    source, target = torch.tensor([[4, 6], [6, 0]]), torch.tensor([[5, 5, 6], [4, 0, 0]])
    for share, progress in product((0.0, 0.4), (0.0, 0.39, 0.4, 1.0)):
        model = random_labeller(0)
        weights = [w.requires_grad_() for w in (model.weights[E1], model.weights["embed"])]
        settings = NagBertSettings(rank=2, pretraining=share)
        training = TranslatorTraining(model, None, settings, 0.0, 0.0, progress)
        with torch.enable_grad():
            value = train(training, (source, target), torch.Generator().manual_seed(0))
            slopes = torch.autograd.grad(value, weights, allow_unused=True)
        trained = [slope is not None and bool(slope.any()) for slope in slopes]
        case = {"pretraining": share, "progress": progress, "weights": (E1, "embed")}
        expect_equal(PRETRAINED, [progress >= share, True], trained, **case)
        yield 0


TRAPS = [
    Trap(LABELLED, likeliest_labels_are_written, refine_card("nag_bert")),
    Trap(RATIO, ratio_saves_labels, refine_card("nag_bert")),
    Trap(ENDS, two_ends_close_the_labels, lambda: append_ends),
    Trap(CONTEXT, neighbours_are_made_unlikely, lambda: context_aware_loss),
    Trap(LOSS, loss_has_two_terms, lambda: nag_bert_loss),
    Trap(PRETRAINED, encoder_is_pretrained, lambda: nag_bert_batch_loss),
]

_nag = partial(Toy, technique="nag_bert")

TOYS = [
    _nag(
        "each position takes its likeliest word",
        "chosen = find_best_path(lattice)",
        "chosen = lattice.emissions.argmax(dim=-1)",
        NagBertRefiner.rewrite,
        law=LABELLED,
    ),
    _nag(
        "the source alone is read",
        "ends = count_inputs(lengths, config.max_positions)",
        "ends = lengths",
        add_masks,
        law=LABELLED,
    ),
    _nag(
        "all positions are labelled, and then cut",
        "places = min(n, int(self.ratio * n) + 2)",
        "places = n",
        NagBertRefiner.start,
        law=RATIO,
    ),
    _nag(
        "a single end",
        "torch.cat((lengths, lengths + 1), dim=1)",
        "lengths",
        append_ends,
        law=ENDS,
    ),
    _nag(
        "plain cross-entropy, as in the released code",
        "min(window, labels.shape[1] - 1) + 1",
        "1",
        context_aware_loss,
        law=CONTEXT,
    ),
    _nag(
        "a word that stands twice in the target is made unlikely too",
        "(labels[:, early] != labels[:, late]) & slots[:, late]",
        "slots[:, late]",
        context_aware_loss,
        law=CONTEXT,
    ),
    _nag(
        "words are trained, and the CRF is not",
        "structure + CONTEXT_WEIGHT * context",
        "context",
        nag_bert_loss,
        law=LOSS,
    ),
    _nag(
        "no pre-training",
        "if training.progress < settings.pretraining:",
        "if False:",
        nag_bert_batch_loss,
        law=PRETRAINED,
    ),
]
