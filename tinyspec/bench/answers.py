"""Compute the figures and tables of the page of results. Its prose is in `results.md.jinja`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tinyspec.bench.book import Sample
from tinyspec.bench.experiments.batches import tabulate_batches
from tinyspec.bench.experiments.clients import tabulate_clients
from tinyspec.bench.experiments.dialects import describe_dialects
from tinyspec.bench.experiments.distillspec import tabulate_grid
from tinyspec.bench.experiments.exits import choose_best_rows, list_exit_columns, tabulate_exits
from tinyspec.bench.experiments.heads import count_paying_sizes, tabulate_heads
from tinyspec.bench.experiments.long_context import list_budget_rows
from tinyspec.bench.experiments.mpee import tabulate_mpee
from tinyspec.bench.experiments.osd import COLUMNS
from tinyspec.bench.experiments.serve_tables import tabulate_serve
from tinyspec.bench.experiments.streams import tabulate_streams
from tinyspec.bench.plan import PLAIN, ArmSpec
from tinyspec.bench.report import (
    SAME_TEXT,
    SHORT,
    Column,
    Grid,
    count_things,
    describe_additions,
    format_speedup,
    gather_arms,
    list_drafting_column,
    list_prompt_columns,
    list_speedup_columns,
    list_unusual_knobs,
    make_grid,
)
from tinyspec.bench.tasks import COPYING, SPEC_BENCH
from tinyspec.decoding.costs import FittedCosts
from tinyspec.technique import load_techniques

Result = Mapping[str, Any]
GOOD_AGREEMENT = 0.95
"""Share of the tokens on which an early exit must agree with the full model to be quoted."""
LOOKUP = "transformers:lookup, best setting"


def join_blocks(blocks: Iterable[str]) -> str:
    """Return the blocks with an empty line between each two."""
    return "\n\n".join(blocks)


def list_commands(*results: Result) -> str:
    """Return the commands that made these results, each once, in a block of code."""
    sessions = [session for result in results for session in result.get("sittings", [result])]
    commands = dict.fromkeys(session["command"] for session in sessions)
    return "\n".join(["Reproduce with:", "", "```sh", *commands, "```"])


def write_table(
    columns: Sequence[Column], rows: Mapping[str, Any], first: str = "", title: str = ""
) -> str:
    """Return a table in Markdown."""
    return make_grid(title, rows, columns, first).to_markdown()


def format_times(value: float | None) -> str:
    """Return a speed-up as text, with its unit: 1.23x."""
    return format_speedup(value, "x")


# ---------------------------------------------------------------------- unchanged, faster, slower


def count_identical(result: Result, arm: str | None = None) -> int:
    """Return on how many questions every arm, or this one, wrote the whole plain text."""
    lines = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    asked = [line for line in lines if arm in (None, line["arm"])]
    other = {line["question"] for line in asked if line["same"] < result["tokens_each"]}
    return len({line["question"] for line in asked} - other)


def tabulate_identical_texts(equality: Result, peer: Result, torch: Result) -> str:
    """Return the table of what was compared with what, and how many texts are identical."""
    asked, each = equality["questions"], equality["tokens_each"]
    rows = [
        [
            f"greedy speculation (`{arm}`) and plain decoding",
            equality["dtype"],
            f"{count_identical(equality, arm)} of {asked}",
            f"{asked * each:,}",
            f"{tau}",
        ]
        for arm, tau in equality["tokens_per_call"].items()
    ]
    for name, of in (("transformers", peer), ("our own torch path", torch)):
        identical = f"{of['identical']} of {of['questions']}"
        rows.append([f"plain decoding and {name}", "float32", identical, f"{of['tokens']:,}", "-"])
    header = ["compared", "weights", "identical texts", "tokens", "tokens per forward pass"]
    return Grid("", header, rows).to_markdown()


def tabulate_race(race: Result) -> str:
    """Return the race by temperature."""
    start = "temperature "
    rows = {key.removeprefix(start): of for key, of in race.items() if key.startswith(start)}
    columns = [
        Column("wall clock against plain", "ratio", format_times),
        Column("tokens per forward pass", "tokens_per_call", ".2f"),
        Column("draft tokens accepted", "acceptance", ".0%"),
        Column("distinct 4-grams", "distinct_4grams", ".2f"),
    ]
    return write_table(columns, rows, "temperature")


def list_speedups(result: Result) -> dict[str, float]:
    """Return each technique's mean over the groups, the fastest first, without plain decoding."""
    overall = result["figures"]["overall"]
    found = {name: of["mean"] for name, of in overall.items() if name != PLAIN}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def count_slow_downs(result: Result) -> int:
    """Return how many rows are slower than plain decoding in the mean of the groups."""
    return sum(round(mean, 2) < 1 for mean in list_speedups(result).values())


def describe_unusual_knobs(result: Result) -> str:
    """Return a sentence with the knobs that have no default value; nothing if there are none."""
    return "".join(f"K{line[1:]}. " for line in list_unusual_knobs(result))


def describe_chapter(result: Result, page: str) -> list[str]:
    """Return the techniques that are faster than plain decoding on some task, and counts of all."""
    tasks, settings = result["figures"]["tasks"], result["settings"]
    arms, means = gather_arms(result["figures"]), list_speedups(result)
    fast = {
        name: arms[name]
        for name in means
        if max(round(of[name]["speedup"]["median"], 2) for of in tasks.values()) >= 1
    }
    columns = [
        *list_speedup_columns(tasks, format_speedup, "median"),
        Column("tokens per forward pass", "tau", ".2f"),
    ]
    most = max(means, key=lambda name: float(arms[name]["tau"]))
    methods = len({ArmSpec.parse(label).name for label in means})
    same = sum(arms[name]["identical"] == arms[name]["jobs"] for name in means)
    slow = count_slow_downs(result)
    return [
        write_table(columns, fast),
        f"{count_things(methods, 'technique')}"
        f"{'' if methods == len(means) else f' in {len(means)} rows'} on "
        f"{arms[most]['jobs']} requests ({', '.join(tasks)}), greedy, "
        f"{count_things(settings['rounds'], 'round')}; times as fast as plain decoding. "
        f"{len(means) - slow} are faster"
        f"{' in the mean of the groups' if len(tasks) > 1 else ''}, the other {slow} are "
        "slow-downs on this machine; those that are slower in every group stand "
        "[below](#when-is-it-slower). Most tokens per forward pass of the target: "
        f"`{most}`, {arms[most]['tau']:.2f}. The text is plain decoding's on every request for "
        f"{same} of {len(means)}. {describe_unusual_knobs(result)}All of it: [{page}]({page}).",
        *describe_additions(result, settings.get("methods", ())),
        list_commands(result),
    ]


def tabulate_long_budgets(result: Result) -> str:
    """Return TriForce's acceptance and speed by context and budget."""
    columns = [
        Column("alpha 1", "alpha_1", ".2f"),
        Column("alpha 2", "alpha_2", ".2f"),
        Column("tokens per forward pass", "tau", ".2f"),
        Column("times as fast", ("speedup", "median"), format_times),
    ]
    return write_table(columns, list_budget_rows(result), "context / budget")


def tabulate_learning(result: Result) -> str:
    """Return the acceptance of a draft that learns, and of the same one without updates."""
    return write_table(COLUMNS[:4], result["figures"], "prompts")


def tabulate_all(kind: str, result: Result, tables: int | None = None) -> str:
    """Return the tables of an experiment's page, or so many of them, the first ones."""
    grids = TABLES[kind](dict(result))[:tables]
    return join_blocks(grid.to_markdown() for grid in grids)


EXIT_COLUMNS = (
    *("layers per token", "K/V fills", "head products", "layers in a row", "work", "agreement"),
    *("perplexity", "above fixed exits, points", "times as fast"),
)


def tabulate_exits_together(*results: Result, settings: Sequence[str] = ()) -> str:
    """Return the exits of several models in one table.

    settings  labels that every model has a row of; none: each technique at its best setting
    """
    rows = {
        f"{label}, {result['settings']['model']}": result["figures"][label]
        for label, result in (
            product(settings, results)
            if settings
            else ((best, one) for one in results for best in choose_best_rows(one))
        )
    }
    columns = [one for one in list_exit_columns(results[0]) if one.heading in EXIT_COLUMNS]
    return make_grid("", rows, columns).to_markdown()


TABLES: Mapping[str, Callable[[dict[str, Any]], list[Grid]]] = {
    "batches": tabulate_batches,
    "clients": tabulate_clients,
    "distillspec": tabulate_grid,
    "exits": tabulate_exits,
    "heads": tabulate_heads,
    "mpee": tabulate_mpee,
    "serve": tabulate_serve,
    "streams": tabulate_streams,
}


STREAMS, CACHED = (1, 2, 4, 8, 16), 256


def tabulate_stream_passes(serve: Result) -> str:
    """Return what a pass of several streams takes, t(B) / t(1), by the costs fitted to passes."""
    costs = FittedCosts.from_json(serve["costs"])
    ones = {n: (1,) * n for n in STREAMS}
    seconds = {n: costs.seconds_of(one, (CACHED,) * n, one) for n, one in ones.items()}
    ratios = {str(n): of / seconds[1] for n, of in seconds.items()}
    columns = [Column(n, n, ".2f") for n in ratios]
    return write_table(columns, {"a pass, in passes of one": ratios}, "streams")


def list_paying_sizes(result: Result) -> str:
    """Return which sizes of a tree are predicted to pay, in a sentence."""
    return count_paying_sizes(result)


def tabulate_slow_downs(chat: Result, tales: Result) -> str:
    """Return every technique that is slower than plain decoding on one of the two models."""
    rows = {
        name: pair
        for name, pair in _pair_speedups(chat, tales).items()
        if min(round(speedup, 2) for speedup in pair if speedup is not None) < 1
    }
    return write_table(_PAIR_COLUMNS, rows)


def tabulate_reported(
    chat: Result, tales: Result, others: Iterable[Result], translation: Result
) -> str:
    """Return what others report of each technique, beside the speed-ups of the two models.

    others  runs of methods that need a model of their own
    """
    pairs = _pair_speedups(chat, tales)
    own = {
        name: f"{format_speedup(speedup)}, {Path(one['settings']['model']).name}"
        for one in others
        for name, speedup in list_speedups(one).items()
        if name not in pairs
    }
    exact = translation["figures"]["teacher, specdec exact"]["speedup"]["median"]
    own["specdec"] = f"{format_speedup(exact)}, {translation['settings']['models']['teacher'][0]}"
    rows = {
        name: (*pairs.get(name, (None, None)), own.get(name), card.reported)
        for name, card in load_techniques().items()
        if card.reported and (name in pairs or name in own)
    }
    elsewhere = Column("a model of its own", lambda row: row[2])
    return write_table([Column("reported", lambda row: row[3]), *_PAIR_COLUMNS, elsewhere], rows)


def tabulate_reported_by(*families: str) -> str:
    """Return what others report of the techniques of these families."""
    cards = load_techniques().items()
    rows = {name: card.reported for name, card in cards if card.family in families}
    reported = {name: text for name, text in rows.items() if text}
    return write_table([Column("reported", lambda text: text)], reported)


def list_unmeasured(
    chapters: Sequence[Result], others: Sequence[Result], pages: Iterable[str] = ()
) -> list[str]:
    """Return the methods that have no row in these results, nor a page of their own.

    chapters  results of `tinyspec bench --chapter`
    others    results whose labels begin with a method: "free 0.5", "sat, K 4"
    pages     names of all results
    """
    labels = [label for of in chapters for label in list_speedups(of)]
    tables = [of.get("arms", of.get("figures")) for of in others]
    labels += [label.partition(" ")[0].rstrip(",") for rows in tables for label in rows]
    rows = {ArmSpec.parse(label).name for label in labels}
    return [
        f"`{name}`"
        for name, card in load_techniques().items()
        if card.kind not in ("analysis", "policy")
        and name not in {PLAIN, *rows, *OTHER_LABELS, *pages}
    ]


OTHER_LABELS = ("calm", "jacobi", "specdec")
"""Methods that have other labels on the pages that measure them."""


def _pair_speedups(chat: Result, tales: Result) -> dict[str, tuple[float | None, float | None]]:
    first, second = list_speedups(chat), list_speedups(tales)
    return {name: (first.get(name), second.get(name)) for name in [*first, *second]}


_PAIR_COLUMNS = [
    Column("smollm2, mean of the groups", lambda row: row[0], format_speedup),
    Column("storyteller, books", lambda row: row[1], format_speedup),
]


def tabulate_other_chapters(sweeps: Result, ppd: Result) -> str:
    """Return the speed of Jacobi iteration and of PPD."""
    blocks, wall = sweeps["figures"], ppd["figures"]["wall"]
    rows = {
        "`jacobi`, blocks of 2 tokens": (blocks["2"]["speedup"], "sweeps.md"),
        "`jacobi`, all tokens in one block": (blocks["all"]["speedup"], "sweeps.md"),
        **{
            f"`ppd`{arm.removeprefix('ppd')}": (five, "ppd.md")
            for arm, five in wall.items()
            if arm.startswith("ppd")
        },
    }
    columns = [
        Column("times as fast", lambda of: of[0]["median"], format_speedup),
        Column("all of it", lambda of: f"[{of[1]}]({of[1]})"),
    ]
    return write_table(columns, rows)


# ---------------------------------------------------------------------- plain decoding and kernels


def tabulate_plain_decoding(plain: Result) -> str:
    """Return plain decoding's speed beside transformers', and its memory."""

    def find_overhead(of: Result) -> int | None:
        memory: dict[str, int] | None = of["memory"]
        return None if memory is None else memory["peak"] - memory["weights"] - memory["cache"]

    columns = [
        Column("tinyspec, tokens/s", ("tokens_per_second", "tinyspec")),
        Column("transformers, tokens/s", ("tokens_per_second", "transformers")),
        Column("times as fast", "ratio", format_times),
        Column(
            "memory over weights and cache",
            find_overhead,
            lambda extra: "-" if extra is None else f"{extra / 2**20:.0f} MiB",
        ),
    ]
    return write_table(columns, {dtype: plain[dtype] for dtype in ("float32", "bfloat16")})


def list_microseconds(core: Result) -> dict[str, float]:
    """Return the median of each kernel's samples, in microseconds."""
    return {name: 1e6 * median(taken) for name, taken in core["samples"].items()}


def tabulate_kernels(core: Result) -> str:
    """Return the time of each compiled kernel beside others for the same."""
    micro = list_microseconds(core)
    draw = "temperature, top-p and draw", "warp_draw"
    rows = [
        [
            what,
            f"{micro[ours]:.0f}",
            who,
            f"{micro[other]:.0f}",
            f"{micro[other] / micro[ours]:.1f}x",
        ]
        for (what, ours), who, other in (
            (draw, "transformers' processors", "transformers_processors"),
            (draw, "torch, the 1,024 best first", "torch_top_k_first"),
            (("verify five draft tokens", "walk"), "transformers", "transformers_verify"),
        )
    ]
    return Grid("", ["", "us", "against", "us", "times as fast"], rows).to_markdown()


def tabulate_products(core: Result) -> str:
    """Return how long each compiled kernel takes for one row by a matrix, by what weights are."""
    rows = {
        kernel: {form: 1e3 * median(taken) for form, taken in forms.items()}
        for kernel, forms in core["products"].items()
    }
    forms = next(iter(rows.values()), {})
    return write_table([Column(f"{form}, ms", form, ".2f") for form in forms], rows)


def list_lookups(retrieval: Result, size: str = "100000") -> dict[str, dict[str, Any]]:
    """Return the figures of each index of this size, and how its lookup grows with the size."""
    growth = retrieval["growth"]
    return {
        name: {"us_per_append": None, **each[size], "growth": growth[name]}
        for name, each in retrieval["figures"].items()
    }


def tabulate_lookups(retrieval: Result) -> str:
    """Return what looking a draft up costs."""
    columns = [
        Column("us per lookup", "us_per_call", ".1f"),
        Column("us per draft token", "us_per_guess", ".2f"),
        Column("us per added token", "us_per_append", ".2f"),
        Column("bytes per token", "bytes_per_token", ".0f"),
        Column("growth of a lookup", "growth", lambda times: f"{times:.1f}x"),
    ]
    return write_table(columns, list_lookups(retrieval))


# ---------------------------------------------------------------------- the survey's experiments


def list_draft_sizes(sizes: Result) -> dict[str, dict[str, Any]]:
    """Return the drafts, the smallest first, each at the length that is fastest."""
    found = {}
    for name, draft in sorted(sizes["drafts"].items(), key=lambda pair: float(pair[1]["weights"])):
        each = {gamma: of["speedup"]["median"] for gamma, of in sizes["figures"][name].items()}
        gamma = max(each, key=lambda gamma: float(each[gamma]))
        found[name] = {**draft, "name": name, "gamma": gamma, "speedup": each[gamma]}
    return found


def find_best_draft(sizes: Result) -> dict[str, Any]:
    """Return the fastest draft."""
    return max(list_draft_sizes(sizes).values(), key=lambda of: float(of["speedup"]))


def tabulate_draft_sizes(sizes: Result) -> str:
    """Return what a larger draft model brings, and costs."""
    columns = [
        Column("weights per token", "weights", lambda n: f"{n / 1e6:.2f}M"),
        Column("acceptance, greedy", "alpha", ".2f"),
        Column("acceptance, temperature 1", "alpha_1", ".2f"),
        Column("cost of a step, in plain steps", "c", ".2f"),
        Column("best speed-up", "speedup", format_times),
        Column("with draft tokens", "gamma"),
    ]
    return write_table(columns, list_draft_sizes(sizes), "draft")


def find_good_exits(exits: Result) -> dict[str, dict[str, float]]:
    """Return, for each family, the cheapest setting with at least `GOOD_AGREEMENT`."""
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for label, of in exits["figures"].items():
        measure, forced = label.rpartition(" ")[0], of["forced"]
        if not measure or forced["agreement"] < GOOD_AGREEMENT:
            continue
        if measure not in found or forced["work"] < found[measure][1]["work"]:
            found[measure] = label, forced
    return dict(found.values())


def tabulate_good_exits(exits: Result) -> str:
    """Return the least work at which exits agree with the full model."""
    columns = [
        Column("layers per token", "layers", ".1f"),
        Column("work over the full model's", "work", ".2f"),
        Column("agreement", "agreement", ".1%"),
    ]
    rows = {f"`{label}`": of for label, of in find_good_exits(exits).items()}
    return write_table(columns, rows)


def find_best_exit(layerskip: Result) -> dict[str, Any]:
    """Return the exit of the model with the greatest bound on LayerSkip's gain."""
    every = [
        {"model": name, "exit": exit, "bound": of["bound"]}
        for name, each in layerskip["models"].items()
        for exit, of in each["exits"].items()
    ]
    return max(every, key=lambda of: float(of["bound"]))


BLEU = Column("BLEU", "bleu", ".1f")
TIMES_AS_FAST = Column("times as fast", ("speedup", "median"), format_times)


def tabulate_translators(translation: Result) -> str:
    """Return the quality and speed of every way to translate."""
    columns = [
        BLEU,
        Column("decoder passes", "decoder_passes", ".1f"),
        TIMES_AS_FAST,
        Column(
            f"in batches of {translation['settings']['batch']}",
            lambda of: of["batch_speedup"] and of["batch_speedup"]["median"],
            format_times,
        ),
    ]
    return write_table(columns, translation["figures"])


def tabulate_iterations(passes: Result) -> str:
    """Return Mask-Predict by its iterations, with one length."""
    rows = {
        label.split("T ")[1].split(",")[0]: of
        for label, of in passes["figures"].items()
        if label.endswith("1 length")
    }
    return write_table([BLEU, TIMES_AS_FAST], rows, "iterations")


def tabulate_right_translations(dialects: Result) -> str:
    """Return how many translations of every hundred are right, by model and dialects."""
    kinds = dialects["figures"]
    arms = dict.fromkeys(arm for of in kinds.values() for arm in of)
    rows = {arm: {kind: 100 * of[arm]["valid"] for kind, of in kinds.items()} for arm in arms}
    columns = [Column(describe_dialects(kind), kind, ".1f") for kind in kinds]
    return write_table(columns, rows, "dialects with")


# ---------------------------------------------------------------------- a run with peers


def mean_over_tasks(ratios: Mapping[str, float], tasks: Iterable[str] = SPEC_BENCH) -> float:
    """Return the mean over these groups.

    >>> mean_over_tasks({"qa": 1.0, "rag": 2.0, "edits": 9.0}, ["qa", "rag"])
    1.5
    """
    found = [ratios[task] for task in tasks if task in ratios]
    return sum(found) / len(found)


def describe_run_with_peers(result: Result, page: str) -> list[str]:
    """Return the table of the run with what must be known to read it, and the table of ratios."""
    settings, arms = result["settings"], gather_arms(result["figures"])
    columns = [
        *list_speedup_columns(result["figures"]["tasks"], format_speedup, "median"),
        Column("tokens/s", "tokens_per_second", ".1f"),
        *list_prompt_columns(arms),
        *list_drafting_column(arms),
        SAME_TEXT,
    ]
    blocks = [
        write_table(columns, arms),
        f"Times as fast as plain decoding, after the prompt: {settings['model']}, "
        f"{settings['dtype']}, greedy, {settings['tokens']} tokens per answer, "
        f"{arms[PLAIN]['jobs']} requests, {count_things(settings['rounds'], 'round')}. "
        f"*Same text*: answers that equal plain decoding's. {describe_unusual_knobs(result)}"
        "Quartiles, counts, memory and every "
        f"peer against every other: [{page}]({page}).",
        *describe_additions(result, settings.get("methods", ())),
    ]
    if ratios := dict(list_ratios(result)):
        blocks.append(
            write_table([Column("times as fast", lambda ratio: ratio, format_speedup)], ratios)
        )
    return blocks


def list_ratios(result: Result) -> list[tuple[str, float]]:
    """Return the ratios that sum up a run: (what, ratio), without what it did not measure."""
    of, against = result["figures"]["tasks"], result["figures"]["against"]
    found: list[tuple[str, float]] = []
    if "transformers" in against:
        plain = against["transformers"][PLAIN]
        least = min(plain[task] for task in of)
        found.append(("plain decoding over transformers, smallest of the groups", least))
    llama = next((peer for peer in against if peer.startswith("llama.cpp")), "")
    if llama:
        mean = mean_over_tasks(against[llama][PLAIN], of)
        found.append(("plain decoding over llama.cpp, mean of the groups", mean))
    if "auto" not in result["figures"]["overall"]:
        return found
    own = {task: arms["auto"]["speedup"]["median"] for task, arms in of.items()}
    six = set(SPEC_BENCH) <= set(own)
    over, groups = "`auto` over plain decoding", "mean of Spec-Bench's six groups"
    if six:
        found.append((f"{over}, {groups}", mean_over_tasks(own)))
    found.append((f"{over}, smallest of the groups", min(own.values())))
    if set(COPYING) <= set(own):
        copied = mean_over_tasks(own, COPYING)
        found.append((f"{over}, mean of what copies (summaries, RAG, edits)", copied))
    if LOOKUP in against:
        least = min(against[LOOKUP]["auto"][task] for task in of)
        what = "`auto` over transformers' prompt lookup in its best setting"
        found.append((f"{what}, smallest of the groups", least))
    if llama and six:
        mean = mean_over_tasks(against[llama]["auto"])
        found.append((f"`auto` over llama.cpp, {groups}", mean))
    return found


def tokens_per_pass(result: Result, arm: str, task: str) -> float:
    """Return the tokens per forward pass of a technique, the median of a group's requests.

    The pass over the prompt is not counted. This is what the speed-up would be if a pass took as
    long as a plain step.
    """
    each = dict[str, list[float]]()
    for sample in (Sample(*row) for row in result["samples"]):
        if sample.arm == arm and sample.task == task and sample.calls:
            each.setdefault(sample.job, []).append(sample.timed / sample.calls)
    return median(median(rates) for rates in each.values())


def tabulate_copying_tasks(result: Result) -> list[str]:
    """Return, for tasks whose answers copy, `auto`'s tokens per pass and the cost of a pass."""
    rates = {task: tokens_per_pass(result, "auto", task) for task in COPYING}
    rows = {
        SHORT.get(task, task): {
            "rate": rate,
            "speedup": result["figures"]["tasks"][task]["auto"]["speedup"]["median"],
        }
        for task, rate in rates.items()
    }
    columns = [
        Column("tokens per forward pass", "rate", ".2f"),
        Column("cost of a pass, in plain steps", lambda of: of["rate"] / of["speedup"], ".2f"),
        Column("times as fast", "speedup", format_speedup),
    ]
    return [
        write_table(columns, rows, "`auto`"),
        "If further positions and lookups cost nothing, the mean of these three groups would be "
        f"{mean_over_tasks(rates, COPYING):.2f} times as fast as plain decoding.",
    ]


def tabulate_pass_costs(results: Iterable[Result]) -> str:
    """Return the table of what a forward pass costs, against one position and against the floor."""
    rows = {}
    for result in results:
        curve = result["curve_figures"]["curves"]["tinyspec"]["rows"]
        most, row = max(curve.items(), key=lambda entry: float(entry[1]["usually"]))
        rows[result["settings"]["dtype"]] = {
            "eight": curve["8"]["against_one"],
            "over": max(of["over"] for of in curve.values()),
            "usually": row["usually"],
            "which": f"{most} positions, {row['milliseconds']:.1f} ms",
        }
    columns = [
        Column("8 positions, in passes over 1", "eight", ".2f"),
        Column("furthest over its floor", "over", ".2f"),
        Column("the same, by medians", "usually", ".2f"),
        Column("which is", "which"),
    ]
    return write_table(columns, rows)


def describe_ceilings(curve: Result) -> str:
    """Return who reads and computes how fast: the fastest set the floor under a forward pass."""
    reads, peaks = curve["ceilings"]["bandwidth"], curve["ceilings"]["peak"]
    rates = ", ".join(f"{who} {rate / 1e9:.1f}" for who, rate in reads.items())
    operations = ", ".join(f"{who} {rate / 1e9:.0f}" for who, rate in peaks.items())
    return f"Bandwidth, GB/s: {rates}. Arithmetic, billion operations/s: {operations}."
