"""`tinyspec bench long-context`: measure TriForce on long texts, by the budget of its middle level.

The texts are passages of the valid books. A shorter context is the end of a longer one, so all
contexts are continued at the same place. A passage is read once. Then plain decoding, and TriForce
with each budget, continue it greedily in turns, on the same cache. The time after the prompt is
measured; choosing the chunks is part of it.

Each level counts its own draft tokens:

    alpha 1  share of the small model's tokens that the middle level accepts, of those it tests
    alpha 2  share of the middle level's tokens that the target accepts, of those it tests
    tau      tokens per forward pass of the target on its full cache

With the budget `full` the middle level sees the whole cache. It retrieves nothing and agrees with
the target, so it has a table of its own, beside plain decoding. A slow-down is printed as one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec.bench.arms import (
    Clock,
    collect_garbage,
    disable_eos,
    load_arm_models,
    make_synchronizer,
)
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.exit_arms import draw_passages, read_classics
from tinyspec.bench.harness import (
    identify_inputs,
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.measure import WARM_UP, count_agreeing, order_of_turn
from tinyspec.bench.plan import PLAIN, BenchSettings
from tinyspec.bench.report import Column, Grid, format_quartiles, make_grid
from tinyspec.bench.settings import LongContextSettings
from tinyspec.bench.tally import five_number_summary
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.speculative.nested import UNSEEN
from tinyspec.technique import Request, find_technique

METHOD = "triforce"
FULL = "full"  # the budget that holds the whole cache


class LongSample(NamedTuple):
    """One continuation of a passage.

    arm         PLAIN, a budget, or FULL
    calls       forward passes of the target on its full cache
    middle      forward passes of the middle level
    accepted    tokens of the middle level that the target accepted, of those that it `tested`
    accepted_1  tokens of the small model that the middle level accepted, of `tested_1`
    same        tokens at the front that are plain decoding's
    """

    context: int
    passage: int
    round: int
    arm: str
    seconds: float
    tokens: int
    calls: int
    middle: int
    accepted: int
    tested: int
    accepted_1: int
    tested_1: int
    same: int


class VerdictCounter:
    """A verifier that counts the draft tokens that it tests, and those that it accepts."""

    def __init__(self, verifier: Callable[..., Any]):
        self.verifier, self.accepted, self.tested = verifier, 0, 0

    def __call__(self, *args: Any) -> Any:
        verdict = self.verifier(*args)
        self.accepted += len(verdict.accepted)
        self.tested += len(verdict.accepted) + len(verdict.rejected)
        return verdict


class LongArms:
    """Plain decoding and TriForce with each budget, on one session, which reads a passage once.

    knobs  of each arm, by its name
    """

    def __init__(self, model: Model, draft: Model, given: LongContextSettings, clock: Clock):
        self.model, self.draft, self.tokens, self.clock = model, draft, given.tokens, clock
        self.forward_log = list[ForwardRecord]()
        self.session, self.prompt = model.session(self.forward_log), list[int]()
        card, whole = find_technique(METHOD), max(given.contexts) + given.tokens
        self.knobs: dict[str, dict[str, Any]] = {PLAIN: {}}
        for budget in (*given.budgets, whole):
            knobs = {"gamma1": given.gamma1, "gamma2": given.gamma2, "budget": budget}
            self.knobs[FULL if budget == whole else str(budget)] = card.settings(knobs)

    def read(self, prompt: list[int]) -> None:
        """Read a passage but for its last token, which is run in the first round."""
        self.session, self.prompt = self.model.session(self.forward_log), prompt
        self.session.extend(prompt)
        self.session.cache.reserve(len(prompt) + 2 * self.tokens)  # it does not grow while timed

    def start(self, arm: str, tokens: int) -> Decoder:
        """Return a decoder of this arm after the passage. The target does not read it again."""
        self.session.rewind(len(self.prompt))
        request = Request(
            self.session,
            [self.draft.session(self.forward_log)],
            SamplingParams(temperature=0.0),
            StoppingCriteria(max_new_tokens=tokens),
            positions=self.model.config.max_positions,
            draft_max_lengths=[self.draft.config.max_positions],
            forward_log=self.forward_log,
        )
        card = find_technique(PLAIN if arm == PLAIN else METHOD)
        decoder: Decoder = card.make(request, **self.knobs[arm])
        decoder.drafter.extend(self.prompt, UNSEEN)
        decoder.context.extend(self.prompt)
        decoder.start = len(self.prompt)
        return decoder

    def run(self, arm: str, passage: int, round: int) -> tuple[list[int], LongSample]:
        """Continue the passage. Returns the tokens, and a sample in which all are plain's."""
        decoder = self.start(arm, self.tokens)
        decoder.verifier = outer = VerdictCounter(decoder.verifier)
        inner = VerdictCounter(decoder.verifier)
        if arm != PLAIN:
            middle: Decoder = decoder.drafter.decoder  # type: ignore[attr-defined]
            middle.verifier = inner = VerdictCounter(middle.verifier)
        collect_garbage()
        wait = make_synchronizer(self.model.device)
        wait()
        n_rounds = n_middle = 0
        begun = self.clock()
        for each in decoder.run(Seeded(0)):
            n_rounds += 1
            n_middle += sum(call.model == self.model.name for call in each.draft_calls)
        wait()
        seconds, new = self.clock() - begun, decoder.new
        sample = LongSample(
            context=len(self.prompt),
            passage=passage,
            round=round,
            arm=arm,
            seconds=seconds,
            tokens=len(new),
            calls=n_rounds,
            middle=n_middle,
            accepted=outer.accepted,
            tested=outer.tested,
            accepted_1=inner.accepted,
            tested_1=inner.tested,
            same=len(new),
        )
        return new, sample

    def take_turns(self, passage: int, rounds: int, tick: Callable[[], None]) -> list[LongSample]:
        """Let every arm continue the passage, in an order that changes each round."""
        samples, written = list[LongSample](), dict[tuple[int, str], list[int]]()
        for round in range(rounds):
            for arm in order_of_turn(list(self.knobs), passage + round):
                written[round, arm], sample = self.run(arm, passage, round)
                samples.append(sample)
                tick()
        return [
            sample._replace(
                same=count_agreeing(written[sample.round, sample.arm], written[sample.round, PLAIN])
            )
            for sample in samples
        ]


def measure_long_contexts(
    given: LongContextSettings,
    out: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Return all samples and what follows from them.

    With `out`, the samples of a passage are written when they are taken; with `resume`, the run
    goes on there. Raises TinyspecError for contexts and budgets that do not fit.
    """
    contexts, budgets, tokens = sorted(given.contexts), sorted(given.budgets), given.tokens
    if not (contexts and budgets):
        raise TinyspecError("there is nothing to measure: name --contexts and --budgets")
    if budgets[-1] >= contexts[0]:
        raise TinyspecError(
            f"a budget of {budgets[-1]} holds the whole context of {contexts[0]}: smaller "
            "--budgets, or larger --contexts"
        )
    bench = BenchSettings(given.model, draft=given.draft, dtype=given.dtype, methods=(METHOD,))
    loaded, drafts = load_arm_models(bench)
    if drafts is None:
        raise TinyspecError(f"{loaded.name} names no draft model: give one with --draft NAME")
    model = disable_eos(loaded)
    if contexts[-1] + tokens > model.config.max_positions:
        raise TinyspecError(
            f"{contexts[-1]} tokens and {tokens} new ones do not fit into the context of "
            f"{model.name} ({model.config.max_positions}): fewer --tokens, or smaller --contexts"
        )
    texts = given.texts or read_classics()
    passages = draw_passages(model, texts, given.prompts, contexts[-1], tokens, given.seed)
    arms = LongArms(model, drafts[0], given, clock)
    settings = {
        "model": model.name,
        "draft": drafts[0].name,
        "dtype": given.dtype,
        "contexts": contexts,
        "budgets": budgets,
        "prompts": given.prompts,
        "tokens": tokens,
        "rounds": given.rounds,
        "gamma1": given.gamma1,
        "gamma2": given.gamma2,
        "seed": given.seed,
        "inputs": identify_inputs(
            [model.weights, drafts[0].weights], [passage.prompt for passage in passages]
        ),
    }
    done: list[LongSample] = read_unfinished(
        out, resume, "long-context", settings, _read_samples, []
    )
    seen = {(sample.passage, sample.context) for sample in done}
    todo = [(n, size) for n in range(given.prompts) for size in contexts if (n, size) not in seen]
    result = _make_result(settings, arms, done)
    steps = len(todo) * (1 + given.rounds * len(arms.knobs))
    with show_progress_bar(f"{model.name}: long contexts", steps, quiet) as tick:
        for at, (number, size) in enumerate(todo):
            arms.read(passages[number].prompt[-size:])
            tick()
            for arm in arms.knobs if at == 0 else ():  # first calls fill caches and thread pools
                list(arms.start(arm, min(tokens, WARM_UP)).run(Seeded(0)))
            done += arms.take_turns(number, given.rounds, tick)
            result = _make_result(settings, arms, done)
            save_result(out, result)
    return result


def _make_result(
    settings: Mapping[str, Any], arms: LongArms, samples: Sequence[LongSample]
) -> dict[str, Any]:
    rows = [list(sample) for sample in samples]
    return stamp_result(
        {
            "settings": settings,
            "knobs": {arm: record_knobs(knobs) for arm, knobs in arms.knobs.items()},
            "columns": list(LongSample._fields),
            "samples": rows,
            "figures": summarize_long_contexts(samples),
        }
    )


def _read_samples(found: dict[str, Any]) -> list[LongSample]:
    return [LongSample(*row) for row in found["samples"]]


def summarize_long_contexts(samples: Sequence[LongSample]) -> dict[str, dict[str, Any]]:
    """Return the figures of each context and arm, from the samples alone."""
    found: dict[str, dict[str, Any]] = {}
    plain = {(s.context, s.passage, s.round): s.seconds for s in samples if s.arm == PLAIN}
    for context in sorted({sample.context for sample in samples}):
        here = [sample for sample in samples if sample.context == context]
        found[str(context)] = {
            arm: _summarize_arm([s for s in here if s.arm == arm], plain)
            for arm in dict.fromkeys(sample.arm for sample in sorted(here, key=_order_arms))
        }
    return found


def _order_arms(sample: LongSample) -> tuple[int, int]:
    """Return where an arm stands: plain decoding, the budgets by size, the full cache."""
    if sample.arm.isdecimal():
        return 1, int(sample.arm)
    return (0, 0) if sample.arm == PLAIN else (2, 0)


def _summarize_arm(
    samples: Sequence[LongSample], plain: Mapping[tuple[int, int, int], float]
) -> dict[str, Any]:
    def count(name: str) -> int:
        return sum(getattr(sample, name) for sample in samples)

    tokens = count("tokens")
    ratios = [plain[s.context, s.passage, s.round] / s.seconds for s in samples]
    return {
        "alpha_1": count("accepted_1") / count("tested_1") if count("tested_1") else None,
        "alpha_2": count("accepted") / count("tested") if count("tested") else None,
        "tau": tokens / count("calls"),
        "middle_per_token": count("middle") / tokens,
        "milliseconds": 1e3 * sum(sample.seconds for sample in samples) / tokens,
        "speedup": five_number_summary(ratios),
        "identical": sum(sample.same == sample.tokens for sample in samples),
        "of": len(samples),
    }


ALPHA_1 = Column("alpha 1", "alpha_1", ".3f")
TAU = Column("tau", "tau", ".2f")
TIMES = Column("times as fast", "speedup", format_quartiles)
MIDDLE = Column("middle passes per token", "middle_per_token", ".2f")
SAME = Column("same", lambda of: f"{of['identical']} of {of['of']}")
COLUMNS = (ALPHA_1, Column("alpha 2", "alpha_2", ".3f"), TAU, MIDDLE, TIMES, SAME)


def list_budget_rows(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of each context and budget, without the full cache."""
    return {
        f"{int(context):,} / {int(arm):,}": of
        for context, arms in result["figures"].items()
        for arm, of in arms.items()
        if arm not in (PLAIN, FULL)
    }


def tabulate_long_contexts(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of contexts and budgets, and that of the full cache."""
    settings, whole = result["settings"], dict[str, Any]()
    for context, arms in result["figures"].items():
        whole[f"{int(context):,}, plain decoding"] = arms[PLAIN]
        whole[f"{int(context):,}, {METHOD}"] = arms[FULL]
    title = f"{METHOD} on {settings['model']} with {settings['draft']}: a retrieved part"
    speed = Column("ms per token", "milliseconds", ".1f")
    return [
        make_grid(title, list_budget_rows(result), COLUMNS, first="context / budget"),
        make_grid("The full cache", whole, (ALPHA_1, TAU, MIDDLE, speed, TIMES, SAME), "context"),
    ]


def list_long_context_notes(result: Mapping[str, Any]) -> list[str]:
    """Return how the figures were measured, in a paragraph."""
    of = result["settings"]
    return [
        f"{of['dtype']}, greedy, {of['prompts']} passages of the valid books, {of['tokens']} new "
        f"tokens, {of['rounds']} rounds; gamma1 {of['gamma1']}, gamma2 {of['gamma2']}. Alpha 1: "
        "share of the small model's tokens that the middle level accepts. Alpha 2: share of the "
        "middle level's tokens that the target accepts. Tau: tokens per pass of the target on its "
        "full cache. Times as fast as plain decoding on the full cache, after the prompt; choosing "
        "the chunks is part of the time. With the full cache the middle level is the target."
    ]


EXPERIMENT = Experiment(
    measure_long_contexts, tabulate_long_contexts, notes=list_long_context_notes
)
