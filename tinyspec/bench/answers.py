"""Sections of the page of results on what speculation gains: unchanged, faster, slower.

Each begins with a sentence that answers its question. Tables follow, then prose and the commands.
"""

from collections.abc import Mapping
from typing import Any

from tinyspec.bench import parts, versus
from tinyspec.bench.plan import PLAIN
from tinyspec.bench.report import SHORT, Grid, least, ratio, several

Results = Mapping[str, Mapping[str, Any]]


def join(*blocks: str) -> str:
    """Return the blocks with an empty line between each two."""
    return "\n\n".join(blocks)


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
    return join(
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
    return join(
        f"On SmolLM2 `auto` is {ratio(auto['spec_bench'], 'x')} as fast as plain decoding on "
        "Spec-Bench and "
        f"{ratio(edits, 'x')} on text edits; with the small bundled models `{race['method']}` is "
        f"{ratio(greedy['ratio'], 'x')}.",
        "### SmolLM2 in bfloat16, beside transformers and llama.cpp",
        *versus.peers(wide, "bench.md"),
        *versus.allowed(wide),
        list_commands(wide),
        "### SmolLM2 in float32",
        *versus.peers(full, "bench-float32.md"),
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
        [key.removeprefix("temperature "), ratio(of["ratio"], "x"), f"{of['tokens_per_call']:.2f}",
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
        f"repetition penalty {race['repetition_penalty']}, {several(race['rounds'], 'round')}. "
        "Greedy text was identical on "
        f"{greedy['identical']} of {len(greedy['prompts'])}. A greedy round with its {tokens:.2f} "
        "tokens takes as long as "
        f"{tokens / greedy['ratio']:.2f} plain steps. What a round is made of:",
        *parts.race(target, draft),
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
            cells = map(ratio, [*each, mean] if many else each)
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
        f"{several(settings['rounds'], 'round')}; times as fast as plain decoding. {fast} are "
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
        ["`jacobi`, blocks of 2 tokens", ratio(sweeps["2"]["speedup"]["median"]), pages[0]],
        ["`jacobi`, all tokens in one block", ratio(sweeps["all"]["speedup"]["median"]), pages[0]],
        *([f"`ppd`{arm.removeprefix('ppd')}", ratio(five["median"]), pages[1]]
          for arm, five in ppd.items() if arm.startswith("ppd")),
    ]  # fmt: skip
    return join(
        f"Where drafting and verifying cost more than the accepted tokens save: {losses[0]} of "
        f"{len(first)} techniques on "
        f"SmolLM2, {losses[1]} of {len(second)} on the storyteller.",
        Grid("", ["", "smollm2, mean of the groups", "storyteller, books"],
             [[name, ratio(first[name]), ratio(second[name])] for name in slow]).table(),
        "`auto` measures costs and drafts only what pays. Its slowest request of all is "
        f"{ratio(least(chat['figures'], 'auto'))} "
        f"on SmolLM2, {ratio(least(tales['figures'], 'auto'))} on the storyteller. Techniques of "
        "the other chapters, on the "
        "storyteller:",
        Grid("", ["", "times as fast", "all of it"], beside).table(),
        "The first table comes from the commands of the two tables by technique, above.",
        list_commands(results["sweeps"], results["ppd"]),
    )  # fmt: skip
