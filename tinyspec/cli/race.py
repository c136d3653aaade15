"""tinyspec race: plain decoding against a technique, live."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.lm.transformer import Model
    from tinyspec.race import Lane, Outcome, Start

OPENING = (
    "The lighthouse keeper had spoken to nobody for eleven days when, on the evening of the great storm, there came "
    "three slow knocks at his door. He set down his lamp, and"
)
PLAIN = "autoregressive"


@click.command("race", cls=base.KnobCommand)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name, folder, .gguf file or hub id."),
    click.option(
        "--method",
        "methods",
        multiple=True,
        default=("speculative_decoding",),
        show_default=True,
        help="Who races against plain decoding; may be repeated.",
    ),
    base.draft_option,
    base.knob_option,
    click.option("--prompt", "-p", default=OPENING, help="The text to continue; - reads standard input."),
    click.option("--chat", is_flag=True, help="The prompt is a user's message in the model's chat template."),
    base.reference_option,
    base.sampling_options,
    base.where_options,
    click.option("--repeat", "-r", type=click.IntRange(1), default=1, show_default=True, help="Race so many times."),
    click.option("--no-live", is_flag=True, help="Only the report."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output."),
    click.option("--svg", type=base.OutputPath(), help="Write a picture here."),
)
@click.pass_context
def race(
    ctx: click.Context,
    /,
    model: str,
    methods: tuple[str, ...],
    draft: list[str],
    knob: tuple[str, ...],
    prompt: str,
    chat: bool,
    references: tuple[Path, ...],
    seed: int,
    device: str,
    dtype: str | None,
    repeat: int,
    no_live: bool,
    as_json: bool,
    svg: Path | None,
    **sampling: Any,
) -> None:
    """Plain decoding against a technique, side by side: same model, same prompt, same machine.

    Options that are not listed are knobs of the method (--gamma 6).

    How it is measured: each has its own clock. The one whose clock is behind takes the next step, alone; drawing and
    turning ids into text happen between the steps, while every clock stands still. A clock covers the prompt and every
    step; loading is outside, and a short untimed start warms the caches. The ratio is of seconds per token, with
    --repeat of their medians. At temperature 0 the texts are compared token by token. Text that loops flatters every
    technique, so the share of distinct 4-grams is printed.

    \b
    Examples:
      tinyspec race
      tinyspec race --gamma 6 --repeat 5
      tinyspec race --temperature 0.8 --seed 3 --prompt "It was a dark night, and"
      tinyspec race --method speculative_decoding --method llma --svg race.svg
      tinyspec race --json
    """
    knobs = base.given_knobs(ctx, knob)
    contestants = [method for method in dict.fromkeys(methods) if method != PLAIN]
    if not contestants:
        raise TinyspecError(f"--method {PLAIN} would race against itself: choose another (`tinyspec methods`)")
    shares = base.settle(ctx, knobs, contestants)
    text = base.read_prompt(prompt, "")
    target, small = base.load_all(model, draft, contestants, device, dtype)

    from tinyspec import race as racing
    from tinyspec.generation import start
    from tinyspec.technique import find

    common = {"seed": seed, "chat": chat, **sampling}
    texts = [base.read_text(path) for path in references]

    def starter(method: str, share: dict[str, Any]) -> "Start":
        copied = texts if find(method).copies else []
        return lambda: start(target, text, method=method, draft=small, references=copied, **common, **share)

    starts = [(PLAIN, starter(PLAIN, {})), *((m, starter(m, s)) for m, s in zip(contestants, shares, strict=True))]
    if texts and not any(find(method).copies for method in contestants):
        raise TinyspecError(f"{', '.join(contestants)} copies from no references: leave --reference out, or take llma")
    for _, begin in starts:  # all that can be wrong with the arguments is said before the first step
        begin()
    racing.warm_up([begin for _, begin in starts])
    greedy = sampling["temperature"] == 0
    title = f"{target.name}, {sampling['max_new_tokens']} tokens, " + _setting(sampling)
    repeats: list[list[Lane]] = []
    out = base.console()
    live = out.is_terminal and not out.is_dumb_terminal and not (no_live or as_json)
    for number in range(1, repeat + 1):
        turn = 1 if number % 2 else -1  # who goes first changes with every repeat
        if live:
            from tinyspec.display import Stage

            which = title + (f"  (repeat {number} of {repeat})" if repeat > 1 else "")
            with Stage(out, text, sampling["max_new_tokens"], which) as stage:
                show = stage.watch if turn == 1 else stage.watch_reversed
                lanes = racing.race(target, starts[::turn], show)
        else:
            lanes = racing.race(target, starts[::turn])
        repeats.append(lanes[::turn])
    outcomes = racing.compare(repeats, greedy)
    if svg is not None:
        _draw(svg, repeats[0], outcomes, title)
    if as_json:
        click.echo(json.dumps(_figures(target, text, common, repeats, outcomes)))
        return
    from tinyspec.display import Stage, report

    if live:  # what stays on the screen
        out.print(Stage(out, text, sampling["max_new_tokens"], title).draw(repeats[0]))
    else:
        out.print(title, highlight=False)
    promises = [find(m).promise(**s).value for m, s in zip(contestants, shares, strict=True)]
    out.print(report(repeats, outcomes, promises), highlight=False)
    out.print(_machine(target), highlight=False)
    if svg is not None:
        out.print(f"picture: {svg}", highlight=False)


def _setting(sampling: dict[str, Any]) -> str:
    """The sampling options in words."""
    if sampling["temperature"] == 0:
        return "greedy"
    others = [f"{name.replace('_', '-')} {sampling[name]}" for name in ("top_k", "top_p", "min_p") if sampling[name]]
    return ", ".join([f"temperature {sampling['temperature']:g}", *others])


def _machine(model: "Model") -> str:
    import torch

    where = (
        f"{torch.get_num_threads()} threads" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    )
    return f"{str(model.dtype).removeprefix('torch.')} on {model.device}, {where}, torch {torch.__version__}"


def _figures(
    model: "Model",
    prompt: str,
    common: dict[str, Any],
    repeats: "Sequence[Sequence[Lane]]",
    outcomes: "Sequence[Outcome]",
) -> dict[str, Any]:
    """For --json: the first contestant's figures by name, then everything."""
    first = outcomes[0]
    return {
        "model": model.name,
        "machine": _machine(model),
        "prompt": prompt,
        **common,
        "method": first.method,
        "ratio": first.ratio,
        "identical": first.identical,
        "tokens_per_call": repeats[0][1].stats.tokens_per_call,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "lanes": [lane.as_dict() for lane in repeats[0]],
        "seconds": [[lane.seconds for lane in lanes] for lanes in repeats],
    }


def _draw(path: Path, lanes: "Sequence[Lane]", outcomes: "Sequence[Outcome]", title: str) -> None:
    from tinyspec.picture import Track, svg

    tracks = []
    for i, lane in enumerate(lanes):
        verdict, note = "", ""
        if i:
            ratio = lanes[0].seconds_per_token / (lane.seconds_per_token or 1)
            verdict = f"{ratio:.2f}x as fast" if ratio >= 1 else f"{ratio:.2f}x: slower"
            note = {True: "the same text", False: "another text", None: "the same law"}[outcomes[i - 1].identical]
        tracks.append(Track(lane.method, lane.trace, lane.ends, lane.prefill, lane.pieces, verdict, note))
    path.write_text(svg(tracks, title), encoding="utf-8")
