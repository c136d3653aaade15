"""tinyspec methods: the registry as a table."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

import tinyspec
from tinyspec.cli import base
from tinyspec.cli.base import flag
from tinyspec.cli.command import describe_range, our_method

if TYPE_CHECKING:
    from tinyspec.technique import Card

HEADINGS = {
    "planning": "baseline and planning",
    "baseline": "baseline and planning",
    "parallel": "non-autoregressive",
    "nonautoregressive": "non-autoregressive",
    "streams": "non-autoregressive",
}
"""How the README's table names families that share a heading."""


RESULTS = Path(tinyspec.__file__).parents[1] / "tutorials" / "results"
"""The committed results; a wheel has none."""


@click.command("methods", cls=base.Command)
@click.argument("name", required=False)
@base.plugin_option
@flag("--json", "as_json", help="A JSON list (an object, with NAME) on standard output.")
@flag("--markdown", help="The table as it stands in the README.")
def methods(name: str | None, as_json: bool, markdown: bool) -> None:
    """Every technique: paper, family, guarantee, knobs. With NAME, what its file says of it.

    \b
    Guarantees, relative to plain decoding under the same sampling options:
      exact    the same law of texts, at any temperature
      greedy   the same text at temperature 0
      lossy    by design; a knob has a neutral value
      approx   no neutral value exists

    \b
    Examples:
      tinyspec methods
      tinyspec methods speculative_decoding
      tinyspec methods --json
    """
    from tinyspec.technique import find_technique, load_techniques

    if name is not None:
        card = find_technique(our_method(name))
        click.echo(
            json.dumps(card.as_dict() | {"doc": card.doc}) if as_json else describe_card(card)
        )
    elif as_json:
        click.echo(json.dumps([card.as_dict() for card in load_techniques().values()]))
    elif markdown:
        click.echo(registry_table(load_techniques().values()))
    else:
        rows = list[tuple[str, ...]]()
        for card in load_techniques().values():
            knobs = ", ".join(f"{knob.name}={knob.default}" for knob in card.knobs)
            rows.append((card.name, card.family, card.guarantee.value, knobs or "-", card.paper))
        base.print_table(("method", "family", "guarantee", "knobs", "paper"), rows)


def registry_table(cards: "Iterable[Card]") -> str:
    """Return the registry as a Markdown table.

    Families stand in the book's order, each name linked to its file.
    """
    lines = ["|technique|what it does|paper|guarantee|", "|---|---|---|---|"]
    heading = ""
    for card in cards:
        if (family := HEADINGS.get(card.family, card.family)) != heading:
            heading = family
            lines.append(f"|**{heading}**||||")
        path = card.build.__module__.replace(".", "/")
        guarantee = "an analysis" if card.kind == "analysis" else card.guarantee.value
        if card.guarantee.value == "lossy" and card.lossy:
            name, neutral = card.lossy
            shown = neutral if isinstance(neutral, str) else f"{neutral:g}"
            guarantee += f" (exact: {name} {shown})"
        what = card.summary or card.title
        lines.append(f"|[`{card.name}`]({path}.py)|{what}|{link_papers(card.paper)}|{guarantee}|")
    return "\n".join(lines)


def link_papers(papers: str) -> str:
    """Return papers as links that show the first author and the year.

    >>> link_papers("Leviathan et al. 2023, arXiv 2211.17192")
    '[Leviathan 2023](https://arxiv.org/abs/2211.17192)'
    """
    links = list[str]()
    for paper in papers.split("; "):
        found = re.fullmatch(
            r"(?:[a-z]+: )?([^,]+?)(?: et al\.)?(?:, ICLR)? (\d{4}), arXiv (\S+)", paper
        )
        links.append(
            f"[{found[1]} {found[2]}](https://arxiv.org/abs/{found[3]})" if found else paper
        )
    return ", ".join(links)


def list_measurements(name: str, folder: Path) -> list[str]:
    """Return the result pages that have a row of a method; none where the folder is missing.

    A row may have a hyphen or a space for "_", and the model before the method. A page with the
    name of the method is about it.
    """
    row = re.compile(rf"^\| (?:\w+, )?{name.replace('_', '[_ -]')}[ :,]", re.MULTILINE)
    pages = (page for page in sorted(folder.glob("*.md")) if page.name != "README.md")
    return [p.name for p in pages if p.stem == name or row.search(p.read_text(encoding="utf-8"))]


def describe_card(card: "Card") -> str:
    """Return a card in full: its file's docstring, then its knobs as command line options."""
    from tinyspec.lm.head_formats import FORMATS

    guarantee = f"guarantee: {card.guarantee.value}"
    if card.lossy is not None:
        guarantee += f" at {card.lossy[0]} {card.lossy[1]}; at other values lossy"
    lines = [card.doc.strip(), "", guarantee]
    if card.seed_promise:
        lines.append(f"seed: {card.seed_promise}")
    if card.tuned is not None:
        train = f"tinyspec train head --for MODEL --method {card.name} --out FOLDER"
        lines.append(f"needs a model that was tuned for it: --model FOLDER; to tune one: {train}")
    elif card.trained is not None:
        train = f"tinyspec train head --for MODEL --method {card.name} --out FOLDER"
        lines.append(f"needs a trained head: --head FOLDER; to train one: {train}")
    for name, format in FORMATS.items():
        if format.method == card.head_method:
            export = f"tinyspec export HEAD --format {name} --out FOLDER"
            lines.append(f"its heads in the format of another program: {export}")
    if card.fills_masks:
        command = f"tinyspec translate --method {card.name}"
        lines.append(f"drafts translations, with a model that was trained for it: {command}")
    elif card.drafts:
        lines.append("needs a draft model: --draft NAME")
    if card.optional_draft:
        lines.append("uses a draft model where there is one: --draft NAME")
    if card.optional_head:
        lines.append("uses a trained head of another method if it is given: --head FOLDER")
    if card.several:
        lines.append("uses several draft models where there are several: --draft NAME,NAME")
    if card.kind == "refine":
        command = f"tinyspec translate --method {card.name}"
        lines.append(f"translates, with a model that was trained for it: {command}")
    if card.kind == "policy":
        made = f"Scheduler(find_technique('{card.name}').policy())"
        lines.append(f"decides which of many requests share a forward pass: {made}")
    if card.teacher:
        lines.append("its candidates are judged by a teacher: --teacher NAME")
    if card.copies:
        lines.append("copies from the prompt and from texts given by --reference FILE")
    if pages := list_measurements(card.name, RESULTS):
        lines.append(f"measured in tutorials/results: {', '.join(pages)}")
    lines.append("knobs:" if card.knobs else "knobs: none")
    flags = [f"--{knob.name.replace('_', '-')} {knob.default}" for knob in card.knobs]
    width = max(map(len, flags), default=0)
    for words, knob in zip(flags, card.knobs, strict=True):
        advice = "; the draft model's card may advise another default" if knob.advised else ""
        lines.append(f"  {words:{width}}  {knob.doc}{describe_range(knob)}{advice}")
    return "\n".join(lines)
