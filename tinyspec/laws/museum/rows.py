"""The rows of the museum: a mutant is a change of the library that one law must catch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tinyspec.laws.evidence import Evidence
from tinyspec.laws.judges import PartsLaw, all_judges
from tinyspec.laws.museum.patching import Patch, apply_patches, changed_copy
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.laws.traps import find_trap


@dataclass(frozen=True)
class Change:
    """A change of the library.

    name      what is wrong, in a few words
    old, new  the text that is replaced, and what stands there instead
    function  where that text is
    bug       its entries in the catalogue, where the mistake was met
    also      further places that the same change touches
    parts     the parts that the law judges: where a compiled kernel has a plain twin, the twin
    kernel    the name of the kernel whose plain twin is changed: its changed copy is judged
    """

    name: str
    old: str
    new: str
    function: Any
    bug: str = "slip"
    also: tuple[Patch, ...] = ()
    parts: Parts = PARTS
    kernel: str | None = None

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Every place that is changed."""
        return (Patch(self.function, self.old, self.new), *self.also)

    @property
    def host(self) -> str:
        """The functions that are changed."""
        return ", ".join(dict.fromkeys(patch.place for patch in self.patches))

    @contextmanager
    def applied(self) -> Iterator[Parts]:
        """Run the library with the change inside the block; yields the parts to judge."""
        if self.kernel is not None:
            copy = changed_copy(self.patches[0])
            yield replace(self.parts, kernels={**self.parts.kernels, self.kernel: copy})
            return
        with apply_patches(self.patches):
            yield self.parts


@dataclass(frozen=True, kw_only=True)
class Mutant(Change):
    """A defect. `law` is the name of the law that must catch it."""

    law: str

    def check(self) -> Evidence:
        """Ask the law. Raises LawViolated if it catches the defect."""
        with self.applied() as parts:
            return all_judges()[self.law](parts)


@dataclass(frozen=True, kw_only=True)
class Equivalent(Change):
    """A change that no law may accuse, with the proof why.

    laws  those that look at it, by name or made for it
    """

    proof: str
    laws: tuple[str | PartsLaw, ...]

    def check(self) -> None:
        """Ask every law. Raises LawViolated if one sees the change after all."""
        with self.applied() as parts:
            for law in self.laws:
                judge: Callable[[Parts], Evidence] = (
                    all_judges()[law] if isinstance(law, str) else law
                )
                judge(parts)


@dataclass(frozen=True, kw_only=True)
class Toy(Change):
    """A look-alike of a technique, as a change of it: simpler, and the same in a demonstration.

    technique  its registry name
    law        the trap that it must fall into
    """

    technique: str
    law: str

    def check(self) -> Evidence:
        """Set the trap. Raises LawViolated if the toy falls into it."""
        trap = find_trap(self.technique, self.law)
        with self.applied():
            return trap.check(trap.real())
