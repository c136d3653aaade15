"""Every mutant is killed by the law meant for it, nothing right is accused, no law is idle."""

import json

import pytest

from tinyspec._core import reference
from tinyspec.decoding.verify import residual, verify_tree
from tinyspec.laws import museum
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.judges import all_judges
from tinyspec.laws.museum.catalogue import CATALOGUE, WAITING
from tinyspec.laws.museum.patching import Patch, apply_patches, replace_once, show_diff, unwrap
from tinyspec.laws.museum.rows import Change, Equivalent, Mutant
from tinyspec.laws.parts import PARTS
from tinyspec.tree import TokenTree

MUTANTS, EQUIVALENT = museum.mutants(), museum.equivalents()
TWINS = {mutant.law: mutant.parts for mutant in MUTANTS if mutant.parts is not PARTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_its_law(mutant: Mutant) -> None:
    right = {patch.function: unwrap(patch.function).__code__ for patch in mutant.patches}
    line = museum.judge_mutant(mutant)
    assert line["killed_by"] == mutant.law, line.get("survived")
    assert line["counterexample"]["expected"] != line["counterexample"]["got"]
    json.dumps(line, allow_nan=False)
    assert all(unwrap(function).__code__ is code for function, code in right.items())


@pytest.mark.parametrize("law", all_judges(), ids=str)
def test_a_law_accuses_nothing_right_and_kills(law: str) -> None:
    """So a killed mutant does something: its law sees it, and does not see it in the library."""
    assert all_judges()[law](PARTS).cases > 0
    assert law in {mutant.law for mutant in MUTANTS}


@pytest.mark.parametrize("law", TWINS)
def test_a_twin_that_mutants_change_is_right(law: str) -> None:
    """Where a kernel is compiled its plain twin is changed: unchanged, the law finds nothing."""
    assert all_judges()[law](TWINS[law]).cases > 0


@pytest.mark.parametrize("change", EQUIVALENT, ids=lambda change: change.name)
def test_an_equivalent_change_is_not_accused(change: Equivalent) -> None:
    assert change.laws and len(change.proof) > 60
    change.check()


@pytest.mark.parametrize(
    "change", [*MUTANTS, *EQUIVALENT, *museum.toys()], ids=lambda change: change.name
)
def test_the_old_text_occurs_once(change: Change) -> None:
    with change.applied():
        pass
    assert all(patch.old.split() != patch.new.split() for patch in change.patches)


def test_no_two_mutants_share_a_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 264


def test_no_two_mutants_are_the_same_change() -> None:
    seen = {(mutant.patches, mutant.law) for mutant in MUTANTS}
    assert len(seen) == len(MUTANTS)


def test_every_known_mistake_has_a_mutant_or_waits() -> None:
    hosted = {bug for entry in (*MUTANTS, *EQUIVALENT) for bug in entry.bug.split(", ")}
    assert hosted <= CATALOGUE.keys()
    assert hosted.isdisjoint(WAITING)
    assert hosted | WAITING.keys() == CATALOGUE.keys()


def test_a_crash_is_no_verdict() -> None:
    first = "kernels = getattr(p"
    crashes = Mutant("crashes", first, f"1 / 0\n{first}", verify_tree, law=JOINT)
    line = museum.judge_mutant(crashes)
    assert line["killed_by"] is None and "ZeroDivisionError" in line["survived"]


def test_a_mutant_that_survives_is_reported() -> None:
    nothing = Mutant("none", "rng: RandomSource", "rng:  object", verify_tree, law="support")
    line = museum.judge_mutant(nothing)
    assert line["killed_by"] is None and "found nothing" in line["survived"]


def test_a_counterexample_speaks_of_the_task() -> None:
    """It has the smallest p and q that show it, the draft, the expected and the got
    distribution.
    """
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "residual is p")
    found = museum.judge_mutant(mutant)["counterexample"]
    assert found["case"] == {
        "p": ["1/2", "1/2"],
        "q": ["0", "1"],
        "draft": "chain of 1",
        "tokens": 1,
    }
    assert found["expected"] == {"(0,)": "1/2", "(1,)": "1/2"}
    assert found["got"] == {"(0,)": "1/4", "(1,)": "3/4"}


# ------------------------------------------------------------------ patching


def test_a_patch_holds_inside_the_block_only() -> None:
    half = reference.Fraction(1, 2)
    with apply_patches([Patch(reference.residual, "unnormalized_residual(row, q, -1)", "row")]):
        assert residual([half, half], [half * 2, half * 0]) == [half, half]
    assert residual([half, half], [half * 2, half * 0]) == [0, 1]


def test_a_patch_ends_with_an_error() -> None:
    tree = TokenTree.chain([0])
    with (
        pytest.raises(KeyError),
        apply_patches([Patch(TokenTree.path, "return", "raise KeyError\nreturn")]),
    ):
        tree.path(0)
    assert tree.path(0)


@pytest.mark.parametrize("old", ["no such text", "("])
def test_a_text_that_is_not_there_exactly_once_is_an_error(old: str) -> None:
    with (
        pytest.raises(ValueError, match=r"decoding.verify.verify_tree: .* occurs \d+ times"),
        apply_patches([Patch(verify_tree, old, "")]),
    ):
        pass


def test_new_outer_names_are_an_error() -> None:
    """A code object cannot gain a variable of the function around it."""
    wrong = Patch(TokenTree.path, "return", "super()\nreturn")
    with pytest.raises(ValueError, match="other outer names"), apply_patches([wrong]):
        pass


def test_unknown_names_are_an_error() -> None:
    """So that a name that was changed elsewhere is found without running the law."""
    wrong = Patch(TokenTree.path, "return", "no_such_name\nreturn")
    with pytest.raises(ValueError, match=r"not there: \['no_such_name'\]"), apply_patches([wrong]):
        pass


def test_what_is_no_plain_function_is_an_error() -> None:
    with pytest.raises(TypeError, match="no function of Python"):
        unwrap(len)


def test_further_lines_keep_the_indentation() -> None:
    assert replace_once("a\n    b  c\n", "b c", "d\ne") == "a\n    d\n    e\n"


def test_a_diff_names_the_place() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "everything is accepted")
    assert show_diff(mutant.patches).splitlines()[0] == "_core.reference.verify_tree"
    assert "  + accept(1)" in show_diff(mutant.patches)
