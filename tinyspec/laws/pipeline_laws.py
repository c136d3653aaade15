"""What a pipeline of two stages costs, round by round, from its forward log: the clock of its k + 1
processors, and their work.

The judge asks the table model itself, by fresh passes: which tokens the model cut off behind layer
dbar holds for likeliest, and whether the text went on with one of them. So a guess that knows more
than a guess may know is seen, and one that is wasted.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.ppd import PpdDrafter, count_layer_steps
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.laws.tables import TableModel
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.technique import Request

PIPELINE_CLOCK = "a pipeline's clock"
PIPELINE_WORK = "a pipeline's work"

Build = Callable[..., Decoder]
PIPELINE_VOCABULARY, PIPELINE_PROMPT, PIPELINE_TOKENS = 4, (0, 1), 6
PIPELINE_SHAPES = [(3, 2, 1), (3, 2, 2), (4, 2, 2), (6, 4, 1), (6, 4, 3), (6, 6, 2), (5, 3, 9)]
"""Layers, the guessing layer, branches."""


class RoundCost(NamedTuple):
    """One round: whether its token was begun before, layer-steps on k + 1 processors, (row, layer)
    evaluations.
    """

    begun: bool
    steps: float
    work: float


def likeliest_guesses(model: TableModel, text: tuple[int, ...], layer: int, k: int) -> list[int]:
    """The k likeliest tokens of the model cut off behind a layer, after a text."""
    row = model.row(text, Plan(last=layer))
    return sorted(range(model.vocabulary), key=lambda token: (-row[token], token))[:k]


def expected_costs(
    model: TableModel, prompt: tuple[int, ...], new: list[int], layer: int, k: int
) -> list[RoundCost]:
    """What each round of this text has to cost."""
    depth, found = model.config.n_layers, list[RoundCost]()
    for at in range(len(new)):
        text = (*prompt, *new[: at - 1])
        begun = at > 0 and layer < depth and new[at - 1] in likeliest_guesses(model, text, layer, k)
        ran = depth - begun * (depth - layer)
        more = min(k, model.vocabulary) * (depth - layer) if at + 1 < len(new) else 0
        found.append(RoundCost(begun, ran, ran + more))
    return found


def _pipeline_runs(
    build: Build,
) -> Iterator[tuple[dict[str, Any], list[RoundCost], list[tuple[ForwardRecord, ...]]]]:
    for (depth, layer, k), seed, temperature in product(PIPELINE_SHAPES, range(3), (1.0, 0.0)):
        model, forward_log = (
            TableModel(seed, PIPELINE_VOCABULARY, depth, zeros=False),
            list[ForwardRecord](),
        )
        sampling, stop = (
            SamplingParams(temperature),
            StoppingCriteria(max_new_tokens=PIPELINE_TOKENS),
        )
        decoder = build(
            Request(
                model.session(forward_log), sampling=sampling, stop=stop, forward_log=forward_log
            ),
            layer=layer,
            k=k,
        )
        decoder.extend(PIPELINE_PROMPT)
        calls = []
        while not decoder.finished:
            round = decoder.step(Seeded(seed).split("round", decoder.rounds))
            calls.append((*round.draft_calls, *round.calls))
        case = {
            "model": model,
            "layers": depth,
            "guessing layer": layer,
            "k": k,
            "text": [*PIPELINE_PROMPT, *decoder.new],
        }
        yield case, expected_costs(model, PIPELINE_PROMPT, decoder.new, layer, k), calls


def pipeline_clock(build: Build) -> Evidence:
    """A round takes all layers, less those that a guess which held has done while the token before
    it was finished.
    """
    seen = 0
    for case, expected, calls in _pipeline_runs(build):
        for at, (round, told) in enumerate(zip(calls, expected, strict=True)):
            seen += 1
            if count_layer_steps(round) != told.steps:
                begun = {"round": at, "its token was guessed": told.begun}
                accuse(
                    PIPELINE_CLOCK,
                    f"{told.steps} layer-steps",
                    f"{count_layer_steps(round)} layer-steps",
                    **case,
                    **begun,
                )
    return Evidence(PIPELINE_CLOCK, seen)


def pipeline_work(build: Build) -> Evidence:
    """A round evaluates what its token still lacks, and the branches' first layers where another
    token is to follow.
    """
    seen = 0
    for case, expected, calls in _pipeline_runs(build):
        for at, (round, told) in enumerate(zip(calls, expected, strict=True)):
            seen, ran = seen + 1, sum(call.row_layers for call in round)
            if ran != told.work:
                accuse(
                    PIPELINE_WORK,
                    f"{told.work} layers of a row",
                    f"{ran} layers of a row",
                    **case,
                    round=at,
                )
    return Evidence(PIPELINE_WORK, seen)


def build_pipeline(parts: Parts) -> Build:
    """A pipeline of these parts."""

    def build(request: Request, layer: int, k: int) -> Decoder:
        pipeline: Any = parts.pipeline(request.target, layer, k)
        told = PpdDrafter(pipeline)
        return parts.decoder(
            pipeline,
            told,
            parts.walk,
            sampling=request.sampling,
            stop=request.stop,
            forward_log=request.forward_log,
        )

    return build


def pipeline_calls(parts: Parts) -> Any:
    """What can be seen without a law: rows and layers of every call."""
    return [
        [(call.rows, call.row_layers) for call in round]
        for _, _, calls in _pipeline_runs(build_pipeline(parts))
        for round in calls
    ]


PIPELINE_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    PIPELINE_CLOCK: lambda parts: pipeline_clock(build_pipeline(parts)),
    PIPELINE_WORK: lambda parts: pipeline_work(build_pipeline(parts)),
}
