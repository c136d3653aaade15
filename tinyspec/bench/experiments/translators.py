"""Make the arms of `tinyspec bench translation`: every way to translate one sentence, and many."""

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
from tinyspec.technique import RefineRequest, find_technique
from tinyspec.training import distilled
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.distilled import BeamSettings
from tinyspec.translation import TranslationStatistics, translate

SHALLOW = "shallow"  # an autoregressive student, whose decoder is smaller than the teacher's
ROLES = (
    *("teacher", SHALLOW, "nat", "nat, fine-tuned", "parallel", "sat"),
    *("iterative_refinement", "nar_crf", "nag_bert", "latent_transformer", "flowseq"),
    *("mask_predict", "specdec"),
    *("blockwise", "blockwise, frozen"),
)
LENGTH_BEAM = 9  # lengths that the teacher chooses among, of parallel and nar_crf: 4 on either side
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
        role = str(model.config.extra.get("trained_for", models.TEACHER))
        role += ", fine-tuned" if "finetuned" in model.config.extra else ""
        role += ", frozen" if model.config.extra.get("frozen") else ""
        role += f", K {model.config.extra['k']}" if role == "sat" else ""
        if role == models.TEACHER and "teacher" in model.config.extra:
            role = SHALLOW
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
    return {
        role: model
        for known in ROLES
        for role, model in found.items()
        if role == known or role.startswith(f"{known}, K ")
    }


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
    if "parallel" in found:
        model, beam = found["parallel"], {"lengths": LENGTH_BEAM}
        label = f"parallel, {count_things(LENGTH_BEAM, 'length')}"
        made.append(_make_refine_arm("parallel", "parallel", model))
        made.append(
            _make_refine_arm(label, "parallel", model, LENGTH_BEAM, found["teacher"], **beam)
        )
    for role, model in found.items():
        if role.startswith("sat, "):
            made.append(_make_refine_arm(role, "sat", model))
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
    if "nar_crf" in found:
        model, method = found["nar_crf"], "nar_crf"
        trained = trained_transitions(model)
        made += [
            _make_refine_arm(f"{method}, {kind}", method, model, transitions=kind)
            for kind in dict.fromkeys((trained, "static", "none"))
        ]
        knobs = {"transitions": trained, "lengths": LENGTH_BEAM}
        label = f"{method}, {trained}, {count_things(LENGTH_BEAM, 'length')}"
        made.append(_make_refine_arm(label, method, model, LENGTH_BEAM, found["teacher"], **knobs))
    if "nag_bert" in found:
        method, model = "nag_bert", found["nag_bert"]
        made += [
            _make_refine_arm(f"{method}, ratio {ratio}", method, model, ratio=ratio)
            for ratio in LABELLED_RATIOS
        ]
    return made


def _make_latent_arms(found: Mapping[str, Seq2Seq]) -> list[TranslatorArm]:
    """Return the arms of models with latent variables: the likeliest ones, and several samples."""
    made, teacher = list[TranslatorArm](), found["teacher"]
    samples = {"samples": LATENT_SAMPLES}
    if "latent_transformer" in found:
        method, model = "latent_transformer", found["latent_transformer"]
        label = f"{method}, {LATENT_SAMPLES} samples"
        made.append(_make_refine_arm(method, method, model))
        made.append(_make_drawing_arm(label, method, model, teacher, **samples))
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
