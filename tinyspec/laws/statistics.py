"""A statistical demo for real models: evidence, not proof.

Where a law cannot be enumerated it can be sampled. The exact laws do not need this page; it shows
on the model a reader cares about what a sample can say, and how little: a test that finds nothing
has only excluded faults it had the power to find. So three figures are printed together:

- the *G-test* of the first tokens of many texts against the target's own law, with its power: the
smallest share of texts in
  which the greedy text might stand in place of a draw and be found nine times in ten;
- a *negative control*, which must fail: the field's commonest mistake, draft tokens chosen greedily
and then judged by
  the probability they would have had (the model drafts for itself here, so all of them pass);
- an *e-value* (see `evalues`), which stays valid if one looks after every text and goes on as long
as one likes; the
  G-test's p is valid for the number of texts that was chosen beforehand, and for no other.

The law is taken from `dense`, a plain float64 pass: nothing that is judged makes it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tinyspec import generation
from tinyspec.arguments import Prompt
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.dense import run_dense
from tinyspec.laws.evalues import EValue
from tinyspec.laws.gtest import (
    g_test,
    g_test_power,
    moved_variation,
    simulated_power,
    smallest_detectable_share,
)
from tinyspec.lm.transformer import Model
from tinyspec.pairing import Draft, drafts_for
from tinyspec.technique import Request, find_technique
from tinyspec.tree import Probs, TokenTree

OTHER_TOKEN = -1
"""In a cell: any token but the likeliest ones. The cell ends there."""

CONTROL = 60
"""Texts of the negative control."""

TextCell = tuple[int, ...]


# ---------------------------------------------------------------------------------------------------- the null law


class TextCells:
    """The law of the first `tokens` new tokens, coarsened: at each step the `width` likeliest
    tokens and all others as one.

    law     probability of each cell; a cell ends after `tokens` tokens, an end of text, or OTHER
    greedy  the cell of the likeliest token at each step
    """

    def __init__(
        self, model: Model, prompt: Sequence[int], tokens: int, width: int, temperature: float
    ):
        self.law: dict[TextCell, float] = {}
        self.inner: set[TextCell] = set()  # what cells begin with
        self.greedy: TextCell = ()
        waiting: list[tuple[TextCell, float]] = [((), 1.0)]
        for said, mass in waiting:  # grows while it is walked
            if len(said) == tokens or (said and said[-1] in (OTHER_TOKEN, *model.config.eos)):
                self.law[said] = mass
                continue
            self.inner.add(said)
            logits = run_dense(model, [*prompt, *said]).logits[-1] / temperature
            weights = np.exp(logits - logits.max())
            row = weights / weights.sum()
            likely = [int(x) for x in np.argsort(-row, kind="stable")[:width] if row[x] > 0]
            if said == self.greedy:
                self.greedy = (*said, likely[0])
            waiting += [((*said, x), mass * float(row[x])) for x in likely]
            rest = 1.0 - math.fsum(float(row[x]) for x in likely)
            if len(likely) < len(row) and rest > 0:
                waiting.append(((*said, OTHER_TOKEN), mass * rest))

    def of(self, text: Sequence[int]) -> TextCell:
        """The cell a text falls into; one that is not in the law is impossible."""
        said: TextCell = ()
        for token in text:
            step = (*said, token)
            if step in self.law:
                return step
            if step not in self.inner:
                return (*said, OTHER_TOKEN)
            said = step
        return said


# ------------------------------------------------------------------------------------------------------- the texts


class SoftGreedy(ModelDrafter):
    """The negative control: proposes the draft's best token and declares the law it might have been
    drawn from.
    """

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return super().propose(context, max_draft_depth, sampling, _Best())  # type: ignore[arg-type]


class _Best:
    def draw(self, row: Probs) -> int:
        return int(np.argmax(row))


def sample_texts(decoder: Decoder, seed: int) -> Iterator[tuple[int, ...]]:
    """New texts of a decoder that has read its prompt, for ever: each with noise of its own, and
    taken back after.
    """
    prompt = len(decoder.context)
    number = 0
    while True:
        rng = Seeded((seed << 64) + number)
        while not decoder.finished:
            decoder.step(rng)
        text = tuple(decoder.new)
        decoder.rewind(prompt)
        yield text
        number += 1


def sample_and_test(
    decoder: Decoder, cells: TextCells, *, samples: int | None, seed: int, alpha: float,
    watch: Callable[[EValue], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Draw texts and judge them. Without `samples`, until the e-value refutes the law or Ctrl-C: it
    allows that.
    """
    running = EValue(cells.law)
    until = None
    try:
        for text in islice(sample_texts(decoder, seed), samples):
            running.see(cells.of(text))
            if until is None and running.refuted(alpha):
                until = running.seen
            if watch is not None:
                watch(running)
            if samples is None and until is not None:
                break
    except KeyboardInterrupt:
        pass
    whole = (
        running.seen == samples
    )  # the G-test is valid only for a number that was chosen beforehand
    test = g_test(running.counts, cells.law) if whole else None
    return {
        "texts": running.seen,
        "counts": [[list(cell), n] for cell, n in running.counts.items()],
        "g": None
        if test is None
        else {**test._asdict(), "statistic": _finite(test.statistic), "refuted": test.p < alpha},
        "e": {
            "log10": _finite(running.log / math.log(10)),
            "p": running.p,
            "refuted": running.refuted(alpha),
            "after": until,
        },
    }


def _finite(x: float) -> float | None:
    """JSON has no word for infinity."""
    return x if math.isfinite(x) else None


def _format_figure(x: float | None) -> str:
    return "infinite" if x is None else f"{x:.1f}"


# -------------------------------------------------------------------------------------------------------- the demo


def run_demo(
    model: Model,
    draft: Draft = None,
    method: str = "speculative_decoding",
    *,
    prompt: Prompt = "Once upon a time",
    samples: int | None = 2000,
    seed: int = 0,
    tokens: int = 2,
    width: int = 6,
    temperature: float = 1.0,
    alpha: float = 0.01,
    watch: Callable[[EValue], None] | None = None,
    **knobs: Any,
) -> dict[str, Any]:
    """Sample `method` on a real model and hold the texts against the model's own law; then the
    control, which must fail.

    samples  texts, or None: until refuted or interrupted
    alpha    level of both tests
    watch    called with the running e-value after every text

    bfloat16 rounds the law itself, so a model in it is run in float32, whose rounding no sample
    that fits into a life can see. The same arguments give the same result, `seconds` apart. Raises
    TinyspecError at temperature 0, where there is nothing to sample: compare the tokens.
    """
    if temperature <= 0:
        raise TinyspecError(
            "the demo samples: choose a temperature above 0 (greedy texts are compared token by token)"
        )
    if samples is not None and samples < 1:
        raise TinyspecError(f"samples is {samples}: it must be 1 or more")
    began = perf_counter()
    model, small = _wide(model), _draft_models(model, draft, method)
    ids = generation.prompt_ids(model, prompt)
    cells = TextCells(model, ids, tokens, width, temperature)
    options: dict[str, Any] = {"max_new_tokens": tokens, "temperature": temperature}
    texts = [ids] if find_technique(method).copies else []  # what it may copy: the prompt itself
    begun = generation.start(
        model, ids, method=method, draft=small, references=texts, **options, **knobs
    )
    real, stop = (
        begun.decoder,
        begun.decoder.stop,
    )  # `begun` is kept: a request that nobody holds is closed
    broken = Request(model.session(), sampling=SamplingParams(temperature), stop=stop).decoder(
        SoftGreedy(model.session(), tokens, stop.eos), verify_tree
    )  # the model drafts for itself: every draft passes
    broken.extend(ids)
    found = sample_and_test(real, cells, samples=samples, seed=seed, alpha=alpha, watch=watch)
    failing = sample_and_test(broken, cells, samples=CONTROL, seed=seed, alpha=alpha)
    share = smallest_detectable_share(cells.law, cells.greedy, samples, alpha) if samples else None
    return {
        "kind": "statistical demo: evidence, not proof",
        "model": model.name,
        "method": method,
        "draft": ", ".join(dict.fromkeys(model.name for model in small)) if small else None,
        "prompt": list(ids),
        "temperature": temperature,
        "alpha": alpha,
        "seed": seed,
        "law": [[list(cell), mass] for cell, mass in cells.law.items()],
        **found,
        "power": None
        if share is None or samples is None
        else {
            "share": share,
            "moved": moved_variation(cells.law, share, cells.greedy),
            "noncentral": g_test_power(cells.law, share, cells.greedy, samples, alpha),
            "simulated": simulated_power(cells.law, share, cells.greedy, samples, alpha, seed),
        },
        "control": failing,
        "control_failed": bool(failing["g"]["refuted"] and failing["e"]["refuted"]),
        "refuted": bool(found["e"]["refuted"] or (found["g"] or {}).get("refuted")),
        "seconds": perf_counter() - began,
    }


def _wide(model: Model) -> Model:
    return model if model.dtype in (torch.float32, torch.float64) else model.to(dtype=torch.float32)


def _draft_models(model: Model, draft: Draft, method: str) -> list[Model] | None:
    chosen = drafts_for(model, find_technique(method), draft)
    return [_wide(small) for small in chosen] or None


def format_demo(result: Mapping[str, Any]) -> str:
    """The result in sentences."""
    control, g, e = result["control"], result["g"], result["e"]
    lines = [
        f"{result['kind']}: {result['method']} on {result['model']}",
        f"{result['texts']} texts against {len(result['law'])} cells of the model's own law, level {result['alpha']}",
    ]
    if g is not None:
        lines.append(
            f"G-test   G = {_format_figure(g['statistic'])}, {g['freedom']} degrees of freedom, p = {g['p']:.3g}"
        )
    if result["power"] is not None:
        lines.append(
            f"power    the greedy text in place of {result['power']['share']:.1%} of the draws, a total variation of "
            f"{result['power']['moved']:.3f}, is found\n         with probability {result['power']['noncentral']:.2f} "
            f"({result['power']['simulated']:.2f} simulated)"
        )
    elif g is not None:
        lines.append("power    none: with so few texts nothing would be found")
    lines.append(
        f"e-value  10^{_format_figure(e['log10'])} now; valid at any time: p = {e['p']:.3g}"
    )
    after = (
        f"refuted after {control['e']['after']} texts" if control["e"]["refuted"] else "NOT refuted"
    )
    lines.append(
        f"control  greedy draft judged by its soft law: {after}, G-test p = {control['g']['p']:.3g}"
    )
    if not result["control_failed"]:
        lines.append("void: the control passed, so these tests see nothing here; take more texts")
    elif result["refuted"]:
        lines.append("refuted: the texts do not have the model's law")
    else:
        lines.append(
            "nothing found: no proof (`tinyspec laws` proves), only what the power above says"
        )
    return "\n".join(lines)
