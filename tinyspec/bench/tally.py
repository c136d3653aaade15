"""Compute figures from samples. Everything here is a function of the samples alone.

A speed-up is a ratio within a turn, where both arms did the same job under the same load. The
ratio of a job is the median over its rounds. The ratio of a task is the median over its jobs, with
minimum, maximum and quartiles. The ratio of a run is the mean over its tasks. A ratio below 1 is a
slow-down. Two costs are compared: `decode`, seconds per token after the prompt, and `request`,
seconds per token with the prompt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from tinyspec.bench.book import Sample
from tinyspec.bench.plan import PLAIN, ArmSpec
from tinyspec.bench.tasks import COPYING, SPEC_BENCH
from tinyspec.decoding.trace import distinct_share

Cost = Callable[[Sample], float]


def seconds_per_token(sample: Sample) -> float:
    """Return the seconds per token after the prompt; 0 if the prefill made all tokens."""
    return sample.decode / sample.timed if sample.timed else 0.0


def seconds_per_token_with_prompt(sample: Sample) -> float:
    """Return the seconds per token of the whole request."""
    return (sample.prefill + sample.decode) / sample.tokens


def five_number_summary(values: Sequence[float]) -> dict[str, float]:
    """Return a median with its spread.

    >>> five_number_summary([1.0, 2.0, 3.0, 4.0, 9.0])
    {'min': 1.0, 'q1': 2.0, 'median': 3.0, 'q3': 4.0, 'max': 9.0}
    """
    q1, middle, q3 = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    return {"min": min(values), "q1": q1, "median": middle, "q3": q3, "max": max(values)}


def paired_ratios(
    samples: Iterable[Sample], base: str, arm: str, cost: Cost = seconds_per_token
) -> dict[str, float]:
    """Return, for each job, how many times as fast as `base` the arm was.

    It is the median over the rounds that both did.
    """
    costs: dict[str, dict[tuple[str, int], float]] = {base: {}, arm: {}}
    for sample in samples:
        if sample.arm in costs and (seconds := cost(sample)) > 0:
            costs[sample.arm][sample.job, sample.round] = seconds
    ratios: dict[str, list[float]] = {}
    for (job, round), seconds in costs[arm].items():
        if (job, round) in costs[base]:
            ratios.setdefault(job, []).append(costs[base][job, round] / seconds)
    return {job: median(found) for job, found in ratios.items()}


def group_by_task(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each task, in their order."""
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.task, []).append(sample)
    return tasks


def count_samples(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Return the figures of one arm that do not depend on the machine.

    A figure is None if a count that it needs is None.
    tau              tokens per forward pass of the target
    acceptance       share of the draft tokens that was accepted
    alpha            share of the tested positions at which a draft token was accepted
    state_per_token  bytes that a drafter keeps, per token of the texts that it keeps
    """
    tokens, calls = sum(s.tokens for s in samples), sum(s.calls for s in samples)

    def total(values: Sequence[float | None]) -> float | None:
        return (
            None
            if any(value is None for value in values)
            else sum(value for value in values if value is not None)
        )

    nodes, accepted = total([s.nodes for s in samples]), total([s.accepted for s in samples])
    layers, stopped = total([s.row_layers for s in samples]), total([s.stopped for s in samples])
    tested = None if accepted is None or stopped is None else accepted + stopped
    state, held = total([s.state for s in samples]), total([s.held for s in samples])
    return {
        "tau": tokens / calls,
        "calls_per_token": calls / tokens,
        "draft_calls_per_token": sum(s.draft_calls for s in samples) / tokens,
        "nodes_per_token": None if nodes is None else nodes / tokens,
        "acceptance": None if accepted is None or not nodes else accepted / nodes,
        "alpha": None if accepted is None or not tested else accepted / tested,
        "state_per_token": state / held if state is not None and held else None,
        "layers_per_token": None if layers is None else layers / tokens,
    }


def describe_prompts(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how fast one arm read prompts, and its median time to the first token, in ms.

    The result is empty for samples of older files, which do not tell it.
    """
    reads = [s.read for s in samples if s.read is not None]
    firsts = [s.first for s in samples if s.first is not None]
    seconds = sum(s.prefill for s in samples)
    if not seconds or not len(reads) == len(firsts) == len(samples):
        return {}
    return {
        "prompt_tokens_per_second": sum(reads) / seconds,
        "first_token": 1e3 * median(firsts),
    }


def measure_drafting(samples: Sequence[Sample], base: str, arm: str) -> dict[str, float]:
    """Return the seconds that drafting takes in a round, in seconds per token of `base`.

    It is the median of the requests that both did. The result is empty for samples that do not
    tell it: those of older files, and of devices.
    """
    plain = {(s.job, s.round): seconds_per_token(s) for s in samples if s.arm == base}
    costs = [
        s.drafting / s.calls / step
        for s in samples
        if s.arm == arm
        and s.drafting is not None
        and (step := plain.get((s.job, s.round), 0.0)) > 0
    ]
    return {"drafting": median(costs)} if costs else {}


def summarize_task(samples: Sequence[Sample], arm: str, base: str = PLAIN) -> dict[str, Any]:
    """Return all figures of one arm on one task's samples."""
    own = [s for s in samples if s.arm == arm]
    jobs = {s.job: [t for t in own if t.job == s.job] for s in own}
    ratios = list(paired_ratios(samples, base, arm).values())
    whole = list(paired_ratios(samples, base, arm, seconds_per_token_with_prompt).values())
    seconds = [median(map(seconds_per_token, rounds)) for rounds in jobs.values()]
    same = [s.same for s in own if s.same is not None]
    return {
        "jobs": len(jobs),
        "speedup": five_number_summary(ratios) if ratios else None,
        "request": five_number_summary(whole) if whole else None,
        "tokens_per_second": len(seconds) / sum(seconds) if sum(seconds) else None,
        "milliseconds_per_token": five_number_summary([1e3 * s for s in seconds]),
        "identical": sum(all(s.same == s.tokens for s in rounds) for rounds in jobs.values())
        if same
        else None,
        "tokens_before_a_difference": sum(same) / sum(s.tokens for s in own) if same else None,
        **measure_drafting(samples, base, arm),
        **count_samples(own),
    }


def summarize_samples(samples: Sequence[Sample], arms: Sequence[str]) -> dict[str, Any]:
    """Return figures by task and arm, of each arm over all tasks, and against every peer."""
    tasks = {
        name: {arm: summarize_task(own, arm) for arm in arms}
        for name, own in group_by_task(samples).items()
    }
    peers = [arm for arm in arms if ArmSpec.parse(arm).is_peer]
    against = {peer: compare_arms(samples, arms, [peer]) for peer in peers}
    for family, members in group_by_family(peers).items():
        if len(members) > 1:
            against[f"{family}, best setting"] = compare_arms(samples, arms, members)
    return {
        "tasks": tasks,
        "overall": {arm: summarize_arm(tasks, samples, arm) for arm in arms},
        "against": against,
    }


def summarize_arm(
    tasks: Mapping[str, Mapping[str, Any]], samples: Sequence[Sample], arm: str
) -> dict[str, Any]:
    """Return the figures of an arm over all tasks: means of the tasks' medians, and the worst task.

    Means are over all tasks, over Spec-Bench's six, and over those whose answers copy.
    """
    ratios = {
        name: arms[arm]["speedup"]["median"] for name, arms in tasks.items() if arms[arm]["speedup"]
    }
    own = [s for s in samples if s.arm == arm]
    found = {name: arms[arm]["identical"] for name, arms in tasks.items()}
    worst = min(ratios, key=lambda name: ratios[name], default=None)
    pace = [
        arms[arm]["tokens_per_second"] for arms in tasks.values() if arms[arm]["tokens_per_second"]
    ]
    return {
        "mean": fmean(ratios.values()) if ratios else None,
        "spec_bench": fmean(ratios[t] for t in SPEC_BENCH)
        if all(t in ratios for t in SPEC_BENCH)
        else None,
        "copying": fmean(ratios[t] for t in COPYING) if all(t in ratios for t in COPYING) else None,
        "worst": None if worst is None else [worst, ratios[worst]],
        "request": _mean_or_none(
            [arms[arm]["request"]["median"] for arms in tasks.values() if arms[arm]["request"]]
        ),
        "tokens_per_second": _mean_or_none(pace),
        "jobs": sum(arms[arm]["jobs"] for arms in tasks.values()),
        "identical": None if None in found.values() else sum(found.values()),
        **measure_drafting(samples, PLAIN, arm),
        **describe_prompts(own),
        **count_samples(own),
    }


def compare_arms(
    samples: Sequence[Sample], arms: Sequence[str], others: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return how many times as fast as the others each arm is, by task and in the mean.

    Several others are settings of one program. The best of them is taken for each task.
    """
    found: dict[str, dict[str, float]] = {}
    for arm in arms:
        ratios: dict[str, float] = {}
        for name, own in group_by_task(samples).items():
            medians = [
                median(r.values()) for other in others if (r := paired_ratios(own, other, arm))
            ]
            if medians:
                ratios[name] = min(medians)
        if ratios:
            found[arm] = {**ratios, "mean": fmean(ratios.values())}
    return found


def group_by_family(labels: Sequence[str]) -> dict[str, list[str]]:
    """Group labels that differ only in the values of their knobs.

    >>> group_by_family(["transformers", "transformers:lookup=3", "transformers:lookup=10"])
    {'transformers': ['transformers'], 'transformers:lookup': ['transformers:lookup=3',
    'transformers:lookup=10']}
    """
    found: dict[str, list[str]] = {}
    for label in labels:
        spec = ArmSpec.parse(label)
        found.setdefault(":".join([spec.name, *(name for name, _ in spec.knobs)]), []).append(label)
    return found


def describe_texts(
    references: Mapping[str, Sequence[int]], eos: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Return, for each task, how much plain greedy decoding repeats, and writes after its end.

    distinct_4grams  share of distinct 4-grams: text that loops makes every drafter look good
    behind_the_end   share of tokens after the first end of text
    """
    tasks: dict[str, list[Sequence[int]]] = {}
    for job, ids in references.items():
        tasks.setdefault(job.split("/")[0], []).append(ids)
    return {
        name: {
            "distinct_4grams": fmean(distinct_share(ids) for ids in written),
            "behind_the_end": fmean(_share_after_end(ids, eos) for ids in written),
        }
        for name, written in tasks.items()
    }


def _share_after_end(ids: Sequence[int], eos: Sequence[int]) -> float:
    end = next((at for at, token in enumerate(ids) if token in eos), len(ids) - 1)
    return (len(ids) - 1 - end) / len(ids) if ids else 0.0


def _mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
