"""Sections of the page of results on the survey's experiments: draft sizes, exits, all at once."""

from collections.abc import Mapping

from tinyspec.bench.answers import Results, join, list_commands
from tinyspec.bench.dialects_report import named
from tinyspec.bench.report import Grid, ratio

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
            [name, f"{draft['weights'] / 1e6:.2f}M", *accepted, ratio(each[gamma], "x"), gamma]
        )
    winner = max(best, key=lambda name: best[name][1])
    heads = ["draft", "weights per token", "acceptance, greedy", "acceptance, temperature 1", "cost of a step, in plain steps",
             "best speed-up", "with draft tokens"]  # fmt: skip
    return join(
        f"Of these drafts of the {result['model']} `{winner}` is best, "
        f"{result['drafts'][winner]['weights'] / 1e6:.2f} million "
        f"weights per token: {ratio(best[winner][1], 'x')} with {best[winner][0]} draft tokens.",
        Grid("", heads, rows).table(),
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
    return join(
        f"Leaving by `{best}` costs {found[best]['work']:.2f} of the full model's work, and "
        f"{found[best]['agreement']:.1%} of the "
        "tokens are still the full model's.",
        Grid(
            "", ["", "layers per token", "work over the full model's", "agreement"], cells
        ).table(),
        f"{result['settings']['model']}, {result['settings']['n_layers']} layers: for each measure "
        "the least work at which at "
        f"least {SHARE:.0%} of the tokens are the full model's. `softmax` multiplies by the "
        "vocabulary matrix after every layer. "
        "All thresholds, perplexity and free-running text: [exits.md](exits.md).",
        "An exit can also draft for the full model, without loss: LayerSkip gains at most "
        f"{ratio(bounds[name, at], 'x')} "
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
        [label, f"{of['bleu']:.1f}", f"{of['decoder_passes']:.1f}", ratio(of["speedup"]["median"], "x"),
         ratio(of["batch_speedup"]["median"], "x") if of["batch_speedup"] else "-"]
        for label, of in figures.items()
    ]  # fmt: skip
    counted = [
        [label.split("T ")[1].split(",")[0], f"{of['bleu']:.1f}", ratio(of["speedup"]["median"], "x")]
        for label, of in passes["figures"].items() if label.endswith("1 length")
    ]  # fmt: skip
    arms = list(dict.fromkeys(arm for of in kinds["figures"].values() for arm in of))
    shares = [
        [arm, *(f"{100 * of[arm]['valid']:.1f}" for of in kinds["figures"].values())]
        for arm in arms
    ]
    return join(
        f"In translation {greedy['bleu'] - nat['bleu']:.1f} BLEU: all words in one pass reach "
        f"{nat['bleu']:.1f} where the "
        f"teacher's greedy decoding reaches {greedy['bleu']:.1f}, "
        f"{ratio(nat['speedup']['median'], 'x')} as fast.",
        Grid(
            "",
            ["", "BLEU", "decoder passes", "times as fast", f"in batches of {settings['batch']}"],
            rows,
        ).table(),
        f"English to German, {settings['sentences']} sentences of Multi30k's test_2016_flickr, "
        "against greedy decoding of the "
        "same teacher. Quartiles, milliseconds and repeated tokens: "
        "[translation.md](translation.md). Jacobi iteration on a "
        "language model: [sweeps.md](sweeps.md).",
        list_commands(table),
        "### Mask-Predict by its iterations",
        Grid("", ["iterations", "BLEU", "times as fast"], counted).table(),
        "One length; times as fast as the teacher, greedy. Three lengths: "
        "[translation-iterations.md](translation-iterations.md).",
        list_commands(passes),
        "### Where a source has several right translations",
        Grid("", ["dialects with", *map(named, kinds["figures"])], shares).table(),
        f"Right translations of every hundred, {kinds['settings']['modes']} dialects. *T*: passes, "
        "*l*: lengths. All of it: "
        "[dialects.md](dialects.md).",
        list_commands(kinds),
    )
