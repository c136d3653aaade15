"""tinyspec laws: hold techniques to their guarantees by walking every outcome, and the laws to the
field's mistakes.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.cli.command import is_debugging, our_method
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.technique import Card


@click.command("laws", cls=base.Command)
@click.argument("methods", nargs=-1, metavar="[METHOD|FILE.py]...")
@base.options(
    base.plugin_option,
    click.option("--all", "everything", is_flag=True, help="Every technique there is."),
    click.option("--thorough", is_flag=True, help="Ten times as many cases."),
    click.option("--seeds", type=click.IntRange(1), help="Instead: a short sample of the cases on so many seeds."),
    click.option(
        "--resume", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
        help="Keep what is done in this JSON file, and go on where it was left."
    ),
    click.option("--out", type=base.OutputPath(parents=True), help="Write the result, with its origin, here."),
    click.option("--mutants", is_flag=True, help="Which law kills each of the field's mistakes."),
    click.option("--toys", is_flag=True, help="Which trap each toy falls into."),
    click.option("--demo", is_flag=True, help="Sample a method on a real model: evidence, labelled as such."),
    click.option("--model", "-m", default="storyteller", help="With --demo: the model."),
    click.option("--samples", type=click.IntRange(1), default=2000, help="With --demo: texts."),
    click.option("--verbose", "-v", is_flag=True, help="With --mutants, --toys: every counterexample, also in a pipe."),
    click.option("--json", "as_json", is_flag=True, help="JSON on standard output."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)  # fmt: skip
def laws(
    methods: tuple[str, ...],
    everything: bool,
    thorough: bool,
    seeds: int | None,
    resume: Path | None,
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
      tinyspec laws --all --thorough --resume thorough.json
      tinyspec laws llma --seeds 200 --resume state.json     nothing correct is ever accused
      tinyspec laws --mutants                                who kills which mistake
      tinyspec laws --toys
      tinyspec laws --demo --samples 500 speculative_decoding
    """
    if mutants + toys + demo + bool(seeds) + thorough > 1:
        raise TinyspecError("--mutants, --toys, --demo, --seeds and --thorough: choose one")
    if mutants or toys:
        _matrix("mutants" if mutants else "toys", verbose, as_json, quiet)
    elif demo:
        _demo(
            find_cards(methods or ("speculative_decoding",))[0].name, model, samples, as_json, quiet
        )
    else:
        if not (methods or everything):
            raise TinyspecError(
                "name a technique (see `tinyspec methods`) or its file, or say --all"
            )
        cards = find_cards(methods, everything)
        if seeds:
            _seeds(cards, seeds, resume, out, as_json, quiet)
        else:
            _prove(cards, thorough, resume, out, as_json, quiet)


def find_cards(methods: Sequence[str], everything: bool = False) -> "list[Card]":
    """Return the cards of techniques, each given by name or by file; after those, with
    `everything`, all others.
    """
    from tinyspec.technique import find_technique, load_techniques

    cards = [find_technique(our_method(name)) for name in methods]
    return list(dict.fromkeys([*cards, *load_techniques().values()] if everything else cards))


def _prove(
    cards: "Sequence[Card]",
    thorough: bool,
    resume: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from tinyspec.laws.prove import CI, THOROUGH, State, report_technique

    profile = THOROUGH if thorough else CI
    state = State(resume, profile.name)
    told: list[dict[str, Any]] = []
    with base.show_progress(quiet or as_json) as show:
        for card in cards:
            told.append(
                report_technique(
                    card,
                    profile,
                    state,
                    lambda card, at, of, case: show(f"{card.name}: {case.title}", at, of),
                    strict=is_debugging(click.get_current_context()),
                )
            )
    accused = [entry for entry in told if entry["accused"]]
    result = {"profile": profile.name, "methods": told}
    _keep(out, result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _table(told)
        for entry in accused:
            for broken in entry["broken"]:
                click.echo(f"\n{entry['method']}, case: {broken['title']}\n{_words(broken)}")
    if accused:
        raise click.exceptions.Exit(1)


def _seeds(
    cards: "Sequence[Card]",
    seeds: int,
    resume: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from tinyspec.laws.prove import FIVE_SECONDS, State, nothing_correct_is_accused

    state = State(resume, f"{FIVE_SECONDS.name}, by seed")
    with base.show_progress(quiet or as_json) as show:
        told = nothing_correct_is_accused(
            cards, seeds, state, lambda card, seed: show(card.name, seed, seeds)
        )
    _keep(out, told)
    if as_json:
        click.echo(json.dumps(told))
    else:
        for name, found in told["methods"].items():
            click.echo(
                f"{name}: {found['seeds']} seeds, {found['cases']} cases, {found['branches']} outcomes, "
                f"{found['seconds']:.1f} s, accused {sum(entry['method'] == name for entry in told['accused'])} times"
            )
        for entry in told["accused"]:
            click.echo(f"\n{entry['method']} on seed {entry['seed']}\n{_words(entry)}")
    if told["accused"]:
        raise click.exceptions.Exit(1)


def _keep(out: Path | None, result: dict[str, Any]) -> None:
    """Write a result with the command, commit, machine and date it comes from."""
    if out is not None:
        from tinyspec.bench.harness import save_result, stamp_result

        save_result(out, stamp_result(result))


def _matrix(what: str, verbose: bool, as_json: bool, quiet: bool) -> None:
    """Show defect by defect the law whose verdict it was, and the counterexample. Exit code 1 where
    one survived.

    In a pipe: one line for each law of the mutants, or technique of the toys, unless `verbose`.
    """
    from tinyspec.laws import museum

    with base.show_progress(quiet or as_json) as show:
        lines = museum.judge_mutants(show) if what == "mutants" else museum.judge_toys(show)
    name, group = ("mutant", "law") if what == "mutants" else ("toy", "technique")
    killed = sum(line["killed_by"] is not None for line in lines)
    survivors = [line for line in lines if line["killed_by"] is None]
    if as_json:
        click.echo(json.dumps(lines))
    elif verbose or sys.stdout.isatty():
        rows = [(x[name], x["killed_by"] or "survived", _short(x["counterexample"])) for x in lines]
        base.print_table((name, "killed by", "counterexample"), rows)
        click.echo(f"{killed} of {len(lines)} {what} killed")
    else:
        for key, members in group_by(lines, group).items():
            dead = sum(line["killed_by"] is not None for line in members)
            click.echo(f"{key}: {dead} of {len(members)} killed")
        for line in survivors:
            click.echo(f"survived: {line[name]} ({line.get('survived', 'no law accused it')})")
        click.echo(f"{killed} of {len(lines)} {what} killed")
    if survivors:
        raise click.exceptions.Exit(1)


def group_by(lines: Sequence[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """Return the lines by the value of one of their fields, in the order of first appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line[key], []).append(line)
    return groups


def _demo(method: str, model: str, samples: int, as_json: bool, quiet: bool) -> None:
    from tinyspec.laws.statistics import format_demo, run_demo

    target, draft = base.load_all(model, [], [method], "cpu", None)
    done = 0
    with base.show_progress(quiet or as_json) as show:

        def watch(value: Any) -> None:
            nonlocal done
            done += 1
            show(f"{method} on {model}", done, samples)

        told = run_demo(target, draft, method, samples=samples, watch=watch)
    if as_json:
        click.echo(json.dumps(told))
    else:
        click.echo(format_demo(told))


# ---------------------------------------------------------------------- showing


def _table(told: Sequence[dict[str, Any]]) -> None:
    """Print what was proved, law by law."""
    rows = list[tuple[str, ...]]()
    for entry in told:
        cells = [(f"ACCUSED: {broken['law']}", "", "", "") for broken in entry["broken"]]
        if entry["kind"] == "analysis":
            cells.append(("an analysis: it decodes nothing", "", "", ""))
        for found in entry["proved"]:
            counts = (str(found["cases"]), str(found["branches"]), f"{found['seconds']:.1f}")
            cells.append((found["law"], *counts))
        heads = [(entry["method"], entry["guarantee"]), *[("", "")] * len(cells)]
        rows += [(*head, *cell) for head, cell in zip(heads, cells, strict=False)]
    base.print_table(("method", "guarantee", "law", "cases#", "outcomes#", "seconds#"), rows)
    proved = [found for entry in told for found in entry["proved"]]
    cases, branches, seconds = (
        sum(found[key] for found in proved) for key in ("cases", "branches", "seconds")
    )
    click.echo(f"{cases} cases, {branches} outcomes, {seconds:.1f} s")


def _words(counterexample: dict[str, Any]) -> str:
    """Return a counterexample, a line for each of its values."""
    case = [f"  {name} = {value}" for name, value in counterexample["case"].items()]
    law, expected, got = (counterexample[key] for key in ("law", "expected", "got"))
    return "\n".join([f"broken: {law}", *case, f"expected {expected}", f"got      {got}"])


def _short(counterexample: dict[str, Any] | None) -> str:
    if counterexample is None:
        return "-"
    case = ", ".join(f"{name} {value}" for name, value in counterexample["case"].items())
    return f"{case}: expected {counterexample['expected']}, got {counterexample['got']}"
