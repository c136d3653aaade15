"""Compute the numbers of sampling and verification, for the exact laws and for the CPU.

A distribution is a list of Fractions in the exact laws, a float64 ndarray on the CPU, or a tensor
on a device. `Kernels` is the definition, in plain Python over any number type. `HostKernels` runs
the compiled kernels, which equal it bit for bit. `device.DeviceKernels` runs torch operations.
`sampling.kernels_of` chooses between them by looking at one row.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tinyspec import _core
from tinyspec._core import reference
from tinyspec.errors import TinyspecError
from tinyspec.lm.host import to_numpy
from tinyspec.tree import ROOT, Probs, TokenTree

if TYPE_CHECKING:  # both import this file
    from tinyspec.decoding.rng import RandomSource
    from tinyspec.decoding.sampling import SamplingParams

Outcome: TypeAlias = tuple[tuple[int, ...], int, tuple[int, ...]]
"""What a verification decides: accepted nodes, recovered or bonus token, rejected nodes."""

TokenSampler: TypeAlias = Callable[[int, int], int]
"""(an accepted node or ROOT, its depth with ROOT at 0) -> the target's next token."""

TOP_K_GROUP = 32  # numbers that share a maximum: the k-th maximum bounds the k-th highest number


class Kernels:
    """The definition, over lists of numbers: exact over Fractions."""

    def probs(self, logits: Any, history: Sequence[int], settings: "SamplingParams") -> Probs:
        """Return a table model's rational weights [V] as a distribution; 1/n is the n-th power."""
        row = [x if type(x) is Fraction else Fraction(x) for x in logits]
        if settings.repetition_penalty != 1:
            raise TinyspecError(
                "a repetition penalty acts on logits: rational weights have no exact one"
            )
        if not row or min(row) < 0 or max(row) == 0:
            raise TinyspecError(
                "rational weights must be non-negative and not all zero to define a distribution"
            )
        if settings.temperature == 0:
            return list(reference.one_hot(row))
        power = round(1 / settings.temperature)
        if not math.isclose(power * settings.temperature, 1, rel_tol=1e-9):
            raise TinyspecError(
                "rational weights are exact at temperature 0 and 1/n only, "
                f"got {settings.temperature}"
            )
        top_p = None if settings.top_p is None else as_fraction(settings.top_p)
        min_p = Fraction(0) if settings.min_p is None else as_fraction(settings.min_p)
        row = row if power == 1 else [x**power for x in row]
        probs = reference.normalize(reference.filter_tokens(row, settings.top_k, top_p, min_p))
        assert probs is not None
        return probs

    def sample(
        self, logits: Any, history: Sequence[int], settings: "SamplingParams", u: float
    ) -> int:
        """Return a token sampled from logits [V] with one uniform."""
        return self.sample_inverse_cdf(settings.probs(logits, history), u)

    def greedy_token(
        self, logits: Any, history: Sequence[int], settings: "SamplingParams"
    ) -> int | None:
        """Return the token with all the mass if it is known without computing a distribution."""
        return None

    def sample_inverse_cdf(self, p: Probs, u: float) -> int:
        """Return the token whose interval of the cumulative sum holds u * total."""
        return reference.sample_inverse_cdf(p, u)

    def sample_without_replacement(self, p: Probs, uniforms: Any) -> list[int]:
        """Return one token for each uniform, without replacement."""
        return reference.sample_without_replacement(p, list(uniforms))

    def exponential_race(self, p: Probs, noise: Any) -> int:
        """Return the token of least noise / probability."""
        return reference.exponential_race(p, list(noise))

    def residual(self, p: Probs, q: Probs) -> Probs:
        """Return max(0, p - q), normalized; p if nothing is left."""
        return reference.residual(p, q)

    def exclude_token(self, p: Probs, token: int) -> Probs:
        """Return p without this token, normalized; p if nothing is left."""
        return reference.exclude_token(p, token)

    def top_k_rows(self, logits: Any, rows: Sequence[int], k: int) -> list[list[int]]:
        """Return the ids of the k highest numbers of some rows, highest first."""
        return [
            sorted(range(len(logits[i])), key=lambda token: (-logits[i][token], token))[:k]
            for i in rows
        ]

    def as_rows(self, logits: Any) -> Any:
        """Return logits [n, V] in the form whose rows are read fastest."""
        return logits

    def as_vector(self, p: Probs, like: Any = None) -> Any:
        """Return p as a vector [V] with `+ - * /`, `.clip(min=0)`, `.max()` and `.sum()`.

        like  a vector whose type and device the result gets, if both may differ
        """
        return np.array(list(p), dtype=object)

    def verify_tree(self, tree: TokenTree, p: Any, rng: "RandomSource") -> Outcome:
        """Verify a tree, one decision after the other, as `verify.verify_tree` says."""
        return reference.verify_tree(*tree, p, rng.accept, rng.draw, self._reject)

    def token_sampler(self, tree: TokenTree, p: Any, rng: "RandomSource") -> TokenSampler:
        """Return (node, depth) -> the target's token after a node: greedy, or sampled from p[node].

        A sampled token's uniform belongs to its position in the text, len(p.context) + depth.
        Raises TinyspecError if a draft token is outside of the vocabulary. At temperature 0 and on
        a device such a token is rejected instead.
        """
        greedy_token = getattr(p, "greedy_token", None)  # of `TargetProbs`: needs no distribution
        if greedy_token is not None and (first := greedy_token(ROOT)) is not None:
            return lambda node, depth: first if node == ROOT else greedy_token(node)
        vocabulary = len(p[ROOT])
        for token, is_probe in zip(tree.tokens, tree.probe, strict=True):
            if not is_probe and not 0 <= token < vocabulary:
                raise TinyspecError(
                    f"drafted token {token} is outside of the target's vocabulary of {vocabulary}: "
                    "use a draft with the target's tokenizer"
                )
        start = len(getattr(p, "context", ()))
        return lambda node, depth: rng.draw_at(p[node], start + depth)

    def _reject(self, p: Probs, q: Probs | None, token: int, last: bool) -> Probs:
        return self.exclude_token(p, token) if q is None else self.residual(p, q)


class HostKernels(Kernels):
    """The compiled kernels of `_core`, over float64 arrays."""

    def probs(self, logits: Any, history: Sequence[int], settings: "SamplingParams") -> Probs:
        return _core.apply_sampling(_as_floats(logits), history, *settings.as_floats())

    def sample(
        self, logits: Any, history: Sequence[int], settings: "SamplingParams", u: float
    ) -> int:
        return _core.sample_from_logits(_as_floats(logits), history, *settings.as_floats(), u)

    def greedy_token(
        self, logits: Any, history: Sequence[int], settings: "SamplingParams"
    ) -> int | None:
        return settings.draw(logits, history, 0.0) if settings.temperature == 0 else None

    def sample_inverse_cdf(self, p: Probs, u: float) -> int:
        return _core.sample_inverse_cdf(_as_doubles(p), u)

    def sample_without_replacement(self, p: Probs, uniforms: Any) -> list[int]:
        return _core.sample_without_replacement(
            _as_doubles(p), np.ascontiguousarray(uniforms, np.float64)
        )

    def exponential_race(self, p: Probs, noise: Any) -> int:
        return _core.exponential_race(_as_doubles(p), np.ascontiguousarray(noise, np.float64))

    def residual(self, p: Probs, q: Probs) -> Probs:
        return _core.residual(_as_doubles(p), _as_doubles(q))

    def exclude_token(self, p: Probs, token: int) -> Probs:
        return _core.exclude_token(_as_doubles(p), token)

    def top_k_rows(self, logits: Any, rows: Sequence[int], k: int) -> list[list[int]]:
        found = []
        for i in rows:
            row = logits[i]
            found.append(
                top_k_ids(to_numpy(row) if isinstance(row, torch.Tensor) else np.asarray(row), k)
            )
        return found

    def as_rows(self, logits: Any) -> Any:
        if isinstance(logits, torch.Tensor) and logits.dtype in (torch.float32, torch.float64):
            return logits.detach().numpy()  # indexing an array is faster
        return logits

    def as_vector(self, p: Probs, like: Any = None) -> Any:
        return _as_doubles(p)

    def verify_tree(self, tree: TokenTree, p: Any, rng: "RandomSource") -> Outcome:
        uniforms = rng.uniforms(len(tree.tokens) + 1)
        if uniforms is None:  # every outcome is enumerated
            return super().verify_tree(tree, p, rng)
        draft_probs = [q if q is None else _as_doubles(q) for q in tree.draft_probs]
        accepted, token, rejected, used = _core.verify_tree(
            tree.tokens, tree.parents, draft_probs, tree.probe, p, uniforms
        )
        rng.push_back(len(uniforms) - used)
        return accepted, token, rejected


def as_fraction(knob: float | Fraction) -> Fraction:
    """Return a setting as the number that was written: 0.9 is 9/10, not the nearest double."""
    return knob if isinstance(knob, Fraction) else Fraction(str(knob))


def _as_doubles(p: Any) -> NDArray[np.float64]:
    """Return a distribution as the kernels read it: contiguous float64 on the CPU."""
    if isinstance(p, torch.Tensor):
        p = p.detach().to("cpu", torch.float64).numpy()
    return np.ascontiguousarray(p, np.float64)


_READ = np.dtype(np.float32), np.dtype(np.float64)


def _as_floats(logits: Any) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return CPU logits as the kernels read them: narrower dtypes become float32, exactly."""
    if isinstance(logits, torch.Tensor):
        logits = logits.detach()
        logits = (
            logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        ).numpy()
    row = np.ascontiguousarray(logits)
    return row if row.dtype in _READ else row.astype(np.float64)


def top_k_ids(row: NDArray[Any], k: int) -> list[int]:
    """Return the indices of the k highest numbers, highest first, lowest index of equals.

    The k-th highest of some maxima is a lower bound: only what reaches it is sorted.

    >>> top_k_ids(np.array([0.2, 0.5, 0.1, 0.2]), 3)
    [1, 0, 3]
    """
    if k == 1:
        return [int(row.argmax())]
    width = len(row) // TOP_K_GROUP
    if k <= width:
        maxima = row[: TOP_K_GROUP * width].reshape(TOP_K_GROUP, width).max(axis=0)
        first = np.flatnonzero(row >= np.partition(maxima, width - k)[width - k])
    else:
        first = np.arange(len(row))
    return [int(index) for index in first[np.argsort(-row[first], kind="stable")][:k]]
