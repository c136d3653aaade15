"""Run a whole chapter on one model: every registered technique that can run there.

The draft models are those that the model's card names, or one of the zoo that was made for it. If
a technique needs something built (a datastore), `stores.py` builds it, and the result names it. A
technique that cannot run on this model stands under `skipped` with the reason. A technique with an
addition of ours (`Knob.ours`) has two rows: the paper's rule, and the addition.
"""

import time
from dataclasses import replace

from tinyspec.bench.arms import TechniqueArm, check_token_balance, list_draft_names
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.stores import prepare_arm
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.model import Model
from tinyspec.pairing import Draft
from tinyspec.technique import CHAPTERS, find_technique, is_tuned_for, load_techniques

TRIED = 16  # tokens that each technique writes before the table is begun
BOOKS = ("books:60",)  # tasks of a model without a chat template
CHATS = ("spec_bench",)  # tasks of a chat model
WITHOUT_TEXT = {
    "analysis": "an analysis, it decodes nothing",
    "policy": "a policy, it schedules many requests",
}


def default_tasks(model: Model) -> tuple[str, ...]:
    """Return the tasks of a chapter's table if none are named."""
    from tinyspec.bench.tasks import expand_tasks

    return expand_tasks(CHATS if model.has_tokenizer and model.tokenizer.has_chat else BOOKS)


def list_decoders(name: str) -> list[str]:
    """Return the names of a chapter's techniques that extend a text.

    The folder of a technique's file is its chapter.
    """
    known = [chapter.rpartition(".")[2] for chapter in CHAPTERS]
    if name not in known:
        raise TinyspecError(f"there is no chapter '{name}': {suggest_nearest(name, known)}")
    return [method for method in _list_kind(name, "decoder") if method != PLAIN]


def list_rows(method: str) -> list[ArmSpec]:
    """Return a technique's rows in a table: the paper's rule, then each addition of ours.

    >>> [spec.label for spec in list_rows("llma")]
    ['llma', 'llma:price=0.25']
    """
    knobs = find_technique(method).knobs
    additions = [ArmSpec(method, ((k.name, k.ours),)) for k in knobs if k.ours is not None]
    return [ArmSpec(method), *additions]


def list_without_text(name: str) -> dict[str, str]:
    """Return the names of a chapter's techniques that write no text, and what they are."""
    return {
        method: f"{what} ({find_technique(method).title})"
        for kind, what in WITHOUT_TEXT.items()
        for method in _list_kind(name, kind)
    }


def _list_kind(chapter: str, kind: str) -> list[str]:
    cards = load_techniques().items()
    return [
        method
        for method, card in cards
        if card.kind == kind and card.build.__module__.split(".")[1] == chapter
    ]


def select_techniques(
    name: str, settings: BenchSettings, model: Model, draft: Draft, job: Job
) -> tuple[BenchSettings, list[str], dict[str, str]]:
    """Return the settings with all rows that run here, reasons for the others, and builds.

    job  the longest one. Each row is tried on it first, so one that fails costs its own row and not
         the whole table hours later.
    """
    can, cannot, built = list[str](), list[str](), dict[str, str]()
    short = job._replace(tokens=min(job.tokens, TRIED))
    for spec in [row for method in list_decoders(name) for row in list_rows(method)]:
        try:
            card = find_technique(spec.name)
            if card.tuned is not None and not is_tuned_for(model, spec.name):
                raise TinyspecError(f"{model.name} was not tuned for it")
            need = prepare_arm(spec, model, draft, settings)
            arm = TechniqueArm(spec, model, settings, draft)
            check_token_balance(arm.run(short, 0, time.perf_counter), short, spec.label)
        except Exception as error:
            kind = "" if isinstance(error, TinyspecError) else f"{type(error).__name__}: "
            cannot.append(f"{spec.label}: {kind}{' '.join(str(error).split())}")
            continue
        can.append(spec.label)
        if need.built:
            built[spec.name] = need.built
    cannot += [f"{method}: {what}" for method, what in list_without_text(name).items()]
    names = ",".join(list_draft_names(settings, model)) if draft is not None else None
    methods = tuple(dict.fromkeys([*settings.methods, *can]))
    return replace(settings, methods=methods, draft=names), cannot, built
