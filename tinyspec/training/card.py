"""The card of a trained checkpoint: README.md and loss.svg, written by code from the recipe and the
log alone.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tinyspec.lm.model import Model
from tinyspec.training.recipe import Recipe
from tinyspec.training.train import TrainingResult


def sample_continuation(
    model: Model, prompt: str, seed: int, temperature: float = 0.8, tokens: int = 120
) -> str:
    """A continuation of `prompt`, drawn plainly: the whole text is run anew for every token. Stops
    at end of text.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = start = model.tokenizer.encode(prompt)
    for _ in range(tokens):
        law = (model.logits(ids[-model.config.max_positions :])[-1] / temperature).softmax(-1)
        drawn = int(torch.multinomial(law, 1, generator=generator))
        if drawn in model.config.eos:
            break
        ids = [*ids, drawn]
    return model.tokenizer.decode(ids[len(start) :])


def draw_curve(
    series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, title: str
) -> str:
    """An SVG line chart, legible on light and dark pages. The first series is solid, the second
    dashed.

    >>> draw_curve({"loss": [(0, 2.0), (10, 1.0)]}, "step", "a curve").count("<polyline")
    1
    """
    width, height, left, bottom, top = 640, 300, 56, 44, 34
    points = [p for line in series.values() for p in line]
    x_high = max(x for x, _ in points) or 1
    # the first losses are those of a uniform guess; the axis ends where most of the curve lies
    ys = sorted(y for _, y in points)
    low, high = ys[0], ys[math.ceil(0.98 * len(ys)) - 1]
    pad = 0.06 * (high - low) or 0.1
    low, high = low - pad, high + pad

    def at(x: float, y: float) -> str:
        y = min(max(y, low), high)
        sx = left + x / x_high * (width - left - 16)
        sy = top + (high - y) / (high - low) * (height - top - bottom)
        return f"{sx:.1f},{sy:.1f}"

    ink = "#7d8590"  # neutral: readable on white and on black
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{ink}" stroke-width="1.8">'
    ]
    for i in range(5):
        y = low + (high - low) * i / 4
        x0, sy = at(0, y).split(",")
        x1 = at(x_high, y).split(",")[0]
        parts.append(
            f'<line x1="{x0}" y1="{sy}" x2="{x1}" y2="{sy}" stroke="{ink}" stroke-width="0.6" opacity="0.4"/>'
        )
        parts.append(
            f'<text x="{left - 8}" y="{float(sy) + 4:.1f}" text-anchor="end">{y:.2f}</text>'
        )
        x = x_high * i / 4
        parts.append(
            f'<text x="{at(x, low).split(",")[0]}" y="{height - bottom + 18}" text-anchor="middle">{_format_count(x)}</text>'
        )
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">{x_label}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour, dash = (("#2f81f7", ""), ("#d29922", ' stroke-dasharray="6 4"'))[i % 2]
        path = " ".join(at(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        parts.append(
            f'<line x1="{left + 180 * i}" y1="14" x2="{left + 26 + 180 * i}" y2="14" stroke="{colour}"{dash}/>'
        )
        parts.append(f'<text x="{left + 34 + 180 * i}" y="18">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _format_count(number: float) -> str:
    """1234567 as 1.2M.

    >>> _format_count(1234567), _format_count(40e6), _format_count(950)
    ('1.2M', '40M', '950')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return f"{number:.0f}"


def write_card(
    out: Path,
    model: Model,
    recipe: Recipe,
    ended: TrainingResult,
    final: Mapping[str, float],
    bytes_per_token: float,
    device: torch.device,
) -> None:
    """Write README.md and loss.svg into `out`. `final`: figures over all valid books, by name."""
    mixed = recipe.exits is not None and recipe.exits.changes_training
    per_byte = (
        1.0 if recipe.teacher else 1 / (math.log(2) * bytes_per_token)
    )  # nats a token to bits a byte
    figure = "alpha" if recipe.teacher else "valid_bits_per_byte"
    series = {
        "training loss"
        if recipe.teacher
        else "training, all exits"
        if mixed
        else "training, bits/byte": [
            (e["tokens"], e["loss"] * per_byte) for e in ended.log if "loss" in e
        ],
        "alpha, valid" if recipe.teacher else "valid, bits/byte": [
            (e["tokens"], e[figure]) for e in ended.log if figure in e
        ],
    }
    svg = draw_curve(
        {name: line for name, line in series.items() if line},
        "tokens seen",
        f"training of {recipe.name}",
    )
    (out / "loss.svg").write_text(svg, encoding="utf-8")
    (out / "README.md").write_text(
        _text(model, recipe, ended, final, bytes_per_token, device), encoding="utf-8"
    )


def describe_device(device: torch.device) -> str:
    """What it was trained on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def _text(
    model: Model,
    recipe: Recipe,
    ended: TrainingResult,
    final: Mapping[str, float],
    bytes_per_token: float,
    device: torch.device,
) -> str:
    c = model.config
    quality = f"{final['valid_bits_per_byte']:.3f} bits per UTF-8 byte over the three valid books (context "
    quality += f"{recipe.context}, stride {recipe.context // 2}, float32)"
    teacher = Path(recipe.teacher).name
    if teacher:
        what = f"The draft of `{teacher}`, distilled from its whole law; it shares its tokenizer."
        quality += f"; alpha = mean of sum min(p, q) = {final['alpha']:.3f} against `{teacher}` at temperature 1"
    if recipe.own is not None:
        strengths = ", ".join(f"{penalty:g}" for penalty in recipe.own.penalties)
        quality += f", and {final['alpha_own']:.3f} on texts that it wrote, under repetition penalties of {strengths}"
    else:
        what = "A small language model that has read 107 public-domain books, for young readers most of them."
    shape = f"LLaMA architecture, {c.n_layers} layers of {c.d_model}, {c.n_heads} query and {c.n_kv_heads} key heads of "
    shape += f"{c.head_dim}, MLP of {c.d_ff}, vocabulary {c.vocab_size} (byte-level BPE), context {c.max_positions}"
    pair = (
        f"- **draft**: `{recipe.draft}`\n"
        if recipe.draft
        else f"- **draft of**: `{teacher}`\n"
        if teacher
        else ""
    )
    if gamma := recipe.extra.get("gamma"):
        pair = (
            pair.removesuffix("\n") + f"; asked for {gamma} tokens a round unless told otherwise\n"
        )
    if recipe.start:
        what += f" It goes on from the weights of `{Path(recipe.start).name}`."
    if recipe.exits is not None:
        what += " " + recipe.exits.describe()
        quality += ".\n" + _exits(recipe, final)
    samples = "\n\n".join(
        f"Seed {seed}:\n\n" + _quote(f"**{prompt}**" + sample_continuation(model, prompt, seed))
        for seed, prompt in enumerate(recipe.prompts)
    )
    return f"""# {recipe.name}

{what}

- **shape**: {shape}
- **parameters**: {c.parameters():,}, stored in bfloat16
- **quality**: {quality}
{pair}- **data**: 107 books of `mlschmitt/classic-books-markdown` (GitHub), {bytes_per_token:.2f} bytes a token; three
  more, by Doyle, Kipling and Nesbit, are the valid books: neither the model nor its tokenizer was trained on them
- **training**: {ended.tokens:,} tokens in {ended.step:,} steps, {ended.seconds / 60:.1f} minutes on {describe_device(device)}
- **licence**: weights MIT; the texts are in the public domain

Made by `recipe.toml`, with this command (log in `log.jsonl`):

    tinyspec data fetch classics
    tinyspec train lm --recipe models/{recipe.name}/recipe.toml --out models/{recipe.name}

![training curve](loss.svg)

## Samples

Unedited: temperature 0.8, 120 tokens, the prompt in bold.

{samples}
"""


def _exits(recipe: Recipe, final: Mapping[str, float]) -> str:
    """What every exit is worth, as a table in the list of a card."""
    layers = [name.removeprefix("exit_") for name in final if name.startswith("exit_")]
    rows = (
        ["after layer", *layers],
        ["---"] + ["---:"] * len(layers),
        ["bits per byte", *(f"{final[f'exit_{layer}']:.3f}" for layer in layers)],
    )
    table = "\n".join("  | " + " | ".join(row) + " |" for row in rows)
    return f"  By exit, over the first {recipe.valid_characters:,} characters of each of these books:\n\n{table}\n"


def _quote(text: str) -> str:
    r"""A text as a markdown quotation that keeps its line ends.

    >>> _quote("a\n\nb")
    '> a  \n>   \n> b'
    """
    return "\n".join(f"> {line}  " for line in text.split("\n")).rstrip()
