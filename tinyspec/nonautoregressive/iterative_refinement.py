"""Iterative refinement: write all words at once, then rewrite all of them, again and again.

Paper: Lee, Mansimov, Cho, EMNLP 2018, arXiv 1802.06901. What is said of their training was read in
the authors' code (github.com/nyu-dl/dl4mt-nonauto, branch multigpu, commit 442df7d).

Idea. A first decoder writes a translation in one pass, from even copies of the source. A second
decoder, the *refiner*, reads a translation and writes a better one; it runs as often as one likes.
Its input at a position is the embedding of the word that the last pass wrote there, plus the state
that this word was read from. So what was likely beside the word is not lost. Every position sees
all positions. The model is trained as two things at once: as a model whose latent variables are its
own translations, and as a denoiser, which repairs a reference that was damaged on purpose.

    y^0          = argmax p_1( . | copies of x, x)                         the first decoder
    y^i          = argmax p_2( . | e(y^(i-1)) + h^(i-1), x)                the refiner
    L            = mean over i = 0 .. 3 of  - log p(y* | input of pass i, x)  - log p(T | x)

Training. The input of pass i + 1 is, with probability 1/2, a damaged reference C(y*) in place of
y^i; the coin falls once for a pass of a batch. The state h^i is added to both, and gradients flow
through it, but not through the choice of words. C picks max(1, floor(w T)) positions, never the
last one; each of them gets, with equal chances, a random word, a swap with the next word, or the
same word once more in place of the next. The share w falls from pass to pass: .9, .63, .37. The
targets are the teacher's (distillation). The first decoder and the refiner begin as the teacher's.

Guarantee: APPROX: no number of iterations gives the teacher's distribution. One iteration is the
first decoder alone. The code that runs is compared with a second version in plain lists.
Pitfall: one decoder that is trained for one pass and iterated; no denoising; words without states.
Ablation: `denoising = 0` of `refinement_loss`. On dialects ten passes then have far fewer right
translations (a test, and tutorials/results/dialects.md).
Tests: tests/nonautoregressive/test_iterative_refinement.py (`refine_translation` against the code
that runs, pass by pass; the stop; the corruptions, all of them enumerated; the passes of the loss).
Additions of ours: a LENGTH token, trained along, in place of a classifier of |y| - |x| that is
trained afterwards; several lengths in one batch, of which the best mean log-probability wins; the
mean of the passes in the loss, where the code has the sum, so that the length weighs as much.
Adaptive stop: the newest translation has the words of the one before it, in any order (the Jaccard
distance of the two is 0). The authors' code waits for five translations.
Left out: positional attention ([shape] positional adds it); removing repeated words from the
translations that are scored. Their code has w = .633, .367, .1, .1: a range in it is wrong. No
model is trained with one decoder for all passes, or on the last words without the last states.
`bench dialects` shows what denoising is worth.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.nat import copy_uniformly, forbid_special_tokens
from tinyspec.nonautoregressive.parallel import (
    copy_to_likeliest_lengths,
    fits_length_token,
    length_nll,
)
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)

REFINER = "refiner"  # name of the second stack
DAMAGE = (0.9, 0.63, 0.37, 0.1)
"""Share of the positions of a reference that are damaged after each pass of the training. The last
share is never used: no pass follows it."""
DENOISING = 0.5  # how often a pass of the training reads a damaged reference
VALIDATION_PASSES = 4  # as many as in the training


def refine_translation(
    first: Callable[[], tuple[list[int], Any]],
    again: Callable[[list[int], Any], tuple[list[int], Any]],
    iterations: int,
    adaptive: bool,
) -> list[list[int]]:
    """Return the translation after every pass (section 3).

    first     a pass of the first decoder -> its words and their states
    again     words and their states -> new ones, in one pass of the refiner
    adaptive  stop when a translation has the words of the one before it

    `IterativeRefiner` does this for several lengths in one batch. A test compares the two.
    """
    words, states = first()
    written = [words]
    while len(written) < iterations:
        words, states = again(words, states)
        written.append(words)
        if adaptive and Counter(words) == Counter(written[-2]):
            break
    return written


# ------------------------------ training (section 3.2)


def corrupt_words(
    target: Tensor, slots: Tensor, share: float, words: range, generator: torch.Generator
) -> Tensor:
    """Return damaged targets [B, T]: C(y*).

    slots  [B, T] False at padding
    share  w, of the positions
    words  ids that a random word is drawn from

    Positions are drawn without replacement from all but the last, and damaged one after another.
    A target of one word is not damaged.
    """
    shape, device = target.shape, target.device
    kinds = torch.randint(3, shape, generator=generator, device=device).tolist()
    drawn = torch.randint(words.start, words.stop, shape, generator=generator, device=device)
    order = torch.rand(shape, generator=generator, device=device).tolist()
    damaged, random_words = target.tolist(), drawn.tolist()
    for number, length in enumerate(slots.sum(dim=1).tolist()):
        row, count = damaged[number], min(max(1, int(share * length)), length - 1)
        for i in sorted(range(length - 1), key=order[number].__getitem__)[:count]:
            if kinds[number][i] == 0:  # the same word once more, in place of the next
                row[i + 1] = row[i]
            elif kinds[number][i] == 1:
                row[i] = random_words[number][i]
            else:
                row[i], row[i + 1] = row[i + 1], row[i]
    return torch.tensor(damaged, device=device).view_as(target)


def refinement_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    generator: torch.Generator,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    denoising: float = DENOISING,
) -> Tensor:
    """Return the loss of all passes and of the length, per target token.

    batch      sources [B, S] and targets [B, T], padded at the end
    denoising  how often a pass reads a damaged reference; 0: never
    """
    source, target = batch
    c, memory = model.config, model.encode(source, dropout)
    places, slots = copy_uniformly((source != c.pad).sum(dim=1), (target != c.pad).sum(dim=1))
    target = target[:, : slots.shape[1]]
    words = range(max(c.pad, c.bos, c.eos, c.mask) + 1, c.vocab_size)
    total = memory.states.new_zeros(())
    inputs, stack = model.embed_words(source.gather(1, places)), "decoder"
    for number, share in enumerate(DAMAGE):
        states = model.decode(model.place(inputs), memory, None, dropout, slots, stack)
        logits = model.logits(states)
        total = total + F.cross_entropy(
            logits[slots], target[slots], reduction="sum", label_smoothing=smoothing
        )
        if number == len(DAMAGE) - 1:
            break
        coin = torch.rand((), generator=generator, device=target.device)
        if coin < denoising:
            read = corrupt_words(target, slots, share, words, generator)
        else:
            read = forbid_special_tokens(model, logits.detach()).argmax(dim=-1)
        inputs, stack = model.embed_words(read) + states, REFINER
    lengths = length_nll(model, target, memory)
    return (total / len(DAMAGE) + lengths) / slots.sum()


# ------------------------------ decoding


class IterativeRefiner:
    """Write all words, and rewrite them, for the l likeliest lengths at once.

    `extra` of its canvas is the states [C, T, d] of the last pass, and which candidates have
    converged [C]. Before the first pass the canvas holds copies of the source.
    """

    def __init__(self, model: Seq2Seq, iterations: int, adaptive: bool = False, lengths: int = 1):
        self.model, self.iterations = model, iterations
        self.adaptive, self.width = adaptive, lengths

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return copies of the source, one candidate for each length."""
        longest = self.model.config.max_positions
        return copy_to_likeliest_lengths(self.model, source, memory, self.width, longest)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write the likeliest word of every position; a candidate that has converged stays."""
        model, stack = self.model, REFINER if iteration else "decoder"
        inputs = model.embed_words(canvas.tokens)
        done = torch.zeros(len(canvas.tokens), dtype=torch.bool, device=canvas.tokens.device)
        if iteration:
            states, done = canvas.extra
            inputs = inputs + states
        states = model.decode(model.place(inputs), memory, None, 0.0, canvas.mask, stack)
        logits = forbid_special_tokens(model, model.logits(states))
        scores, words = logits.log_softmax(dim=-1).max(dim=-1)
        words = words.masked_fill(~canvas.mask, model.config.pad)
        if self.adaptive and iteration:
            words = torch.where(done[:, None], canvas.tokens, words)
            scores = torch.where(done[:, None], canvas.scores, scores)
            before = canvas.tokens.masked_fill(~canvas.mask, model.config.pad)
            same = words.sort(dim=1).values == before.sort(dim=1).values
            done = done | same.all(dim=1)
        return Canvas(words, canvas.mask, scores, (states, done))

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        if not iteration or not self.adaptive:
            return iteration == self.iterations
        return iteration == self.iterations or bool(canvas.extra[1].all())

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return int(canvas.means().argmax())


# ------------------------------ the card


def iterative_refinement_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `refinement_loss` of a batch of the trainer."""
    options = generator, training.dropout, training.smoothing
    return refinement_loss(training.model, batch, *options)


def translate_in_iterations(model: Seq2Seq, settings: object, sources: Tensor) -> list[list[int]]:
    """Return translations of padded sources [B, S], each of its likeliest length."""
    return translate_sources(model, sources, IterativeRefiner(model, VALIDATION_PASSES))


@technique(
    title="Deterministic iterative refinement",
    summary="rewrites all words in every pass",
    paper="Lee et al. 2018, arXiv 1802.06901",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    translator=TrainedTranslator(
        iterative_refinement_batch_loss,
        translate_in_iterations,
        "A first decoder writes all words at once, and a refiner rewrites all of them, again and "
        "again (`iterative_refinement`). Its figure is that of four iterations over the likeliest "
        "length.",
        shape={"lengths": 9, "stacks": {REFINER: 2}},
        fits=fits_length_token,
    ),
    knobs=(
        Knob("iterations", 10, "most decoder passes", low=1, high=1024, small=(3, 1)),
        Knob(
            "adaptive",
            False,
            "whether to stop when a translation has the words of the one before, in any order",
            choices=(True, False),
        ),
        Knob("lengths", 1, "target lengths tried at once", low=1, high=1024, small=(2, 1)),
    ),
)
def iterative_refinement(
    request: RefineRequest, *, iterations: int, adaptive: bool, lengths: int
) -> IterativeRefiner:
    """Return a refiner that writes all words, then rewrites all of them in every pass."""
    c = request.model.config
    if not c.lengths or REFINER not in c.stacks:
        lacks = "LENGTH token" if not c.lengths else "second decoder"
        raise TinyspecError(
            f"{request.model.name} has no {lacks}: train a model from "
            "models/multi30k-refine/recipe.toml (tinyspec train mt)"
        )
    return IterativeRefiner(request.model, iterations, adaptive, lengths)
