"""Sections of the page of results on costs: forward passes, plain decoding, kernels, lookups."""

from statistics import median

from tinyspec.bench import parts, versus
from tinyspec.bench.answers import Results, join, list_commands
from tinyspec.bench.report import Grid, number, ratio


def answer_cost(results: Results) -> str:
    """Return what a forward pass costs: by positions, by its parts, and over the machine's
    floor.
    """
    wide, full, taken = results["bench"], results["bench-float32"], results["parts"]
    cached, of = next(iter(taken["figures"].items()))
    one, eight = of["milliseconds"]["1"], of["milliseconds"]["8"]
    return join(
        f"After {cached} tokens a forward pass of SmolLM2 takes {one['whole']:.1f} ms over 1 "
        "position and "
        f"{eight['whole']:.1f} over 8; the layers' matrices are "
        f"{one['matrices'] / one['whole']:.0%} and "
        f"{eight['matrices'] / eight['whole']:.0%} of it.",
        *parts.told(taken),
        versus.floors([wide, full]),
        "The floor under a forward pass is the larger of its weights at the greatest bandwidth and "
        "its arithmetic at the "
        "greatest peak of the same run. The whole cost curves, with those of transformers and "
        "llama.cpp: "
        "[bench.md](bench.md), [bench-float32.md](bench-float32.md).",
        f"The bfloat16 run. {versus.ceilings(wide['curve_figures'])}",
        f"The float32 run. {versus.ceilings(full['curve_figures'])}",
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
            ratio(result[dtype]["ratio"], "x"),
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
    return join(
        f"{rows[0][3]} as fast as transformers' `generate` in float32 and {rows[1][3]} in "
        "bfloat16; against llama.cpp "
        f"{ratio(beside[0], 'x')} and {ratio(beside[1], 'x')}.",
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
    return join(
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
        added = number(of.get("us_per_append"))
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
    return join(
        f"Between {min(taken):.0f} and {max(taken):.0f} microseconds at {int(size):,} known tokens.",
        Grid("", heads, rows).table(),
        f"Medians, Python's share included. Growth: a lookup at {max(sizes):,} known tokens over "
        f"one at {min(sizes):,}.",
        list_commands(result),
    )
