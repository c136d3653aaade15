"""tinyspec race: plain decoding against a technique, measured, then played back."""

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import POSITIVE, flag, option
from tinyspec.errors import TinyspecError
from tinyspec.files import write_whole

if TYPE_CHECKING:
    from tinyspec.lm.model import Model
    from tinyspec.show.race import Lane, Outcome, Start

PLAIN = "autoregressive"
MOST_RACES = 9  # without --repeat
ENOUGH_SECONDS = 10.0  # without --repeat: no further race is begun after so long

# The settings of a race where the command line does not say otherwise, greedy or sampled. The
# penalty is that of `bench race`: without it a small base model writes one sentence over and over.
# top-p 0.6 keeps it from inventing words. Prompt and seed were chosen by reading, not by speed. Of
# some 2,400 seeds over twelve openings a script selected those whose two texts, the plain and the
# speculative, hold words, pairs and triples of words that the training books hold too. Of these we
# took one that reads well in both lanes and commits as many tokens per forward pass as most seeds
# do: 3.76, where the median of 40 seeds is 3.56.
STORY: dict[str, Any] = {
    "prompt": "One evening a fox came to the door of the old woman's house. "
    '"Good evening," said the fox.',
    "max_new_tokens": 64,
    "temperature": 0.8,
    "top_p": 0.6,
    "repetition_penalty": 1.2,
    "seed": 7507,
}

# With --chat. An edit is what a technique that copies is for, and a greedy answer can be compared
# token by token. The text was chosen because SmolLM2 corrects both of its mistakes.
EDIT: dict[str, Any] = {
    "prompt": (
        "Correct the spelling mistakes in this text. Change nothing else, and write out the whole "
        "text.\n\n"
        "The train stoped in the middle of the plain. The driver climbed down, walked to the "
        "front of the engine and looked at the rails. Then he sat down on a milestone and lit "
        "his pipe. The passengers opend their windows. A woman with a basket asked what had "
        "happened, and the driver answered that nothing had happened yet. The driver waited for "
        "an hour. Then a cow came slowly over the hill, crossed the rails and went down to the "
        "river to drink. The driver put his pipe away, climbed up again, and the train went on."
    ),
    "max_new_tokens": 128,
    "temperature": 0.0,
    "top_p": None,
    "repetition_penalty": 1.0,
    "seed": 0,
}


@click.command("race", cls=base.KnobCommand, context_settings={"default_map": STORY})
@base.model_option
@option(
    "--method",
    "methods",
    multiple=True,
    default=("speculative_decoding",),
    help="Who races against plain decoding; may be repeated.",
)
@base.draft_option
@base.head_option
@base.knob_option
@option(
    "--prompt",
    "-p",
    show_default="the opening of a tale",
    help="The text to continue; - reads stdin.",
)
@flag(
    "--chat",
    help="The prompt is a user's message to a chat model. "
    "[default: an editing task, greedy, at most 128 tokens]",
)
@base.reference_option
@base.sampling_options
@base.where_options
@option(
    "--repeat",
    "-r",
    type=POSITIVE,
    help=f"Race so many times. [default: {MOST_RACES}, fewer if they take more than "
    f"{ENOUGH_SECONDS:g} seconds]",
)
@option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    help="Speed of the playback; 1 is real time. "
    "[default: 1; a race of under a second is slowed to last 8]",
)
@flag("--no-live", help="Do not play the race back: print the report alone, as in a pipe.")
@base.json_option
@option("--svg", type=base.OUTPUT_FILE, help="Write a picture here.")
@click.pass_context
def race(
    ctx: click.Context,
    /,
    methods: tuple[str, ...],
    prompt: str,
    chat: bool,
    references: tuple[Path, ...],
    repeat: int | None,
    speed: float | None,
    no_live: bool,
    as_json: bool,
    svg: Path | None,
    **given: Any,
) -> None:
    """Plain decoding against a technique, side by side: same model, same prompt, same machine.

    Options that are not listed are knobs of the method (--gamma 6).

    First it is measured, several times, with nothing on the screen. Each lane has its own clock.
    The lane whose clock shows least takes the next step, alone. A clock covers the prompt and every
    step; loading is outside, and a short untimed start warms the caches. The ratio is of seconds
    per token: the median over the races, and their range.

    Then the race whose ratio is the median is played back. If it took less than a second, it is
    slowed to last 8, all clocks alike; others are played in real time. Ctrl-C ends the playback and
    prints the report.

    At temperature 0 the texts are compared token by token. Text that loops flatters every
    technique: hence the repetition penalty (off with --chat), and the share of distinct 4-grams is
    printed.

    \b
    Examples:
      tinyspec race
      tinyspec race --gamma 6 --repeat 25
      tinyspec race --temperature 0 --prompt "It was a dark night, and"
      tinyspec race --method speculative_decoding --method token_recycling
      tinyspec race --no-live --svg race.svg
      tinyspec race --speed 1
      tinyspec models fetch smollm2 && tinyspec race --model smollm2 --chat --method auto
    """
    if speed is not None and not speed > 0:
        raise TinyspecError("--speed nan is no speed: 1 is real time")
    defaults = EDIT if chat else STORY
    text = base.read_prompt(prompt if base.is_given(ctx, "prompt") else defaults["prompt"], "")
    given |= {name: defaults[name] for name in defaults if not base.is_given(ctx, name)}
    given.pop("prompt", None)
    contestants = [method for method in dict.fromkeys(methods) if method != PLAIN]
    if not contestants:
        raise TinyspecError(
            f"--method {PLAIN} would race against itself: choose another (`tinyspec methods`)"
        )
    chosen = base.GenerateOptions.take(ctx, given, *contestants)
    settings = chosen.settings
    if sys.stdout.isatty() and not (no_live or as_json):
        click.echo(f"loading {chosen.model} ...", err=True)  # a large model takes seconds
    target, drafts = chosen.load()

    from tinyspec.generation import start_generation
    from tinyspec.pairing import drafts_for
    from tinyspec.show import race as racing
    from tinyspec.technique import find_technique

    texts = [base.read_text(path) for path in references]
    if texts and not any(find_technique(method).copies for method in contestants):
        raise TinyspecError(
            f"{', '.join(contestants)} copies from no references: leave --reference out, "
            "or take llma"
        )
    starts: list[tuple[str, Start]] = []
    for method, knobs in zip([PLAIN, *contestants], [{}, *chosen.knobs], strict=True):
        copied = texts if find_technique(method).copies else []
        more = {"references": copied, "chat": chat, **settings, **knobs}
        start = partial(start_generation, target, text, method=method, draft=drafts, **more)
        start()  # what is wrong with the arguments becomes an error before the first step
        starts.append((method, start))
    racing.warm_up([start for _, start in starts])
    out = base.console()
    live = out.is_terminal and not out.is_dumb_terminal and not (no_live or as_json)
    repeats = run_races(target, starts, repeat, out if live else None)
    cards = [find_technique(method) for method in contestants]
    keeps = [
        card.keeps_text(settings["temperature"], len(drafts_for(target, card, drafts)))
        for card in cards
    ]
    outcomes = racing.compare_lanes(repeats, keeps)
    median = racing.find_median_race(outcomes[0].ratios)
    lanes = repeats[median]
    title = f"{target.name}, {describe_sampling(settings)}"
    if svg is not None:
        write_whole(svg, draw_picture(lanes, outcomes, title, text).encode())
    if as_json:
        first = outcomes[0]
        figures = {
            "model": target.name,
            "machine": describe_hardware(target),
            "prompt": text,
            "chat": chat,
            **settings,
            "method": first.method,
            "ratio": first.ratio,
            "identical": first.identical,
            "tokens_per_call": lanes[1].stats.tokens_per_call,
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "lanes": [lane.as_dict() for lane in lanes],
            "seconds": [[lane.seconds for lane in lanes] for lanes in repeats],
            "shown": median,  # which race the lanes are of: the one whose ratio is the median
        }
        click.echo(json.dumps(figures))
        return
    from rich.console import Group

    from tinyspec.show.display import RaceStage, choose_speed, race_report

    guarantees = [
        find_technique(method).promise(**knobs).value
        for method, knobs in zip(contestants, chosen.knobs, strict=True)
    ]
    picture = [] if svg is None else [f"picture: {svg}"]
    report = Group(race_report(lanes, outcomes, guarantees), describe_hardware(target), *picture)
    if live:
        stage = RaceStage(out, text + "\n\n" if chat else text, title)
        with suppress(KeyboardInterrupt):  # whoever has seen enough still gets the report
            stage.play(lanes, speed or choose_speed(lanes))
        # Room for the text beside the report, the title, a legend, an empty line, the next prompt.
        room = out.height - len(out.render_lines(report, pad=False)) - 4
        report = Group(stage.tell(lanes[1], room), "", report) if room > 0 else report
    out.print(title, report, sep="\n", highlight=False)


def run_races(
    model: "Model", starts: "Sequence[tuple[str, Start]]", repeat: int | None, out: Any
) -> "list[list[Lane]]":
    """Run the races. On a terminal (`out`) say between them how far it is.

    Nothing is drawn while a clock runs.
    """
    from rich.live import Live

    from tinyspec.show import race as racing

    most, began = repeat or MOST_RACES, time.monotonic()
    repeats: list[list[Lane]] = []
    shown = Live(console=out, auto_refresh=False, transient=True) if out is not None else None
    with shown or nullcontext(), leave_out_of_collections():
        # Without --repeat the time decides how many; an odd number has a race in the middle.
        while len(repeats) < most and (
            repeat or len(repeats) % 2 == 0 or time.monotonic() - began < ENOUGH_SECONDS
        ):
            if shown is not None:
                limit = most if repeat else f"at most {most}"
                shown.update(f"measuring race {len(repeats) + 1} of {limit} ...", refresh=True)
            turn = -1 if len(repeats) % 2 else 1  # who goes first changes with every race
            repeats.append(racing.race(model, starts[::turn])[::turn])
    return repeats


@contextmanager
def leave_out_of_collections() -> Iterator[None]:
    """Leave what is loaded by now out of the garbage collections.

    Each race begins with a collection, and looking through all of torch's objects takes as long as
    a race.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe_sampling(settings: dict[str, Any]) -> str:
    """Return the sampling options in words."""
    temperature, penalty = settings["temperature"], settings["repetition_penalty"]
    words = ["greedy"]
    if temperature != 0:
        words = [f"temperature {temperature:g}"]
        for name in ("top_k", "top_p", "min_p"):
            if settings[name] is not None:
                words.append(f"{name.replace('_', '-')} {settings[name]}")
    if penalty != 1:
        words.append(f"repetition penalty {penalty:g}")
    if temperature != 0:
        words.append(f"seed {settings['seed']}")
    return ", ".join(words)


def describe_hardware(model: "Model") -> str:
    """Return the number format, the device and what computes there, in words."""
    import torch

    dtype = str(model.dtype).removeprefix("torch.")
    where = f"{torch.get_num_threads()} threads"
    if model.device.type != "cpu":
        where = torch.cuda.get_device_name(model.device)
    return f"{dtype} on {model.device}, {where}, torch {torch.__version__}"


def draw_picture(
    lanes: "Sequence[Lane]", outcomes: "Sequence[Outcome]", title: str, prompt: str
) -> str:
    """Return the picture of a race, as SVG."""
    from tinyspec.show.display import name_lane
    from tinyspec.show.picture import Track, draw_race

    same = {True: "same text", False: "another text", None: "same distribution"}
    tracks = []
    for i, lane in enumerate(lanes):
        verdict, note = "", ""
        if i:
            ratio = lanes[0].seconds_per_token / (lane.seconds_per_token or 1)
            verdict = f"{ratio:.2f}x as fast"
            if ratio < 1:
                verdict = f"slower: {1 / (ratio or 1):.2f}x the time"
            note = same[outcomes[i - 1].identical]
        name, began = name_lane(lane.method), lane.prefill
        track = Track(name, lane.trace, lane.ends, began, lane.pieces, verdict, note, prompt)
        tracks.append(track)
    return draw_race(tracks, title)
