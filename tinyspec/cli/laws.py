"""tinyspec laws: hold techniques to their guarantees by walking every outcome, and the laws to the
field's mistakes.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinyspec.cli import base
from tinyspec.cli.base import POSITIVE, flag, option
from tinyspec.cli.command import is_debugging, our_method
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.technique import Card

STATE_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
Advance = Callable[[str, int, int], None]


class LawsReport(NamedTuple):
    """What one run found.

    result     what --json prints
    lines      what is printed otherwise, below the table if there is one
    is_broken  a law is broken, or a mistake survived
    table      column names and rows
    """

    result: Any
    lines: Sequence[str]
    is_broken: bool = False
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None


@click.command("laws", cls=base.Command)
@click.argument("methods", nargs=-1, metavar="[METHOD|FILE.py]...")
@base.plugin_option
@flag("--all", "everything", help="Every technique there is.")
@flag("--thorough", help="Ten times as many cases.")
@option("--seeds", type=POSITIVE, help="Instead: a short sample of the cases on so many seeds.")
@option(
    "--resume",
    type=STATE_FILE,
    metavar="FILE",
    help="Keep what is done in this JSON file, and go on where it was left.",
)
@option("--jobs", type=POSITIVE, default=1, help="Processes that run the cases, by joblib.")
@flag("--ray", help="With --jobs: on the nodes of a Ray cluster.")
@option(
    "--out", type=base.OutputPath(parents=True), help="Write the result, with its origin, here."
)
@flag("--mutants", help="Which law kills each of the field's mistakes.")
@flag("--toys", help="Which trap each toy falls into.")
@flag("--demo", help="Sample a method on a real model: evidence, labelled as such.")
@option("--model", "-m", default="storyteller", help="With --demo: the model.")
@option("--samples", type=POSITIVE, default=2000, help="With --demo: texts.")
@flag("--verbose", "-v", help="With --mutants, --toys: every counterexample, also in a pipe.")
@flag("--json", "as_json", help="JSON on standard output.")
@base.quiet_option
def laws(
    methods: tuple[str, ...],
    everything: bool,
    thorough: bool,
    seeds: int | None,
    resume: Path | None,
    jobs: int,
    ray: bool,
    out: Path | None,
    mutants: bool,
    toys: bool,
    demo: bool,
    model: str,
    samples: int,
    verbose: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove a technique: walk every outcome of its decoder on small models and compare the law of
    its texts, exactly.

    Prints, law by law, how many cases were looked at, how many outcomes were walked, and how long
    it took. A failure prints the smallest case found (p, q, the text, expected, got), for each law
    that is broken, and ends with exit code 1. A technique file of your own is held to its card from
    wherever it stands.

    \b
    Examples:
      tinyspec laws speculative_decoding
      tinyspec laws my_method.py
      tinyspec laws --all --json
      tinyspec laws --all --thorough --resume thorough.json --jobs 2
      tinyspec laws llma --seeds 200 --resume state.json     nothing correct is ever accused
      tinyspec laws --mutants                                who kills which mistake
      tinyspec laws --toys
      tinyspec laws --demo --samples 500 speculative_decoding
    """
    if mutants + toys + demo + bool(seeds) + thorough > 1:
        raise TinyspecError("--mutants, --toys, --demo, --seeds and --thorough: choose one")
    if ray and jobs == 1:
        raise TinyspecError("--ray needs a number of processes: give --jobs N")
    is_proof = not (mutants or toys or demo)
    if not is_proof and (out or resume or jobs > 1):
        raise TinyspecError("--out, --resume and --jobs are for proofs: leave them out here")
    if is_proof and not (methods or everything):
        raise TinyspecError("name a technique (see `tinyspec methods`) or its file, or say --all")
    with base.show_command_progress(quiet or as_json) as show:
        if mutants or toys:
            is_wide = verbose or sys.stdout.isatty()
            report = judge_museum("mutants" if mutants else "toys", is_wide, show)
        elif demo:
            (card, *_) = find_cards(methods or ("speculative_decoding",))
            report = run_statistics(card.name, model, samples, show)
        elif seeds:
            cards = find_cards(methods, everything)
            report = prove_on_seeds(cards, seeds, resume, show, jobs, ray)
        else:
            report = prove(find_cards(methods, everything), thorough, resume, show, jobs, ray)
    if out is not None and is_proof:
        from tinyspec.bench.harness import save_result, stamp_result

        save_result(out, stamp_result(report.result))
    if as_json:
        click.echo(json.dumps(report.result))
    else:
        if report.table is not None:
            base.print_table(*report.table)
        click.echo("\n".join(report.lines))
    if report.is_broken:
        raise click.exceptions.Exit(1)


def find_cards(methods: Sequence[str], everything: bool = False) -> "list[Card]":
    """Return the cards of techniques, each given by name or by file; after those, with
    `everything`, all others.
    """
    from tinyspec.technique import find_technique, load_techniques

    cards = [find_technique(our_method(name)) for name in methods]
    return list(dict.fromkeys([*cards, *load_techniques().values()] if everything else cards))


def prove(
    cards: "Sequence[Card]",
    thorough: bool,
    resume: Path | None,
    show: Advance,
    n_jobs: int = 1,
    on_ray: bool = False,
) -> LawsReport:
    """Prove every law of these techniques."""
    from tinyspec.laws.prove import CI, THOROUGH, State, report_technique, run_jobs

    profile = THOROUGH if thorough else CI
    state = State(resume, profile.name)
    if n_jobs > 1:
        run_jobs(cards, profile, state, n_jobs, on_ray, watch=show)
    is_strict = is_debugging(click.get_current_context())

    def watch(card: "Card", at: int, of: int, case: Any) -> None:
        show(f"{card.name}: {case.title}", at, of)

    entries = [report_technique(card, profile, state, watch, strict=is_strict) for card in cards]
    proved = [found for entry in entries for found in entry["proved"]]
    cases, branches, seconds = (
        sum(found[key] for found in proved) for key in ("cases", "branches", "seconds")
    )
    lines = [f"{cases} cases, {branches} outcomes, {seconds:.1f} s"]
    for entry in entries:
        for broken in entry["broken"]:
            title = f"{entry['method']}, case: {broken['title']}"
            lines.append(f"\n{title}\n{format_counterexample(broken)}")
    columns = ("method", "guarantee", "law", "cases#", "outcomes#", "seconds#")
    return LawsReport(
        {"profile": profile.name, "methods": entries},
        lines,
        any(entry["accused"] for entry in entries),
        (columns, [row for entry in entries for row in make_table_rows(entry)]),
    )


def make_table_rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table's rows of a technique: a row for each law that is broken or proved."""
    cells = [(f"ACCUSED: {broken['law']}", "", "", "") for broken in entry["broken"]]
    if entry["kind"] == "analysis":
        cells.append(("an analysis: it decodes nothing", "", "", ""))
    for found in entry["proved"]:
        counts = (str(found["cases"]), str(found["branches"]), f"{found['seconds']:.1f}")
        cells.append((found["law"], *counts))
    heads = [(entry["method"], entry["guarantee"]), *[("", "")] * len(cells)]
    return [(*head, *cell) for head, cell in zip(heads, cells, strict=False)]


def prove_on_seeds(
    cards: "Sequence[Card]",
    seeds: int,
    resume: Path | None,
    show: Advance,
    n_jobs: int = 1,
    on_ray: bool = False,
) -> LawsReport:
    """Prove these techniques on a short sample of the cases for each of many seeds."""
    from tinyspec.laws.prove import FIVE_SECONDS, State, nothing_correct_is_accused, run_jobs

    state = State(resume, f"{FIVE_SECONDS.name}, by seed")
    if n_jobs > 1:
        sample = replace(FIVE_SECONDS, seeds=range(seeds))
        run_jobs(cards, sample, state, n_jobs, on_ray, by_seed=True, watch=show)
    result = nothing_correct_is_accused(
        cards, seeds, state, lambda card, seed: show(card.name, seed, seeds)
    )
    accused, lines = result["accused"], list[str]()
    for name, found in result["methods"].items():
        times = sum(entry["method"] == name for entry in accused)
        lines.append(
            f"{name}: {found['seeds']} seeds, {found['cases']} cases, {found['branches']} "
            f"outcomes, {found['seconds']:.1f} s, accused {times} times"
        )
    for entry in accused:
        title = f"{entry['method']} on seed {entry['seed']}"
        lines.append(f"\n{title}\n{format_counterexample(entry)}")
    return LawsReport(result, lines, bool(accused))


def judge_museum(what: str, is_wide: bool, show: Advance) -> LawsReport:
    """Judge all "mutants" or "toys": each by the law that is meant for it, or by its trap.

    is_wide  a row for each, with the counterexample that its law found. Else one line for each law
             of the mutants, or technique of the toys, and the survivors by name.
    """
    from tinyspec.laws import museum

    judged = museum.judge_mutants(show) if what == "mutants" else museum.judge_toys(show)
    name, group = ("mutant", "law") if what == "mutants" else ("toy", "technique")
    survivors = [entry for entry in judged if entry["killed_by"] is None]
    n_killed = Counter(entry[group] for entry in judged if entry["killed_by"] is not None)
    lines, table = list[str](), None
    if is_wide:
        rows = []
        for entry in judged:
            shown = describe_in_one_line(entry["counterexample"])
            rows.append((entry[name], entry["killed_by"] or "survived", shown))
        table = ((name, "killed by", "counterexample"), rows)
    else:
        for key, count in Counter(entry[group] for entry in judged).items():
            lines.append(f"{key}: {n_killed[key]} of {count} killed")
        for entry in survivors:
            why = entry.get("survived", "no law accused it")
            lines.append(f"survived: {entry[name]} ({why})")
    lines.append(f"{n_killed.total()} of {len(judged)} {what} killed")
    return LawsReport(judged, lines, bool(survivors), table)


def run_statistics(method: str, model: str, samples: int, show: Advance) -> LawsReport:
    """Sample texts of a method and of plain decoding on a real model, and compare their counts."""
    from tinyspec.laws.statistics import format_demo, run_demo

    target, draft = base.load_all(model, [], [method], "cpu", None)
    done = 0

    def watch(value: Any) -> None:
        nonlocal done
        done += 1
        show(f"{method} on {model}", done, samples)

    result = run_demo(target, draft, method, samples=samples, watch=watch)
    return LawsReport(result, [format_demo(result)])


def format_counterexample(counterexample: dict[str, Any]) -> str:
    """Return a counterexample, a line for each of its values."""
    case = [f"  {name} = {value}" for name, value in counterexample["case"].items()]
    law, expected, got = (counterexample[key] for key in ("law", "expected", "got"))
    return "\n".join([f"broken: {law}", *case, f"expected {expected}", f"got      {got}"])


def describe_in_one_line(counterexample: dict[str, Any] | None) -> str:
    """Return a counterexample on one line; "-" for none."""
    if counterexample is None:
        return "-"
    case = ", ".join(f"{name} {value}" for name, value in counterexample["case"].items())
    return f"{case}: expected {counterexample['expected']}, got {counterexample['got']}"
