"""The sections of the page of results: each answers one question of a reader.

A section begins with a sentence that answers its question. Tables follow, then prose and commands.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tinyspec.bench.book import Sample
from tinyspec.bench.experiments import parts
from tinyspec.bench.experiments.dialects import describe_kind
from tinyspec.bench.plan import PLAIN
from tinyspec.bench.report import (
    SHORT,
    Grid,
    count_things,
    find_least_speedup,
    format_number,
    format_speedup,
)
from tinyspec.bench.tasks import COPYING, SPEC_BENCH

Results = Mapping[str, Mapping[str, Any]]


def join_blocks(*blocks: str) -> str:
    """Return the blocks with an empty line between each two."""
    return "\n\n".join(blocks)


def show_chart(name: str, text: str) -> str:
    """Return the line that shows a chart, with what it says for those who cannot see it."""
    return f"![{text}]({name}.svg)"


def list_commands(*results: Mapping[str, Any]) -> str:
    """Return the commands that made these results, each once, in a block of code."""
    sittings = [sitting for result in results for sitting in result.get("sittings", [result])]
    return "\n".join(
        ["Reproduce with:", "", "```sh", *dict.fromkeys(s["command"] for s in sittings), "```"]
    )


def count_identical(result: Mapping[str, Any], arm: str | None = None) -> int:
    """Return on how many questions every arm, or this one, wrote plain decoding's text, to its
    end.
    """
    lines = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    asked = [line for line in lines if arm in (None, line["arm"])]
    other = {line["question"] for line in asked if line["same"] < result["tokens_each"]}
    return len({line["question"] for line in asked} - other)


def answer_unchanged(results: Results) -> str:
    """Return whether speculation changes the text, by what was compared with what."""
    bits, theirs, torch, seeds = (
        results[name] for name in ("equality", "peer", "peer-torch", "laws_seeds")
    )
    asked, each = bits["questions"], bits["tokens_each"]
    rows = [
        [f"greedy speculation (`{arm}`) and plain decoding", bits["dtype"], f"{count_identical(bits, arm)} of {asked}",
         f"{asked * each:,}", f"{tau}"]
        for arm, tau in bits["tokens_per_call"].items()
    ] + [
        [f"plain decoding and {of}", "float32", f"{peer['identical']} of {peer['questions']}", f"{peer['tokens']:,}", "-"]
        for of, peer in (("transformers", theirs), ("our own torch path", torch))
    ]  # fmt: skip
    runs = seeds["methods"].values()
    return join_blocks(
        f"Greedy speculation writes plain decoding's text on {count_identical(bits)} of {asked} "
        "Spec-Bench questions in "
        f"{bits['dtype']}; plain decoding writes transformers' on {theirs['identical']} of "
        f"{theirs['questions']} in float32.",
        Grid(
            "",
            ["compared", "weights", "identical texts", "tokens", "tokens per forward pass"],
            rows,
        ).table(),
        "`rehearsed` copies from the plain answer itself with every seventh token changed, so "
        "that most of the text is "
        f"verified in long blocks. Of these {bits['tokens']:,} tokens of speculation "
        f"{bits['mismatches']} texts differ. Against "
        f"transformers {theirs['mismatches']} of {theirs['tokens']:,} tokens differ (allowed only "
        "where the two best logits "
        f"are within {theirs['gap']:g}).",
        "Above temperature 0 *unchanged* means the same joint distribution, which `tinyspec laws` "
        "proves on small models. Two "
        "long runs are kept: all cases tenfold ([laws_thorough.json](laws_thorough.json)), and "
        "correct code under "
        f"{max(run['seeds'] for run in runs)} seeds, {sum(run['cases'] for run in runs):,} cases "
        "in all, of which "
        f"{len(seeds['accused'])} were wrongly accused ([laws_seeds.json](laws_seeds.json)).",
        list_commands(bits, theirs, torch, results["laws_thorough"], seeds),
    )


def answer_faster(results: Results) -> str:
    """Return the speed-ups: beside peers, between the bundled models, and by technique."""
    wide, full, race = results["bench"], results["bench-float32"], results["race"]
    auto, greedy = wide["figures"]["overall"]["auto"], race["temperature 0.0"]
    edits = wide["figures"]["tasks"]["edits"]["auto"]["speedup"]["median"]
    return join_blocks(
        f"On SmolLM2 `auto` is {format_speedup(auto['spec_bench'], 'x')} as fast as plain decoding on "
        "Spec-Bench and "
        f"{format_speedup(edits, 'x')} on text edits; with the small bundled models `{race['method']}` is "
        f"{format_speedup(greedy['ratio'], 'x')}.",
        "### SmolLM2 in bfloat16, beside transformers and llama.cpp",
        *describe_run_with_peers(wide, "bench.md"),
        show_chart("bench-speedups", "Times as fast as plain decoding, by task and arm"),
        *tabulate_copying_tasks(wide),
        list_commands(wide),
        "### SmolLM2 in float32",
        *describe_run_with_peers(full, "bench-float32.md"),
        list_commands(full),
        "### The race of the bundled models",
        *describe_race(results),
        "### SmolLM2 by technique and task",
        *describe_chapter(results["speculative-smollm2"], "speculative-smollm2.md"),
        "### The storyteller by technique",
        *describe_chapter(results["speculative-storyteller"], "speculative-storyteller.md"),
    )


def describe_race(results: Results) -> list[str]:
    """Return the race by temperature, and what a round of it costs."""
    race, target, draft = (
        results[name] for name in ("race", "parts-storyteller", "parts-apprentice")
    )
    greedy = race["temperature 0.0"]
    rows = [
        [key.removeprefix("temperature "), format_speedup(of["ratio"], "x"), f"{of['tokens_per_call']:.2f}",
         f"{of['acceptance']:.0%}", f"{of['distinct_4grams']:.2f}"]
        for key, of in race.items() if key.startswith("temperature ")
    ]  # fmt: skip
    heads = [
        "temperature",
        "wall clock against plain",
        "tokens per forward pass",
        "draft tokens accepted",
        "distinct 4-grams",
    ]
    tokens = greedy["tokens_per_call"]
    return [
        Grid("", heads, rows).table(),
        f"`{race['model']}` and its draft on ten openings from books that neither was trained on, "
        f"{race['tokens']} tokens each, "
        f"repetition penalty {race['repetition_penalty']}, {count_things(race['rounds'], 'round')}. "
        "Greedy text was identical on "
        f"{greedy['identical']} of {len(greedy['prompts'])}. A greedy round with its {tokens:.2f} "
        "tokens takes as long as "
        f"{tokens / greedy['ratio']:.2f} plain steps. What a round is made of:",
        *parts.describe_race_round(target, draft),
        list_commands(race, target, draft),
    ]


def list_speedups(result: Mapping[str, Any]) -> dict[str, float]:
    """Return each technique's mean over the groups, the fastest first, without plain decoding."""
    overall = result["figures"]["overall"]
    found = {name: of["mean"] for name, of in overall.items() if name != PLAIN}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def describe_chapter(result: Mapping[str, Any], page: str) -> list[str]:
    """Return the techniques that are faster than plain decoding on some task, and counts of all."""
    tasks, overall, settings = (
        result["figures"]["tasks"],
        result["figures"]["overall"],
        result["settings"],
    )
    means, many = list_speedups(result), len(tasks) > 1
    rows = []
    for name, mean in means.items():
        each = [of[name]["speedup"]["median"] for of in tasks.values()]
        if round(max(each), 2) >= 1:
            cells = map(format_speedup, [*each, mean] if many else each)
            rows.append([name, *cells, f"{overall[name]['tau']:.2f}"])
    fast = sum(round(mean, 2) >= 1 for mean in means.values())
    most = max(means, key=lambda name: overall[name]["tau"])
    same = sum(overall[name]["identical"] == overall[name]["jobs"] for name in means)
    heads = [
        "",
        *(SHORT.get(task, task) for task in tasks),
        *(["mean"] if many else []),
        "tokens per forward pass",
    ]
    return [
        Grid("", heads, rows).table(),
        f"{len(means)} techniques on {overall[most]['jobs']} requests ({', '.join(tasks)}), "
        "greedy, "
        f"{count_things(settings['rounds'], 'round')}; times as fast as plain decoding. {fast} are "
        "faster"
        f"{' in the mean of the groups' if many else ''}, the other {len(means) - fast} are "
        "slow-downs on this machine; those "
        "that are slower in every group stand [below](#when-is-it-slower). Most tokens per "
        "forward pass of the target: "
        f"`{most}`, {overall[most]['tau']:.2f}. The text is plain decoding's on every request for "
        f"{same} of {len(means)}. "
        f"All of it: [{page}]({page}).",
        list_commands(result),
    ]


def answer_slower(results: Results) -> str:
    """Return every technique that is slower than plain decoding on one of the two models."""
    chat, tales = (results[f"speculative-{name}"] for name in ("smollm2", "storyteller"))
    first, second = list_speedups(chat), list_speedups(tales)
    slow = [name for name in first if round(min(first[name], second[name]), 2) < 1]
    losses = [sum(round(mean, 2) < 1 for mean in means.values()) for means in (first, second)]
    sweeps, ppd = results["sweeps"]["figures"], results["ppd"]["figures"]["wall"]
    pages = "[sweeps.md](sweeps.md)", "[ppd.md](ppd.md)"
    beside = [
        ["`jacobi`, blocks of 2 tokens", format_speedup(sweeps["2"]["speedup"]["median"]), pages[0]],
        ["`jacobi`, all tokens in one block", format_speedup(sweeps["all"]["speedup"]["median"]), pages[0]],
        *([f"`ppd`{arm.removeprefix('ppd')}", format_speedup(five["median"]), pages[1]]
          for arm, five in ppd.items() if arm.startswith("ppd")),
    ]  # fmt: skip
    return join_blocks(
        f"Where drafting and verifying cost more than the accepted tokens save: {losses[0]} of "
        f"{len(first)} techniques on "
        f"SmolLM2, {losses[1]} of {len(second)} on the storyteller.",
        Grid("", ["", "smollm2, mean of the groups", "storyteller, books"],
             [[name, format_speedup(first[name]), format_speedup(second[name])] for name in slow]).table(),
        "`auto` measures costs and drafts only what pays. Its slowest request of all is "
        f"{format_speedup(find_least_speedup(chat['figures'], 'auto'))} "
        f"on SmolLM2, {format_speedup(find_least_speedup(tales['figures'], 'auto'))} on the storyteller. Techniques of "
        "the other chapters, on the "
        "storyteller:",
        Grid("", ["", "times as fast", "all of it"], beside).table(),
        "The first table comes from the commands of the two tables by technique, above.",
        list_commands(results["sweeps"], results["ppd"]),
    )  # fmt: skip


# ---------------------------------------------------------------------- what passes, plain decoding, kernels and lookups cost


def answer_cost(results: Results) -> str:
    """Return what a forward pass costs: by positions, by its parts, and over the machine's
    floor.
    """
    wide, full, taken = results["bench"], results["bench-float32"], results["parts"]
    cached, of = next(iter(taken["figures"].items()))
    one, eight = of["milliseconds"]["1"], of["milliseconds"]["8"]
    return join_blocks(
        f"After {cached} tokens a forward pass of SmolLM2 takes {one['whole']:.1f} ms over 1 "
        "position and "
        f"{eight['whole']:.1f} over 8; the layers' matrices are "
        f"{one['matrices'] / one['whole']:.0%} and "
        f"{eight['matrices'] / eight['whole']:.0%} of it.",
        *parts.describe_parts(taken),
        tabulate_pass_costs([wide, full]),
        show_chart("bench-curve", "The cost of a forward pass over k new tokens"),
        "The floor under a forward pass is the larger of its weights at the greatest bandwidth and "
        "its arithmetic at the "
        "greatest peak of the same run. The whole cost curves, with those of transformers and "
        "llama.cpp: "
        "[bench.md](bench.md), [bench-float32.md](bench-float32.md).",
        f"The bfloat16 run. {describe_ceilings(wide['curve_figures'])}",
        f"The float32 run. {describe_ceilings(full['curve_figures'])}",
        list_commands(taken),
    )


def answer_plain(results: Results) -> str:
    """Return how fast plain decoding is against transformers and llama.cpp."""
    result, rows = results["plain"], []
    for dtype in ("float32", "bfloat16"):
        pace, memory = result[dtype]["tokens_per_second"], result[dtype]["memory"]
        beyond = memory and memory["peak"] - memory["weights"] - memory["cache"]
        over = "-" if beyond is None else f"{beyond / 2**20:.0f} MiB"
        row = [
            dtype,
            f"{pace['tinyspec']}",
            f"{pace['transformers']}",
            format_speedup(result[dtype]["ratio"], "x"),
        ]
        rows.append([*row, over])
    heads = [
        "",
        "tinyspec, tokens/s",
        "transformers, tokens/s",
        "times as fast",
        "memory over weights and cache",
    ]
    beside = [
        results[name]["figures"]["against"]["llama.cpp"]["autoregressive"]["mean"]
        for name in ("bench-float32", "bench")
    ]
    return join_blocks(
        f"{rows[0][3]} as fast as transformers' `generate` in float32 and {rows[1][3]} in "
        "bfloat16; against llama.cpp "
        f"{format_speedup(beside[0], 'x')} and {format_speedup(beside[1], 'x')}.",
        Grid("", heads, rows).table(),
        f"SmolLM2-135M-Instruct, {result['tokens']} tokens, batch 1, the same weights. The figures "
        "against llama.cpp are means "
        "of the groups [above](#how-much-faster-is-it).",
        list_commands(result),
    )


def answer_kernels(results: Results) -> str:
    """Return what the compiled kernels take, and others for the same."""
    result = results["core"]
    each = {name: median(taken) for name, taken in result["samples"].items()}
    micro = {name: 1e6 * seconds for name, seconds in each.items()}
    rows = [
        [
            what,
            f"{micro[ours]:.0f}",
            whose,
            f"{micro[theirs]:.0f}",
            f"{each[theirs] / each[ours]:.1f}x",
        ]
        for what, ours, whose, theirs in (
            (
                "temperature, top-p and draw",
                "warp_draw",
                "transformers' processors",
                "transformers_processors",
            ),
            (
                "temperature, top-p and draw",
                "warp_draw",
                "torch, the 1,024 best first",
                "torch_top_k_first",
            ),
            ("verify five draft tokens", "walk", "transformers", "transformers_verify"),
        )
    ]
    return join_blocks(
        f"At a vocabulary of {result['vocabulary']:,} a draw takes {micro['warp_draw']:.0f} "
        "microseconds and verifying five "
        f"draft tokens {micro['walk']:.0f}.",
        Grid("", ["", "us", "against", "us", "times as fast"], rows).table(),
        list_commands(result),
    )


def answer_lookup(results: Results, size: str = "100000") -> str:
    """Return what looking a draft up costs, and how that grows with what is known."""
    result, rows = results["retrieval"], []
    sizes = [int(n) for n in next(iter(result["figures"].values()))]
    for name, each in result["figures"].items():
        of = each[size]
        added = format_number(of.get("us_per_append"))
        row = [
            name,
            f"{of['us_per_call']:.1f}",
            f"{of['us_per_guess']:.2f}",
            added,
            f"{of['bytes_per_token']:.0f}",
        ]
        rows.append([*row, f"{result['growth'][name]:.1f}x"])
    heads = [
        "",
        "us per lookup",
        "us per draft token",
        "us per added token",
        "bytes per token",
        "growth of a lookup",
    ]
    taken = [each[size]["us_per_call"] for each in result["figures"].values()]
    return join_blocks(
        f"Between {min(taken):.0f} and {max(taken):.0f} microseconds at {int(size):,} known tokens.",
        Grid("", heads, rows).table(),
        f"Medians, Python's share included. Growth: a lookup at {max(sizes):,} known tokens over "
        f"one at {min(sizes):,}.",
        list_commands(result),
    )


# ---------------------------------------------------------------------- the survey's three experiments


SHARE = 0.95  # of tokens on which an early exit must agree with the full model to be quoted


def answer_sizes(results: Results) -> str:
    """Return the survey's first experiment: what a larger draft model brings, and costs."""
    result = results["sizes"]
    rows, best = list[list[str]](), dict[str, tuple[str, float]]()
    for name, draft in sorted(result["drafts"].items(), key=lambda pair: float(pair[1]["weights"])):
        each = {gamma: of["speedup"]["median"] for gamma, of in result["figures"][name].items()}
        gamma = max(each, key=lambda gamma: float(each[gamma]))
        best[name] = gamma, each[gamma]
        accepted = [f"{draft['alpha']:.2f}", f"{draft['alpha_1']:.2f}", f"{draft['c']:.2f}"]
        rows.append(
            [
                name,
                f"{draft['weights'] / 1e6:.2f}M",
                *accepted,
                format_speedup(each[gamma], "x"),
                gamma,
            ]
        )
    winner = max(best, key=lambda name: best[name][1])
    heads = ["draft", "weights per token", "acceptance, greedy", "acceptance, temperature 1", "cost of a step, in plain steps",
             "best speed-up", "with draft tokens"]  # fmt: skip
    return join_blocks(
        f"Of these drafts of the {result['model']} `{winner}` is best, "
        f"{result['drafts'][winner]['weights'] / 1e6:.2f} million "
        f"weights per token: {format_speedup(best[winner][1], 'x')} with {best[winner][0]} draft tokens.",
        Grid("", heads, rows).table(),
        show_chart("sizes", "Acceptance rate and speed-up over the weights that a draft reads"),
        f"The best of {len(result['gammas'])} draft lengths, with quartiles and the forecast from "
        "acceptance and cost: "
        "[sizes.md](sizes.md).",
        list_commands(result),
    )


def answer_exits(results: Results) -> str:
    """Return the survey's second experiment: the least work at which exits agree with the full
    model.
    """
    result, layerskip = results["exits"], results["layerskip"]
    found = dict[str, Mapping[str, float]]()
    for measure in dict.fromkeys(label.rpartition(" ")[0] for label in result["figures"]):
        rows = {
            label: of["forced"]
            for label, of in result["figures"].items()
            if label.rpartition(" ")[0] == measure
        }
        good = {label: of for label, of in rows.items() if measure and of["agreement"] >= SHARE}
        if good:
            label = min(good, key=lambda label: float(good[label]["work"]))
            found[label] = good[label]
    cells = [
        [f"`{label}`", f"{of['layers']:.1f}", f"{of['work']:.2f}", f"{of['agreement']:.1%}"]
        for label, of in found.items()
    ]
    best = min(found, key=lambda label: found[label]["work"])
    bounds = {
        (name, at): of["bound"]
        for name, each in layerskip["models"].items()
        for at, of in each["exits"].items()
    }
    name, at = max(bounds, key=lambda key: float(bounds[key]))
    return join_blocks(
        f"Leaving by `{best}` costs {found[best]['work']:.2f} of the full model's work, and "
        f"{found[best]['agreement']:.1%} of the "
        "tokens are still the full model's.",
        Grid(
            "", ["", "layers per token", "work over the full model's", "agreement"], cells
        ).table(),
        show_chart("exits", "Agreement and perplexity over the work that early exits leave"),
        f"{result['settings']['model']}, {result['settings']['n_layers']} layers: for each measure "
        "the least work at which at "
        f"least {SHARE:.0%} of the tokens are the full model's. `softmax` multiplies by the "
        "vocabulary matrix after every layer. "
        "All thresholds, perplexity and free-running text: [exits.md](exits.md).",
        "An exit can also draft for the full model, without loss: LayerSkip gains at most "
        f"{format_speedup(bounds[name, at], 'x')} "
        f"({name}, exit {at}; layers counted, [layerskip.md](layerskip.md)). Tokens that an early "
        "layer predicts, on more "
        "processors: [ppd.md](ppd.md).",
        list_commands(result, layerskip, results["ppd"]),
    )


def answer_at_once(results: Results) -> str:
    """Return chapter 3: what writing all words at once, or in a few passes, costs in quality."""
    table, passes, kinds = (
        results[name] for name in ("translation", "translation-iterations", "dialects")
    )
    settings, figures = table["settings"], table["figures"]
    greedy, nat = figures["teacher, greedy"], figures["nat, argmax"]
    rows = [
        [label, f"{of['bleu']:.1f}", f"{of['decoder_passes']:.1f}", format_speedup(of["speedup"]["median"], "x"),
         format_speedup(of["batch_speedup"]["median"], "x") if of["batch_speedup"] else "-"]
        for label, of in figures.items()
    ]  # fmt: skip
    counted = [
        [label.split("T ")[1].split(",")[0], f"{of['bleu']:.1f}", format_speedup(of["speedup"]["median"], "x")]
        for label, of in passes["figures"].items() if label.endswith("1 length")
    ]  # fmt: skip
    arms = list(dict.fromkeys(arm for of in kinds["figures"].values() for arm in of))
    shares = [
        [arm, *(f"{100 * of[arm]['valid']:.1f}" for of in kinds["figures"].values())]
        for arm in arms
    ]
    return join_blocks(
        f"In translation {greedy['bleu'] - nat['bleu']:.1f} BLEU: all words in one pass reach "
        f"{nat['bleu']:.1f} where the "
        f"teacher's greedy decoding reaches {greedy['bleu']:.1f}, "
        f"{format_speedup(nat['speedup']['median'], 'x')} as fast.",
        Grid(
            "",
            ["", "BLEU", "decoder passes", "times as fast", f"in batches of {settings['batch']}"],
            rows,
        ).table(),
        show_chart("translation", "BLEU and milliseconds of every way to translate"),
        f"English to German, {settings['sentences']} sentences of Multi30k's test_2016_flickr, "
        "against greedy decoding of the "
        "same teacher. Quartiles, milliseconds and repeated tokens: "
        "[translation.md](translation.md). Jacobi iteration on a "
        "language model: [sweeps.md](sweeps.md).",
        list_commands(table),
        "### Mask-Predict by its iterations",
        Grid("", ["iterations", "BLEU", "times as fast"], counted).table(),
        show_chart("translation-iterations", "BLEU and milliseconds by iterations"),
        "One length; times as fast as the teacher, greedy. Three lengths: "
        "[translation-iterations.md](translation-iterations.md).",
        list_commands(passes),
        "### Where a source has several right translations",
        Grid("", ["dialects with", *map(describe_kind, kinds["figures"])], shares).table(),
        show_chart("dialects", "Right translations by dialects and model"),
        f"Right translations of every hundred, {kinds['settings']['modes']} dialects. *T*: passes, "
        "*l*: lengths. All of it: "
        "[dialects.md](dialects.md).",
        list_commands(kinds),
    )


# ---------------------------------------------------------------------- tables of a run with peers


LOOKUP = "transformers:lookup, best setting"


def mean_over_tasks(ratios: Mapping[str, float], tasks: Iterable[str] = SPEC_BENCH) -> float:
    """The mean over these groups.

    >>> mean_over_tasks({"qa": 1.0, "rag": 2.0, "edits": 9.0}, ["qa", "rag"])
    1.5
    """
    found = [ratios[task] for task in tasks if task in ratios]
    return sum(found) / len(found)


def describe_run_with_peers(result: Mapping[str, Any], page: str) -> list[str]:
    """Return the table of the run with what must be known to read it, and the table of ratios."""
    figures, settings = result["figures"], result["settings"]
    tasks, overall = figures["tasks"], figures["overall"]
    rows = []
    for arm, all_of in overall.items():
        each = [of[arm]["speedup"]["median"] for of in tasks.values()]
        same = "-" if all_of["identical"] is None else f"{all_of['identical']} of {all_of['jobs']}"
        pace = f"{all_of['tokens_per_second']:.1f}"
        rows.append([arm, *map(format_speedup, [*each, all_of["mean"]]), pace, same])
    heads = ["", *(SHORT.get(task, task) for task in tasks), "mean", "tokens/s", "same text"]
    blocks = [
        Grid("", heads, rows).table(),
        f"Times as fast as plain decoding, after the prompt: {settings['model']}, "
        f"{settings['dtype']}, greedy, "
        f"{settings['tokens']} tokens per answer, {overall[PLAIN]['jobs']} requests, "
        f"{count_things(settings['rounds'], 'round')}. *Same text*: answers that equal plain "
        "decoding's. Quartiles, counts, "
        f"memory and every peer against every other: [{page}]({page}).",
    ]
    if found := list_ratios(result):
        blocks.append(
            Grid(
                "", ["", "times as fast"], [[what, format_speedup(value)] for what, value in found]
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
                mean_over_tasks(against["llama.cpp"][PLAIN], of),
            )
        )
    if "auto" not in result["figures"]["overall"]:
        return found
    own = {task: arms["auto"]["speedup"]["median"] for task, arms in of.items()}
    if set(SPEC_BENCH) <= set(own):
        found.append(
            ("`auto` over plain decoding, mean of Spec-Bench's six groups", mean_over_tasks(own))
        )
    found.append(("`auto` over plain decoding, smallest of the groups", min(own.values())))
    if set(COPYING) <= set(own):
        copied = mean_over_tasks(own, COPYING)
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
                mean_over_tasks(against["llama.cpp"]["auto"]),
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


def tabulate_copying_tasks(result: Mapping[str, Any]) -> list[str]:
    """Return, where texts copy, `auto`'s tokens per forward pass and the cost of such a pass."""
    tasks = result["figures"]["tasks"]
    rates = {task: tokens_a_call(result, "auto", task) for task in COPYING}
    rows = []
    for task, rate in rates.items():
        speedup = tasks[task]["auto"]["speedup"]["median"]
        rows.append(
            [
                SHORT.get(task, task),
                f"{rate:.2f}",
                f"{rate / speedup:.2f}",
                format_speedup(speedup),
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
        f"{mean_over_tasks(rates, COPYING):.2f} times as fast as plain decoding.",
    ]


def tabulate_pass_costs(results: Iterable[Mapping[str, Any]]) -> str:
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


def describe_ceilings(curve: Mapping[str, Any]) -> str:
    """Return who reads and computes how fast: the fastest set the floor under a forward pass."""
    reads, peaks = curve["ceilings"]["bandwidth"], curve["ceilings"]["peak"]
    told = ", ".join(f"{who} {rate / 1e9:.1f}" for who, rate in reads.items())
    sums = ", ".join(f"{who} {rate / 1e9:.0f}" for who, rate in peaks.items())
    return f"Bandwidth, GB/s: {told}. Arithmetic, billion operations/s: {sums}."
