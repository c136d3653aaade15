"""Write the page of all measurements from the committed results: `python -m tinyspec.bench.summary tutorials/results`.

A test holds the committed page to this text, so that no number in it can be older than the result it came from.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tinyspec.bench import parts, report, versus
from tinyspec.bench.dialects_report import named
from tinyspec.bench.harness import machines


def load(folder: Path, name: str) -> dict[str, Any]:
    """One committed result."""
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return result


def verdict(ratio: float) -> str:
    """A ratio in words; a slow-down is called one.

    >>> verdict(1.5), verdict(0.8)
    ('1.50x', '0.80x (a slow-down)')
    """
    return f"{ratio:.2f}x" + ("" if round(ratio, 2) >= 1 else " (a slow-down)")


QUOTED = (
    *("race", "plain", "core", "speculative-storyteller", "speculative-smollm2", "retrieval", "sizes", "exits"),
    *("translation", "translation-iterations", "dialects", "equality", "peer", "bench", "bench-float32", "parts"),
    *("parts-storyteller", "parts-apprentice"),
)
"""The results that the README quotes."""
RACE = 1.3  # what the race shall be won by


def races(result: dict[str, Any]) -> list[str]:
    """The race: one row a temperature."""
    lines = [
        "| temperature | wall clock against plain | tokens per target call | drafted tokens accepted | distinct 4-grams |",
        "|---|---|---|---|---|",
    ]
    for key, figures in result.items():
        if key.startswith("temperature "):
            lines.append(
                f"| {key.removeprefix('temperature ')} | {verdict(figures['ratio'])} | {figures['tokens_per_call']:.2f} | "
                f"{figures['acceptance']:.0%} | {figures['distinct_4grams']:.2f} |"
            )
    greedy = result["temperature 0.0"]
    ratio, tokens = greedy["ratio"], greedy["tokens_per_call"]
    word = "reached" if ratio > RACE else "missed"
    lines += [
        "",
        f"The aim was {RACE}: {word}. Greedy, a round with its {tokens:.2f} tokens takes as long as {tokens / ratio:.2f} plain "
        f"steps; {tokens / RACE:.2f} are what it may take.",
    ]
    return lines


def plain(result: dict[str, Any]) -> list[str]:
    """Plain decoding against transformers: one row a dtype."""
    lines = [
        "| dtype | tinyspec, tokens/s | transformers, tokens/s | ratio | memory over weights and cache |",
        "|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        figures = result[dtype]
        pace, memory = figures["tokens_per_second"], figures["memory"]
        over = (memory["peak"] - memory["weights"] - memory["cache"]) / 2**20
        lines.append(
            f"| {dtype} | {pace['tinyspec']} | {pace['transformers']} | {verdict(figures['ratio'])} | {over:.0f} MiB |"
        )
    return lines


def equality(result: dict[str, Any]) -> str:
    """Tokens against a peer's."""
    return (
        f"**Equality** (`{result['command']}`): greedy float32 tokens against transformers on {result['questions']} "
        f"Spec-Bench questions: {result['identical']} of {len(result['rows'])} identical, {result['mismatches']} of "
        f"{result['tokens']:,} tokens differ (allowed only where the two best logits are within {result['gap']:g})."
    )


def bits(result: dict[str, Any]) -> str:
    """Greedy speculation against plain greedy decoding, in bfloat16."""
    return (
        f"**Lossless in {result['dtype']}** (`{result['command']}`): greedy speculation against plain greedy decoding on "
        f"{result['questions']} Spec-Bench questions, {result['tokens']:,} tokens: {result['mismatches']} texts differ "
        f"(tokens a call: {', '.join(f'{arm} {tau}' for arm, tau in result['tokens_per_call'].items())})."
    )


def kernels(result: dict[str, Any]) -> str:
    """Compiled kernels against others."""
    each = {name: median(taken) for name, taken in result["samples"].items()}
    micro = result["microseconds"]
    return (
        f"**Kernels** (`{result['command']}`) at a vocabulary of {result['vocabulary']:,}: temperature, top-p and draw take "
        f"{micro['warp_draw']:.0f} us, {each['warp_draw'] / each['transformers_processors']:.2f} of transformers' "
        f"processors and {each['warp_draw'] / each['torch_top_k_first']:.2f} of torch with the 1,024 best first; "
        f"verifying five drafted tokens takes {micro['walk']:.0f} us, "
        f"{each['transformers_verify'] / each['walk']:.0f}x faster than transformers'."
    )


def chapter(result: dict[str, Any], page: str) -> list[str]:
    """All techniques of a chapter on a model's own texts: who is fastest on which task, and how many are slower than plain."""
    tasks, overall = result["figures"]["tasks"], dict(result["figures"]["overall"])
    jobs, settings = overall.pop("autoregressive")["jobs"], result["settings"]
    many = len(tasks) > 1
    best = sorted(overall, key=lambda name: -overall[name]["mean"])
    told = [f"`{name}` {overall[name]['mean']:.2f}x" for name in best if round(overall[name]["mean"], 2) >= 1]
    most = max(best, key=lambda name: overall[name]["tau"])
    same = sum(row["identical"] == row["jobs"] for row in overall.values())
    commands = ", then ".join(f"`{command}`" for command in dict.fromkeys(s["command"] for s in result["sittings"]))
    lines = [
        f"**Chapter 1 on {settings['model']}** ({commands}): {len(best)} techniques on {jobs} "
        f"requests ({', '.join(tasks)}), greedy, {settings['rounds']} round(s). Faster than plain decoding"
        f"{' in the mean of the groups' if many else ''}: {', '.join(told) or 'none'}; the other {len(best) - len(told)} are "
        f"slow-downs on this machine. Most tokens a target call: `{most}`, {overall[most]['tau']:.2f}. The text is plain "
        f"decoding's on every request for {same} of {len(best)}. All of it: [{page}]({page})."
    ]
    if many:
        heads = ["", *(report.SHORT.get(task, task) for task in tasks), "mean"]
        lines += ["", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for name in best:
            each = [of[name]["speedup"]["median"] for of in tasks.values()]
            if round(max(each), 2) >= 1:
                lines.append("| " + " | ".join([name, *map(report.ratio, [*each, overall[name]["mean"]])]) + " |")
        lines += ["", "Techniques that are slower in every group stand on that page alone."]
    return lines


def retrieval(result: dict[str, Any], size: str = "100000") -> list[str]:
    """What looking a draft up costs, and how that grows with what is known."""
    sizes = [int(n) for n in next(iter(result["figures"].values()))]
    lines = [
        f"**Looking a draft up** (`{result['command']}`): medians at {int(size):,} known tokens, the Python call included, and "
        f"a call at {max(sizes):,} over one at {min(sizes):,}.",
        "",
        "| | us a call | us a guess | us an added token | bytes a token | growth of a call |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in result["figures"].items():
        of = each[size]
        added = report.number(of.get("us_per_append"))
        lines.append(
            f"| {name} | {of['us_per_call']:.1f} | {of['us_per_guess']:.2f} | {added} | {of['bytes_per_token']:.0f} | "
            f"{result['growth'][name]:.1f}x |"
        )
    return lines


def sizes(result: dict[str, Any], page: str) -> str:
    """The survey's first experiment: what a larger draft brings, and costs."""
    told = list[str]()
    for name, draft in sorted(result["drafts"].items(), key=lambda pair: pair[1]["weights"]):
        gamma, best = max(result["figures"][name].items(), key=lambda pair: pair[1]["speedup"]["median"])
        told.append(
            f"`{name}` {draft['weights'] / 1e6:.2f}M: {draft['alpha']:.2f} ({draft['alpha_1']:.2f}), {draft['c']:.2f}, "
            f"{verdict(best['speedup']['median'])} with {gamma}"
        )
    return (
        f"**Drafts by size** (`{result['command']}`): weights that a draft of {result['model']} reads for a token, greedy "
        f"acceptance (at temperature 1), a step of it in plain steps, the best of {len(result['gammas'])} lengths of draft. "
        f"{'; '.join(told)}. [{page}]({page})."
    )


def exits(result: dict[str, Any], page: str, share: float = 0.95) -> str:
    """Chapter 2's experiment: for each measure the cheapest threshold at which the exits still agree with the full model."""
    depth, found = result["settings"]["n_layers"], list[str]()
    for measure in dict.fromkeys(label.rpartition(" ")[0] for label in result["figures"]):
        rows = {
            label: of["forced"]
            for label, of in result["figures"].items()
            if label.rpartition(" ")[0] == measure and of["forced"]["agreement"] >= share
        }
        if rows and measure:
            label = min(rows, key=lambda label: rows[label]["work"])
            of = rows[label]
            found.append(f"`{label}` {of['layers']:.1f} layers, {of['work']:.2f} of the work, {of['agreement']:.1%}")
    return (
        f"**Leaving early** (`{result['command']}`): {result['settings']['model']}, {depth} layers. The least work at which "
        f"at least {share:.0%} of the words are the full model's: {'; '.join(found)} (`softmax` asks the head behind every "
        f"layer). [{page}]({page})."
    )


def translations(result: dict[str, Any], page: str) -> list[str]:
    """Chapter 3's table."""
    settings = result["settings"]
    lines = [
        f"**Translation** (`{result['command']}`): English to German, {settings['sentences']} sentences of Multi30k's "
        f"test_2016_flickr, greedy decoding of the same teacher = 1. [{page}]({page}).",
        "",
        f"| | BLEU | decoder passes | times as fast | in batches of {settings['batch']} |",
        "|---|---|---|---|---|",
    ]
    for label, of in result["figures"].items():
        many = verdict(of["batch_speedup"]["median"]) if of["batch_speedup"] else "-"
        lines.append(
            f"| {label} | {of['bleu']:.1f} | {of['decoder_passes']:.1f} | {verdict(of['speedup']['median'])} | {many} |"
        )
    return lines


def iterations(result: dict[str, Any], page: str) -> str:
    """The survey's third experiment: what each further iteration of Mask-Predict brings, and costs."""
    rows = [
        f"{label.split('T ')[1].split(',')[0]}: {of['bleu']:.1f} ({of['speedup']['median']:.2f}x)"
        for label, of in result["figures"].items()
        if label.endswith("1 length")
    ]
    return (
        f"**Mask-Predict by its iterations** (`{result['command']}`), one length, BLEU (times as fast as the teacher, "
        f"greedy): {', '.join(rows)}. [{page}]({page})."
    )


def dialects(result: dict[str, Any], page: str) -> list[str]:
    """What writing everything at once costs where there are several right answers."""
    kinds = result["figures"]
    arms = list(dict.fromkeys(arm for of in kinds.values() for arm in of))
    modes = result["settings"]["modes"]
    rows = [[arm, *(f"{100 * of[arm]['valid']:.1f}" for of in kinds.values())] for arm in arms]
    return [
        f"**Several right translations** (`{result['command']}`): right ones of every hundred, {modes} dialects with "
        f"{', '.join(map(named, kinds))}. [{page}]({page}).",
        "",
        *("| " + " | ".join(row) + " |" for row in (["", *kinds], ["---"] * (1 + len(kinds)), *rows)),
    ]


def text(folder: Path) -> str:
    """Return the page."""
    race, bare = load(folder, "race"), load(folder, "plain")
    greedy = race["temperature 0.0"]
    quoted = {name: load(folder, name) for name in QUOTED if (folder / f"{name}.json").exists()}
    pair = [quoted[name] for name in ("parts-storyteller", "parts-apprentice") if name in quoted]
    lines = [
        "# Measured",
        "",
        f"All on {machines(quoted)}; arms interleaved in one run, ratios of medians, raw samples in",
        "this folder.",
        "",
        f"**The race** (`{race['command']}`): the bundled pair on ten openings from books that neither was trained on, "
        f"{race['tokens']} tokens each, repetition penalty {race['repetition_penalty']}. "
        f"Greedy text was identical on {greedy['identical']} of {len(greedy['prompts'])}.",
        "",
        *races(race),
        "",
        *([parts.race(*pair), ""] if len(pair) == 2 else []),
        f"**Plain decoding** (`{bare['command']}`): SmolLM2-135M-Instruct, {bare['tokens']} tokens, batch 1, against "
        "transformers' `generate` on the same weights.",
        "",
        *plain(bare),
        "",
        kernels(load(folder, "core")),
    ]
    for name in ("speculative-storyteller", "speculative-smollm2"):
        if (folder / f"{name}.json").exists():
            lines += ["", *chapter(load(folder, name), f"{name}.md")]
    if (folder / "retrieval.json").exists():
        lines += ["", *retrieval(load(folder, "retrieval"))]
    made: list[tuple[str, Callable[[dict[str, Any], str], str | list[str]]]] = [
        ("sizes", sizes), ("exits", exits), ("translation", translations), ("translation-iterations", iterations),
        ("dialects", dialects),
    ]  # fmt: skip
    for name, words in made:
        if (folder / f"{name}.json").exists():
            said = words(load(folder, name), f"{name}.md")
            lines += ["", *([said] if isinstance(said, str) else said)]
    if (folder / "equality.json").exists():
        lines += ["", bits(load(folder, "equality"))]
    if (folder / "peer.json").exists():  # takes minutes, so it may be measured on its own
        lines += ["", equality(load(folder, "peer"))]
    for name in ("bench", "bench-float32"):
        if (folder / f"{name}.json").exists():
            lines += ["", *versus.peers(load(folder, name), f"{name}.md")]
    if (folder / "parts.json").exists():
        lines += ["", *parts.told(load(folder, "parts"))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    results = Path(sys.argv[1])
    (results / "README.md").write_text(text(results), encoding="utf-8")
