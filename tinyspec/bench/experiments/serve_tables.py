"""Tables and pictures of `tinyspec bench serve`: see serve.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tinyspec.bench.experiments.serve_runs import PREFILL_FIRST
from tinyspec.bench.plot import FASTER, INK, SLOWER, Chart, Lines
from tinyspec.bench.report import (
    Column,
    Grid,
    count_things,
    describe_provenance,
    format_number,
    format_speedup,
    make_grid,
)
from tinyspec.decoding.costs import a100_costs

REAL, FITTED, ROOFLINE = "real", "fitted", "roofline"
PERCENTILES = (50, 75, 90, 95, 99, 99.9, 100)  # of the gaps, for the picture
CLOSE = 0.1  # a relative error of the simulated clock that counts as close


def find_baseline(policies: Sequence[str]) -> str:
    """Return the policy that the others are compared with."""
    return PREFILL_FIRST if PREFILL_FIRST in policies else policies[0]


def _write_pair(a: str, b: str, spec: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda of: f"{format_number(of[a], spec)} / {format_number(of[b], spec)}"


FIGURES = (
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("against", "against", format_speedup),
    Column("TTFT p50 / p99", _write_pair("ttft_p50", "ttft_p99", ".0f")),
    Column("gap p50 / p99", _write_pair("gap_p50", "gap_p99", ".1f")),
    Column("gap max", "gap_max", ".1f"),
    Column("completion p50", "completion_p50", ".0f"),
    Column("passes", "passes"),
    Column("rows per pass", "rows_per_pass", ".1f"),
)
RATIOS = (
    Column("simulated / real: passes", "busy_ratio", ".2f"),
    Column("time", "seconds_ratio", ".2f"),
    Column("completion p50", "completion_p50_ratio", ".2f"),
    Column("p99 gap", "gap_p99_ratio", ".2f"),
)


def tabulate_serve(result: Mapping[str, Any]) -> list[Grid]:
    """Return a table for each load, SARATHI's by the lengths of prompts, and those of a GPU."""
    settings, figures = result["settings"], result["figures"]
    base, grids = find_baseline(settings["policies"]), list[Grid]()
    for label in _list_loads(settings):
        rows = {
            policy: {**of, "busy_ratio": None}
            | {f"{k}_ratio": x for k, x in figures["ratios"][label][policy].items()}
            for policy, of in _add_against(figures[REAL][label], settings).items()
        }
        load = f"{label} of the capacity ({figures['capacity']:.2f} requests/s)"
        title = f"{result['model']}, real time, {load}; milliseconds; against: times the tokens/s"
        grids.append(make_grid(f"{title} of {base}", rows, (*FIGURES, *RATIOS)))
    if settings["ratios"]:
        grids.append(_tabulate_ratios(result, base))
    for label in _list_loads(settings):
        rows = _add_against(result["simulated"][ROOFLINE][label], settings)
        title = f"Simulated, {describe_roofline()}, {label} of its capacity; milliseconds"
        grids.append(make_grid(title, rows, FIGURES))
    return grids


def _list_loads(settings: Mapping[str, Any]) -> list[str]:
    return [f"load {load:g}" for load in settings["loads"]]


def _add_against(
    policies: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy, with its throughput against the baseline's."""
    order = list(dict.fromkeys(settings["policies"]))
    rate = policies[find_baseline(order)]["tokens_per_second"]
    return {
        policy: {**policies[policy], "against": policies[policy]["tokens_per_second"] / rate}
        for policy in order
    }


def _tabulate_ratios(result: Mapping[str, Any], base: str) -> Grid:
    """Return the throughput of each policy by P:D, real, simulated, and on the GPU."""
    sources = {
        "real": result["figures"][REAL],
        "simulated": result["simulated"][FITTED],
        "GPU": result["simulated"][ROOFLINE],
    }
    ratios = [f"P:D {ratio}" for ratio in result["settings"]["ratios"]]
    rows: dict[str, dict[str, Any]] = {}
    for label in ratios:
        for name, traces in sources.items():
            for policy, of in _add_against(traces[label], result["settings"]).items():
                rows.setdefault(policy, {})[f"{label} {name}"] = of["against"]
    columns = [
        Column(f"{label}\n{name}", f"{label} {name}", format_speedup)
        for label in ratios
        for name in sources
    ]
    total = result["settings"]["prompt_tokens"] + result["settings"]["new_tokens"]
    title = f"All requests at once, about {total} tokens each: times the tokens/s of {base}"
    return make_grid(title, rows, columns)


def describe_roofline() -> str:
    """Return what the second clock's costs are."""
    gpu = a100_costs()
    return (
        f"{gpu.model} on one {gpu.device} (a roofline, not a measurement: "
        f"{gpu.bandwidth / 1e12:.2f} TB/s, {gpu.peak / 1e12:.0f} TFLOP/s, "
        f"equal at {gpu.knee:.0f} rows)"
    )


def describe_validation(result: Mapping[str, Any]) -> list[str]:
    """Return how far the simulated clock is from real time.

    Loads stand apart: no run of one ends before its last arrival, which is the same for both.
    """
    loads, base = _list_loads(result["settings"]), find_baseline(result["settings"]["policies"])
    again = f"The same traces again under {base}, against the first time"
    lines = list[str]()
    for what, source in (("Simulated against real", "ratios"), (again, "repeated")):
        ratios = result["figures"][source]
        at_once = [label for label in ratios if label not in loads]
        for name, labels in (
            ("Poisson arrivals", loads),
            ("all requests at once (capacity and P:D)", at_once),
        ):
            if found := _list_agreements({label: ratios[label] for label in labels}):
                lines.append(f"{what}, {name}: {'; '.join(found)}.")
    errors = [abs(error) for error in result["cost_errors"]]
    lines.append(
        f"Fit of {len(errors)} kinds of passes: off by {median(errors):.1%} in the median, "
        f"{max(errors):.0%} at most. Between the runs the pace of the machine was "
        f"{min(result['paces'].values()):.2f} to {max(result['paces'].values()):.2f} of its median."
    )
    return lines


def _list_agreements(ratios: Mapping[str, Any]) -> list[str]:
    """Return in how many of these runs each figure is close, and the worst."""
    clauses = list[str]()
    for name, what in (
        ("busy", "passes"),
        ("seconds", "whole time"),
        ("completion_p50", "median completion"),
        ("gap_p99", "p99 gap"),
    ):
        found = {
            f"{policy}, {label}": of[name]
            for label, policies in ratios.items()
            for policy, of in policies.items()
            if of.get(name) is not None
        }
        if found:
            within = sum(abs(ratio - 1) <= CLOSE for ratio in found.values())
            worst = max(found, key=lambda key: abs(found[key] - 1))
            clauses.append(
                f"{what} within {CLOSE:.0%} in {within} of {len(found)} runs, median "
                f"{median(found.values()):.2f}, worst {found[worst]:.2f} ({worst})"
            )
    return clauses


def describe_best_policies(result: Mapping[str, Any]) -> str:
    """Return at which P:D the policy with the most tokens/s is another one on the GPU."""
    if not (ratios := [f"P:D {ratio}" for ratio in result["settings"]["ratios"]]):
        return ""
    sources = result["figures"][REAL], *(result["simulated"][name] for name in (FITTED, ROOFLINE))
    flips = list[str]()
    for label in ratios:
        real, fitted, gpu = (
            max(traces[label], key=lambda policy: traces[label][policy]["tokens_per_second"])
            for traces in sources
        )
        if real != gpu:
            flips.append(f"at {label} here {real} (simulated: {fitted}), there {gpu}")
    if flips:
        return f"The policy with the most tokens/s is another one on the GPU: {'; '.join(flips)}."
    return (
        f"The policy with the most tokens/s is the same here and on the GPU: {', '.join(ratios)}."
    )


def list_serve_notes(result: Mapping[str, Any]) -> list[str]:
    """Return the lines below the tables."""
    settings, best = result["settings"], describe_best_policies(result)
    return [
        *describe_validation(result),
        *([best] if best else []),
        f"{settings['requests']} requests of about {settings['prompt_tokens']} + "
        f"{settings['new_tokens']} tokens, at most {settings['max_live']} at once, "
        f"{count_things(settings['rounds'], 'round')}, plain greedy decoding; {result['dtype']}, "
        f"{count_things(result['machine']['threads'], 'thread')}; {describe_provenance(result)}. "
        "The requests are submitted by a thread of the same process.",
    ]


# ---------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class PassGantt(Lines):
    """A panel of passes: time from left to right, a line for each request.

    spans  rows of [request, begin, end, is_prefill]; end: of the axis
    """

    spans: Sequence[Sequence[Any]] = field(default=())
    end: float = 0.0

    def draw_on(self, axes: Any) -> None:
        for is_prefill, label, colour, height in (
            (True, "reads its prompt", SLOWER, 0.8),
            (False, "decodes", FASTER, 0.4),
        ):
            for number, request in enumerate(sorted({span[0] for span in self.spans})):
                bars = [
                    (begin, stop - begin)
                    for whose, begin, stop, prefill in self.spans
                    if (whose, prefill) == (request, is_prefill)
                ]
                place = (request - height / 2, height)
                named = {"label": label} if number == 0 else {}
                axes.broken_barh(bars, place, color=colour, ec=INK, lw=0.2, **named)
        axes.set_ylim(max((span[0] for span in self.spans), default=0) + 0.5, -0.5)
        axes.set_xlim(0, self.end)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel("request")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def chart_serve(result: Mapping[str, Any]) -> Chart:
    """Draw the passes of two policies, and the gaps of all, real and on the GPU."""
    drawn, settings = result["drawn"], result["settings"]
    end = max((span[2] for spans in drawn.values() for span in spans), default=1.0)
    panels: list[Lines] = [
        PassGantt(f"{policy}: passes, simulated", {}, "milliseconds", spans=spans, end=end)
        for policy, spans in drawn.items()
    ]
    loads = _list_loads(settings)
    label = loads[len(loads) // 2]
    real, gpu = result["figures"][REAL][label], result["simulated"][ROOFLINE][label]
    names = dict(enumerate(f"p{q:g}" for q in PERCENTILES))
    for title, policies in (("real", real), ("simulated A100", gpu)):
        lines = {
            policy: dict(enumerate(of["gaps"].values()))
            for policy, of in policies.items()
            if of["n_gaps"]
        }
        panels.append(
            Lines(f"ms between two tokens, {label}, {title}", lines, "percentile", x_names=names)
        )
    summary = "; ".join(
        f"{policy}: {of['tokens_per_second']:.0f} tokens/s, p99 gap "
        f"{format_number(of['gap_p99'], '.0f')} ms"
        for policy, of in real.items()
    )
    return Chart(
        f"{result['model']}: many requests under {len(settings['policies'])} policies",
        panels,
        list_serve_notes(result),
        f"{label}: {summary}",
    )
