"""A whole chapter on one model: every registered technique with defaults that work, and of the
others what each lacks.

Drafts are those that the model's card names, or a model of the zoo that was made for it; where a
technique needs something built (a datastore), it is built (stores.py) and named in the result.
Nothing is dropped silently: a technique that cannot run on this model stands under `skipped` with
the reason.
"""

import time
from dataclasses import replace

from tinyspec.bench.arms import TechniqueArm, check_token_balance, draft_names
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.stores import prepare_arm
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.model import Model
from tinyspec.pairing import Draft
from tinyspec.technique import CHAPTERS, Card, find_technique, load_techniques

TRIED = 16  # tokens that each technique makes before the table is begun
BOOKS, CHATS = (
    ("books:60",),
    ("spec_bench",),
)  # what is asked: of a plain model its own continuations, of a chat model Spec-Bench


def usual_tasks(model: Model) -> tuple[str, ...]:
    """The tasks of a chapter's table where none are named."""
    from tinyspec.bench.tasks import expand_tasks

    return expand_tasks(CHATS if model.has_tokenizer and model.tokenizer.has_chat else BOOKS)


def methods_of(name: str) -> list[str]:
    """Names of a chapter's techniques that extend a text. A technique's file says which chapter it
    is of.
    """
    known = [chapter.rpartition(".")[2] for chapter in CHAPTERS]
    if name not in known:
        raise TinyspecError(f"there is no chapter '{name}': {suggest_nearest(name, known)}")
    return [
        method
        for method, card in load_techniques().items()
        if _is_decoder_of(card, name) and method != PLAIN
    ]


def analyses_of(name: str) -> list[str]:
    """Those that decode nothing, for the list of what is left out."""
    return [
        m
        for m, card in load_techniques().items()
        if card.kind == "analysis" and card.build.__module__.split(".")[1] == name
    ]


def _is_decoder_of(card: Card, chapter: str) -> bool:
    return card.kind == "decoder" and card.build.__module__.split(".")[1] == chapter


def find_contestants(
    name: str, settings: BenchSettings, model: Model, draft: Draft, job: Job
) -> tuple[BenchSettings, list[str], dict[str, str]]:
    """The settings with every technique that can run here; of the others what each lacks; and what
    was built for whom.

    job  the longest, on which each is tried: a technique that fails costs its own row, not hours
         later the table
    """
    can, cannot, built = list[str](), list[str](), dict[str, str]()
    short = job._replace(tokens=min(job.tokens, TRIED))
    for method in methods_of(name):
        try:
            need = prepare_arm(ArmSpec(method), model)
            check_token_balance(
                TechniqueArm(ArmSpec(method), model, settings, draft).run(
                    short, 0, time.perf_counter
                ),
                short,
                method,
            )
        except Exception as error:
            kind = "" if isinstance(error, TinyspecError) else f"{type(error).__name__}: "
            cannot.append(f"{method}: {kind}{' '.join(str(error).split())}")
            continue
        can.append(method)
        if need.built:
            built[method] = need.built
    cannot += [
        f"{method}: an analysis, it decodes nothing ({find_technique(method).title})"
        for method in analyses_of(name)
    ]
    names = ",".join(draft_names(settings, model)) if draft is not None else None
    methods = tuple(dict.fromkeys([*settings.methods, *can]))
    return replace(settings, methods=methods, draft=names), cannot, built
