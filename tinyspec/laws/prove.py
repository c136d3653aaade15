"""Hold a technique to its guarantee, and say what was looked at.

    from tinyspec.laws.prove import prove
    prove(find("speculative_decoding"))
    # [Evidence(law='joint distribution', cases=38, branches=1012, ...), ...]

A profile says which cases are looked at, on how many seeds. Nothing is random: the same profile
asks the same questions, so a run that was stopped goes on where it was (`State`).
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError
from tinyspec.laws import exit_laws  # noqa: F401  (enters CALM's oracle)
from tinyspec.laws.contracts import contracts_of_technique
from tinyspec.laws.evidence import Counterexample, Evidence, LawViolated
from tinyspec.laws.suites import SuiteCase, technique_cases
from tinyspec.plugins import describe_error, locate_error
from tinyspec.processes import run_pieces
from tinyspec.technique import Card, Guarantee, find_technique, load_plugin, load_techniques

CONTRACTS = "the contracts of a drafter"


@dataclass(frozen=True)
class Profile:
    """The selection of cases that a proof runs.

    seeds   each makes other tables, prompts and references
    sample  how many cases of a seed's list are asked, chosen by the seed; None: all
    """

    name: str
    seeds: Sequence[int] = (0,)
    sample: int | None = None


CI = Profile("ci")
THOROUGH = Profile("thorough", range(10))
FIVE_SECONDS = Profile("five-second", sample=16)

WatchCases = Callable[[Card, int, int, SuiteCase], None]
"""Called before each case with the card, how many cases are done, how many there are, and the
case.
"""


def prove_technique(
    card: Card, profile: Profile = CI, state: "State | None" = None, watch: WatchCases | None = None
) -> list[Evidence]:
    """Return what was proved, one Evidence per law; raises LawViolated at the first broken case.

    A technique of kind "analysis" decodes nothing, so there is nothing to prove: the list is empty.
    """
    found: dict[str, Evidence] = {}
    for case, run in _case_runs(card, list_questions(card, profile), state, watch):
        try:
            _add(found, run())
        except LawViolated as accused:
            accused.add_note(f"case: {case.title}")
            raise
    if state is not None:
        state.write()
    return list(found.values())


def _case_runs(
    card: Card,
    asked: Sequence[tuple[str, SuiteCase]],
    state: "State | None",
    watch: WatchCases | None,
) -> Iterator[tuple[SuiteCase, Callable[[], Evidence]]]:
    """Yield every case that is asked, and a function that runs it or recalls its result."""

    def run(key: str, case: SuiteCase) -> Evidence:
        evidence = None if state is None else state.known(card.name, key)
        if evidence is None:
            evidence = case.run()
            if state is not None:
                state.enter(card.name, key, evidence)
        return evidence

    for number, (key, case) in enumerate(asked):
        if watch is not None:
            watch(card, number, len(asked), case)
        yield case, partial(run, key, case)


def _add(found: dict[str, Evidence], evidence: Evidence) -> None:
    known = found.get(evidence.law)
    found[evidence.law] = evidence if known is None else known + evidence


def list_questions(card: Card, profile: Profile) -> list[tuple[str, SuiteCase]]:
    """Return every case of a profile, with a name that is its own: seed, law, title."""
    asked: list[tuple[str, SuiteCase]] = []
    for seed in profile.seeds:
        chosen = technique_cases(card, seed)
        if profile.sample is not None and len(chosen) > profile.sample:
            rng = random.Random(f"{card.name} {seed}")
            chosen = [chosen[i] for i in sorted(rng.sample(range(len(chosen)), profile.sample))]
        asked += [(f"{seed}: {case.law}: {case.title}", case) for case in chosen]
    has_contracts = card.guarantee in (Guarantee.EXACT, Guarantee.LOSSY)
    declares = card.kind == "decoder" and not card.coupled  # a raced token has no distribution
    if profile.sample is None and declares and has_contracts:
        title = "truthful, presence, examined tokens"
        asked.append((CONTRACTS, SuiteCase(CONTRACTS, title, lambda: _contracts(card))))
    return asked


def _contracts(card: Card) -> Evidence:
    """Check what its drafter owes, under every warper and in every precision, for any seed."""
    return sum(contracts_of_technique(card), Evidence(CONTRACTS))


class State:
    """The results so far, in a JSON file that survives an interruption.

    path     None: in memory only
    profile  a file made under another profile, or with other code, is rejected
    """

    def __init__(self, path: Path | None, profile: str):
        self.path, self.profile = path, profile
        self.done: dict[str, dict[str, dict[str, Any]]] = {}
        self.accused: list[dict[str, Any]] = []
        self._written = 0.0
        code_fingerprint()
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            profile, code = data["profile"], data["code"]
            self.done, self.accused = data["done"], data["accused"]
        except (ValueError, KeyError, TypeError) as error:
            raise TinyspecError(
                f"{path} is not a file that --resume wrote: choose another name"
            ) from error
        if profile != self.profile:
            raise TinyspecError(
                f"{path} was begun under the profile '{profile}', not '{self.profile}': "
                "choose another name"
            )
        if code != code_fingerprint():
            raise TinyspecError(
                f"{path} was begun with other code, which proves nothing of this: "
                "choose another name"
            )

    def known(self, method: str, key: str) -> Evidence | None:
        """Return what a case found when it was run before."""
        entry = self.done.get(method, {}).get(key)
        return None if entry is None else Evidence(**entry)

    def enter(self, method: str, key: str, evidence: Evidence) -> None:
        """Record what a case found; the file is at most two seconds late."""
        self.done.setdefault(method, {})[key] = asdict(evidence)
        if monotonic() - self._written > 2:
            self.write()

    def blame(self, method: str, seed: int, accused: LawViolated) -> None:
        """Record a counterexample."""
        entry = {"method": method, "seed": seed, **accused.counterexample.as_dict()}
        if entry not in self.accused:
            self.accused.append(entry)
        self.write()

    def write(self) -> None:
        """Replace the file by a new one, so that no half of it is ever seen."""
        if self.path is None:
            return
        whole = {
            "profile": self.profile,
            "code": code_fingerprint(),
            "done": self.done,
            "accused": self.accused,
        }
        text = json.dumps(whole, indent=1)
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self.path)
        self._written = monotonic()


@cache
def code_fingerprint() -> str:
    """Return a hash of the code that is judged and that judges, as it was at the start.

    It covers everything below the command line, and the files of plugins.
    """
    package, above = Path(__file__).parent.parent, ("cli", "bench")
    files = [
        file
        for file in sorted(package.rglob("*.py*"))
        if file.relative_to(package).parts[0] not in above
    ]
    modules = {card.build.__module__ for card in load_techniques().values()}
    plugins = [name for name in modules if not name.startswith("tinyspec.")]
    outside = [getattr(sys.modules.get(name), "__file__", None) for name in plugins]
    files += [Path(file) for file in sorted(filter(None, outside))]
    sources = [file.read_bytes() for file in files if file.suffix in (".py", ".pyx", ".pxd")]
    return blake2b(b"\0".join(sources), digest_size=8).hexdigest()


# ---------------------------------------------------------------------- several processes


class ProofPiece(NamedTuple):
    """A piece of a proof that another process can run.

    plugin  the file of a technique that is not the book's
    number  which case of the profile; None: all of them together
    """

    method: str
    plugin: str | None
    profile: Profile
    number: int | None
    key: str

    def answer(self) -> tuple[str, str, Evidence | None]:
        """Run it. Returns (method, key, evidence); None: a law is broken, or something was raised.

        The process that asked runs it again then, and reports what it finds.
        """
        if self.plugin is not None and self.method not in load_techniques():
            load_plugin(self.plugin)
        card = find_technique(self.method)
        try:
            if self.number is None:
                found = sum(prove_technique(card, self.profile), Evidence("all"))
            else:
                found = _questions_of(card, self.profile)[self.number][1].run()
        except Exception:
            return self.method, self.key, None
        return self.method, self.key, found


@lru_cache(maxsize=4)
def _questions_of(card: Card, profile: Profile) -> list[tuple[str, SuiteCase]]:
    return list_questions(card, profile)


def list_pieces(
    cards: Sequence[Card], profile: Profile, state: State, by_seed: bool
) -> list[ProofPiece]:
    """Return what is still to be run. With `by_seed`, all cases of a seed are one piece."""
    jobs = list[ProofPiece]()
    for card in cards:
        module = card.build.__module__
        is_plugin = not module.startswith("tinyspec.")
        plugin = getattr(sys.modules.get(module), "__file__", None) if is_plugin else None
        pieces: list[tuple[int | None, str, Profile]]
        if by_seed:
            pieces = [(None, str(seed), replace(profile, seeds=(seed,))) for seed in profile.seeds]
        else:
            keys = (key for key, _ in list_questions(card, profile))
            pieces = [(index, key, profile) for index, key in enumerate(keys)]
        jobs += [
            ProofPiece(card.name, plugin, part, number, key)
            for number, key, part in pieces
            if state.known(card.name, key) is None
        ]
    return jobs


def run_jobs(
    cards: Sequence[Card],
    profile: Profile,
    state: State,
    n_jobs: int,
    on_ray: bool = False,
    by_seed: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> None:
    """Run a proof's pieces in several processes, and enter what they find into the state.

    The proof itself then recalls them, in its own order, so its result does not depend on the
    number of processes. Raises TinyspecError: see `run_pieces`.
    """
    left = list_pieces(cards, profile, state, by_seed)
    found = run_pieces(ProofPiece.answer, left, n_jobs, on_ray)
    for done, (method, key, evidence) in enumerate(found, 1):
        if evidence is not None:
            state.enter(method, key, evidence)
        if watch is not None:
            watch(method, done, len(left))
    state.write()


def report_technique(
    card: Card,
    profile: Profile,
    state: State | None = None,
    watch: WatchCases | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Check all laws of a technique and return plain data: what was proved and what was broken.

    A broken law is not asked again, and the others are. An exception breaks the law whose case ran,
    unless `strict`: then it goes through. `broken` has a counterexample for each broken law, with
    the title of its case; `accused` is the first of them, or None.
    """
    found: dict[str, Evidence] = {}
    broken: dict[str, dict[str, Any]] = {}
    law, title = "its card", "what the laws ask of it"
    caught = () if strict else (Exception,)
    try:
        asked = list_questions(card, profile)
    except caught as error:
        broken[law] = {"title": title, **_crash(card, law, error).as_dict()}
        asked = []
    for case, run in _case_runs(card, asked, state, watch):
        if (law := case.law) in broken:
            continue
        try:
            _add(found, run())
        except LawViolated as accused:
            broken[law] = {"title": case.title, **accused.counterexample.as_dict()}
        except caught as error:
            broken[law] = {"title": case.title, **_crash(card, law, error).as_dict()}
    if state is not None:
        state.write()
    proved = [asdict(evidence) for evidence in found.values() if evidence.law not in broken]
    first = next(iter(broken.values()), None)
    accused_of = None if first is None else {k: v for k, v in first.items() if k != "title"}
    return {
        "method": card.name,
        "guarantee": card.guarantee.value,
        "kind": card.kind,
        "accused": accused_of,
        "proved": proved,
        "broken": list(broken.values()),
    }


def _crash(card: Card, law: str, error: BaseException) -> Counterexample:
    """Return an exception of a technique as a counterexample: what was raised, and where."""
    file = getattr(sys.modules.get(card.build.__module__), "__file__", None)
    where = {} if file is None else {"raised at": locate_error(error, Path(file))}
    return Counterexample(law, where, "no exception", describe_error(error))


def nothing_correct_is_accused(
    cards: Sequence[Card],
    seeds: int,
    state: State,
    watch: Callable[[Card, int], None] | None = None,
) -> dict[str, Any]:
    """Run the five-second profile on many seeds: every counterexample here is wrong, or a defect.

    Returns what was looked at, by method, and every counterexample. Goes on where `state` was left.
    """
    methods: dict[str, Any] = {}
    for card in cards:
        total = Evidence("all")
        for seed in range(seeds):
            if watch is not None:
                watch(card, seed)
            known = state.known(card.name, str(seed))
            if known is None:
                one_seed = Profile("five-second", (seed,), FIVE_SECONDS.sample)
                try:
                    known = sum(prove_technique(card, one_seed), Evidence("all"))
                except LawViolated as accused:
                    state.blame(card.name, seed, accused)
                    known = Evidence("all")
                state.enter(card.name, str(seed), known)
            total = total + known
        state.write()
        methods[card.name] = {
            "seeds": seeds,
            "cases": total.cases,
            "branches": total.branches,
            "seconds": total.seconds,
        }
    return {"profile": FIVE_SECONDS.name, "methods": methods, "accused": state.accused}
