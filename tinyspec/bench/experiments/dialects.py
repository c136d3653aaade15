"""`tinyspec bench dialects`: what writing all words at once costs where a source has several right
translations.

On the task of tinyspec/training/dialects.py, where the best a model can do is known exactly: a
model that reads what it wrote; one that writes in a single parallel pass, trained on the same pairs
and on the first one's translations of their sources (distillation); and Mask-Predict, by its
passes, on the pairs as they are. Every model is judged with the length that it tells itself.

All are Seq2Seq of one shape, trained alike for the same number of steps. A training that was
interrupted goes on.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import read_unfinished, save_result, show_progress, stamp_result
from tinyspec.bench.plot import SLOWER, Bars, Chart
from tinyspec.bench.report import Grid, describe_provenance, format_number
from tinyspec.bench.settings import DialectSettings
from tinyspec.decoding.refine import Canvas, Refiner
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive import mask_predict
from tinyspec.nonautoregressive.mask_predict import length_logprobs, select_lengths
from tinyspec.nonautoregressive.nat import copy_uniformly, decode_parallel, forbid_special_tokens
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.distilled import BeamSettings, write_translations
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import train
from tinyspec.training.translation_tasks import teacher_forcing_loss

AR, RAW, SAMPLED, KD = "autoregressive", "parallel", "parallel, sampled", "parallel, distilled"
KINDS = {
    "lex": "words of their own",
    "ord": "orders of their own",
    "fert": "fertilities of their own",
}
BATCH = 250  # sources that are decoded together
Loss = Callable[[Seq2Seq, Tensor, Tensor], Tensor]


def task_of(given: DialectSettings, kind: str) -> Dialects:
    """Return the task of a kind of dialects."""
    return Dialects(tuple(kind.split("+")), given.modes, given.words, given.shortest, given.longest)


class DialectTrial:
    """One kind of dialects: its sentences, and the models as they are trained in `folder`."""

    def __init__(self, kind: str, setup: DialectSettings, folder: Path):
        self.setup, self.folder, self.task = setup, folder, task_of(setup, kind)
        held = self.task.sample_pairs(setup.tests, seed=2 * setup.seed + 1)
        pairs = self.task.sample_pairs(
            setup.pairs, seed=2 * setup.seed + 2, exclude={pair.source for pair in held}
        )
        self.tests = [pair.source for pair in held]
        self.held = pad_sequences(self.tests), pad_sequences([pair.target for pair in held])
        self.sources = [pair.source for pair in pairs]
        self.targets: list[Sequence[int]] = [pair.target for pair in pairs]

    def fit(
        self, name: str, loss: Loss, targets: Sequence[Sequence[int]], steps: int = 0
    ) -> Seq2Seq:
        """A model trained on the sources and these targets; at once, where the folder holds it
        already.
        """
        s = self.setup
        config = Seq2SeqConfig(
            self.task.vocab_size, s.width, 4, 2 * s.width, s.layers, s.layers, 2 * self.task.max_target_length + 12,
            lengths=self.task.max_target_length + 1,
        )  # fmt: skip
        model = Seq2Seq.create(config, torch.Generator().manual_seed(s.seed + len(name)))
        said = [
            (x, y[: self.task.max_target_length])
            for x, y in zip(self.sources, targets, strict=True)
            if y
        ]  # a poor teacher's: cut
        if not said:
            raise TinyspecError(f"the teacher of {name} says nothing at all: more --steps")
        source, target = pad_sequences([x for x, _ in said]), pad_sequences([y for _, y in said])

        def batches(generator: torch.Generator) -> tuple[Tensor, ...]:
            """As many pairs of each dialect: a model that meets one of them more often takes that
            one for a while.
            """
            first = torch.randint(
                max(1, len(source) // s.modes), (max(1, s.batch // s.modes), 1), generator=generator
            )
            rows = (s.modes * first + torch.arange(s.modes)).flatten().clamp(max=len(source) - 1)
            return source[rows], target[rows]

        steps = steps or s.steps
        settings = TrainSettings(
            steps, s.lr, warmup=max(1, steps // 15), floor=0.0, weight_decay=0.01, betas=(0.9, 0.98), seed=s.seed,
            save_minutes=1.0,
        )  # fmt: skip
        where = self.folder / name.replace(", ", "-")
        ended = train(model.weights, batches, lambda *batch: loss(model, *batch), settings, where)
        if not ended.finished:
            raise KeyboardInterrupt
        for weight in model.weights.values():
            weight.requires_grad_(False)
        return model

    def translate_tests(self, model: Seq2Seq, refiner: Refiner) -> list[list[int]]:
        """The test sentences as a refiner writes them."""
        made = list[list[int]]()
        for at in range(0, len(self.tests), BATCH):
            part = pad_sequences(self.tests[at : at + BATCH])
            made += translate_sources(
                model, part, refiner, [Seeded(at + i) for i in range(len(part))]
            )
        return made

    def judge_outputs(
        self, outputs: Sequence[Sequence[int]], passes: float, **more: float
    ) -> dict[str, Any]:
        """An arm as plain data: a digit a sentence (1 valid + 2 of one dialect + 4 repeats a
        token), and what it cost.
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
        """Trained on the pairs as they are: the teacher."""
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
        """One parallel pass from evenly spread copies of the source; only on the pairs as they are
        its nats have a floor.
        """
        model = self.fit(
            name, one_pass_loss, targets, self.setup.student_steps if name == KD else 0
        )
        found = {name: self.judge_outputs(self.translate_tests(model, CopyRefiner(model)), 1)}
        if name == RAW:
            source, target = self.held
            with torch.no_grad():
                found[name]["nats"] = float(
                    one_pass_nll(model, source, target, model.encode(source))
                ) / len(target)
            generator = torch.Generator().manual_seed(self.setup.seed)
            found[SAMPLED] = self.judge_outputs(
                self.translate_tests(model, CopyRefiner(model, generator)), 1
            )
        return found

    def run_mask_predict(
        self, passes: Sequence[int], lengths: Sequence[int]
    ) -> dict[str, dict[str, Any]]:
        """Mask-Predict by its passes, with the first number of lengths; the most passes with the
        others.
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


def translate_greedily(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy translations of a batch."""
    return write_translations(model, sources, BeamSettings(beam=1, factor=2.0))


def one_pass_nll(model: Seq2Seq, source: Tensor, target: Tensor, memory: EncoderOutput) -> Tensor:
    """-sum of log p(y_t | x, T) over a batch, all places written in one pass from evenly spread
    copies of the source.
    """
    places, slots = copy_uniformly((source != 0).sum(dim=1), (target != 0).sum(dim=1))
    logits = model.logits(decode_parallel(model, source.gather(1, places), slots, memory)[slots])
    return F.cross_entropy(logits, target[:, : slots.shape[1]][slots], reduction="sum")


def one_pass_loss(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
    """The one-pass model's loss: its words and its length, per word."""
    memory, lengths = model.encode(source), (target != 0).sum(dim=1)
    told = F.cross_entropy(model.length_logits(memory), lengths, reduction="sum")
    return (one_pass_nll(model, source, target, memory) + told) / lengths.sum()


class CopyRefiner:
    """One pass from copies of the source, spread evenly over the likeliest length; words likeliest,
    or drawn one by one.
    """

    def __init__(self, model: Seq2Seq, generator: torch.Generator | None = None):
        self.model, self.generator = model, generator

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        length = select_lengths(length_logprobs(self.model, memory), 1)[0]
        places, slots = copy_uniformly(torch.tensor([len(source)]), torch.tensor(length))
        return Canvas(
            torch.tensor([list(source)]).gather(1, places), slots, torch.zeros(slots.shape)
        )

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        states = decode_parallel(self.model, canvas.tokens, canvas.mask, memory)
        law = forbid_special_tokens(self.model, self.model.logits(states)).log_softmax(dim=-1)
        tokens = law.argmax(dim=-1)
        if self.generator is not None:
            tokens = torch.multinomial(
                law.exp().flatten(0, 1), 1, generator=self.generator
            ).view_as(tokens)
        return Canvas(tokens, canvas.mask, law.gather(-1, tokens[..., None])[..., 0])

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 1

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0


# ---------------------------------------------------------------------- the whole table


def measure_dialects(
    given: DialectSettings, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Measure every kind with every model.

    With `out`, each kind is written as it is done; with `resume`, what is there is kept.
    """
    kinds, passes, lengths = given.kinds, given.passes, given.lengths
    for kind in kinds:
        task_of(given, kind)
    settings = {name: value for name, value in asdict(given).items() if name != "kinds"}
    settings |= {"passes": list(passes), "lengths": list(lengths)}
    done: dict[str, Any] = {}
    if resume:
        done = read_unfinished(out, "dialects", settings, lambda found: dict(found["kinds"])) or {}
    parts = None if out is None else out.with_name(out.name + ".parts")
    if parts is not None and parts.exists() and not resume:
        shutil.rmtree(parts)
    with (
        tempfile.TemporaryDirectory() as temporary,
        show_progress("dialects", 4 * len(kinds), quiet) as tick,
    ):
        for kind in kinds:
            if kind not in done:
                done[kind] = _measure_kind(
                    DialectTrial(kind, given, (parts or Path(temporary)) / kind),
                    passes,
                    lengths,
                    tick,
                )
                if out is not None:
                    save_result(out, stamp_result({"settings": settings, "kinds": done}))
            else:
                for _ in range(4):
                    tick()
    result = stamp_result({"settings": settings, "kinds": {kind: done[kind] for kind in kinds}})
    result["figures"] = summarize_dialects(result)
    if out is not None:
        save_result(out, result)
        shutil.rmtree(out.with_name(out.name + ".parts"), ignore_errors=True)
    return result


def _measure_kind(
    trial: DialectTrial, passes: Sequence[int], lengths: Sequence[int], tick: Callable[[], None]
) -> dict[str, Any]:
    """The arms of one kind, and the floors of its test sentences."""
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
    arms |= trial.run_mask_predict(passes, lengths)
    tick()
    return {"floors": mean, "arms": arms}


# ---------------------------------------------------------------------- what is shown


def summarize_dialects(result: Mapping[str, Any]) -> dict[str, Any]:
    """Shares of every arm, from its verdicts alone: a digit a sentence, 1 valid + 2 of one dialect
    + 4 repeats a token.
    """
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


def describe_kind(kind: str) -> str:
    """A kind in words.

    >>> describe_kind("lex+fert")
    'words and fertilities of their own'
    """
    return " and ".join(KINDS[one].split()[0] for one in kind.split("+")) + " of their own"


def tabulate_dialects(result: Mapping[str, Any]) -> list[Grid]:
    """A table a kind, a row a model or number of passes."""
    made = []
    for kind, arms in result["figures"].items():
        floors, rows = result["kinds"][kind]["floors"], []
        for arm, of in arms.items():
            row = result["kinds"][kind]["arms"][arm]
            floor = floors["sequence" if arm == "autoregressive" else "parallel"]
            nats = f"{row['nats']:.2f} / {floor:.2f}" if "nats" in row else "-"
            shares = [f"{100 * of[name]:.1f}" for name in ("valid", "single", "repeated")]
            rows.append([arm, *shares, format_number(row["passes"]), nats])
        head = [
            "model",
            "valid %",
            "of one dialect %",
            "with a repeated word %",
            "decoder passes",
            "nats / the floor",
        ]
        made.append(
            Grid(f"{result['settings']['modes']} dialects with {describe_kind(kind)}", head, rows)
        )
    return made


def chart_dialects(result: Mapping[str, Any]) -> Chart:
    """Draw a panel a kind, a bar a model: how many outputs are a right translation."""
    shares, s = result["figures"], result["settings"]
    arms = list(dict.fromkeys(arm for of in shares.values() for arm in of))
    panels = list[Bars]()
    for kind, of in shares.items():
        valid = {arm: 100 * of[arm]["valid"] if arm in of else None for arm in arms}
        low = {arm: SLOWER for arm, share in valid.items() if share is not None and share < 90}
        panels.append(Bars(describe_kind(kind), valid, colours=low, top=100, named=not panels))
    return Chart(
        "Right translations, of every hundred",
        panels,
        [
            f"T: decoder passes, l: lengths tried at once. {s['modes']} equally likely dialects, {s['shortest']} to "
            f"{s['longest']} of {s['words']} words, {s['tests']} test sentences, lengths as each model tells them.",
            f"{s['layers']} + {s['layers']} layers of {s['width']}, {s['steps']} steps of {s['batch']} sentences, "
            f"one seed; {describe_provenance(result)}",
        ],
        "; ".join(
            f"{kind}: " + ", ".join(f"{a} {100 * f['valid']:.1f}" for a, f in of.items())
            for kind, of in shares.items()
        ),
        columns=max(len(panels), 1),
    )


EXPERIMENT = Experiment(measure_dialects, tabulate_dialects, chart_dialects)
