"""Loops, stop rules and streams of chance with one defect each."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.stopping import Reason, StoppingCriteria
from tinyspec.laws.exact import JOINT
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS

# ------------------------------------------------------------------ noise that is used twice


class Renamed:
    """A chance whose streams are asked for under other names."""

    def __init__(self, rng: Any, name: Any):
        self.rng, self.name = rng, name

    def split(self, role: str, round: int) -> Any:
        return self.rng.split(*self.name(role, round))


def streams(name: Any) -> type[Decoder]:
    """A decoder that names its streams so; right: (role, round), which names none twice."""

    class Named(Decoder):
        def step(self, rng: Any) -> Round:
            return super().step(Renamed(rng, name))  # type: ignore[arg-type]

    return Named


class SharedStream(Seeded):
    """All requests of a process draw on one generator."""

    generator = np.random.Generator(np.random.Philox(key=1))

    def __init__(self, seed: int):
        super().__init__(int(self.generator.integers(1 << 30)))  # right: super().__init__(seed)


class GlobalGenerator(Seeded):
    """Asks Python's global generator for its seed."""

    def split(self, role: str, round: int) -> Seeded:
        return Seeded(random.getrandbits(30)).split(
            role, round
        )  # right: super().split(role, round)


# ------------------------------------------------------------------ the loop


class TrustsDraftedEnd(Decoder):
    """Closes the request when the *draft* ends the text."""

    def step(self, rng: Any) -> Round:
        round = super().step(rng)
        if any(token in self.stop.eos for token in round.tree.tokens):
            self.finished = (
                "eos"  # right: where the stop rule finds an end among the committed tokens
            )
        return round


class CutsAfterTheCommit(Decoder):
    """The step commits all that was accepted; what a stop cuts off is only taken out of the
    answer.
    """

    def step(self, rng: Any) -> Round:
        stop, self.stop = (
            self.stop,
            StoppingCriteria(),
        )  # right: the cut comes first, inside the step
        round = super().step(rng)
        self.stop = stop
        before = self.context[self.start : len(self.context) - len(round.tokens)]
        kept, self.finished = stop.cut(before, round.tokens, self._limit)
        del self.context[len(self.context) - len(round.tokens) + kept :]
        return round._replace(tokens=round.tokens[:kept])


class RoomForOneMore(Decoder):
    @property
    def max_draft_depth(self) -> int:
        return super().max_draft_depth + 1  # right: each round adds a token of its own


class LawsOneLate(Decoder):
    def step(self, rng: Any) -> Round:
        round = super().step(rng)
        return round._replace(
            output_probs=(*round.output_probs[1:], round.output_probs[0])
        )  # right: round.output_probs


# ------------------------------------------------------------------ the stop


class OnlyTheLastToken(StoppingCriteria):
    """Looks for a stop at the end of a block."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, Reason | None]:
        kept, reason = super().cut([*new, *fresh[:-1]], fresh[-1:], limit)
        return len(fresh) - 1 + kept, reason  # right: at every token of the block


class OnlyTheBlock(StoppingCriteria):
    """Forgets what stood before the block, so that a stop which began there is missed."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, Reason | None]:
        most = None if self.max_new_tokens is None else self.max_new_tokens - len(new)
        left = None if limit is None else limit - len(new)
        alone = StoppingCriteria(self.eos, self.strings, self.sequences, most, self.decode)
        return alone.cut((), fresh, left)  # right: after `new`


class CapFirst(StoppingCriteria):
    """The budget is looked at before the block."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, Reason | None]:
        room = self.tokens_left(len(new), limit)
        if room is not None and len(fresh) >= room[0]:
            return room  # right: unless something in these tokens ended the text before
        return super().cut(new, fresh, limit)


class Overshoots(StoppingCriteria):
    """The budget is looked at after the block."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, Reason | None]:
        kept, reason = StoppingCriteria(
            self.eos, self.strings, self.sequences, None, self.decode
        ).cut(new, fresh)
        room = self.tokens_left(len(new) + kept, limit)
        if reason is None and room is not None and room[0] <= 0:
            return kept, room[1]  # right: not more than there was room for
        return kept, reason


class DropsTheEnd(StoppingCriteria):
    """An end token is not kept."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, Reason | None]:
        kept, reason = super().cut(new, fresh, limit)
        return (kept - 1, reason) if reason == "eos" else (kept, reason)  # right: kept


def with_eos(change: Any) -> Any:
    """A stop rule that knows other end tokens than it was given."""
    return lambda **rule: StoppingCriteria(**{**rule, "eos": change(rule["eos"])})


def _noise(
    name: str, bug: str, decoder: Any, law: str = JOINT, witness: Any = see.chains
) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, decoder=decoder), witness)


def _loop(name: str, bug: str, decoder: Any, law: str = "stop", witness: Any = see.ends) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, decoder=decoder), witness)


def _stop(name: str, bug: str, stop: Any) -> Mutant:
    return Mutant(name, bug, "stop", replace(PARTS, stop=stop), see.ends)


MUTANTS = [
    _noise("reseeded in the loop", "B32", streams(lambda role, round: (role, 0))),
    _noise(
        "draft noise kept over rounds",
        "S1",
        streams(lambda role, round: (role, 0 if role == "draft" else round)),
    ),
    _noise(
        "draft and verifier share a stream", "B32", streams(lambda role, round: ("noise", round))
    ),
    _noise(
        "noise comes round again",
        "S1",
        streams(lambda role, round: (role, round % 4)),
        "chance ledger",
        see.uniforms,
    ),
    Mutant(
        "stream shared by requests",
        "B33",
        "same seed same output",
        replace(PARTS, seeded=SharedStream),
        see.noise_states,
    ),
    Mutant(
        "global generator used",
        "B34",
        "global randomness is untouched",
        replace(PARTS, seeded=GlobalGenerator),
        see.noise_states,
    ),
    _loop("drafted end of text trusted", "B27", TrustsDraftedEnd),
    _loop("cut after the commit", "B26", CutsAfterTheCommit, "committed text"),
    _loop("draft one too deep", "B30", RoomForOneMore, "room"),
    _loop(
        "laws of a round one late", "B16", LawsOneLate, "round laws are the targets", see.figures
    ),
    _stop("end of text ignored", "S11", with_eos(lambda eos: frozenset())),
    _stop("only one end token known", "B28", with_eos(lambda eos: frozenset(sorted(eos)[:1]))),
    _stop("stop looked for at the last token only", "B26", OnlyTheLastToken),
    _stop("stop across rounds missed", "B29", OnlyTheBlock),
    _stop("budget before stops", "slip", CapFirst),
    _stop("more tokens than asked for", "B30", Overshoots),
    _stop("end token dropped", "B26", DropsTheEnd),
]
