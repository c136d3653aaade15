"""The other forms: a whole decoding function, and a drafter."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.laws.accused import Counterexample
from tinyspec.laws.cases import CheckCase, SmallModel, draft_cases, generation_cases
from tinyspec.laws.dice import EnumeratedGenerator
from tinyspec.laws.forms import (
    Form,
    Misfit,
    OutcomeProbs,
    RunOutcome,
    Tokens,
    convert_rows,
    read_token_ids,
    to_small_fraction,
)


class GenerationForm(Form):
    """generate(p, q, gamma, n, rng) -> tokens."""

    what = "decoding function"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        return generation_cases(seed)

    def shown(self, case: CheckCase) -> dict[str, Any]:
        shown = {}
        for name, model in (("p", case.p), ("q", case.q)):
            laws: Any = model.shown(case.tokens - 1)
            if len(model.laws) == 1:
                laws = {"any context": list(model.laws[0])}
            elif isinstance(laws, list):
                laws = {f"{length} tokens before": law for length, law in enumerate(laws)}
            shown[name] = laws
        return shown | {"gamma": case.gamma, "n": case.tokens}

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        def p(context: Any) -> Any:
            return convert_rows(case.p.law(read_token_ids(context, "context")), numbers)

        def q(context: Any) -> Any:
            return convert_rows(case.q.law(read_token_ids(context, "context")), numbers)

        return RunOutcome(
            (), read_token_ids(self.call(dice, p, q, case.gamma, case.tokens), self.what)
        )

    def judge(self, case: CheckCase, law: OutcomeProbs) -> Counterexample | None:
        for outcome, mass in law.items():
            fits = len(outcome.tokens) >= case.tokens and all(
                0 <= t < case.vocabulary for t in outcome.tokens
            )
            if not fits and not self.too_rare(outcome, mass):
                expected = f"{case.tokens} token ids below {case.vocabulary}"
                return Counterexample(
                    "tokens asked for", self.shown(case), expected, list(outcome.tokens)
                )
        return self.compare(case, law)

    def report(self, *given: Any) -> Any:
        shown, expected, got = super().report(*given)
        del shown["draft"]
        return shown, expected, got


class DrafterForm(Form):
    """draft(q, context, gamma, rng) -> (tokens, laws)."""

    what, law = "drafter", "truthful drafter"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        return draft_cases(seed)

    def shown(self, case: CheckCase) -> dict[str, Any]:
        return {"q": case.q.shown(case.gamma - 1), "gamma": case.gamma}

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        def q(context: Any) -> Any:
            return convert_rows(case.q.law(read_token_ids(context, "context")), numbers)

        return self.outcome(self.call(dice, q, [], case.gamma))

    def outcome(self, result: Any) -> RunOutcome:
        """What a drafter returned."""
        try:
            tokens, laws = result
        except (TypeError, ValueError):
            raise Misfit(
                f"a drafter returns (tokens, distributions); this one returned {result!r}"
            ) from None
        kept = tuple(
            None if law is None else tuple(getattr(law, "tolist", lambda law=law: law)())
            for law in laws
        )
        if len(tokens) != len(kept):
            raise Misfit(
                f"a drafter returns one distribution (or None) a token; this one returned {len(kept)} for {len(tokens)}"
            )
        return RunOutcome((), read_token_ids(tokens, self.what), kept)

    def judge(self, case: CheckCase, law: OutcomeProbs) -> Counterexample | None:
        """Each token, given those before it and its declared law, is distributed as that law says,
        wherever it is kept.
        """
        for place in range(max(len(outcome.tokens) for outcome in law)):
            reached: dict[Tokens, Any] = {}
            kept: dict[tuple[Tokens, Any], list[Any]] = {}
            for outcome, mass in law.items():
                before = outcome.tokens[:place]
                reached[before] = reached.get(before, 0) + mass
                if len(outcome.tokens) > place and outcome.laws[place] is not None:
                    if not 0 <= outcome.tokens[place] < len(outcome.laws[place]):
                        declared = [to_small_fraction(x) for x in outcome.laws[place]]
                        shown = self.shown(case) | {
                            "drafted before": list(before),
                            "declared": declared,
                        }
                        expected = f"a token below {len(declared)}"
                        return Counterexample(self.law, shown, expected, outcome.tokens[place])
                    masses = kept.setdefault(
                        (before, outcome.laws[place]), [0] * len(outcome.laws[place])
                    )
                    masses[outcome.tokens[place]] += mass
            for (before, declared), masses in kept.items():
                whole = sum(masses)
                if all(
                    self.same(x * whole, mass) for x, mass in zip(declared, masses, strict=True)
                ):
                    continue
                part = all(
                    mass <= reached[before] * x + 1e-9
                    for x, mass in zip(declared, masses, strict=True)
                )
                shown = self.shown(case) | {
                    "drafted before": list(before),
                    "declared": [to_small_fraction(x) for x in declared],
                }
                expected = f"tokens drawn from the declared distribution{', kept whatever they are' if part else ''}"
                got = [to_small_fraction(mass / whole) for mass in masses]
                return Counterexample("presence" if part else self.law, shown, expected, got)
        return None

    def corner(self, case: CheckCase, law: OutcomeProbs, number: int) -> Counterexample | None:
        return None


@dataclass(frozen=True)
class DraftContext:
    """What a drafter with a model of its own is asked."""

    text: Tokens
    gamma: int = 8  # uniforms it may index
    tokens: int = 0
    vocabulary: int = 0
    p = SmallModel(())


class OwnDrafterForm(DrafterForm):
    """draft(context, rng) -> (tokens, laws)."""

    def cases(self, seed: int) -> Iterator[DraftContext]:  # type: ignore[override]
        return (DraftContext(text) for text in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))

    def shown(self, case: DraftContext) -> dict[str, Any]:  # type: ignore[override]
        return {"context": list(case.text)}

    def play(  # type: ignore[override]
        self, case: DraftContext, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        return self.outcome(self.call(dice, list(case.text)))
