"""SpecDec (Xia et al. 2023): one pass fills a block, and two conditions decide what is accepted."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.rewriting_laws import random_translator
from tinyspec.laws.traps import GREEDY, SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import MaskFiller, Seq2Seq
from tinyspec.speculative.drafting import specdec
from tinyspec.technique import Request

ONE_CALL = "a round is one pass of the drafter, however long its block"
CONDITIONS = "a token is accepted if it is among the beta likeliest and within tau of the likeliest"
MONOTONE = "a larger beta or tau accepts no fewer tokens of a block"
FILLED = "a block is what the training forward says at its masks"
PLANTED = "a drafter that is fitted to two sentences drafts them, after every part of them"
GLANCED = "of n wrong masks, share * n are shown, and what is shown has no label"

Glance = Callable[..., specdec.MaskedBlocks]

WORDS = 9  # ids below 4 are special
TRANSLATOR = Seq2SeqConfig(WORDS, 8, 2, 8, 1, 1, 24)
SOURCES = ((4, 7, 5), (8,), (6, 6, 5, 4))
WEIGHTS = (4, 16, 2, 8, 0)  # of a target: no two tokens are equally likely
BETAS, TAUS = (1, 2, 3, 5), (0.0, 0.5, 1.0, 1.7, 100.0)


def random_filler(seed: int) -> Seq2Seq:
    """Return a random model that fills in masks."""
    return random_translator(TRANSLATOR, 50 + seed, 6, "filler", embed=1)


def begin_translation(
    build: Build,
    models: tuple[Seq2Seq, Seq2Seq],
    source: Sequence[int],
    text: Sequence[int] = (),
    eos: frozenset[int] = frozenset(),
    **knobs: Any,
) -> Decoder:
    """Return a decoder that translates a source, after the first tokens of the translation.

    models  the translator and the drafter
    """
    forward_log: list[Any] = []
    translator, filler = (model.with_log(forward_log) for model in models)
    request = Request(
        translator.condition_on(source).session(forward_log),
        [filler.fill_masks(source)],
        GREEDY,
        StoppingCriteria(eos, max_new_tokens=11),
        positions=translator.config.max_positions,
        draft_max_lengths=[filler.config.max_positions],
        forward_log=forward_log,
    )
    decoder = build(request, **knobs)
    decoder.extend([translator.config.bos, *text])
    return decoder


def random_pair(seed: int) -> tuple[Seq2Seq, Seq2Seq]:
    """Return a random translator and a random drafter."""
    return random_translator(TRANSLATOR, seed, 6, "translator", embed=1), random_filler(seed)


@collect_evidence(ONE_CALL)
def one_pass_fills_a_block(build: Build) -> Iterator[int]:
    """Check the passes of the drafter and the length of its draft, round by round."""
    for seed, k, source in product(range(2), (1, 3, 7), SOURCES):
        decoder = begin_translation(build, random_pair(seed), source, k=k, beta=1)
        while not decoder.finished:
            room = decoder.max_draft_depth
            round = decoder.step(Seeded(decoder.rounds))
            got = len(round.draft_calls), len(round.tree.tokens)
            case = {"models": seed, "source": source, "k": k, "room": room}
            expect_equal(ONE_CALL, (int(room > 0), min(k, room)), got, **case)
            yield 1


def is_allowed(weights: Sequence[int], token: int, beta: int, tau: float) -> bool:
    """Return whether both conditions hold, by their definition."""
    ranked = sorted(weights, reverse=True)
    if not weights[token]:
        return False
    gap = math.log(ranked[0]) - math.log(weights[token])
    return ranked.index(weights[token]) < beta and gap <= tau


def forced_draft(build: Build, token: int, sampling: SamplingParams, **knobs: Any) -> Decoder:
    """Return a decoder on tables by hand, whose drafter fills every mask with this token."""
    target = TableModel(vocabulary=5, rows=lambda text: WEIGHTS)
    draft = TableModel(vocabulary=5, rows=lambda text: [int(x == token) for x in range(5)])
    return begin_decoder(build, [target, draft], (0,), sampling, 2, k=1, **knobs)


def accepts_draft(begin: Callable[[], Decoder], rng: Exhaustive) -> bool:
    """Return whether the first round of a new decoder accepts its draft token."""
    return bool(begin().step(rng).verdict.accepted)


@collect_evidence(CONDITIONS)
def both_conditions_decide(build: Build) -> Iterator[int]:
    """Check for each token whether it is accepted: at temperature 0, and with what probability
    above.
    """
    best = WEIGHTS.index(max(WEIGHTS))
    for beta, tau, token in product(BETAS, TAUS, range(5)):
        knobs: dict[str, Any] = {"beta": beta, "tau": tau}
        allowed = is_allowed(WEIGHTS, token, beta, tau)
        case = {"weights": WEIGHTS, "draft token": token, **knobs}
        got = forced_draft(build, token, GREEDY, **knobs).step(Seeded(0)).tokens
        expect_equal(CONDITIONS, (token, best) if allowed else (best,), got, **case)
        mass = 0.0
        for is_accepted, probability in Exhaustive.walk(
            partial(accepts_draft, partial(forced_draft, build, token, SAMPLED, **knobs))
        ):
            mass += is_accepted * float(probability)
        always = allowed and beta > 1
        expected = 1.0 if always else WEIGHTS[token] / sum(WEIGHTS)
        if abs(mass - expected) > 1e-12:
            accuse(CONDITIONS, expected, mass, **case, temperature=1)
        yield 1


@collect_evidence(MONOTONE)
def more_is_accepted_with_larger_knobs(build: Build) -> Iterator[int]:
    """Check the accepted length of the same block under every pair of settings."""
    settings = list(product((1, 2, 3, 4), (0.0, 0.3, 0.8, 1.5, 100.0)))
    for seed in range(12):
        models = [TableModel(2 * seed + number, 4, zeros=False) for number in range(2)]
        lengths = dict[tuple[int, float], int]()
        for beta, tau in settings:
            decoder = begin_decoder(build, models, (0, 1), GREEDY, 9, k=4, beta=beta, tau=tau)
            lengths[beta, tau] = len(decoder.step(Seeded(0)).verdict.accepted)
        for less, more in product(settings, settings):
            if less[0] <= more[0] and less[1] <= more[1] and lengths[less] > lengths[more]:
                case = {"tables": seed, "beta, tau": less, "larger beta, tau": more}
                accuse(MONOTONE, f"at least {lengths[less]}", lengths[more], **case)
        yield len(settings)


@collect_evidence(FILLED)
def block_is_what_training_says(build: Build) -> Iterator[int]:
    """Check every draft against the training forward, in a batch beside a longer text."""
    k = 4
    for seed, source in product(range(3), SOURCES):
        models = random_pair(seed)
        filler, config = models[1], models[1].config
        decoder = begin_translation(build, models, source, k=k, beta=1)
        while decoder.max_draft_depth >= k:
            text = list(decoder.context)
            rows = [[*text, *[config.mask] * k, config.pad, config.pad], [4] * (len(text) + k + 2)]
            memory = filler.encode(torch.tensor([source, source]))
            states = specdec.block_states(filler, torch.tensor(rows), memory)
            said = filler.logits(states)[0, len(text) : len(text) + k].argmax(-1).tolist()
            round = decoder.step(Seeded(decoder.rounds))
            case = {"models": seed, "source": source, "text": text}
            expect_equal(FILLED, said, list(round.tree.tokens), **case)
            yield k


def fit_filler(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], block: int) -> Seq2Seq:
    """Return a model whose own loss has fitted it to these pairs, of equal lengths."""
    config = Seq2SeqConfig(WORDS, 32, 2, 32, 1, 1, 24)
    generator = torch.Generator().manual_seed(0)
    model = Seq2Seq.create(config, generator)
    source, target = (
        torch.tensor([list(pair[side]) for pair in pairs] * 8) for side in range(2)
    )  # eight random prefixes of each in a step
    optimizer = torch.optim.Adam([w.requires_grad_() for w in model.parameters()], lr=1e-2)
    for step in range(FITTING_STEPS):
        share = specdec.glancing_share(step / FITTING_STEPS)
        loss = specdec.block_filling_loss(model, (source, target), block, share, generator, 0, 0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights = {name: w.detach() for name, w in model.weights.items()}
    return Seq2Seq(config, weights, name="fitted")


FITTING_STEPS = 150
SENTENCES = (((4, 5, 6), (8, 4, 4, 7, 6, 5, 8)), ((7, 7, 8), (5, 6, 7, 7, 8, 4, 6)))


@collect_evidence(PLANTED)
def fitted_drafter_drafts_its_sentences(build: Build) -> Iterator[int]:
    """Check the block after every part of the sentences."""
    block = 3
    filler = fit_filler(SENTENCES, block)
    translator, ends = random_pair(0)[0], frozenset({filler.config.eos})
    for source, target in SENTENCES:
        whole = (*target, filler.config.eos)
        for n in range(len(target)):
            decoder = begin_translation(
                build, (translator, filler), source, target[:n], ends, k=block, beta=1
            )
            tree = decoder.drafter.propose(decoder.context, block, GREEDY, Seeded(0))
            case = {"source": source, "text": target[:n]}
            expect_equal(PLANTED, whole[n : n + block], tuple(tree.tokens), **case)
            yield 1


@collect_evidence(GLANCED)
def glancing_shows_a_share(glance: Glance) -> Iterator[int]:
    """Check how many masks of each row are shown, and what is left of inputs and labels."""
    target = torch.tensor([[4, 5, 6, 7, 8, 4], [6, 7, 0, 0, 0, 0], [8, 8, 5, 4, 0, 0]])
    source = torch.tensor([[4, 7, 5]] * 3)
    for seed, share in product(range(4), (0.0, 0.3, 0.5, 1.0)):
        model, generator = random_filler(seed), torch.Generator().manual_seed(seed)
        masked = specdec.mask_blocks(model.config, target, 4, generator)
        memory = model.encode(source)
        inputs, labels = glance(model, masked, memory, share, generator)
        filled = model.logits(specdec.block_states(model, masked.inputs, memory)).argmax(-1)
        for row, old in enumerate(masked.labels.tolist()):
            known = [place for place, token in enumerate(old) if token != model.config.pad]
            wrong = sum(int(filled[row, place]) != old[place] for place in known)
            shown = [place for place in known if int(inputs[row, place]) != model.config.mask]
            case = {"model": seed, "share": share, "wrong": wrong}
            expect_equal(GLANCED, int(share * wrong), len(shown), **case, of="shown masks")
            read = masked.inputs[row].tolist()
            for place in shown:
                read[place] = old[place]
            left = [0 if place in shown else token for place, token in enumerate(old)]
            expect_equal(GLANCED, read, inputs[row].tolist(), **case, of="what is read")
            expect_equal(GLANCED, left, labels[row].tolist(), **case, of="labels")
            yield 1


TRAPS = [
    Trap(ONE_CALL, one_pass_fills_a_block, card("specdec")),
    Trap(CONDITIONS, both_conditions_decide, card("specdec")),
    Trap(MONOTONE, more_is_accepted_with_larger_knobs, card("specdec")),
    Trap(FILLED, block_is_what_training_says, card("specdec")),
    Trap(PLANTED, fitted_drafter_drafts_its_sentences, card("specdec")),
    Trap(GLANCED, glancing_shows_a_share, lambda: specdec.glance_at_labels),
]

_specdec = partial(Toy, technique="specdec")

TOYS = [
    _specdec(
        "a small model that writes from left to right",
        "logits = self.model.score(masks).logits",
        "return ModelDrafter.propose(self, context, max_draft_depth, sampling, rng)",
        specdec.SpecDecDrafter.propose,
        law=ONE_CALL,
    ),
    _specdec(
        "the beta likeliest, however far they are",
        "token in likeliest and row[token] / row[likeliest[0]] >= least",
        "token in likeliest",
        specdec.top_beta_verifier,
        law=CONDITIONS,
    ),
    _specdec(
        "the distance alone",
        "token in likeliest and row[token] / row[likeliest[0]] >= least",
        "row[token] / row[likeliest[0]] >= least",
        specdec.top_beta_verifier,
        law=CONDITIONS,
    ),
    _specdec(
        "all of the beta likeliest within tau, or none",
        "row[token] / row[likeliest[0]] >= least",
        "row[likeliest[-1]] / row[likeliest[0]] >= least",
        specdec.top_beta_verifier,
        law=MONOTONE,
    ),
    _specdec(
        "masks that do not see the masks after them",
        "self.model.decode(self.model.embed(ids), self.memory)",
        "self.model.decode(self.model.embed(ids), self.memory, "
        "torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril())",
        MaskFiller.score,
        law=FILLED,
    ),
    _specdec(
        "logits that are read one mask early",
        "[1 : max_draft_depth + 1]",
        "[:max_draft_depth]",
        specdec.SpecDecDrafter.propose,
        law=FILLED,
    ),
    _specdec(
        "masks that are trained on the next token",
        "labels = text.masked_fill(~is_mask, config.pad)",
        "labels = text.roll(-1, 1).masked_fill(~is_mask, config.pad)",
        specdec.mask_blocks,
        law=PLANTED,
    ),
    _specdec(
        "trained on the first block of a sentence alone",
        "(share * lengths).long()",
        "(0 * lengths).long()",
        specdec.mask_blocks,
        law=PLANTED,
    ),
    _specdec(
        "shown tokens that count in the loss",
        "labels.masked_fill(shown, model.config.pad)",
        "labels",
        specdec.glance_at_labels,
        law=GLANCED,
    ),
    _specdec(
        "a share of all masks, right or wrong",
        "wrong.sum(dim=1, keepdim=True)",
        "known.sum(dim=1, keepdim=True)",
        specdec.glance_at_labels,
        law=GLANCED,
    ),
]
