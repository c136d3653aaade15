"""What `tinyspec bench dialects` shows: shares recomputed from the verdicts, a table a kind, and a
picture.
"""

from collections.abc import Mapping
from typing import Any

from tinyspec.bench import figures
from tinyspec.bench.report import Grid, number

KINDS = {
    "lex": "words of their own",
    "ord": "orders of their own",
    "fert": "fertilities of their own",
}


def told(result: Mapping[str, Any]) -> dict[str, Any]:
    """Shares of every arm, from its verdicts alone: a digit a sentence, 1 valid + 2 of one dialect
    + 4 repeats a token.
    """
    return {
        kind: {
            arm: {
                name: sum(int(mark) >> bit & 1 for mark in row["verdicts"]) / len(row["verdicts"])
                for bit, name in enumerate(("valid", "single", "repeated"))
            }
            for arm, row in of["arms"].items()
        }
        for kind, of in result["kinds"].items()
    }


def named(kind: str) -> str:
    """A kind in words.

    >>> named("lex+fert")
    'words and fertilities of their own'
    """
    return " and ".join(KINDS[one].split()[0] for one in kind.split("+")) + " of their own"


def grids(result: Mapping[str, Any]) -> list[Grid]:
    """A table a kind, a row a model or number of passes."""
    made = []
    for kind, arms in result["figures"].items():
        floors, rows = result["kinds"][kind]["floors"], []
        for arm, of in arms.items():
            row = result["kinds"][kind]["arms"][arm]
            floor = floors["sequence" if arm == "autoregressive" else "parallel"]
            nats = f"{row['nats']:.2f} / {floor:.2f}" if "nats" in row else "-"
            shares = [f"{100 * of[name]:.1f}" for name in ("valid", "single", "repeated")]
            rows.append([arm, *shares, number(row["passes"]), nats])
        head = [
            "model",
            "valid %",
            "of one dialect %",
            "with a repeated word %",
            "decoder passes",
            "nats / the floor",
        ]
        made.append(Grid(f"{result['settings']['modes']} dialects with {named(kind)}", head, rows))
    return made


def picture(result: Mapping[str, Any]) -> str:
    """A panel a kind, a bar a model: how many outputs are a right translation."""
    kinds, shares = list(result["figures"]), result["figures"]
    arms = list(dict.fromkeys(arm for of in shares.values() for arm in of))
    names = 16 + figures.LETTER * max(map(len, arms))
    wide = (figures.WIDTH - 2 * figures.MARGIN - names) / len(kinds)
    body = [figures._text(figures.MARGIN, 32, "Right translations, of every hundred", "title")]
    top = 84.0
    for i, arm in enumerate(arms):
        body.append(
            figures._text(figures.MARGIN + names - 10, top + figures.ROW * i + 12, arm, "end")
        )
    for column, kind in enumerate(kinds):
        x = figures.MARGIN + names + column * wide
        body.append(figures._text(x, top - 14, named(kind), "head"))
        body.append(
            f'<path class="one" d="M{x:.1f} {top - 4:.1f}V{top + figures.ROW * len(arms):.1f}"/>'
        )
        for i, arm in enumerate(arms):
            if arm not in shares[kind]:
                continue
            share, y = shares[kind][arm]["valid"], top + figures.ROW * i
            style, long = "fast" if share >= 0.9 else "slow", max(share * (wide - 60), 0.5)
            body.append(
                f'<path class="{style}" d="M{x:.1f} {y + 2:.1f}h{long:.1f}v12h-{long:.1f}z"/>'
            )
            body.append(figures._text(x + long + 5, y + 12, f"{100 * share:.1f}"))
    end, s, machine = top + figures.ROW * len(arms) + 26, result["settings"], result["machine"]
    for line in (
        f"T: decoder passes, l: lengths tried at once. {s['modes']} equally likely dialects, {s['shortest']} to "
        f"{s['longest']} of {s['words']} words, {s['tests']} test sentences, lengths as each model tells them.",
        f"{s['layers']} + {s['layers']} layers of {s['width']}, {s['steps']} steps of {s['batch']} sentences, one seed; "
        f"{result['date']}, commit {result['commit']}, {machine['cpu']}",
    ):
        body.append(figures._text(figures.MARGIN, end, line, "quiet"))
        end += 18
    said = "; ".join(
        f"{kind}: " + ", ".join(f"{a} {100 * f['valid']:.1f}" for a, f in shares[kind].items())
        for kind in kinds
    )
    return figures._svg(body, end, "Right translations by dialects and model", said)
