"""SkipDecode: run fewer layers the later a token stands in the text, and keep the top ones.

Paper: Del Corro, Del Giorno, Agarwal, Yu, Awadallah, Mukherjee 2023, arXiv 2307.02628. There is no
public code.

Idea. How many layers a token runs depends on its place alone, and never rises along the text. So
all texts of a batch run the same layers in a step, and the cost is known beforehand. A few layers
at the bottom are kept (*warm-up*); then the token jumps to the top layers, and the middle is left
out. The layers of a token are among those of every token before it: in each layer that it runs, all
tokens before it have their own keys and values. Nothing is copied, and nothing is run again.

    e(t) = round(e_max - (e_max - e_min) t / N)      layers of new token t = 0 .. N, then e_min
    S(t) = {1 .. w} and {L - (e(t) - w) + 1 .. L}    the layers that it runs; w: warm-up layers

The prompt runs e_max layers.

Training. The model is tuned with the same layers left out, by `tinyspec train head --method
skip_decode`, on texts that it wrote: cross-entropy of the tokens after the prompt, where the layers
of each follow from its place. Such a dense pass is the masked stream of `Blocks.layer_states`.

Guarantee: LOSSY in `speedup`; EXACT at 1, where every token runs all layers.
Pitfall: keeping the bottom layers instead, which is an early exit with a decaying depth; a depth
for each text of a batch; a schedule that rises, so that a token attends to keys that are not there
(the session raises an error); a model that was not tuned.
Ablation: `keep_top = false` of section [head] tunes an early exit at the same depths: it leaves out
the upper layers, not the middle. So tuned, `exits-plain` agrees less often with its full depth, and
its perplexity is higher, at each speed-up tried (tutorials/results/exits-skip-bottom.md).
Tests: tests/early_exit/test_skip_decode.py (`decode_with_schedule` against the code that runs, on
every outcome; nested layers; the cost; a batch) and laws/exit_laws.py (the exact joint
distribution).
Left out: the paper's table of e_max and e_min by speed-up, which we could not read. Ours: the mean
of e over N tokens is L / speedup, rounded, as far as w < e <= L allows, and e_min is as small as
that allows. Prompts of a batch need no padding on the left, because a place is counted from a
text's own first new token. Forced text after new tokens runs on the schedule: the depth cannot rise
again. Not measured, because the bench keeps sums over a text: the perplexity by position (in the
paper).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.calm import find_longest_output
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan, Scores
from tinyspec.technique import (
    Guarantee,
    Knob,
    Request,
    TrainingBatch,
    Tuned,
    Tuning,
    is_tuned_for,
    technique,
    tuned_settings,
)
from tinyspec.tree import TokenTree


def decode_with_schedule(
    embed: Callable[[int], Any],
    run_layer: Callable[[int, Any, int], Any],
    read: Callable[[Any], Any],
    text: Sequence[int],
    n_tokens: int,
    layers_at: Callable[[int], Sequence[int]],
    rng: Any,
) -> list[int]:
    """Return the text after so many new tokens (section 3).

    embed      token -> its state below the first layer
    run_layer  (layer, state, position) -> the state after it; it keeps the keys and values
    read       state -> next-token distribution [V]
    layers_at  t -> the layers of new token t, counted from 0; below 0: of the prompt
    rng        a numpy.random.Generator

    The token that decides new token t is the one before it: it runs the layers of t. The decoder
    runs `SkipTarget`. A test compares the two on every outcome.
    """
    output = list(text)
    for position in range(len(text) + n_tokens - 1):
        state, t = embed(output[position]), position - (len(text) - 1)
        for layer in layers_at(t):
            state = run_layer(layer, state, position)
        if t >= 0:
            row = read(state)
            output.append(rng.choice(len(row), p=row))
    return output


# ------------------------------ the schedule (section 3.1)


class DepthSchedule(NamedTuple):
    """The layers of every token.

    depth        L
    most, least  e_max and e_min
    warmup       w
    horizon      N; 0: the depth does not fall
    keep_top     whether the upper layers are kept; otherwise the lower ones, an early exit
    """

    depth: int
    most: int
    least: int
    warmup: int
    horizon: int
    keep_top: bool = True

    def count_layers(self, t: int) -> int:
        """Return e(t).

        >>> [DepthSchedule(10, 8, 2, 1, 6).count_layers(t) for t in (-4, 0, 1, 2, 5, 6, 99)]
        [8, 8, 7, 6, 3, 2, 2]
        """
        if not self.horizon:
            return self.most
        fallen = (self.most - self.least) * min(max(t, 0), self.horizon)
        return round(self.most - fallen / self.horizon)

    def layers_at(self, t: int) -> list[int]:
        """Return S(t), counted from 0.

        >>> DepthSchedule(6, 4, 2, 1, 2).layers_at(0), DepthSchedule(6, 4, 2, 1, 2).layers_at(2)
        ([0, 3, 4, 5], [0, 5])
        """
        if not self.keep_top:
            return [*range(self.count_layers(t))]
        first = self.depth - (self.count_layers(t) - self.warmup)
        return [*range(self.warmup), *range(max(first, self.warmup), self.depth)]

    def plan_at(self, t: int) -> Plan:
        """Return what the session leaves out."""
        run = self.layers_at(t)
        skipped = (layer for layer in range(self.depth) if layer not in run)
        return Plan(
            skip=frozenset(half for layer in skipped for half in (2 * layer, 2 * layer + 1))
        )

    def mask_skipped(self, steps: Tensor) -> Tensor:
        """Return which of the tokens at places t [B, T] each layer leaves out: [L, B, T]."""
        table = torch.ones(self.depth, self.horizon + 1, dtype=torch.bool, device=steps.device)
        for t in range(self.horizon + 1):
            table[self.layers_at(t), t] = False
        return table[:, steps.clamp(0, self.horizon)]


def plan_depths(
    speedup: float, depth: int, warmup: int, horizon: int, keep_top: bool = True
) -> DepthSchedule:
    """Return the schedule whose mean depth over `horizon` new tokens is about L / speedup.

    A token runs at least `warmup` + 1 layers, so a large speedup may not be reached. With horizon 0
    every token runs e_max layers. keep_top is that of `DepthSchedule`.
    Raises TinyspecError if the warm-up leaves no layer after it.

    >>> plan_depths(2, 10, 1, 64)[1:3], plan_depths(1.25, 10, 1, 64)[1:3]
    ((8, 2), (10, 6))
    """
    if warmup >= depth:
        raise TinyspecError(
            f"warmup is {warmup}: the model has {depth} layers, and one must follow: set warmup to "
            f"at most {depth - 1}"
        )
    both = 2 * depth / speedup  # e_max + e_min
    least = min(max(round(both) - depth, warmup + 1), depth)
    most = max(min(round(both) - least, depth), least)
    return DepthSchedule(depth, most, least, warmup, horizon, keep_top)


class SkipTarget:
    """A session in which each token runs the layers of its place."""

    def __init__(self, session: Any, make_schedule: Callable[[int], DepthSchedule]):
        self.session, self.make_schedule = session, make_schedule
        self.forget_schedule()

    def __getattr__(self, name: str) -> Any:  # text, commit, model, ...: the session's
        return getattr(self.session, name)

    def __len__(self) -> int:
        return len(self.session)

    def forget_schedule(self) -> None:
        """Begin anew: the next token that is scored decides new token 0."""
        self.start: int | None = None
        self.schedule: DepthSchedule | None = None

    def _begin_schedule(self) -> None:
        """Begin the schedule at the newest token, if it has not begun."""
        if self.start is None:
            self.start = len(self.session) - 1
            self.schedule = self.make_schedule(len(self.session))

    def _set_plan(self) -> int:
        """Set the plan of the newest token, and return how many layers it runs."""
        assert self.schedule is not None and self.start is not None
        t = len(self.session) - 1 - self.start
        self.session.set_plan(self.schedule.plan_at(t))
        return self.schedule.count_layers(t)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Run the prompt through e_max layers; later text token by token, on the schedule."""
        if self.start is None:
            self.session.set_plan(self.make_schedule(len(self.session) + len(tokens)).plan_at(-1))
            scores: Scores = self.session.extend(tokens, hidden_layers)
            return scores
        for token in tokens:
            self._set_plan()
            self.session.extend([token])
        scores = self.session.extend((), hidden_layers)
        return scores

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the newest token's row, after the layers of its place."""
        if tree.tokens:
            raise ValueError("a schedule decides token by token: it takes no drafts")
        self._begin_schedule()
        layers = self._set_plan()
        scores: Scores = self.session.score(tree, hidden_layers)
        return scores._replace(layers=[layers])

    def rewind(self, length: int) -> None:
        """Forget the text after `length` tokens, and the schedule if no new token is left."""
        self.session.rewind(length)
        if self.start is not None and length <= self.start + 1:
            self.forget_schedule()

    def end(self) -> None:
        """End the request."""
        self.session.end()
        self.forget_schedule()


# ------------------------------ training


@dataclass(frozen=True)
class SkipDecodeSettings:
    """What a model is tuned for: section [head] of a recipe.

    horizon   N, the new tokens over which the depth falls
    keep_top  false: leave out the upper layers, not the middle (the ablation)
    """

    speedup: float = 2.0
    warmup: int = 1
    horizon: int = 128
    keep_top: bool = True

    def __post_init__(self) -> None:
        if not (1 <= self.speedup <= 8 and self.warmup >= 0 and self.horizon >= 1):
            raise TinyspecError("[head] wants 1 <= speedup <= 8, warmup >= 0, horizon >= 1")


def skip_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the cross-entropy of what the model wrote, each token through its own layers.

    New token 0 of a text is the first of the answer, or the first of it that the context holds. A
    question that the model wrote before it is part of the prompt.
    """
    own, blocks = tuning.settings, tuning.blocks
    depth = blocks.config.n_layers
    schedule = plan_depths(own.speedup, depth, own.warmup, own.horizon, own.keep_top)
    ids, is_answer = batch.ids, batch.is_answer[:, :-1]
    if not is_answer.any():
        return blocks.embed.sum() * 0
    places = torch.arange(ids.shape[1] - 1, device=ids.device)
    begins = is_answer & ~F.pad(is_answer, (1, 0))[:, :-1]
    steps = places - (places * begins).amax(dim=1, keepdim=True)  # [B, T - 1]
    *_, states = blocks.layer_states(ids[:, :-1], skipped=schedule.mask_skipped(steps))
    return F.cross_entropy(blocks.compute_logits(states[is_answer]), ids[:, 1:][is_answer])


# ------------------------------ the card


@technique(
    title="SkipDecode: fewer middle layers the later the token",
    summary="later tokens skip more middle layers",
    paper="Del Corro et al. 2023, arXiv 2307.02628",
    reported="2x to 5x, OPT (survey)",
    family="early exit",
    guarantee=Guarantee.LOSSY,
    lossy=("speedup", 1.0),
    tuned=Tuned(SkipDecodeSettings, skip_loss, small=SkipDecodeSettings(horizon=4)),
    knobs=(
        Knob(
            "speedup",
            2.0,
            "the layers of the model for each layer that a token runs, on average; 1: all run",
            low=1.0,
            high=8.0,
        ),
        Knob(
            "warmup", 1, "layers at the bottom that every token runs", low=0, high=1023, small=(1,)
        ),
        Knob(
            "horizon",
            0,
            "new tokens over which the depth falls; 0: what the model was tuned for, else as many "
            "as the text can get",
            low=0,
            high=1 << 20,
            small=(2, 1),
        ),
    ),
)
def skip_decode(request: Request, *, speedup: float, warmup: int, horizon: int) -> Decoder:
    """Return a decoder whose tokens run fewer layers the later they stand."""
    session: Any = request.target
    model = session.model
    tuned = tuned_settings(model, "skip_decode", SkipDecodeSettings)

    def make_schedule(prompt: int) -> DepthSchedule:
        longest = find_longest_output(request, prompt)
        chosen = horizon or (tuned.horizon if is_tuned_for(model, "skip_decode") else longest)
        n_falling = 0 if chosen == math.inf else int(chosen)
        return plan_depths(speedup, model.config.n_layers, warmup, n_falling, tuned.keep_top)

    if speedup == 1:
        return request.decoder(BaseDrafter(), verify_tree)
    make_schedule(0)  # raises an error before anything runs, if the knobs do not fit the model
    target: Any = SkipTarget(session, make_schedule)
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)
