"""FlowSeq: draw latent vectors from a flow given the source, and read all words off them at once.

Paper: Ma, Zhou, Li, Neubig, Hovy, EMNLP-IJCNLP 2019, arXiv 1909.02480. What is said of their code
was read there (github.com/XuezheMax/flowseq, commits 8e534e5 and 8cbee64).

Idea. A model that writes all words at once mixes translations, because no word knows the others.
FlowSeq moves what the words must agree on into latent vectors, one for each position. Given them,
and the source, the words are independent. The latent vectors are not: their prior is a normalizing
flow (flow.py), which turns independent noise into vectors that depend on each other and on the
source. All positions go through it at once. The model is a variational autoencoder: a *posterior*
reads the target and tells which latent vectors it may come from.

    p(y | x)  = integral of  p(z | x, T)  prod over t of p(y_t | z, x)  dz   times p(T | x)
    z         = f^-1(noise; x)            noise ~ N(0, temperature^2)
    L         = - log p(y | z, x) + w (log q(z | x, y) - log p(z | x)) - log p(T | x),   z ~ q
    rank      = log mean over k of p(y | z_k, x) p(z_k | x) / q(z_k | x, y),   z_k ~ q

Training. On people's translations or a teacher's. In the first part (`startup`) w is 0 and z is the
posterior's mean: words and length are trained. Then w rises from 0 to 1 (`warmup`). The posterior
reads the target without a fifth of its words. Its standard deviations begin near 1, and the
couplings of the flow as constants. T - S is classified from the mean of the encoder's states, among
those T that the levels divide.

Decoding. Without noise (temperature 0) the flow gives one z: that is the paper's argmax decoding.
With several lengths or samples in one batch, a teacher chooses (*noisy parallel decoding*), or the
model's own importance-weighted estimate `rank`, plus log p(T | x), per position.

Guarantee: APPROX: no number of samples gives a teacher's distribution. The flow's density is
compared with numerical Jacobians, and the code that runs with a second version in plain lists.
Pitfall: a "flow" of one diagonal scaling, whose latent vectors stay independent; a posterior whose
spread begins at random, so that noise hides the mean when draws begin; a log-determinant
without the mask or the number of heads; a posterior that collapsed: print the bits of z per word,
and shuffle z. After a collapse, decoding without noise fails: the decoder was trained on draws of
z, and the mode of the prior lies far from most of them. Draw z (`temperature`) instead: then
96.4 % of distilled dialects with words of their own (training/dialects.py) are valid, without noise
46.2 %. Of raw ones 90.2 % are, and 100 % without (tutorials/results/dialects-flowseq.md).
Ablation: latent vectors that are not read: two dialects are mixed. With those of another sentence a
target is not given back (two tests).
Tests: tests/nonautoregressive/test_flowseq.py (`translate_by_flow` against the code that runs; the
flow's inverse, its log-determinant by Jacobians; the bound; two dialects, with latent vectors that
are exchanged; without couplings two dialects are told apart too, since the decoder reads all of z).
Additions of ours: of several samples the first one has no noise, with either judge (in the code
only with the estimate); a target is filled up with ends to a length that the levels divide.
Left out, of the authors' code: eight of the twelve couplings of a step, its second mix and its
other actnorms; the coupling after each level that predicts what leaves from what stays; a unit at
the head of each level that attends from positions to z, which is also how their decoder reads z
(here position t is given z_t); the convolutional and recurrent couplings; weight normalization; for
the lengths a second layer, smoothed labels, and the last state in place of the mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, best_candidate, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.ops import linear
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.flow import (
    Flow,
    coupling_stacks,
    flow_heads,
    initialize_couplings,
    normal_log_density,
)
from tinyspec.nonautoregressive.nar_crf import score_words
from tinyspec.nonautoregressive.nat import require_teacher, write_until_end
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    check_ranges,
    read_trained_settings,
    technique,
)

POSTERIOR = "posterior"  # the stack that reads the target
LATENT = "latent.weight"  # z -> what the decoder reads
DIFFERENCE = "length_difference"  # the classifier of T - S
BEGUN = "flow_begun"  # 0 until the flow has its first weights, then 1
HIDDEN_WORDS = 0.2  # share of the target's words that the posterior does not see
FIRST_SPREAD = 0.025  # of the posterior's log standard deviations, as in the authors' code
LEAST_UNIFORM = 1e-12  # a uniform is taken to be no less: its normal value is finite
REMEDY = "train a model from models/multi30k-flowseq/recipe.toml (tinyspec train mt)"


def translate_by_flow(
    lengths: Sequence[int],
    noise: Callable[[int, int], list[list[float]]],
    invert_flow: Callable[[list[list[float]]], list[list[float]]],
    read_words: Callable[[list[list[float]]], list[int]],
    rank: Callable[[list[int], int], float],
    samples: int,
    eos: int,
) -> list[int]:
    """Return the best of the translations of these lengths, `samples` of each (section 3.4).

    noise        (length, number of the sample) -> a vector for each position
    invert_flow  noise -> latent vectors
    read_words   latent vectors -> the likeliest word of each position
    rank         (words, length) -> what candidates are compared by

    `FlowSeqRefiner` does this in one batch. A test compares the two.
    """
    candidates = list[tuple[float, list[int]]]()
    for length in lengths:
        for number in range(samples):
            words = read_words(invert_flow(noise(length, number)))
            text = words[: words.index(eos)] if eos in words else words
            candidates.append((rank(text, length), text))
    return max(candidates, key=lambda one: one[0])[1]


# ------------------------------ the model


@dataclass(frozen=True)
class FlowSeqSettings:
    """Section [translator] of a recipe.

    levels   of the flow: after each but the last, half of the channels are noise
    steps    of each level
    longest  the largest |T - S| that is predicted
    startup  share of the training in which z is the posterior's mean, and w is 0
    warmup   share of the training after it in which the weight of the latent vectors' cost rises
    """

    levels: int = 2
    steps: int = 1
    longest: int = 16
    startup: float = 0.2
    warmup: float = 0.2

    def __post_init__(self) -> None:
        whole = {"levels": 4, "steps": 16, "longest": 1024}
        check_ranges(self, whole, {"startup": (0, 1), "warmup": (0, 1)})

    @property
    def multiple(self) -> int:
        """Return what divides every length."""
        return 1 << self.levels - 1

    def latent_weight(self, progress: float) -> float:
        """Return the weight w of the latent vectors' cost.

        >>> [FlowSeqSettings().latent_weight(x) for x in (0.1, 0.2, 0.25, 0.4)]
        [0.0, 0.0, 0.25, 1.0]
        """
        since = round(progress - self.startup, 9)
        return max(0.0, min(1.0, since / self.warmup)) if self.warmup else float(since >= 0)


def flowseq_config(config: Seq2SeqConfig, settings: FlowSeqSettings) -> Seq2SeqConfig:
    """Return a config with the weights of posterior, flow and length classifier."""
    d, steps = config.d_model, settings.levels * settings.steps
    if settings.longest < settings.multiple:
        raise TinyspecError(
            f"[translator] longest is {settings.longest}: with {settings.levels} levels it must be "
            f"at least {settings.multiple}"
        )
    if config.max_positions <= settings.multiple:
        raise TinyspecError(
            f"[translator] {settings.levels} levels need more than {settings.multiple} positions: "
            "lower levels"
        )
    heads: dict[str, tuple[int, ...]] = {
        LATENT: (d, d),
        f"{POSTERIOR}.mean.weight": (d, d),
        f"{POSTERIOR}.spread.weight": (d, d),
        DIFFERENCE: (2 * settings.longest + 1, d),
        BEGUN: (1,),
        **flow_heads(config, steps),
    }
    return replace(config, heads=heads, stacks={**config.stacks, **coupling_stacks(steps)})


def initialize_flowseq(weights: Mapping[str, Tensor]) -> None:
    """Let the posterior's standard deviations begin near 1, and the couplings as constants."""
    weights[f"{POSTERIOR}.spread.weight"].mul_(FIRST_SPREAD)
    initialize_couplings(weights)


def make_flow(
    model: Seq2Seq,
    settings: FlowSeqSettings,
    memory: EncoderOutput,
    dropout: float = 0.0,
    begins: bool = False,
) -> Flow:
    """Return the flow of a model over the latent vectors of these sources."""
    return Flow(model, memory, settings.levels, settings.steps, dropout, begins)


def read_latents(
    model: Seq2Seq, z: Tensor, slots: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """Return the decoder's states [B, T, d] of one pass over latent vectors [B, T, d]."""
    inputs = model.place(linear(z, model.weights[LATENT]))
    return model.decode(inputs, memory, None, dropout, slots)


def posterior_of(
    model: Seq2Seq,
    words: Tensor,
    slots: Tensor,
    memory: EncoderOutput,
    dropout: float = 0.0,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean and the log standard deviation [B, T, d] of q(z | x, y).

    words   [B, T], filled up with ends
    hidden  [B, T] words that are not seen; None: all are seen
    """
    read = model.embed_words(words)
    read = read if hidden is None else read.masked_fill(hidden[..., None], 0)
    inputs = model.place(read)
    x = model.decode(inputs, memory, None, dropout, slots, POSTERIOR, is_pass=False)
    weights = (model.weights[f"{POSTERIOR}.{part}.weight"] for part in ("mean", "spread"))
    mean, log_std = (linear(x, weight) for weight in weights)
    return mean, log_std


# ------------------------------ the length (section 3.3)


def difference_logits(model: Seq2Seq, settings: FlowSeqSettings, memory: EncoderOutput) -> Tensor:
    """Return the logits [B, 2 R + 1] of T - S = -R .. R; -inf where the levels do not divide T."""
    inside, reach = memory.mask[..., None], settings.longest
    mean = memory.states.masked_fill(~inside, 0).sum(dim=1) / inside.sum(dim=1)
    logits = linear(mean, model.weights[DIFFERENCE])
    lengths = memory.mask.sum(dim=1)[:, None] + torch.arange(-reach, reach + 1, device=mean.device)
    fits = (lengths > 0) & (lengths % settings.multiple == 0)
    return (logits if logits.dtype == torch.float64 else logits.float()).masked_fill(~fits, -inf)


def find_lengths(
    model: Seq2Seq, settings: FlowSeqSettings, memory: EncoderOutput, count: int, longest: int
) -> tuple[list[int], Tensor]:
    """Return the likeliest lengths of one source, and log p(T | x) of each.

    They are multiples of 2^(levels - 1), perhaps fewer than `count`. If none fits: the longest
    multiple, and 0.
    """
    size = int(memory.mask.sum())
    logprobs = difference_logits(model, settings, memory)[0].log_softmax(dim=-1)
    order = logprobs.sort(descending=True, stable=True).indices.tolist()
    known = [(size + place - settings.longest, place) for place in order]
    fitting = [
        (length, place)
        for length, place in known
        if 1 <= length <= longest and length % settings.multiple == 0
    ][:count]
    if not fitting:  # the source is longer than all that may be written
        return [longest // settings.multiple * settings.multiple], logprobs.new_zeros(1)
    lengths, places = zip(*fitting, strict=True)
    return list(lengths), logprobs[list(places)]


def fill_up(target: Tensor, pad: int, eos: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Return targets [B, T'] filled up with ends to a multiple, and their slots.

    >>> fill_up(torch.tensor([[5, 6, 7], [5, 6, 0]]), 0, 2, 2)[0].tolist()
    [[5, 6, 7, 2], [5, 6, 0, 0]]
    """
    lengths = (target != pad).sum(dim=1, keepdim=True)
    rounded = -(-lengths // multiple) * multiple
    room = int(rounded.max())
    longer = F.pad(target, (0, max(0, room - target.shape[1])), value=pad)[:, :room]
    places = torch.arange(room, device=target.device)
    return longer.masked_fill((places >= lengths) & (places < rounded), eos), places < rounded


# ------------------------------ training (section 3.1)


class FlowSeqTerms(NamedTuple):
    """The terms of the loss, summed over a batch.

    words    - log p(y | z, x)
    latents  log q(z | x, y) - log p(z | x)
    length   - log p(T | x)
    places   positions of the targets, filled up
    """

    words: Tensor
    latents: Tensor
    length: Tensor
    places: Tensor


def flowseq_terms(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    settings: FlowSeqSettings,
    generator: torch.Generator,
    progress: float = 1.0,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> FlowSeqTerms:
    """Return the terms of the loss of a batch, for one z from the posterior.

    batch     sources [B, S] and targets [B, T], padded at the end
    progress  of the training: before `startup` z is the posterior's mean, and costs nothing. The
              first batch after it gives the flow its first weights
    """
    source, target = batch
    config, memory = model.config, model.encode(source, dropout)
    words, slots = fill_up(target, config.pad, config.eos, settings.multiple)
    draws = torch.rand(words.shape, generator=generator, device=words.device)
    mean, log_std = posterior_of(model, words, slots, memory, dropout, draws < HIDDEN_WORDS)
    z, latents = mean, mean.new_zeros(())
    if progress >= settings.startup:
        noise = torch.empty_like(mean).normal_(generator=generator)
        z = mean + noise * log_std.exp()
        log_q = normal_log_density(noise, slots, log_std)
        begins = torch.is_grad_enabled() and not bool(model.weights[BEGUN])
        flow = make_flow(model, settings, memory, dropout, begins)
        latents = (log_q - flow.log_density(z, slots)).sum()
        if begins:
            model.weights[BEGUN].data.fill_(1.0)
    states = read_latents(model, z, slots, memory, dropout)
    cost = F.cross_entropy(
        score_words(model, states[slots]), words[slots], reduction="sum", label_smoothing=smoothing
    )
    difference = slots.sum(dim=1) - memory.mask.sum(dim=1) + settings.longest
    logits = difference_logits(model, settings, memory)
    length = F.cross_entropy(logits, difference, reduction="sum")
    return FlowSeqTerms(cost, latents, length, slots.sum())


def flowseq_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return the loss of a batch of the trainer, per position."""
    options = training.progress, training.dropout, training.smoothing
    terms = flowseq_terms(training.model, batch, training.settings, generator, *options)
    weight: float = training.settings.latent_weight(training.progress)
    return (terms.words + weight * terms.latents + terms.length) / terms.places


# ------------------------------ decoding (section 3.4)


def normal_noise(rng: RandomSource, length: int, width: int) -> Tensor:
    """Return standard normal noise [length, width], in float64."""
    uniforms = rng.uniforms(length * width)
    if uniforms is None:
        raise TinyspecError(
            "flowseq draws real numbers: use a seeded source, not an enumerating one"
        )
    drawn: Tensor = torch.special.ndtri(torch.tensor(uniforms).clamp(min=LEAST_UNIFORM))
    return drawn.view(length, width)


class FlowSeqRefiner:
    """Write all words of several lengths and samples in one pass; the best translation is chosen.

    teacher    chooses; None: the importance-weighted estimate does, if there are candidates
    estimates  passes that each add one z from the posterior to the estimate
    """

    def __init__(
        self,
        model: Seq2Seq,
        settings: FlowSeqSettings,
        teacher: Seq2Seq | None = None,
        lengths: int = 1,
        samples: int = 1,
        temperature: float = 0.0,
        estimates: int = 0,
    ):
        self.model, self.settings, self.teacher = model, settings, teacher
        self.lengths, self.samples, self.temperature = lengths, samples, temperature
        self.estimates = estimates

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas of masks, `samples` candidates for each of the likeliest lengths.

        `extra` is the numbers of the candidates [C], log p(T | x) of each [C], and their estimates
        so far [C, 0].
        """
        longest = self.model.config.max_positions - (self.teacher is not None)  # it reads bos too
        lengths, logprobs = find_lengths(self.model, self.settings, memory, self.lengths, longest)
        canvas = blank_canvas(
            [length for length in lengths for _ in range(self.samples)],
            self.model.config.mask,
            self.model.device,
        )
        numbers = torch.arange(len(canvas.tokens), device=self.model.device)
        extra = (
            numbers,
            logprobs.repeat_interleave(self.samples),
            logprobs.new_empty(len(numbers), 0),
        )
        return canvas._replace(extra=extra)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write all words; in later passes, add an estimate of log p(y | x, T)."""
        ends = iteration == self.estimates
        if iteration == 0:
            canvas = self.write_words(canvas, memory, rng)
        else:
            canvas = self.add_estimate(canvas, memory, rng)
        return self.cut_at_end(canvas) if ends else canvas

    def write_words(self, canvas: Canvas, memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Write the likeliest words of every candidate's latent vectors, filled up with ends."""
        slots, count = canvas.mask, len(canvas.tokens)
        # For one source of a batch `extra` is not kept, and a draw is an error.
        if canvas.extra is None:
            numbers = torch.ones(count, dtype=torch.long, device=slots.device)
            canvas = canvas._replace(extra=(numbers, canvas.scores[:, 0], canvas.scores[:, :0]))
        width = self.model.config.d_model
        noise = torch.zeros(*slots.shape, width, dtype=torch.float64)
        for row, number in enumerate(canvas.extra[0].tolist()):
            if self.temperature and (self.samples == 1 or number % self.samples):
                length = int(slots[row].sum())
                stream = rng.split("noise", number)
                noise[row, :length] = self.temperature * normal_noise(stream, length, width)
        flow = make_flow(self.model, self.settings, memory)
        z = flow.from_noise(noise.to(self.model.device, self.model.dtype), slots)
        states = read_latents(self.model, z, slots, memory)
        self.model.count_layers(flow.count_row_layers(slots.numel()))
        written = write_until_end(self.model, self.model.logits(states), slots)
        tokens = written.tokens.masked_fill(slots & ~written.mask, self.model.config.eos)
        return Canvas(tokens, slots, written.scores, canvas.extra)

    def add_estimate(self, canvas: Canvas, memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Add log p(y | z, x) p(z | x) / q(z | x, y) of one z from the posterior."""
        numbers, logprobs, estimates = canvas.extra
        slots, words = canvas.mask, canvas.tokens.masked_fill(~canvas.mask, self.model.config.pad)
        noise = torch.zeros(*slots.shape, self.model.config.d_model, dtype=torch.float64)
        for row, number in enumerate(numbers.tolist()):
            length = int(slots[row].sum())
            stream = rng.split("posterior", number)
            noise[row, :length] = normal_noise(stream, length, noise.shape[-1])
        noise = noise.to(self.model.device, self.model.dtype)
        mean, log_std = posterior_of(self.model, words, slots, memory)
        z = mean + noise * log_std.exp()
        flow = make_flow(self.model, self.settings, memory)
        weight = flow.log_density(z, slots) - normal_log_density(noise, slots, log_std)
        states = read_latents(self.model, z, slots, memory)
        posterior = self.model.config.stacks[POSTERIOR] * slots.numel()
        self.model.count_layers(flow.count_row_layers(slots.numel()) + posterior)
        each = self.model.logits(states).log_softmax(dim=-1).gather(-1, words[..., None])[..., 0]
        weight = weight + each.masked_fill(~slots, 0).sum(dim=1)
        estimates = torch.cat((estimates, weight[:, None]), dim=1)
        return canvas._replace(extra=(numbers, logprobs, estimates))

    def cut_at_end(self, canvas: Canvas) -> Canvas:
        """Return the canvas without ends. Its `extra` is the rank of each candidate [C]."""
        _, logprobs, estimates = canvas.extra
        mask = canvas.mask & (canvas.tokens != self.model.config.eos)
        tokens = canvas.tokens.masked_fill(~mask, self.model.config.pad)
        rank = estimates.logsumexp(dim=1) - log(max(1, self.estimates)) + logprobs
        return Canvas(tokens, mask, canvas.scores, rank / canvas.mask.sum(dim=1))

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 1 + self.estimates

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        if self.teacher is not None:
            return best_candidate(self.teacher, source, canvas)
        return int(canvas.extra.argmax()) if self.estimates else 0


# ------------------------------ the card


def translate_without_noise(
    model: Seq2Seq, settings: FlowSeqSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S], each of its likeliest length."""
    return translate_sources(model, sources, FlowSeqRefiner(model, settings))


def fits_difference(
    config: Seq2SeqConfig, settings: FlowSeqSettings, source: int, target: int
) -> bool:
    """Return whether the length of a target, filled up, can be predicted and written."""
    length = -(-target // settings.multiple) * settings.multiple
    return 0 < length <= config.max_positions and abs(length - source) <= settings.longest


@technique(
    title="FlowSeq: latent vectors from a normalizing flow",
    summary="reads all words off a flow's latents",
    paper="Ma et al. 2019, arXiv 1909.02480",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        flowseq_batch_loss,
        translate_without_noise,
        "It reads all words off latent vectors, which a flow of {settings.levels} levels makes "
        "from noise (`flowseq`). Its figure is that of no noise and the likeliest length.",
        shape={"stacks": {POSTERIOR: 1}},
        settings=FlowSeqSettings,
        fits=fits_difference,
        equip=flowseq_config,
        initialize=initialize_flowseq,
        float32=True,
    ),
    knobs=(
        Knob("lengths", 1, "target lengths tried at once", low=1, high=128, small=(1, 3)),
        Knob("samples", 1, "samples of each length", low=1, high=128, small=(1, 2)),
        Knob(
            "temperature",
            0.0,
            "standard deviation of the noise; of several samples the first one has none",
            low=0.0,
            high=10.0,
            small=(0.7, 0.0),
        ),
        Knob(
            "judge",
            "teacher",
            "who chooses among candidates: the teacher, or the importance-weighted estimate",
            choices=("teacher", "importance"),
        ),
        Knob(
            "estimates",
            1,
            "latent vectors drawn for the importance estimate, one pass each",
            low=1,
            high=64,
            small=(1, 2),
        ),
    ),
)
def flowseq(
    request: RefineRequest,
    *,
    lengths: int,
    samples: int,
    temperature: float,
    judge: str,
    estimates: int,
) -> FlowSeqRefiner:
    """Return a refiner that writes all words in one pass, from the flow's latent vectors."""
    model, teacher = request.model, request.teacher
    if DIFFERENCE not in model.weights or POSTERIOR not in model.config.stacks:
        raise TinyspecError(f"{model.name} has no flow of latent vectors: {REMEDY}")
    settings = read_trained_settings(model, FlowSeqSettings, flowseq_config, "flow", REMEDY)
    if samples > 1 and not temperature:
        raise TinyspecError(f"{samples} samples without noise are equal: set temperature above 0")
    drawn = lengths, samples, temperature
    if lengths * samples == 1:
        return FlowSeqRefiner(model, settings, None, *drawn)
    if judge == "importance":
        return FlowSeqRefiner(model, settings, None, *drawn, estimates)
    candidates = f"{lengths} lengths and {samples} samples"
    teacher = require_teacher(model, teacher, candidates, "set judge to importance")
    return FlowSeqRefiner(model, settings, teacher, *drawn)
