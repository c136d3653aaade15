"""The two oracles of optimal transport agree, and small distributions are enumerated once."""

import importlib
from fractions import Fraction as F

import numpy as np
import pytest

import tinyspec
from tinyspec.errors import TinyspecError
from tinyspec.laws import evidence, theorems
from tinyspec.laws.exact.rational import distribution_pairs, distributions, overlap_mass


def test_the_linear_program_and_the_cut_agree() -> None:
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    cases = [
        (p, q, k, replace)
        for p, q in list(distribution_pairs((3,), 5))[::23]
        for k in (1, 2, 3)
        for replace in (True, False)
    ]
    for _ in range(20):
        weights = [rng.integers(0, 9, 4) + np.eye(4, dtype=int)[0] for _ in "pq"]
        p, q = (tuple(F(int(x), int(w.sum())) for x in w) for w in weights)
        cases.append((p, q, int(rng.integers(1, 4)), bool(rng.integers(2))))
    for p, q, k, again in cases:
        drawn = theorems.drafted_sets(q, k, again)
        best = theorems.optimal_transport(p, drawn)
        assert theorems.by_linear_program(p, drawn) == pytest.approx(float(best), abs=1e-9)
        if k == 1:
            assert best == overlap_mass(p, q)
        if again:  # the closed form over all sets of tokens
            sets = [[y for y in range(len(p)) if mask >> y & 1] for mask in range(1 << len(p))]
            assert best == min(1 + sum(p[y] for y in h) - sum(q[y] for y in h) ** k for h in sets)
            assert theorems.matching_acceptance(p, q, k) <= best


def test_without_scipy_the_error_says_what_to_install(monkeypatch) -> None:
    def gone(name: str):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(TinyspecError, match=r'needs scipy: pip install .*test\]"'):
        theorems.by_linear_program((F(1),), {frozenset({0}): F(1)})


def test_the_install_command_fits_a_clone_or_a_wheel(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tinyspec, "__file__", str(tmp_path / "tinyspec" / "__init__.py"))
    assert evidence.install_command() == 'pip install "tinyspec[test]"'
    (tmp_path / "pyproject.toml").touch()
    assert evidence.install_command() == 'pip install -e ".[test]"'


def test_small_distributions_come_once_each_and_the_smallest_first() -> None:
    some = list(distribution_pairs(largest=6))
    assert len(set(some)) == len(some)
    assert some[0] == ((0, 1), (0, 1))
    assert all(sum(p) == sum(q) == 1 for p, q in some)
    assert len(list(distributions(3, 4))) == 9
