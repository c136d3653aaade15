"""A statistical demo for real models: evidence, not proof.

Where a distribution cannot be enumerated it can be sampled. The exact laws do not need this file;
it shows what a sample on a real model can say, and how little: a test that finds nothing has only
excluded faults it had the power to find. So three figures are printed together:

- the *G-test* of the first tokens of many texts against the target's distribution, with its power:
  the smallest share of texts in which the greedy text might replace a draw and be found nine times
  in ten;
- a *negative control*, which must fail: the field's commonest mistake, draft tokens chosen greedily
  and then judged by the probability they would have had (the model drafts for itself here, so all
  of them pass);
- an *e-value*, which stays valid if one looks after every text and goes on as long as one likes.
  The G-test's p is valid for the number of texts that was chosen beforehand, and for no other.

An e-value is the wealth of a gambler who begins with 1 and bets on each text before it comes. The
bet is a distribution: the frequencies so far, shrunk towards the null p by a Dirichlet prior of
strength m, (n_x + m p(x)) / (n + m). The wealth is multiplied by bet / p at what came. Under p a
factor is 1 on average, so the wealth is a martingale, and by Ville's inequality it ever reaches 1 /
alpha with probability at most alpha. The best m is unknown, so an equal share is bet with each of
several (universal inference, Wasserman, Ramdas and Balakrishnan 2020; Lindon and Malek 2022).

The null is taken from `run_dense`, a plain float64 pass: nothing that is judged makes it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

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
from tinyspec.laws.evidence import import_extra
from tinyspec.laws.exact.models import run_dense
from tinyspec.lm.model import Model
from tinyspec.pairing import Draft, drafts_for
from tinyspec.technique import Request, find_technique
from tinyspec.tree import Probs, TokenTree

STRENGTHS = (10, 100, 1000, 10000)


class EValue:
    """The running e-value; under the null, P(highest ever >= 1 / alpha) <= alpha.

    null  probability of each outcome, all positive; an outcome it does not know is impossible, and
          refutes it at once
    """

    def __init__(self, null: Mapping[Any, float], strengths: Sequence[int] = STRENGTHS):
        if not null or min(null.values()) <= 0 or abs(math.fsum(null.values()) - 1) > 1e-9:
            raise ValueError(
                "the null is a distribution: positive probabilities that add up to one"
            )
        self.null, self.strengths = dict(null), tuple(strengths)
        self.counts = dict.fromkeys(self.null, 0)
        self.seen = 0
        self._logs = [0.0] * len(self.strengths)
        self.log = 0.0  # of the e-value now
        self.highest = 0.0  # the highest it has ever been, as a logarithm

    def see(self, outcome: Any) -> None:
        """Add one more outcome."""
        if outcome not in self.null:
            self.log = self.highest = math.inf
            self._logs = [math.inf] * len(self._logs)
            self.counts[outcome] = 0
        else:
            share = self.counts[outcome] / self.null[outcome]
            for i, m in enumerate(self.strengths):
                self._logs[i] += math.log((share + m) / (self.seen + m))
            top = max(self._logs)
            spread = math.fsum(math.exp(log - top) for log in self._logs) if top < math.inf else 1.0
            self.log = top + math.log(spread / len(self._logs))
            self.highest = max(self.highest, self.log)
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        self.seen += 1

    @property
    def p(self) -> float:
        """Return a p-value that is valid at any time: 1 / the highest e-value so far."""
        return math.exp(-self.highest)

    def refuted(self, alpha: float) -> bool:
        """Return whether the e-value has ever reached 1 / alpha."""
        return self.highest >= -math.log(alpha)


LEAST = 5.0
"""Texts that must be expected in a cell for chi-square to be a fair approximation; smaller cells
are put together.
"""


class GTest(NamedTuple):
    """The statistic 2 sum O ln(O / E) over large enough cells, and its chi-square tail."""

    statistic: float
    freedom: int
    p: float


def pool_cells(probs: Mapping[Any, float], texts: int) -> list[list[Any]]:
    """Return groups of cells with at least `LEAST` expected texts each, except perhaps the last."""
    groups: list[list[Any]] = []
    for cell in sorted(probs, key=lambda c: (probs[c], c)):
        if groups and math.fsum(probs[c] for c in groups[-1]) * texts < LEAST:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def g_test(counts: Mapping[Any, int], probs: Mapping[Any, float]) -> GTest:
    """Return the likelihood-ratio test of counts against a distribution. Needs scipy."""
    texts = sum(counts.values())
    groups = pool_cells(probs, texts)
    if any(cell not in probs for cell, n in counts.items() if n):
        return GTest(math.inf, len(groups) - 1, 0.0)
    observed = np.array([sum(counts.get(c, 0) for c in group) for group in groups])
    expected = np.array([math.fsum(probs[c] for c in group) for group in groups]) * texts
    statistic = float(_g_statistic(observed, expected))
    freedom = len(groups) - 1
    if not freedom:
        return GTest(statistic, freedom, 1.0)
    return GTest(statistic, freedom, float(import_extra("scipy.stats").chi2.sf(statistic, freedom)))


def _g_statistic(observed: Any, expected: Any) -> Any:
    """Return G of each row of counts: [.., cells] -> [..]."""
    terms = observed * np.log(np.maximum(observed, 1) / expected)
    return 2 * np.where(observed > 0, terms, 0.0).sum(axis=-1)


def g_test_power(
    probs: Mapping[Any, float], share: float, to: Any, texts: int, alpha: float
) -> float:
    """Return the probability that the G-test finds a fault at level alpha.

    A fault puts the cell `to` in place of a draw in `share` of the texts. G is then noncentral
    chi-square, with 2 n KL(faulty, null) as its noncentrality.
    """
    stats = import_extra("scipy.stats")
    null, faulty = _faulty_probs(probs, share, to, texts)
    freedom = len(null) - 1
    if not freedom:
        return 0.0
    noncentrality = 2 * texts * float((faulty * np.log(faulty / null)).sum())
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, freedom), freedom, noncentrality))


def simulated_power(
    probs: Mapping[Any, float],
    share: float,
    to: Any,
    texts: int,
    alpha: float,
    seed: int = 0,
    runs: int = 2000,
) -> float:
    """Return the same by simulation: how often the test rejects counts of the faulty
    distribution."""
    null, faulty = _faulty_probs(probs, share, to, texts)
    counts = np.random.default_rng(seed).multinomial(texts, faulty, size=runs)
    critical = import_extra("scipy.stats").chi2.isf(alpha, len(null) - 1)
    return float((_g_statistic(counts, null * texts) >= critical).mean())


def smallest_detectable_share(
    probs: Mapping[Any, float], to: Any, texts: int, alpha: float, wanted: float = 0.9
) -> float | None:
    """Return the smallest share found with probability `wanted`; None where none is."""
    low, high = 0.0, 1.0
    if g_test_power(probs, high, to, texts, alpha) < wanted:
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if g_test_power(probs, middle, to, texts, alpha) >= wanted
            else (middle, high)
        )
    return high


def moved_variation(probs: Mapping[Any, float], share: float, to: Any) -> float:
    """Return the total variation between the faulty distribution and the null."""
    return share * (1 - probs[to])


def _faulty_probs(probs: Mapping[Any, float], share: float, to: Any, texts: int) -> tuple[Any, Any]:
    groups = pool_cells(probs, texts)
    null = np.array([math.fsum(probs[c] for c in group) for group in groups])
    null /= null.sum()
    there = np.array([float(to in group) for group in groups])
    return null, np.maximum((1 - share) * null + share * there, 1e-300)


OTHER_TOKEN = -1
"""In a cell: any token but the likeliest ones. The cell ends there."""

CONTROL = 60
"""Texts of the negative control."""

TextCell = tuple[int, ...]


# ---------------------------------------------------------------------- the null distribution


class TextCells:
    """The distribution of the first new tokens, coarsened to the likeliest tokens and the others.

    probs   probability of each cell; a cell ends after `tokens` tokens, an end of text, or OTHER
    greedy  the cell of the likeliest token at each step
    """

    def __init__(
        self, model: Model, prompt: Sequence[int], tokens: int, width: int, temperature: float
    ):
        self.probs: dict[TextCell, float] = {}
        self.inner: set[TextCell] = set()  # what cells begin with
        self.greedy: TextCell = ()
        waiting: list[tuple[TextCell, float]] = [((), 1.0)]
        for cell, mass in waiting:  # grows while it is walked
            if len(cell) == tokens or (cell and cell[-1] in (OTHER_TOKEN, *model.config.eos)):
                self.probs[cell] = mass
                continue
            self.inner.add(cell)
            logits = run_dense(model, [*prompt, *cell]).logits[-1] / temperature
            weights = np.exp(logits - logits.max())
            row = weights / weights.sum()
            likely = [int(x) for x in np.argsort(-row, kind="stable")[:width] if row[x] > 0]
            if cell == self.greedy:
                self.greedy = (*cell, likely[0])
            waiting += [((*cell, x), mass * float(row[x])) for x in likely]
            rest = 1.0 - math.fsum(float(row[x]) for x in likely)
            if len(likely) < len(row) and rest > 0:
                waiting.append(((*cell, OTHER_TOKEN), mass * rest))

    def of(self, text: Sequence[int]) -> TextCell:
        """Return the cell of a text; one that is not in the distribution is impossible."""
        cell: TextCell = ()
        for token in text:
            step = (*cell, token)
            if step in self.probs:
                return step
            if step not in self.inner:
                return (*cell, OTHER_TOKEN)
            cell = step
        return cell


# ---------------------------------------------------------------------- the texts


class SoftGreedy(ModelDrafter):
    """The negative control: proposes the draft's best token as if it had been drawn."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        greedy: Any = _GreedySource()
        return super().propose(context, max_draft_depth, sampling, greedy)


class _GreedySource:
    def draw(self, row: Probs) -> int:
        return int(np.argmax(row))


def sample_texts(decoder: Decoder, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield new texts of a decoder for ever, each with its own noise; rewinds after each."""
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
    """Draw texts and judge them; without `samples`, until the e-value refutes or Ctrl-C."""
    running = EValue(cells.probs)
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
    test = g_test(running.counts, cells.probs) if whole else None
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
    """Return None for an infinite number, which JSON cannot express."""
    return x if math.isfinite(x) else None


def _format_figure(x: float | None) -> str:
    return "infinite" if x is None else f"{x:.1f}"


# ---------------------------------------------------------------------- the demo


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
    """Sample `method` on a real model and test the texts; then the control, which must fail.

    samples  texts, or None: until refuted or interrupted
    alpha    level of both tests
    watch    called with the running e-value after every text

    bfloat16 rounds the distribution itself, so a model in it is run in float32, whose rounding no
    sample of practical size can see. The same arguments give the same result, `seconds` apart.
    Raises TinyspecError at temperature 0, where there is nothing to sample: compare the tokens.
    """
    if temperature <= 0:
        raise TinyspecError(
            "the demo samples: choose a temperature above 0 "
            "(greedy texts are compared token by token)"
        )
    if samples is not None and samples < 1:
        raise TinyspecError(f"samples is {samples}: it must be 1 or more")
    began = perf_counter()
    model, small = _wide(model), _draft_models(model, draft, method)
    ids = generation.prompt_ids(model, prompt)
    cells = TextCells(model, ids, tokens, width, temperature)
    options: dict[str, Any] = {"max_new_tokens": tokens, "temperature": temperature}
    texts = [ids] if find_technique(method).copies else []  # what it may copy: the prompt itself
    begun = generation.start_generation(
        model, ids, method=method, draft=small, references=texts, **options, **knobs
    )
    # `begun` must stay referenced: a request that nobody holds is closed
    real, stop = begun.decoder, begun.decoder.stop
    # the model drafts for itself, so every draft token passes
    drafter = SoftGreedy(model.session(), tokens, stop.eos)
    request = Request(model.session(), sampling=SamplingParams(temperature), stop=stop)
    broken = request.decoder(drafter, verify_tree)
    broken.extend(ids)
    found = sample_and_test(real, cells, samples=samples, seed=seed, alpha=alpha, watch=watch)
    failing = sample_and_test(broken, cells, samples=CONTROL, seed=seed, alpha=alpha)
    share = (
        smallest_detectable_share(cells.probs, cells.greedy, samples, alpha) if samples else None
    )
    return {
        "kind": "statistical demo: evidence, not proof",
        "model": model.name,
        "method": method,
        "draft": ", ".join(dict.fromkeys(model.name for model in small)) if small else None,
        "prompt": list(ids),
        "temperature": temperature,
        "alpha": alpha,
        "seed": seed,
        "law": [[list(cell), mass] for cell, mass in cells.probs.items()],
        **found,
        "power": None
        if share is None or samples is None
        else {
            "share": share,
            "moved": moved_variation(cells.probs, share, cells.greedy),
            "noncentral": g_test_power(cells.probs, share, cells.greedy, samples, alpha),
            "simulated": simulated_power(cells.probs, share, cells.greedy, samples, alpha, seed),
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
    """Return the result in sentences."""
    control, g, e = result["control"], result["g"], result["e"]
    lines = [
        f"{result['kind']}: {result['method']} on {result['model']}",
        f"{result['texts']} texts against {len(result['law'])} cells of the model's own "
        f"distribution, level {result['alpha']}",
    ]
    if g is not None:
        lines.append(
            f"G-test   G = {_format_figure(g['statistic'])}, {g['freedom']} degrees of freedom, "
            f"p = {g['p']:.3g}"
        )
    if (power := result["power"]) is not None:
        lines.append(
            f"power    the greedy text in place of {power['share']:.1%} of the draws, a total "
            f"variation of {power['moved']:.3f}, is found\n"
            f"         with probability {power['noncentral']:.2f} "
            f"({power['simulated']:.2f} simulated)"
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
        f"control  greedy draft judged by its soft distribution: {after}, G-test p = "
        f"{control['g']['p']:.3g}"
    )
    if not result["control_failed"]:
        lines.append("void: the control passed, so these tests see nothing here; take more texts")
    elif result["refuted"]:
        lines.append("refuted: the texts do not have the model's distribution")
    else:
        lines.append(
            "nothing found: no proof (`tinyspec laws` proves), only what the power above says"
        )
    return "\n".join(lines)
