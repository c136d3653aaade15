"""Make the arms of `tinyspec bench translation`: every way to translate one sentence, and many.

A technique that rewrites has a row as soon as a model was trained for it, by its card. Those in
`ROLES` have more rows than one, or rows with knobs of their own.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tinyspec import models
from tinyspec.bench.report import count_things
from tinyspec.decoding.refine import token_logprobs
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.nar_crf import trained_transitions
from tinyspec.nonautoregressive.nat import NatRefiner
from tinyspec.nonautoregressive.refine_many import refine_many, translate_sources
from tinyspec.pairing import advised_knobs
from tinyspec.technique import RefineRequest, find_technique, load_techniques
from tinyspec.training import distilled
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.distilled import BeamSettings
from tinyspec.translation import TranslationStatistics, translate

SHALLOW = "shallow"  # an autoregressive student, whose decoder is smaller than the teacher's
BASE = "parallel"  # the plainest model of one pass: others are compared with it
ROLES = (
    *("teacher", SHALLOW, "nat", "nat, fine-tuned", BASE, "sat"),
    *("iterative_refinement", "nar_crf", "nag_bert", "latent_transformer", "flowseq"),
    *("synst", "mask_predict", "specdec"),
    *("blockwise", "blockwise, frozen"),
)
EXITS = "exits"  # a left-to-right model whose layers are exits: `bench exits` has its rows
LENGTH_BEAM = 9  # lengths that the teacher chooses among, of parallel and nar_crf: 4 on either side
WORD_BEAM = CHUNK_BEAM = 4  # texts of sat, and sequences of chunks of synst: the teacher's beam
LABELLED_RATIOS = (1.0, 0.5)  # of the positions that nag_bert labels
LATENT_SAMPLES = 10  # of codes or latent vectors, of which one translation is chosen
NOISE = 0.5  # standard deviation of the noise in such samples of flowseq
PLAIN = "teacher, greedy"
EXPERIMENTS = ("table", "iterations")
Ids = list[int]


class Translated(NamedTuple):
    """A translation, and its passes: of decoders and encoders, and of a teacher that judged.

    A model that drafted has a decoder and an encoder too.
    """

    text: str
    tokens: Ids
    decoder: int
    encoder: int
    teacher: int


class TranslatorArm(NamedTuple):
    """A way to translate.

    one    translates a text
    many   translates several sources at once; None: it has no such form
    width  rows of a batch that a source becomes
    knobs  the value of every knob of its method
    """

    label: str
    one: Callable[[str], Translated]
    many: Callable[[Sequence[Ids]], list[Ids]] | None
    width: int = 1
    knobs: Mapping[str, Any] = {}


def load_translators_by_role(names: Sequence[str]) -> dict[str, Seq2Seq]:
    """Return the models by what they were trained for; those on this machine if none is named.

    Raises TinyspecError if there is no teacher.
    """
    found: dict[str, Seq2Seq] = {}
    for name in names or models.list_translators():
        model = models.load_translator(name)
        role = find_role(model)
        if role in found and names:
            raise TinyspecError(
                f"{name} and {found[role].name} were both trained for {role}: name one of them"
            )
        found.setdefault(role, model)
    if models.TEACHER not in found:
        raise TinyspecError(
            "there is no autoregressive teacher to compare with: name it in --models, or train it "
            "(train mt)"
        )
    order = [*dict.fromkeys((*ROLES, *load_techniques()))]

    def place(role: str) -> tuple[int, str]:
        known = role if role in order else role.partition(",")[0]
        return (order.index(known) if known in order else len(order)), role

    return {role: found[role] for role in sorted(found, key=place) if role != EXITS}


def find_role(model: Seq2Seq) -> str:
    """Return what a translation model was trained for, with what tells it from others of its kind.

    raw  it has a teacher's tokens, but learnt from people's translations
    """
    extra = model.config.extra
    role = str(extra.get("trained_for", models.TEACHER))
    if role == models.TEACHER:
        if "teacher" in extra:
            return SHALLOW
        return EXITS if "exits" in extra else role
    role += ", fine-tuned" if "finetuned" in extra else ""
    role += ", frozen" if extra.get("frozen") else ""
    role += f", K {extra['k']}" if role == "sat" else ""
    card = load_techniques().get(role.partition(",")[0])
    rewrites = card is not None and card.kind == "refine"
    is_raw = rewrites and "teacher" in extra and "distilled" not in extra
    return role + (", raw" if is_raw else "")


def list_absent_translators(found: Mapping[str, Seq2Seq]) -> dict[str, str]:
    """Return the models that would have rows and are not trained here: name -> how to train each.

    They are those of the zoo's recipes for translation models. A model for exits has no row.
    """
    there, cards = {model.name for model in found.values()}, load_techniques()
    absent = dict[str, str]()
    for name, recipe in models.list_untrained().items():
        plan = tomllib.loads(recipe.read_text(encoding="utf-8"))
        method = str(plan.get("method", ""))
        has_rows = method in ROLES or (method in cards and cards[method].kind == "refine")
        command = models.read_training_command(recipe)
        if has_rows and "exits" not in plan and "train mt" in command and name not in there:
            absent[name] = command
    return absent


def make_translator_arms(
    experiment: str,
    found: Mapping[str, Seq2Seq],
    samples: Sequence[int],
    iterations: Sequence[int],
    lengths: Sequence[int],
) -> list[TranslatorArm]:
    """Return the arms of an experiment, plain decoding by the teacher first."""
    teacher = found["teacher"]
    made = [_make_greedy_arm(PLAIN, teacher)]
    if experiment == "iterations":
        if "mask_predict" not in found:
            raise TinyspecError(
                "no model for mask_predict on this machine: name it in --models, or train it "
                "(train mt)"
            )
    else:
        made.append(_make_beam_arm(teacher, 4))
        knobs = find_technique("jacobi").settings({})
        blocks = _make_one(teacher, "jacobi", None, **knobs)
        made.append(TranslatorArm("teacher, jacobi", blocks, None, knobs=knobs))
        if "specdec" in found:
            made += _make_specdec_arms(teacher, found["specdec"])
        for role in ("blockwise", "blockwise, frozen"):
            if role in found:
                made += _make_blockwise_arms(role, found[role])
        for role in ("nat", "nat, fine-tuned"):
            if role not in found:
                continue
            nat = found[role]
            made += [
                _make_nat_arm(f"{role}, {first}", nat, None, first, 1)
                for first in ("argmax", "average")
            ]
            made += [
                _make_nat_arm(f"{role}, NPD {count}", nat, teacher, "argmax", count)
                for count in samples
            ]
        made += _make_further_arms(found, iterations)
        for role, model in found.items():
            if _has_card_arms(role):
                made += _make_card_arms(role, model, teacher)
    if "mask_predict" in found:
        made += [
            _make_refine_arm(
                label_mask_predict(count, wide),
                "mask_predict",
                found["mask_predict"],
                wide,
                iterations=count,
                lengths=wide,
            )
            for wide in lengths
            for count in iterations
        ]
    return made


def _make_further_arms(
    found: Mapping[str, Seq2Seq], iterations: Sequence[int]
) -> list[TranslatorArm]:
    """Return the arms of the autoregressive student and of the models that write in few passes."""
    made = list[TranslatorArm]()
    if SHALLOW in found:
        made.append(_make_greedy_arm("shallow decoder, greedy", found[SHALLOW]))
    if BASE in found:
        made += _make_card_arms(BASE, found[BASE], found["teacher"])
    for role, model in found.items():
        if role.startswith("sat, "):
            made.append(_make_refine_arm(role, "sat", model))
            label = f"{role}, beam {WORD_BEAM}"
            made.append(_make_refine_arm(label, "sat", model, WORD_BEAM, beam=WORD_BEAM))
    if "iterative_refinement" in found:
        method, model = "iterative_refinement", found["iterative_refinement"]
        made += [
            _make_refine_arm(f"{method}, T {count}", method, model, iterations=count)
            for count in iterations
        ]
        made.append(_make_refine_arm(f"{method}, adaptive", method, model, adaptive=True))
    return made + _make_structured_arms(found) + _make_latent_arms(found)


def _make_structured_arms(found: Mapping[str, Seq2Seq]) -> list[TranslatorArm]:
    """Return the arms of models whose words a CRF joins, and of the words without it."""
    made = list[TranslatorArm]()
    method = "nar_crf"
    for role in (method, f"{method}, raw"):
        if role not in found:
            continue
        model = found[role]
        trained = trained_transitions(model)
        made += [
            _make_refine_arm(f"{role}, {kind}", method, model, transitions=kind)
            for kind in dict.fromkeys((trained, "static", "none"))
        ]
        knobs = {"transitions": trained, "lengths": LENGTH_BEAM, "around": True}
        label = f"{role}, {trained}, {count_things(LENGTH_BEAM, 'length')}"
        made.append(_make_refine_arm(label, method, model, LENGTH_BEAM, found["teacher"], **knobs))
    if "nag_bert" in found:
        method, model = "nag_bert", found["nag_bert"]
        made += [
            _make_refine_arm(f"{method}, ratio {ratio}", method, model, ratio=ratio)
            for ratio in LABELLED_RATIOS
        ]
    if "synst" in found:
        method, model = "synst", found["synst"]
        made.append(_make_refine_arm(method, method, model))
        label = f"{method}, beam {CHUNK_BEAM}"
        made.append(_make_refine_arm(label, method, model, CHUNK_BEAM, beam=CHUNK_BEAM))
    return made


def _has_card_arms(role: str) -> bool:
    """Return whether a role's rows are those of its card: it rewrites, and has no others here."""
    card = load_techniques().get(role.partition(",")[0])
    is_known = role in ROLES or role.startswith(("sat, ", "nar_crf, ", "latent_transformer, "))
    return not is_known and card is not None and card.kind == "refine"


def _make_card_arms(role: str, model: Seq2Seq, teacher: Seq2Seq) -> list[TranslatorArm]:
    """Return the arms of any other technique that rewrites: as its card says.

    If a teacher may choose among several lengths, that is a second arm.
    """
    card = find_technique(role.partition(",")[0])
    made = [_make_refine_arm(role, card.name, model)]
    if card.teacher and any(knob.name == "lengths" for knob in card.knobs):
        label = f"{role}, {count_things(LENGTH_BEAM, 'length')}"
        knobs: dict[str, Any] = {"lengths": LENGTH_BEAM}
        if any(knob.name == "around" for knob in card.knobs):
            knobs["around"] = True
        made.append(_make_refine_arm(label, card.name, model, LENGTH_BEAM, teacher, **knobs))
    return made


def _make_latent_arms(found: Mapping[str, Seq2Seq]) -> list[TranslatorArm]:
    """Return the arms of models with latent variables: the likeliest ones, and several samples."""
    made, teacher = list[TranslatorArm](), found["teacher"]
    samples = {"samples": LATENT_SAMPLES}
    method = "latent_transformer"
    for role in (method, f"{method}, raw"):
        if role in found:
            label = f"{role}, {LATENT_SAMPLES} samples"
            made.append(_make_refine_arm(role, method, found[role]))
            made.append(_make_drawing_arm(label, method, found[role], teacher, **samples))
    if "flowseq" in found:
        method, model = "flowseq", found["flowseq"]
        label = f"{method}, {count_things(LENGTH_BEAM, 'length')}"
        made.append(_make_refine_arm(method, method, model))
        made.append(
            _make_refine_arm(label, method, model, LENGTH_BEAM, teacher, lengths=LENGTH_BEAM)
        )
        for judge, one in (("teacher", teacher), ("importance", None)):
            label = f"{method}, {LATENT_SAMPLES} samples, {judge}"
            knobs = {**samples, "temperature": NOISE, "judge": judge}
            made.append(_make_drawing_arm(label, method, model, one, **knobs))
    return made


def label_mask_predict(iterations: int, lengths: int) -> str:
    """Return the name of an arm of Mask-Predict.

    >>> label_mask_predict(10, 1), label_mask_predict(1, 3)
    ('mask_predict, T 10, 1 length', 'mask_predict, T 1, 3 lengths')
    """
    return f"mask_predict, T {iterations}, {count_things(lengths, 'length')}"


def _make_one(
    model: Seq2Seq, method: str, teacher: Seq2Seq | None, **knobs: Any
) -> Callable[[str], Translated]:
    def one(text: str) -> Translated:
        made = translate(model, text, method=method, teacher=teacher, **knobs)
        assert not isinstance(made, list)
        stats = made.stats
        assert isinstance(stats, TranslationStatistics)
        tokens = [token for token in made.tokens if token != model.config.eos]
        return Translated(
            made.text,
            tokens,
            stats.target_calls + stats.draft_calls,
            stats.encoder_calls,
            stats.teacher_calls,
        )

    return one


def _make_greedy_arm(label: str, model: Seq2Seq) -> TranslatorArm:
    """Return plain decoding by an autoregressive model."""
    return TranslatorArm(
        label,
        _make_one(model, "plain", None),
        lambda part: distilled.write_translations(model, part, BeamSettings(beam=1)),
    )


def _make_beam_arm(model: Seq2Seq, beam: int) -> TranslatorArm:
    beam_settings = BeamSettings(beam=beam)

    def one(text: str) -> Translated:
        forward_log: list[ForwardRecord] = []
        ids = distilled.write_translations(
            model.with_log(forward_log), [model.tokenizer.encode(text)], beam_settings
        )[0]
        passes = sum(call.model == model.name for call in forward_log)
        return Translated(model.tokenizer.decode(ids), ids, passes, len(forward_log) - passes, 0)

    return TranslatorArm(
        f"teacher, beam {beam}",
        one,
        lambda part: distilled.write_translations(model, part, beam_settings),
        beam,
        {"beam": beam},
    )


def _make_specdec_arms(teacher: Seq2Seq, draft: Seq2Seq) -> list[TranslatorArm]:
    """Return SpecDec where it is exact, and with the conditions of the authors' command."""
    card, made = find_technique("specdec"), []
    for label, chosen in (("exact", {"beta": 1}), ("relaxed", {})):
        knobs = card.settings({**advised_knobs(card, [draft]), **chosen})
        one = _make_one(teacher, "specdec", None, draft=draft, **knobs)
        made.append(TranslatorArm(f"teacher, specdec {label}", one, None, knobs=knobs))
    return made


def _make_blockwise_arms(role: str, model: Seq2Seq) -> list[TranslatorArm]:
    """Return a model with a block layer: greedy, by exact blocks, and by the paper's relaxed rules.

    A frozen model's greedy text is its teacher's, which has a row already.
    """
    card, made = find_technique("blockwise"), list[TranslatorArm]()
    if role == "blockwise":
        made.append(
            TranslatorArm(
                f"{role}, greedy",
                _make_one(model, "plain", None),
                lambda part: distilled.write_translations(model, part, BeamSettings(beam=1)),
            )
        )
    rules: dict[str, dict[str, Any]] = {
        "exact": {},
        "top 2": {"rule": "top", "slack": 1},
        "blocks of 2": {"rule": "block", "slack": 1},
    }
    for label, chosen in rules.items():
        knobs = card.settings(chosen)
        one = _make_one(model, "blockwise", None, **knobs)
        made.append(TranslatorArm(f"{role}, {label}", one, None, knobs=knobs))
    return made


def _make_nat_arm(
    label: str, model: Seq2Seq, teacher: Seq2Seq | None, first: str, samples: int
) -> TranslatorArm:
    def many(part: Sequence[Ids]) -> list[Ids]:
        refiner = NatRefiner(model, None, first, samples, 1.0)
        sources = pad_sequences(part)
        rngs = [Seeded(0) for _ in part]
        if teacher is None:
            return translate_sources(model, sources, refiner, rngs)
        canvases = refine_many(model, sources, refiner, rngs)
        with torch.inference_mode():
            totals = token_logprobs(
                teacher, teacher.encode(sources).select_rows(canvases.owners), canvases.canvas
            ).sum(dim=1)
        best = [
            max(
                (canvases.owners == i).nonzero().flatten().tolist(),
                key=lambda row: float(totals[row]),
            )
            for i in range(len(part))
        ]
        return [canvases.canvas.text(row) for row in best]

    knobs = find_technique("nat").settings({"samples": samples, "fertility": first})
    return TranslatorArm(label, _make_one(model, "nat", teacher, **knobs), many, samples, knobs)


def _make_refine_arm(
    label: str,
    method: str,
    model: Seq2Seq,
    width: int = 1,
    teacher: Seq2Seq | None = None,
    **knobs: Any,
) -> TranslatorArm:
    """Return an arm of a technique that rewrites a canvas and draws nothing meanwhile."""
    card = find_technique(method)

    def many(part: Sequence[Ids]) -> list[Ids]:
        refiner = card.refiner(RefineRequest(model, teacher), **knobs)
        return translate_sources(model, pad_sequences(part), refiner)

    one = _make_one(model, method, teacher, **knobs)
    return TranslatorArm(label, one, many, width, card.settings(knobs))


def _make_drawing_arm(
    label: str, method: str, model: Seq2Seq, teacher: Seq2Seq | None, **knobs: Any
) -> TranslatorArm:
    """Return an arm of a technique that draws while it rewrites, so that it has no batches."""
    one = _make_one(model, method, teacher, **knobs)
    return TranslatorArm(label, one, None, LATENT_SAMPLES, find_technique(method).settings(knobs))
