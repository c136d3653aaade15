"""`tinyspec bench translation`: measure BLEU, passes and time of every way to translate.

At batch 1 all arms translate each of Multi30k's test sentences in turn, from text to text, under
the same load of the machine. Samples are sums over blocks of sentences, BLEU's counts too, and an
interrupted run goes on at the next block. Then each arm translates the first sentences in large
batches, where parallel decoding has least to gain. There are two experiments: a table of all
methods, and the survey's third, Mask-Predict by its iterations.

A technique that writes in few passes must beat two rows. One is the base, `parallel`: blocks are
drawn again (the paired bootstrap) to tell a lead from noise. The other is an autoregressive model
with a shallow decoder.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tinyspec import data
from tinyspec.bench.bootstrap import Lead, compare_bleu
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.translators import (
    BASE,
    EXPERIMENTS,
    PLAIN,
    Ids,
    Translated,
    TranslatorArm,
    label_mask_predict,
    list_absent_translators,
    load_translators_by_role,
    make_translator_arms,
)
from tinyspec.bench.harness import (
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.measure import order_of_turn
from tinyspec.bench.plot import Bars, Chart, Lines
from tinyspec.bench.report import (
    Column,
    Grid,
    count_things,
    describe_old_columns,
    describe_provenance,
    format_quartiles,
    make_grid,
)
from tinyspec.bench.settings import TranslationSettings
from tinyspec.bench.tally import five_number_summary
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.checkpoint import hash_weights
from tinyspec.training.bleu import (
    ORDER,
    BleuCounts,
    count_characters,
    count_ngrams,
    load_bleu,
    score_characters,
)

BLOCK = 20  # sentences of a sample, and of a unit that the bootstrap draws
ROWS = 1024  # most rows of a batch: a source with s candidates is s of them
Clock = Callable[[], float]


class BlockSample(NamedTuple):
    """An arm's sums over a block of sentences; seconds at batch 1.

    counts      n-grams found in the reference, then all n-grams, of 1 to ORDER words
    characters  the counts of chrF; older files have none
    """

    arm: str
    block: int
    sentences: int
    seconds: float
    tokens: int
    repeats: int
    decoder: int
    encoder: int
    teacher: int
    wanted: int
    counts: list[int]
    characters: list[int]

    @property
    def bleu_counts(self) -> BleuCounts:
        return BleuCounts(tuple(self.counts[:ORDER]), tuple(self.counts[ORDER:]), self.wanted)

    def as_row(self) -> list[Any]:
        """Return the sample as a file has it: the counts one by one."""
        return [*self[:-2], *self.counts, *self.characters]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "BlockSample":
        """Return the sample of a row of a file."""
        first = len(cls._fields) - 2
        last = first + 2 * ORDER
        return cls._make([*row[:first], list(row[first:last]), list(row[last:])])


COLUMNS = [
    *BlockSample._fields[:-2],
    *(f"{what}_{n}" for what in ("hits", "all") for n in range(1, ORDER + 1)),
    *(f"characters_{what}_{n}" for n in range(1, 7) for what in ("all", "wanted", "hits")),
]


def measure_translation(
    given: TranslationSettings,
    out: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
    block: int = BLOCK,
) -> dict[str, Any]:
    """Return all figures with their samples.

    With `out`, the file is written after every block; with `resume`, the run goes on with it.
    """
    experiment, batch, rounds = given.experiment, given.batch, given.rounds
    if experiment not in EXPERIMENTS:
        raise TinyspecError(
            f"there is no experiment {experiment}: {suggest_nearest(experiment, EXPERIMENTS)}"
        )
    load_bleu()  # reports at once if sacrebleu is missing
    texts = data.read_multi30k("test", given.data_folder)[: given.sentences]
    found = load_translators_by_role(given.models)
    whole = experiment == "iterations"
    asked = make_translator_arms(
        experiment,
        found,
        given.samples,
        given.iterations or (range(1, 11) if whole else (1, 4, 10)),
        given.lengths or ((1, 3, 5) if whole else (3, 5)),
    )
    settings = {
        "experiment": experiment,
        "models": {
            role: [model.name, hash_weights(model.weights)] for role, model in found.items()
        },
        "sentences": len(texts),
        "arms": [arm.label for arm in asked],
        "block": block,
        "batch": batch,
        "rounds": rounds,
        "dtype": "float32",
    }
    nothing: tuple[list[BlockSample], dict[str, list[float]]] = ([], {})
    samples, batches = read_unfinished(out, resume, "translation", settings, _read_samples, nothing)
    blocks = [texts[at : at + block] for at in range(0, len(texts), block)]

    def make_result() -> dict[str, Any]:
        made = {
            "settings": settings,
            "knobs": {arm.label: record_knobs(arm.knobs) for arm in asked},
            "absent": list_absent_translators(found),
            "columns": COLUMNS,
            "samples": [one.as_row() for one in samples],
            "batches": batches,
        }
        return stamp_result({**made, "figures": summarize_translation(made)})

    def save() -> None:
        if out is not None:
            save_result(out, make_result())

    done = {one.block for one in samples}
    timed = [arm for arm in asked if arm.many is not None]
    turns = range(min((len(taken) for taken in batches.values()), default=0), rounds)
    steps = (len(blocks) - len(done)) * len(asked) + len(turns) * len(timed)
    with show_progress_bar(f"{len(asked)} ways to translate", steps, quiet) as tick:
        for arm in asked if steps else ():
            arm.one(texts[0][0])  # warm up
        for number, part in enumerate(blocks):
            if number not in done:
                samples += _translate_block(asked, number, part, clock, tick)
                save()
        some = [found["teacher"].tokenizer.encode(english) for english, _ in texts[: 4 * batch]]
        some.sort(key=len)
        for turn in turns:
            taken = {}
            for arm in order_of_turn(timed, turn):
                taken[arm.label] = _time_batches(arm, some, batch, clock)
                tick()
            for label, seconds in taken.items():
                batches.setdefault(label, []).append(seconds)
            save()
    return make_result()


def _translate_block(
    asked: Sequence[TranslatorArm],
    number: int,
    block: Sequence[tuple[str, str]],
    clock: Clock,
    tick: Callable[[], None],
) -> list[BlockSample]:
    """Translate each sentence of a block by all arms in turn."""
    seconds = {arm.label: 0.0 for arm in asked}
    made: dict[str, list[Translated]] = {arm.label: [] for arm in asked}
    for place, (english, _) in enumerate(block):
        for arm in order_of_turn(asked, number * len(block) + place):
            begun = clock()
            done = arm.one(english)
            seconds[arm.label] += clock() - begun
            made[arm.label].append(done)
    samples = []
    for arm in asked:
        own = made[arm.label]
        texts, references = [one.text for one in own], [german for _, german in block]
        found = count_ngrams(texts, references)
        samples.append(
            BlockSample(
                arm=arm.label,
                block=number,
                sentences=len(own),
                seconds=round(seconds[arm.label], 6),
                tokens=sum(len(one.tokens) for one in own),
                repeats=sum(a == b for one in own for a, b in pairwise(one.tokens)),
                decoder=sum(one.decoder for one in own),
                encoder=sum(one.encoder for one in own),
                teacher=sum(one.teacher for one in own),
                wanted=found.reference_length,
                counts=[*found.matches, *found.totals],
                characters=[*count_characters(texts, references)],
            )
        )
        tick()
    return samples


def _time_batches(arm: TranslatorArm, sources: Sequence[Ids], batch: int, clock: Clock) -> float:
    """Return the seconds per sentence if many are translated at once."""
    assert arm.many is not None
    size = max(1, min(batch, ROWS // arm.width))
    begun = clock()
    for at in range(0, len(sources), size):
        arm.many(sources[at : at + size])
    return (clock() - begun) / len(sources)


def summarize_translation(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by arm, from the samples alone.

    Times as fast as plain decoding are ratios within a block, and for batches within a round. The
    lead over the base is in BLEU, with its interval.
    """
    by_arm: dict[str, dict[int, BlockSample]] = {}
    for row in result["samples"]:
        sample = BlockSample.from_row(row)
        by_arm.setdefault(sample.arm, {})[sample.block] = sample
    found: dict[str, Any] = {}
    for label, blocks in by_arm.items():
        own, plain, batches = list(blocks.values()), by_arm[PLAIN], result["batches"]
        score = sum((one.bleu_counts for one in own[1:]), own[0].bleu_counts).bleu
        characters = [sum(of) for of in zip(*(one.characters for one in own), strict=True)]
        lead = None
        if BASE in by_arm and label != BASE:
            lead = list(compare_bleu(_list_counts(blocks), _list_counts(by_arm[BASE])))
        many, tokens = sum(one.sentences for one in own), sum(one.tokens for one in own)
        ratios = [plain[block].seconds / one.seconds for block, one in blocks.items()]
        pairs = list(zip(batches.get(PLAIN, ()), batches.get(label, ()), strict=False))
        found[label] = {
            "bleu": score.score,
            "signature": score.signature,
            "chrf": score_characters(characters)._asdict() if characters else None,
            "lead": lead,
            **{
                f"{what}_passes": sum(getattr(one, what) for one in own) / many
                for what in ("decoder", "encoder", "teacher")
            },
            "tokens": tokens / many,
            "repeated": sum(one.repeats for one in own) / max(tokens, 1),
            "milliseconds": 1000 * median(one.seconds / one.sentences for one in own),
            "speedup": five_number_summary(ratios),
            "batch_milliseconds": 1000 * median(batches[label]) if label in batches else None,
            "batch_speedup": five_number_summary([slow / fast for slow, fast in pairs])
            if pairs
            else None,
        }
    return found


def _list_counts(blocks: Mapping[int, BlockSample]) -> list[list[int]]:
    """Return the counts of BLEU of each block, in the order of the blocks."""
    return [[*blocks[at].counts, blocks[at].wanted] for at in sorted(blocks)]


def _read_samples(found: dict[str, Any]) -> tuple[list[BlockSample], dict[str, list[float]]]:
    """Return the samples and batches of an interrupted run."""
    batches = {str(label): [float(x) for x in taken] for label, taken in found["batches"].items()}
    return [BlockSample.from_row(row) for row in found["samples"]], batches


def tabulate_translation(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of arms."""
    settings = result["settings"]
    columns = [
        Column("BLEU", "bleu", ".2f"),
        Column(f"above {BASE}", "lead", write_lead),
        Column("chrF", lambda of: of["chrf"] and of["chrf"]["score"], ".1f"),
        Column("decoder passes", "decoder_passes", ".1f"),
        Column("encoder", "encoder_passes", ".0f"),
        Column("teacher", "teacher_passes", ".0f"),
        Column("ms per sentence", "milliseconds", ".1f"),
        Column("times as fast", "speedup", format_quartiles),
        Column(f"ms, batch {settings['batch']}", "batch_milliseconds", ".2f"),
        Column("times as fast", "batch_speedup", format_quartiles),
        Column("repeated tokens", "repeated", ".1%"),
    ]
    title = f"English to German, Multi30k test_2016_flickr, {settings['sentences']} sentences"
    return [make_grid(title, result["figures"], columns)]


def write_lead(lead: Sequence[float] | None) -> str:
    """Return a lead in BLEU with its interval.

    >>> write_lead([1.26, 0.9, 1.6]), write_lead([0.2, -0.1, 0.5]), write_lead(None)
    ('+1.3 (+0.9 to +1.6)', '+0.2 (-0.1 to +0.5), no difference', '-')
    """
    if lead is None:
        return "-"
    of = Lead(*lead)
    noise = f", {of.verdict}" if of.verdict == "no difference" else ""
    return f"{of.lead:+.1f} ({of.low:+.1f} to {of.high:+.1f}){noise}"


def describe_translation(result: Mapping[str, Any]) -> list[str]:
    """Return what stands below a table: how BLEU was computed, the models, and the machine."""
    machine, settings = result["machine"], result["settings"]
    plain = next(iter(result["figures"].values()))
    models = ", ".join(name for name, _ in settings["models"].values())
    notes = [
        f"BLEU: sacrebleu, raw text, {plain['signature']}. Times as fast: medians (quartiles) "
        f"against `{PLAIN}` in the same turn.",
        f"Models: {models}; {settings['dtype']}, {machine['threads']} threads, "
        f"{describe_provenance(result)}.",
    ]
    if plain["chrf"]:
        notes.insert(1, f"chrF: sacrebleu, {plain['chrf']['signature']}.")
    if BASE in result["figures"]:
        notes.append(
            f"Above {BASE}: difference in BLEU, with the 95 % interval of the paired bootstrap "
            f"over blocks of {settings['block']} sentences."
        )
    return notes


def note_translation(result: Mapping[str, Any]) -> list[str]:
    """Return the same, and which columns and rows are missing, and why."""
    alone = f"Above {BASE}: not known, since this run had no model of `{BASE}`."
    return [
        *describe_translation(result),
        *([] if BASE in result["figures"] else [alone]),
        *describe_old_columns(result, COLUMNS),
        *(
            f"No row of {name}, which is not trained here: `{command}`."
            for name, command in result.get("absent", {}).items()
        ),
    ]


def lines_by_iterations(result: Mapping[str, Any], figure: str) -> dict[str, dict[float, float]]:
    """Return a figure of Mask-Predict by iterations, a line for each number of lengths."""
    found: dict[str, dict[float, float]] = {}
    for lengths in range(1, 100):
        line: dict[float, float] = {
            count: of[figure]
            for count in range(1, 1000)
            if (of := result["figures"].get(label_mask_predict(count, lengths))) is not None
        }
        if line:
            found[count_things(lengths, "length")] = line
    return found


def chart_translation(result: Mapping[str, Any]) -> Chart:
    """Draw BLEU and time: bars of all methods, or lines over Mask-Predict's iterations."""
    found = result["figures"]
    shown = {"BLEU": "bleu", "milliseconds per sentence, batch 1": "milliseconds"}
    if result["settings"]["experiment"] != "iterations":
        panels = [
            Bars(title, {label: of[figure] for label, of in found.items()}, named=figure == "bleu")
            for title, figure in shown.items()
        ]
        summary = "; ".join(
            f"{label}: BLEU {of['bleu']:.1f}, {of['milliseconds']:.1f} ms"
            for label, of in found.items()
        )
        return Chart(
            "Ways to translate: quality and time", panels, describe_translation(result), summary
        )
    over = {title: lines_by_iterations(result, figure) for title, figure in shown.items()}
    last = max(count for line in over["BLEU"].values() for count in line)
    return Chart(
        "Mask-Predict by its iterations: quality and time",
        [
            Lines(
                title,
                over[title],
                "iterations",
                dict.fromkeys((1, last), found[PLAIN][figure]),
                f"{PLAIN} decoding",
            )
            for title, figure in shown.items()
        ],
        describe_translation(result),
        "; ".join(
            f"{label}: BLEU {line[max(line)]:.1f} at {max(line)} iterations"
            for label, line in over["BLEU"].items()
        ),
    )


EXPERIMENT = Experiment(
    measure_translation,
    tabulate_translation,
    chart_translation,
    notes=note_translation,
    closing=note_translation,
)
