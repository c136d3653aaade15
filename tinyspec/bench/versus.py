"""What the README says of a run with peers: one table, and below it what the project set out for, beside what came of it.

The aims are those of a processor with AVX-512 and two threads, for SmolLM2; a figure that misses its aim is printed with the
others.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tinyspec.bench import report
from tinyspec.bench.book import Sample
from tinyspec.bench.plan import PLAIN
from tinyspec.bench.tasks import COPYING, SPEC_BENCH

LOOKUP = "transformers:lookup, best setting"
PLAINLY = {"float32": (2.7, 0.85), "bfloat16": (3.0, 0.9)}
"""What plain decoding shall be at least, in times transformers and llama.cpp, by dtype."""
OVER = 1.35  # times its floor that a call shall take at most
Against = Mapping[str, Mapping[str, float]]


def mean(ratios: Mapping[str, float], tasks: Iterable[str] = SPEC_BENCH) -> float:
    """The mean over these groups.

    >>> mean({"qa": 1.0, "rag": 2.0, "edits": 9.0}, ["qa", "rag"])
    1.5
    """
    found = [ratios[task] for task in tasks if task in ratios]
    return sum(found) / len(found)


def aims(result: Mapping[str, Any]) -> list[tuple[str, float, float, bool]]:
    """(what, the figure, its aim, whether it is reached). What this run did not measure is left out."""
    figures, curve = result["figures"], result.get("curve_figures")
    of, against = figures["tasks"], figures["against"]
    dtype = result["settings"]["dtype"]
    told: list[tuple[str, float, float, bool]] = []

    def at_least(what: str, figure: float, aim: float) -> None:
        told.append((what, figure, aim, figure >= aim))

    def at_most(what: str, figure: float, aim: float) -> None:
        told.append((what, figure, aim, figure <= aim))

    if "transformers" in against:
        ours = against["transformers"][PLAIN]
        at_least("plain decoding, times transformers, least of the groups", min(ours[t] for t in of), PLAINLY[dtype][0])
    if "llama.cpp" in against:
        times = mean(against["llama.cpp"][PLAIN], of)
        at_least("plain decoding, times llama.cpp, mean of the groups", times, PLAINLY[dtype][1])
    if "auto" in figures["overall"] and dtype == "bfloat16":
        own = {task: arms["auto"]["speedup"]["median"] for task, arms in of.items()}
        at_least("`auto`, times plain decoding, mean of Spec-Bench's six groups", mean(own), 1.5)
        at_least("`auto`, times plain decoding, least of the groups", min(own.values()), 0.97)
        at_least("`auto`, times plain decoding, mean of what copies (summaries, RAG, edits)", mean(own, COPYING), 2.5)
        if LOOKUP in against:
            least = min(against[LOOKUP]["auto"][task] for task in of)
            at_least("`auto`, times transformers' prompt lookup in its best setting, least of the groups", least, 3.0)
        if "llama.cpp" in against:
            at_least("`auto`, times llama.cpp, mean of the six groups", mean(against["llama.cpp"]["auto"]), 1.1)
    if curve:
        rows = curve["curves"]["tinyspec"]["rows"]
        at_most("a call over 8 rows, in calls over one", rows["8"]["against_one"], 1.25)
        at_most("the call furthest over its floor, that of the best moment", furthest(rows, "over"), OVER)
        if all("usually" in row for row in rows.values()):  # older results have none
            at_most("the same, the floor in medians too", furthest(rows, "usually"), OVER)
    return told


def furthest(rows: Mapping[str, Mapping[str, float]], how: str) -> float:
    """How many times its floor the worst of all calls takes."""
    return max(row[how] for row in rows.values())


def peers(result: Mapping[str, Any], page: str) -> list[str]:
    """The run: who is how fast on which group, and the aims."""
    figures, settings = result["figures"], result["settings"]
    tasks, overall = figures["tasks"], figures["overall"]
    commands = ", then ".join(f"`{c}`" for c in dict.fromkeys(s["command"] for s in result["sittings"]))
    heads = ["", *(report.SHORT.get(task, task) for task in tasks), "mean", "tokens/s", "same text"]
    lines = [
        f"**With peers, {settings['dtype']}** ({commands}): {settings['model']}, greedy, "
        f"{settings['tokens']} tokens an answer, {overall[PLAIN]['jobs']} requests, {settings['rounds']} round(s); times as "
        f"fast as plain decoding, behind the prompt. All of it, and the cost curve: [{page}]({page}).",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for arm, all_of in overall.items():
        each = [of[arm]["speedup"]["median"] for of in tasks.values()]
        same = "-" if all_of["identical"] is None else f"{all_of['identical']} of {all_of['jobs']}"
        cells = [*map(report.ratio, [*each, all_of["mean"]]), f"{all_of['tokens_per_second']:.1f}", same]
        lines.append("| " + " | ".join([arm, *cells]) + " |")
    lines += ["", "| what was aimed at | is | aim | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {figure:.2f} | {aim:.2f} | {'reached' if good else 'missed'} |"
        for what, figure, aim, good in aims(result)
    ]
    if "auto" in overall and set(COPYING) <= set(tasks):
        lines += ["", allowed(result)]
    if told := closing(result):
        lines += ["", told]
    if "curve_figures" in result:
        lines += ["", ceilings(result["curve_figures"])]
    return lines


def tokens_a_call(result: Mapping[str, Any], arm: str, task: str) -> float:
    """Behind the prompt, the median over the requests of a group: what their speed-up would be if only calls took time."""
    each = dict[str, list[float]]()
    for sample in (Sample(*row) for row in result["samples"]):
        if sample.arm == arm and sample.task == task and sample.calls > 1:  # the first call gave the first token
            each.setdefault(sample.job, []).append(sample.timed / (sample.calls - 1))
    return median(median(rates) for rates in each.values())


def allowed(result: Mapping[str, Any]) -> str:
    """What copies: the tokens that `auto` has for a call, and what a call of it takes. Free rows would turn one into speed."""
    tasks = result["figures"]["tasks"]
    rates = {task: tokens_a_call(result, "auto", task) for task in COPYING}
    told = ", ".join(
        f"{report.SHORT.get(task, task)} {rate:.2f} (a call takes {rate / tasks[task]['auto']['speedup']['median']:.2f})"
        for task, rate in rates.items()
    )
    return (
        f"Tokens that `auto` has for a call where texts copy, and what that call takes in plain ones: {told}. With rows and "
        f"looks that cost nothing the mean of what copies would be {mean(rates, COPYING):.2f}: what a row costs, and where, is "
        "taken apart below."
    )


def closing(result: Mapping[str, Any]) -> str:
    """Of what missed its aim: by how much the calls behind it would have to be shorter. Empty: nothing missed."""
    told, curve = list[str](), result.get("curve_figures")
    for what, figure, aim, good in aims(result):
        if not good and "copies" in what:
            told.append(
                f"calls of `auto` where texts copy that take {figure / aim:.2f} of their time, with the tokens they have"
            )
        if not good and "8 rows" in what:
            told.append(
                f"a call over 8 rows that takes {aim / figure:.2f} of its time, beside the one over one row as it is"
            )
    if curve:
        rows = curve["curves"]["tinyspec"]["rows"]
        most, row = max(rows.items(), key=lambda entry: entry[1].get("usually", entry[1]["over"]))
        over = row.get("usually", row["over"])
        if over > OVER:
            took = row["milliseconds"]
            told.append(
                f"no call so far over its floor as the one over {most} rows, which takes {took:.1f} ms and may take "
                f"{took * OVER / over:.1f} (in medians)"
            )
    return f"What would close the misses: {'; '.join(told)}." if told else ""


def ceilings(curve: Mapping[str, Any]) -> str:
    """Why a call is not at its floor: who reads how fast in this run, and what our own products reach."""
    reads, peaks = curve["ceilings"]["bandwidth"], curve["ceilings"]["peak"]
    told = ", ".join(f"{who} {rate / 1e9:.1f}" for who, rate in reads.items())
    sums = ", ".join(f"{who} {rate / 1e9:.0f}" for who, rate in peaks.items())
    return (
        f"The floor under a call is the larger of its weights at the greatest bandwidth and its arithmetic at the greatest "
        f"peak of this run. Bandwidth, GB/s: {told}. Arithmetic, billion operations/s: {sums}."
    )
