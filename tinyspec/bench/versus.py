"""Tables of a run with peers: who is how fast on which group, and the ratios that sum it up."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tinyspec.bench import report
from tinyspec.bench.book import Sample
from tinyspec.bench.plan import PLAIN
from tinyspec.bench.report import Grid
from tinyspec.bench.tasks import COPYING, SPEC_BENCH

LOOKUP = "transformers:lookup, best setting"


def mean(ratios: Mapping[str, float], tasks: Iterable[str] = SPEC_BENCH) -> float:
    """The mean over these groups.

    >>> mean({"qa": 1.0, "rag": 2.0, "edits": 9.0}, ["qa", "rag"])
    1.5
    """
    found = [ratios[task] for task in tasks if task in ratios]
    return sum(found) / len(found)


def peers(result: Mapping[str, Any], page: str) -> list[str]:
    """Return the table of the run with what must be known to read it, and the table of ratios."""
    figures, settings = result["figures"], result["settings"]
    tasks, overall = figures["tasks"], figures["overall"]
    rows = []
    for arm, all_of in overall.items():
        each = [of[arm]["speedup"]["median"] for of in tasks.values()]
        same = "-" if all_of["identical"] is None else f"{all_of['identical']} of {all_of['jobs']}"
        pace = f"{all_of['tokens_per_second']:.1f}"
        rows.append([arm, *map(report.ratio, [*each, all_of["mean"]]), pace, same])
    heads = ["", *(report.SHORT.get(task, task) for task in tasks), "mean", "tokens/s", "same text"]
    blocks = [
        Grid("", heads, rows).table(),
        f"Times as fast as plain decoding, after the prompt: {settings['model']}, "
        f"{settings['dtype']}, greedy, "
        f"{settings['tokens']} tokens per answer, {overall[PLAIN]['jobs']} requests, "
        f"{report.several(settings['rounds'], 'round')}. *Same text*: answers that equal plain "
        "decoding's. Quartiles, counts, "
        f"memory and every peer against every other: [{page}]({page}).",
    ]
    if found := list_ratios(result):
        blocks.append(
            Grid(
                "", ["", "times as fast"], [[what, report.ratio(value)] for what, value in found]
            ).table()
        )
    return blocks


def list_ratios(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the ratios that sum up a run: (what, ratio), without what it did not measure."""
    of, against = result["figures"]["tasks"], result["figures"]["against"]
    found: list[tuple[str, float]] = []
    if "transformers" in against:
        plain = against["transformers"][PLAIN]
        found.append(
            (
                "plain decoding over transformers, smallest of the groups",
                min(plain[task] for task in of),
            )
        )
    if "llama.cpp" in against:
        found.append(
            (
                "plain decoding over llama.cpp, mean of the groups",
                mean(against["llama.cpp"][PLAIN], of),
            )
        )
    if "auto" not in result["figures"]["overall"]:
        return found
    own = {task: arms["auto"]["speedup"]["median"] for task, arms in of.items()}
    if set(SPEC_BENCH) <= set(own):
        found.append(("`auto` over plain decoding, mean of Spec-Bench's six groups", mean(own)))
    found.append(("`auto` over plain decoding, smallest of the groups", min(own.values())))
    if set(COPYING) <= set(own):
        copied = mean(own, COPYING)
        found.append(
            ("`auto` over plain decoding, mean of what copies (summaries, RAG, edits)", copied)
        )
    if LOOKUP in against:
        smallest = min(against[LOOKUP]["auto"][task] for task in of)
        found.append(
            (
                "`auto` over transformers' prompt lookup in its best setting, smallest of the groups",
                smallest,
            )
        )
    if "llama.cpp" in against and set(SPEC_BENCH) <= set(own):
        found.append(
            (
                "`auto` over llama.cpp, mean of Spec-Bench's six groups",
                mean(against["llama.cpp"]["auto"]),
            )
        )
    return found


def tokens_a_call(result: Mapping[str, Any], arm: str, task: str) -> float:
    """Return an arm's tokens per forward pass after the prompt, the median of a group's requests.

    It is what the speed-up would be if a pass always took as long as a plain step.
    """
    each = dict[str, list[float]]()
    for sample in (Sample(*row) for row in result["samples"]):
        if (
            sample.arm == arm and sample.task == task and sample.calls > 1
        ):  # the first pass gave the first token
            each.setdefault(sample.job, []).append(sample.timed / (sample.calls - 1))
    return median(median(rates) for rates in each.values())


def allowed(result: Mapping[str, Any]) -> list[str]:
    """Return, where texts copy, `auto`'s tokens per forward pass and the cost of such a pass."""
    tasks = result["figures"]["tasks"]
    rates = {task: tokens_a_call(result, "auto", task) for task in COPYING}
    rows = []
    for task, rate in rates.items():
        speedup = tasks[task]["auto"]["speedup"]["median"]
        rows.append(
            [
                report.SHORT.get(task, task),
                f"{rate:.2f}",
                f"{rate / speedup:.2f}",
                report.ratio(speedup),
            ]
        )
    return [
        Grid(
            "",
            [
                "`auto`",
                "tokens per forward pass",
                "cost of a pass, in plain steps",
                "times as fast",
            ],
            rows,
        ).table(),
        "If further positions and lookups cost nothing, the mean of these three groups would be "
        f"{mean(rates, COPYING):.2f} times as fast as plain decoding.",
    ]


def floors(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of what a forward pass costs, against one position and against the floor."""
    rows = []
    for result in results:
        curve = result["curve_figures"]["curves"]["tinyspec"]["rows"]
        most, row = max(curve.items(), key=lambda entry: float(entry[1]["usually"]))
        rows.append([
            result["settings"]["dtype"],
            f"{curve['8']['against_one']:.2f}",
            f"{max(of['over'] for of in curve.values()):.2f}",
            f"{row['usually']:.2f}",
            f"{most} positions, {row['milliseconds']:.1f} ms",
        ])  # fmt: skip
    heads = [
        "",
        "8 positions, in passes over 1",
        "furthest over its floor",
        "the same, by medians",
        "which is",
    ]
    return Grid("", heads, rows).table()


def ceilings(curve: Mapping[str, Any]) -> str:
    """Return who reads and computes how fast: the fastest set the floor under a forward pass."""
    reads, peaks = curve["ceilings"]["bandwidth"], curve["ceilings"]["peak"]
    told = ", ".join(f"{who} {rate / 1e9:.1f}" for who, rate in reads.items())
    sums = ", ".join(f"{who} {rate / 1e9:.0f}" for who, rate in peaks.items())
    return f"Bandwidth, GB/s: {told}. Arithmetic, billion operations/s: {sums}."
