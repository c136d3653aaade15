"""`tinyspec bench dialects`: measure parallel decoding where a source has several translations.

The task is that of tinyspec/training/dialects.py, where the best that a model can do is known
exactly. The models are:

    autoregressive   reads what it wrote
    one pass         writes all words in parallel, trained on the same pairs, and on the first
                     model's translations of their sources (distillation)
    SAT              writes two words in a pass, trained on both
    refinement       by its passes, trained on the pairs as they are; also without denoising
    Mask-Predict     by its passes, trained on the pairs as they are
    the others       every further technique that rewrites, as its card says, trained on both;
                     FlowSeq also with latent vectors drawn from its prior

Every model predicts the length itself. All are Seq2Seq models of one shape, trained alike for the
same number of steps, from random weights. An interrupted training goes on.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import read_unfinished, save_result, show_progress_bar, stamp_result
from tinyspec.bench.plot import SLOWER, Bars, Chart
from tinyspec.bench.report import Column, Grid, describe_provenance, make_grid
from tinyspec.bench.settings import DialectSettings
from tinyspec.decoding.refine import Canvas, Refiner, refine
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive import mask_predict
from tinyspec.nonautoregressive.flowseq import FlowSeqRefiner
from tinyspec.nonautoregressive.iterative_refinement import (
    DENOISING,
    REFINER,
    IterativeRefiner,
    refinement_loss,
)
from tinyspec.nonautoregressive.nat import decode_parallel, forbid_special_tokens
from tinyspec.nonautoregressive.parallel import ParallelRefiner, parallel_loss, parallel_nll
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.nonautoregressive.sat import SatRefiner, sat_loss
from tinyspec.technique import Card, TrainedTranslator, find_technique, load_techniques
from tinyspec.training.bitext import MASK, SentencePair, pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.distilled import BeamSettings, write_translations
from tinyspec.training.recipe import TranslationRecipe
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import train
from tinyspec.training.translation_tasks import (
    count_in_pairs,
    make_student_task,
    teacher_forcing_loss,
)

AR, RAW, SAMPLED, KD = "autoregressive", "parallel", "parallel, sampled", "parallel, distilled"
GROUP = 2  # words of a group of SAT
SAT, SAT_KD = f"sat, K {GROUP}", f"sat, K {GROUP}, distilled"
REFINED = "iterative refinement"
DRAWN = ", noise 1"  # of FlowSeq, drawn from its prior
GERMAN = ("synst",)  # its chunks are found in German words: tests/nonautoregressive/test_synst.py
RUN_HERE = ("sat", "iterative_refinement", "mask_predict")  # with rows of their own
KINDS = {
    "lex": "words of their own",
    "ord": "orders of their own",
    "fert": "fertilities of their own",
}
BATCH = 250  # sources that are decoded together
Loss = Callable[[Seq2Seq, Tensor, Tensor], Tensor]


def make_dialects(given: DialectSettings, kind: str) -> Dialects:
    """Return the task of a kind of dialects."""
    return Dialects(tuple(kind.split("+")), given.modes, given.words, given.shortest, given.longest)


class DialectTrial:
    """One kind of dialects: its sentences, and the models as they are trained in `folder`."""

    def __init__(self, kind: str, setup: DialectSettings, folder: Path):
        self.setup, self.folder, self.task = setup, folder, make_dialects(setup, kind)
        held = self.task.sample_pairs(setup.tests, seed=2 * setup.seed + 1)
        pairs = self.task.sample_pairs(
            setup.pairs, seed=2 * setup.seed + 2, exclude={pair.source for pair in held}
        )
        self.tests = [pair.source for pair in held]
        self.held = pad_sequences(self.tests), pad_sequences([pair.target for pair in held])
        self.sources = [pair.source for pair in pairs]
        self.targets: list[Sequence[int]] = [pair.target for pair in pairs]

    def make_config(self, **changes: Any) -> Seq2SeqConfig:
        """Return the shape that all models have, with these changes."""
        s, longest = self.setup, self.task.max_target_length
        config = Seq2SeqConfig(
            vocab_size=self.task.vocab_size,
            d_model=s.width,
            n_heads=4,
            d_ff=2 * s.width,
            encoder_layers=s.layers,
            decoder_layers=s.layers,
            max_positions=2 * longest + 12,
            lengths=longest + 1,
        )
        return replace(config, **changes)

    def pair_sources(self, name: str, targets: Sequence[Sequence[int]]) -> list[SentencePair]:
        """Return the training pairs.

        A poor teacher may have written nothing, or too much, or tokens that are no words. These
        become the first word: no technique learns to write them.
        """
        longest = self.task.max_target_length
        pairs = [
            SentencePair(list(x), [max(token, MASK + 1) for token in y[:longest]])
            for x, y in zip(self.sources, targets, strict=True)
            if y
        ]
        if not pairs:
            raise TinyspecError(f"the teacher of {name} says nothing at all: more --steps")
        return pairs

    def fit(
        self,
        name: str,
        loss: Loss,
        targets: Sequence[Sequence[int]],
        steps: int = 0,
        stacks: Mapping[str, int] | None = None,
    ) -> Seq2Seq:
        """Return a model trained on the sources and these targets; at once if the folder has it.

        stacks  its further decoder stacks
        """
        pairs = self.pair_sources(name, targets)
        source, target = pad_sequences([x for x, _ in pairs]), pad_sequences([y for _, y in pairs])
        config = self.make_config(stacks=stacks or {})

        def take(numbers: Sequence[int]) -> tuple[Tensor, ...]:
            return source[numbers], target[numbers]

        model = Seq2Seq.create(config, self.seed_weights(name))
        return self.train_model(name, model, len(pairs), take, loss, steps)

    def fit_card(
        self,
        name: str,
        card: Card,
        targets: Sequence[Sequence[int]],
        teacher: Seq2Seq | None = None,
        settings: Any = None,
    ) -> Seq2Seq:
        """Return a model of a technique, trained as `train mt` trains it, on the pairs that fit.

        settings  what it is trained for; None: the card's defaults
        """
        trained = card.translator
        assert trained is not None
        settings = trained.settings() if settings is None else settings
        plan = TranslationRecipe(
            name,
            self.shape_for(trained),
            self.make_settings(),
            card.name,
            self.task.vocab_size,
            dropout=0.0,
            smoothing=0.0,
            teacher="" if teacher is None else AR,
            translator=asdict(settings),
        )
        pairs = self.pair_sources(name, targets)
        task = make_student_task(plan, pairs, [], teacher)

        def loss(model: Seq2Seq, *batch: Tensor) -> Tensor:
            seed = int(torch.randint(1 << 62, ()))  # the trainer has seeded torch for this step
            return task.loss(model, batch, torch.Generator().manual_seed(seed))

        config = plan.config(self.task.vocab_size)
        config = replace(config, extra={**config.extra, **count_in_pairs(plan, pairs)})
        first = Seq2Seq.create(config, self.seed_weights(name))
        trained.initialize(first.weights)
        return self.train_model(name, first, len(task.pairs), task.batch, loss, 0, task.before_step)

    def shape_for(self, trained: TrainedTranslator) -> dict[str, Any]:
        """Return section [shape] of a recipe: the common one, with what the card asks for.

        Where a model has no decoder, its encoder has the decoder's layers too.
        """
        common, layers = self.make_config(), self.setup.layers
        names = ("d_model", "n_heads", "d_ff", "encoder_layers", "decoder_layers", "max_positions")
        shape = {name: getattr(common, name) for name in names} | dict(trained.shape)
        if shape.get("lengths"):
            shape["lengths"] = common.lengths
        if shape.get("stacks"):
            shape["stacks"] = dict.fromkeys(shape["stacks"], layers)
        if not shape["decoder_layers"]:
            shape["encoder_layers"] = 2 * layers
        return shape

    def make_settings(self, steps: int = 0) -> TrainSettings:
        """Return how every model is trained; 0 steps: as many as the others."""
        steps = steps or self.setup.steps
        return TrainSettings(
            steps,
            self.setup.lr,
            warmup=max(1, steps // 15),
            floor=0.0,
            weight_decay=0.01,
            betas=(0.9, 0.98),
            seed=self.setup.seed,
            save_minutes=1.0,
        )

    def seed_weights(self, name: str) -> torch.Generator:
        """Return a generator for the first weights of a model."""
        return torch.Generator().manual_seed(self.setup.seed + len(name))

    def train_model(
        self,
        name: str,
        model: Seq2Seq,
        n_pairs: int,
        take: Callable[[Sequence[int]], tuple[Tensor, ...]],
        loss: Callable[..., Tensor],
        steps: int,
        before_step: Callable[[int, float], None] | None = None,
    ) -> Seq2Seq:
        """Train a model on so many pairs, and return it.

        take  numbers of pairs -> the batch that they make
        """
        s = self.setup

        def batches(generator: torch.Generator) -> tuple[Tensor, ...]:
            """Draw as many pairs of each dialect: a model prefers one that it meets more often."""
            first = torch.randint(
                max(1, n_pairs // s.modes), (max(1, s.batch // s.modes), 1), generator=generator
            )
            rows = (s.modes * first + torch.arange(s.modes)).flatten().clamp(max=n_pairs - 1)
            return take(rows.tolist())

        ended = train(
            model.weights,
            batches,
            lambda *batch: loss(model, *batch),
            self.make_settings(steps),
            self.folder / name.replace(", ", "-"),
            before_step=before_step,
        )
        if not ended.finished:
            raise KeyboardInterrupt
        for weight in model.weights.values():
            weight.requires_grad_(False)
        return model

    def translate_tests(self, model: Seq2Seq, refiner: Refiner) -> list[list[int]]:
        """Return the test sentences as a refiner translates them."""
        made = list[list[int]]()
        for at in range(0, len(self.tests), BATCH):
            part = pad_sequences(self.tests[at : at + BATCH])
            made += translate_sources(
                model, part, refiner, [Seeded(at + i) for i in range(len(part))]
            )
        return made

    def draw_tests(self, model: Seq2Seq, refiner: Refiner) -> list[list[int]]:
        """Return the test sentences as a refiner translates them that draws numbers."""
        made = list[list[int]]()
        for at, source in enumerate(self.tests):
            refined = refine(model, source, refiner, Seeded(at))
            for _ in refined:
                pass
            made.append(list(refined.tokens))
        return made

    def judge_outputs(
        self, outputs: Sequence[Sequence[int]], passes: float, **more: float
    ) -> dict[str, Any]:
        """Return an arm as plain data.

        verdicts  a digit for each sentence: 1 if it is a right translation, + 2 if it is of one
                  dialect, + 4 if it repeats a token
        """
        marks = (
            self.task.judge_output(source, output)
            for source, output in zip(self.tests, outputs, strict=True)
        )
        return {
            "passes": passes,
            "verdicts": "".join(
                str(valid + 2 * single + 4 * twice) for valid, single, twice in marks
            ),
            **more,
        }

    # ------------------------------------------------------------------ the models

    def run_autoregressive(self) -> tuple[Seq2Seq, dict[str, Any]]:
        """Train the autoregressive model, the teacher, on the pairs, and judge it."""
        model = self.fit(AR, teacher_forcing_loss, self.targets)
        made = [
            text
            for at in range(0, len(self.tests), BATCH)
            for text in translate_greedily(model, self.tests[at : at + BATCH])
        ]
        source, target = self.held
        with torch.no_grad():
            ends = int((target != 0).sum()) + len(target)
            nats = float(teacher_forcing_loss(model, source, target)) * ends / len(target)
        return model, self.judge_outputs(made, sum(map(len, made)) / len(made) + 1, nats=nats)

    def run_one_pass(
        self, name: str, targets: Sequence[Sequence[int]]
    ) -> dict[str, dict[str, Any]]:
        """Train a model of one parallel pass on these targets, and judge it.

        On the pairs as they are (RAW) its nats have a known floor, so they are measured there.
        """
        model = self.fit(
            name, one_pass_loss, targets, self.setup.student_steps if name == KD else 0
        )
        found = {name: self.judge_outputs(self.translate_tests(model, ParallelRefiner(model)), 1)}
        if name == RAW:
            source, target = self.held
            with torch.no_grad():
                found[name]["nats"] = float(
                    parallel_nll(model, source, target, model.encode(source))
                ) / len(target)
            generator = torch.Generator().manual_seed(self.setup.seed)
            found[SAMPLED] = self.judge_outputs(
                self.translate_tests(model, SamplingRefiner(model, generator)), 1
            )
        return found

    def run_mask_predict(
        self, passes: Sequence[int], lengths: Sequence[int]
    ) -> dict[str, dict[str, Any]]:
        """Train Mask-Predict, and judge it by its passes and lengths.

        All passes run with the first number of lengths, the most passes with the others too.
        """

        def loss(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
            seed = int(torch.randint(1 << 62, ()))  # the trainer has seeded torch for this step
            batch = mask_predict.TranslationPairs(source, target)
            return mask_predict.masked_lm_loss(model, batch, torch.Generator().manual_seed(seed))

        model, found = self.fit("mask-predict", loss, self.targets), {}
        for t, count in [
            *((t, lengths[0]) for t in passes),
            *((max(passes), count) for count in lengths[1:]),
        ]:
            refiner = mask_predict.MaskPredictRefiner(model, t, count)
            found[f"mask-predict, T {t}, l {count}"] = self.judge_outputs(
                self.translate_tests(model, refiner), t
            )
        return found

    def run_groups(self, name: str, targets: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
        """Train SAT with groups of GROUP words on these targets, and judge it."""

        def loss(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
            return sat_loss(model, (source, target), GROUP)

        model = self.fit(name, loss, targets)
        made = self.translate_tests(model, SatRefiner(model, GROUP))
        passes = sum(-(-(len(text) + 1) // GROUP) for text in made) / len(made)
        return {name: self.judge_outputs(made, passes)}

    def run_refinement(self, passes: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Train iterative refinement on the pairs, with denoising and without, and judge both.

        Without denoising, the most passes are run alone.
        """
        found = {}
        for name, denoising, counts in (
            (REFINED, DENOISING, passes),
            (f"{REFINED} without denoising", 0.0, [max(passes)]),
        ):

            def loss(
                model: Seq2Seq, source: Tensor, target: Tensor, denoising: float = denoising
            ) -> Tensor:
                seed = int(torch.randint(1 << 62, ()))  # the trainer has seeded torch for this step
                generator = torch.Generator().manual_seed(seed)
                return refinement_loss(model, (source, target), generator, denoising=denoising)

            model = self.fit(name, loss, self.targets, stacks={REFINER: self.setup.layers})
            for count in counts:
                made = self.translate_tests(model, IterativeRefiner(model, count))
                found[f"{name}, T {count}"] = self.judge_outputs(made, count)
        return found

    def run_card(
        self, card: Card, targets: Mapping[str, Sequence[Sequence[int]]], teacher: Seq2Seq
    ) -> dict[str, dict[str, Any]]:
        """Train a technique on each of these targets, and judge it as its card translates.

        targets  by what the row's name has after the technique's
        """
        found, trained = dict[str, dict[str, Any]](), card.translator
        assert trained is not None and trained.translate is not None
        for ending, taught in targets.items():
            name, forward_log = card.name + ending, list[ForwardRecord]()
            model = self.fit_card(name, card, taught, teacher).with_log(forward_log)
            made, batches = list[list[int]](), 0
            for at in range(0, len(self.tests), BATCH):
                part = pad_sequences(self.tests[at : at + BATCH])
                made += trained.translate(model, trained.settings(), part)
                batches += 1
            passes = sum(call.model == model.name for call in forward_log) / batches
            found[name] = self.judge_outputs(made, passes)
            if card.name == "flowseq":
                drawing = FlowSeqRefiner(model, trained.settings(), temperature=1.0)
                found[name + DRAWN] = self.judge_outputs(self.draw_tests(model, drawing), passes)
        return found


def translate_greedily(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return greedy translations of a batch."""
    return write_translations(model, sources, BeamSettings(beam=1, factor=2.0))


def one_pass_loss(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
    """Return the loss of the model that writes in one pass."""
    return parallel_loss(model, (source, target))


class SamplingRefiner(ParallelRefiner):
    """Write all words of the likeliest length in one pass, each sampled by `generator`."""

    def __init__(self, model: Seq2Seq, generator: torch.Generator):
        super().__init__(model)
        self.generator = generator

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        states = decode_parallel(self.model, canvas.tokens, canvas.mask, memory)
        logprobs = forbid_special_tokens(self.model, self.model.logits(states)).log_softmax(dim=-1)
        probs = logprobs.exp().flatten(0, 1)
        tokens = torch.multinomial(probs, 1, generator=self.generator).view_as(canvas.tokens)
        return Canvas(tokens, canvas.mask, logprobs.gather(-1, tokens[..., None])[..., 0])


# ---------------------------------------------------------------------- the whole table


def measure_dialects(
    given: DialectSettings, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Measure every kind with every model.

    With `out`, each kind is written when it is done, and `resume` goes on there. Trainings lie
    beside the file until the end.
    """
    kinds = given.kinds
    for kind in kinds:
        make_dialects(given, kind)  # a wrong kind is reported before anything is trained
    chosen = choose_trained_cards(given.methods)
    settings = {name: value for name, value in asdict(given).items() if name != "kinds"}
    settings |= {"passes": list(given.passes), "lengths": list(given.lengths)}
    settings |= {"methods": [card.name for card in chosen]}
    trainings = 3 + sum(_count_trainings(card) for card in chosen)
    done: dict[str, Any] = read_unfinished(
        out, resume, "dialects", settings, lambda found: dict(found["kinds"]), {}, is_timed=False
    )
    parts = None if out is None else out.with_name(out.name + ".parts")
    if parts is not None and not resume:
        shutil.rmtree(parts, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory() as temporary,
        show_progress_bar("dialects", trainings * len(kinds), quiet) as tick,
    ):
        for kind in kinds:
            if kind not in done:
                trial = DialectTrial(kind, given, (parts or Path(temporary)) / kind)
                done[kind] = _measure_kind(trial, chosen, tick)
                save_result(out, stamp_result({"settings": settings, "kinds": done}))
            else:
                for _ in range(trainings):
                    tick()
    result = stamp_result({"settings": settings, "kinds": {kind: done[kind] for kind in kinds}})
    result["figures"] = summarize_dialects(result)
    save_result(out, result)
    if parts is not None:
        shutil.rmtree(parts, ignore_errors=True)
    return result


def choose_trained_cards(methods: Sequence[str]) -> list[Card]:
    """Return the techniques that are trained beside the one of one pass; none named: all.

    Raises TinyspecError for one that trains no translation model of its own.
    """
    known = {
        name: card
        for name, card in load_techniques().items()
        if card.kind == "refine" and card.translator is not None and card.translator.translate
        if name not in ("parallel", *GERMAN)
    }
    for method in methods:
        if find_technique(method).name not in known:
            raise TinyspecError(
                f"{method} has no row among dialects: {suggest_nearest(method, known)}"
            )
    wanted = {find_technique(method).name for method in methods} or set(known)
    return [card for name, card in known.items() if name in wanted]


def _count_trainings(card: Card) -> int:
    return 1 if card.name == "mask_predict" else 2


def _measure_kind(
    trial: DialectTrial, cards: Sequence[Card], tick: Callable[[], None]
) -> dict[str, Any]:
    """Return the arms of one kind, and the floors of its test sentences."""
    floors = [trial.task.entropy_bounds(source) for source in trial.tests]
    mean = {
        name: sum(getattr(one, name) for one in floors) / len(floors)
        for name in ("sequence", "parallel")
    }
    teacher, row = trial.run_autoregressive()
    arms = {AR: row}
    tick()
    arms |= trial.run_one_pass(RAW, trial.targets)
    tick()
    taught = [
        text
        for at in range(0, len(trial.sources), BATCH)
        for text in translate_greedily(teacher, trial.sources[at : at + BATCH])
    ]
    arms |= trial.run_one_pass(KD, taught)
    tick()
    passes, lengths = trial.setup.passes, trial.setup.lengths
    order = [*RUN_HERE, *(card.name for card in cards)]
    for card in sorted(cards, key=lambda card: order.index(card.name)):
        if card.name == "sat":
            arms |= trial.run_groups(SAT, trial.targets)
            arms |= trial.run_groups(SAT_KD, taught)
        elif card.name == "iterative_refinement":
            arms |= trial.run_refinement(passes)
        elif card.name == "mask_predict":
            arms |= trial.run_mask_predict(passes, lengths)
        else:
            targets: dict[str, Sequence[Sequence[int]]] = {"": trial.targets}
            targets[", distilled"] = taught
            arms |= trial.run_card(card, targets, teacher)
        for _ in range(_count_trainings(card)):
            tick()
    return {"floors": mean, "arms": arms}


# ---------------------------------------------------------------------- what is shown


def summarize_dialects(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shares of every arm, from its verdicts alone (`DialectTrial.judge_outputs`)."""
    return {
        kind: {
            arm: {
                name: sum(int(mark) >> bit & 1 for mark in row["verdicts"]) / len(row["verdicts"])
                for bit, name in enumerate(("valid", "single", "repeated"))
            }
            for arm, row in of["arms"].items()
        }
        for kind, of in result["kinds"].items()
    }


def describe_dialects(kind: str) -> str:
    """Return a kind of dialects in words.

    >>> describe_dialects("lex+fert")
    'words and fertilities of their own'
    """
    return " and ".join(KINDS[one].split()[0] for one in kind.split("+")) + " of their own"


def write_percent(share: float) -> str:
    return f"{100 * share:.1f}"


COLUMNS = (
    Column("valid %", "valid", write_percent),
    Column("of one dialect %", "single", write_percent),
    Column("with a repeated word %", "repeated", write_percent),
    Column("decoder passes", "passes", ".2f"),
    Column("nats / the floor", "nats"),
)


def tabulate_dialects(result: Mapping[str, Any]) -> list[Grid]:
    """Return a table for each kind, a line for each model or number of passes."""
    made = []
    for kind, shares in result["figures"].items():
        floors, rows = result["kinds"][kind]["floors"], {}
        for arm, of in result["kinds"][kind]["arms"].items():
            floor = floors["sequence" if arm == AR else "parallel"]
            nats = f"{of['nats']:.2f} / {floor:.2f}" if "nats" in of else "-"
            rows[arm] = {**shares[arm], "passes": of["passes"], "nats": nats}
        title = f"{result['settings']['modes']} dialects with {describe_dialects(kind)}"
        made.append(make_grid(title, rows, COLUMNS, first="model"))
    return made


def chart_dialects(result: Mapping[str, Any]) -> Chart:
    """Draw a panel for each kind, a bar for each model: the share of right translations."""
    shares, s = result["figures"], result["settings"]
    arms = list(dict.fromkeys(arm for of in shares.values() for arm in of))
    panels = list[Bars]()
    for kind, of in shares.items():
        valid = {arm: 100 * of[arm]["valid"] if arm in of else None for arm in arms}
        low = {arm: SLOWER for arm, share in valid.items() if share is not None and share < 90}
        panels.append(Bars(describe_dialects(kind), valid, colours=low, top=100, named=not panels))
    return Chart(
        "Right translations, of every hundred",
        panels,
        [
            f"T: decoder passes, l: lengths tried at once. {s['modes']} equally likely dialects, "
            f"{s['shortest']} to {s['longest']} of {s['words']} words, {s['tests']} test "
            "sentences, lengths as each model tells them.",
            f"{s['layers']} + {s['layers']} layers of {s['width']}, {s['steps']} steps of "
            f"{s['batch']} sentences, one seed; {describe_provenance(result)}",
        ],
        "; ".join(
            f"{kind}: " + ", ".join(f"{a} {100 * f['valid']:.1f}" for a, f in of.items())
            for kind, of in shares.items()
        ),
        columns=max(len(panels), 1),
    )


EXPERIMENT = Experiment(measure_dialects, tabulate_dialects, chart_dialects)
