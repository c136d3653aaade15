# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Sample and verify over a vocabulary. Each kernel equals its twin in reference.py, bit for bit in float64.

Everything is O(V): nothing sorts. Sums run in the twin's order (blocks of 256 in order, eight strided
lanes inside), which the compiler may turn into SIMD without -ffast-math. exp is written out for the same
reason (src/exp.h).
"""

cimport cython
from libc.limits cimport INT_MAX
from libc.math cimport INFINITY
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from tinyspec._core.rows cimport (
    BLOCK, BUCKETS, add_blocks, block_sum, find_in_difference, find_token, first_double, first_float, largest,
    write_probs, write_residual, sum_blocks,
)

import numpy as np

from tinyspec.errors import TinyspecError

ROOT = -1

ctypedef fused real:
    float
    double


cdef double* spare = NULL


cdef double* scratch(Py_ssize_t n) except NULL:
    """Return memory for n tokens: a row, its block sums, then the masses and candidates of keep_top_mass.

    The last one is kept (its n stands before it), because fresh pages cost as much as the kernels. It is
    taken and given back under the GIL, so no two kernels ever share one.
    """
    global spare
    cdef double* room = spare
    if n > INT_MAX:
        raise TinyspecError(f"a row has at most {INT_MAX} tokens, got {n}")
    spare = NULL
    if room == NULL or room[0] < n:
        free(room)
        room = <double*> malloc((1 + n + (n // BLOCK + 1) + 4 * BUCKETS + (n // 2 + 1)) * sizeof(double))
        if room == NULL:
            raise MemoryError()
        room[0] = n
    return room + 1


cdef void release(double* room) noexcept:
    global spare
    if room != NULL:
        free(spare)
        spare = room - 1


cdef int raise_no_mass(const double* sums, Py_ssize_t n) except -1:
    mass = add_blocks(sums, (n + BLOCK - 1) // BLOCK)
    raise TinyspecError(
        f"cannot draw from a row whose sum is {mass}: a distribution must be finite and have some mass")


cdef int check_uniform(double u) except -1:
    if not 0 <= u < 1:
        raise TinyspecError(f"a uniform must be at least 0 and below 1, got {u}")
    return 0


def sample_inverse_cdf(const double[::1] row not None, double u):
    """Return the token whose interval of the cumulative sum holds u * total. O(V).

    A token of probability zero is never returned. Raises TinyspecError unless 0 <= u < 1.
    """
    check_uniform(u)
    cdef Py_ssize_t n = row.shape[0], token = -1
    cdef double* sums = scratch(n)
    try:
        if n:
            with nogil:
                sum_blocks(&row[0], n, sums)
                token = find_token(&row[0], n, sums, u)
        if token < 0:
            raise_no_mass(sums, n)
        return token
    finally:
        release(sums)


def sample_without_replacement(const double[::1] row not None, const double[::1] uniforms not None):
    """Return one token for each uniform, without replacement, until none is left. O(V + k (B + V/B))."""
    cdef Py_ssize_t n = row.shape[0], k = uniforms.shape[0], i, token, b
    cdef double* x = scratch(n)
    cdef double* sums = x + n
    cdef list drawn = []
    try:
        if n:
            memcpy(x, &row[0], n * sizeof(double))
        sum_blocks(x, n, sums)
        for i in range(k):
            token = find_token(x, n, sums, uniforms[i])
            if token < 0:
                if add_blocks(sums, (n + BLOCK - 1) // BLOCK) != 0:
                    raise_no_mass(sums, n)
                break
            check_uniform(uniforms[i])
            drawn.append(token)
            x[token] = 0
            b = token // BLOCK
            sums[b] = block_sum(x + b * BLOCK, min(<Py_ssize_t> BLOCK, n - b * BLOCK))
        return drawn
    finally:
        release(x)


def exponential_race(const double[::1] row not None, const double[::1] noise not None):
    """Return argmin noise / row over the support, lowest id first. O(V)."""
    cdef Py_ssize_t n = row.shape[0], i, best = -1
    cdef double time = INFINITY, t
    if noise.shape[0] != n:
        raise ValueError(f"a race needs one noise value for each token: {n} tokens, {noise.shape[0]} values")
    with nogil:
        for i in range(n):
            if row[i] > 0:
                t = noise[i] / row[i]
                if best < 0 or t < time:
                    best, time = i, t
    if best < 0:
        raise TinyspecError("cannot race a row without mass")
    return best


# --- from logits to a distribution

cdef Py_ssize_t first_highest(const real[::1] logits) noexcept:
    """Return the lowest id of the highest logit; -1 if there is none, or not a finite one."""
    if real is float:
        return first_float(&logits[0], logits.shape[0]) if logits.shape[0] else -1
    else:
        return first_double(&logits[0], logits.shape[0]) if logits.shape[0] else -1


cdef int check_settings(double temperature, top_k, double top_p, double min_p, double penalty) except -1:
    """Raise TinyspecError for settings without a meaning; `not` so that NaN is caught too."""
    if not 0 <= temperature < INFINITY:
        raise TinyspecError(f"temperature must be finite and at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise TinyspecError(f"top_k must be at least 1, got {top_k}")
    if not 0 < top_p <= 1:
        raise TinyspecError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= min_p <= 1:
        raise TinyspecError(f"min_p must be between 0 and 1, got {min_p}")
    if not 0 < penalty < INFINITY:
        raise TinyspecError(f"the repetition penalty must be finite and above 0, got {penalty}")
    return 0


cdef Py_ssize_t fill_probs(const real[::1] logits, double* x, double* sums, history, double temperature, top_k,
                           top_p, min_p, double penalty) except -2:
    """Write the distribution x[n] of logits[n] and its block sums, and return -1.

    If sampling is greedy, write nothing and return the token. The penalty is applied once to each distinct id.
    A penalty of 1 or more lets no score rise: the highest one stays the highest, unless it is penalised.
    """
    cdef Py_ssize_t i, token, n = logits.shape[0], k = 0 if top_k is None else top_k
    cdef double nucleus = 1 if top_p is None else top_p, floor = 0 if min_p is None else min_p, score, top
    check_settings(temperature, top_k, nucleus, floor, penalty)
    token = first_highest(logits) if temperature == 0 and penalty >= 1 else -1
    if token >= 0 and (penalty == 1 or token not in history):
        return token
    if n == 0:
        raise TinyspecError("the logits are empty, so they define no distribution")
    with nogil:
        for i in range(n):
            x[i] = logits[i]
    if penalty != 1:
        for token in history:
            if 0 <= token < n:
                score = logits[token]
                x[token] = score * penalty if score < 0 else score / penalty
    token = first_double(x, n) if temperature == 0 else -1
    if token >= 0:
        return token
    top = largest(x, n)
    if top != top:
        raise TinyspecError("the logits contain NaN: check the weights, or compute in a wider dtype")
    if top == INFINITY or top == -INFINITY:
        what = "contain +inf" if top > 0 else "are all -inf: no token is allowed"
        raise TinyspecError(f"the logits {what}, so they define no distribution")
    with nogil:
        write_probs(x, n, sums, top, temperature, k, nucleus, floor)
    return -1


def apply_sampling(const real[::1] logits not None, history, double temperature, top_k, top_p, min_p, double penalty):
    """Return logits [V] (float32 or float64) as a distribution, float64 [V], in Hugging Face's order. O(V)."""
    cdef Py_ssize_t n = logits.shape[0], token
    cdef double* sums = scratch(n)
    cdef double[::1] row
    try:
        row = out = np.empty(max(n, 1))
        token = fill_probs(logits, &row[0], sums + n, history, temperature, top_k, top_p, min_p, penalty)
        if token >= 0:
            row[:] = 0
            row[token] = 1
        return out
    finally:
        release(sums)


def sample_from_logits(const real[::1] logits not None, history, double temperature, top_k, top_p, min_p, double penalty,
                       double u):
    """Return sample_inverse_cdf(apply_sampling(...), u), without a row in between. O(V)."""
    cdef Py_ssize_t n = logits.shape[0], token
    check_uniform(u)
    cdef double* x = scratch(n)
    try:
        token = fill_probs(logits, x, x + n, history, temperature, top_k, top_p, min_p, penalty)
        return token if token >= 0 else find_token(x, n, x + n, u)
    finally:
        release(x)


# --- verifying

cdef int same_length(Py_ssize_t n, Py_ssize_t m) except -1:
    if n != m:
        raise TinyspecError(f"the draft's distribution has {m} tokens, the target's {n}: pad it with zeros")
    return 0


cdef const double[::1] read_row(row) except *:
    """Return the target's row as a memoryview, which None would be too."""
    if row is None:
        raise TypeError("the target's distribution is None")
    return row


cdef new_residual(const double[::1] row, const double* q, Py_ssize_t token):
    cdef Py_ssize_t n = row.shape[0]
    cdef double* sums = scratch(n)
    cdef double[::1] x
    try:
        out = np.empty(n)
        x = out
        return out if n and write_residual(&row[0], q, token, n, &x[0], sums) else np.array(row)
    finally:
        release(sums)


def residual(const double[::1] row not None, const double[::1] q not None):
    """Return max(0, row - q), normalized; the row if nothing is left. O(V)."""
    same_length(row.shape[0], q.shape[0])
    return new_residual(row, &q[0] if q.shape[0] else NULL, -1)


def exclude_token(const double[::1] row not None, Py_ssize_t token):
    """Return the row without this token, normalized; the row if nothing is left. O(V)."""
    if not 0 <= token < row.shape[0]:
        raise TinyspecError(f"token {token} is outside of a row of {row.shape[0]} tokens")
    return new_residual(row, NULL, token)


cdef double next_uniform(const double[::1] uniforms, Py_ssize_t* used) except -1:
    if used[0] >= uniforms.shape[0]:
        raise TinyspecError("the given uniforms are used up: give one for each tested node and one for the last draw")
    check_uniform(uniforms[used[0]])
    used[0] += 1
    return uniforms[used[0] - 1]


@cython.boundscheck(True)  # reading p[node] may run any code, which may shorten a list
def verify_tree(tokens, parents, draft_probs, probe, p, const double[::1] uniforms not None):
    """Decide as reference.verify_tree: one uniform for each tested node in order, one for the last draw.

    Returns (accepted, next, rejected, used uniforms). Reads p[ROOT], and p[node] of accepted nodes only.
    O(n depth + tested V).
    """
    cdef Py_ssize_t n = len(tokens), V, used = 0, node, token, i = 0
    cdef const double[::1] row, q
    cdef const double* current
    cdef double* room = NULL
    cdef double* sums
    cdef const double* point
    cdef Py_ssize_t last
    cdef bint summed = False  # whether `room` holds the current distribution, a residual, and its block sums
    cdef double ratio
    cdef list accepted = [], rejected = [], siblings
    if not n == len(parents) == len(draft_probs) == len(probe):
        raise TinyspecError(
            f"a tree of {n} tokens has {len(parents)} parents, {len(draft_probs)} distributions and {len(probe)} probe flags")
    row = read_row(p[ROOT])
    V = row.shape[0]
    if V == 0:
        raise TinyspecError("cannot draw from a row without tokens")
    try:
        current = &row[0]
        siblings = [node for node in range(n) if parents[node] == -1 and not probe[node]]
        while i < len(siblings):
            node = siblings[i]
            token = tokens[node]
            declared = draft_probs[node]
            if not 0 <= token < V:
                raise TinyspecError(f"drafted token {token} is outside of the target's vocabulary of {V}")
            ratio = current[token]
            if declared is not None:
                q = declared
                same_length(V, q.shape[0])
                if not q[token] > 0:
                    raise TinyspecError(
                        f"drafted token {token} has probability {q[token]} under its declared distribution "
                        "(declare None)")
                ratio = ratio / q[token]
            if next_uniform(uniforms, &used) < ratio:
                accepted.append(node)
                release(room)  # p[node] may run a kernel that wants it
                room = NULL
                here = {twin for twin in siblings if tokens[twin] == token}
                row = read_row(p[node])
                if row.shape[0] != V:
                    raise TinyspecError(f"the target's distribution has {V} tokens at the root, {row.shape[0]} at node {node}")
                current, summed = &row[0], False
                siblings = [twin for twin in range(n) if parents[twin] in here and not probe[twin]]
                i = 0
                continue
            rejected.append(node)
            i += 1
            if room == NULL:
                room = scratch(V)
            point = &q[0] if declared is not None else NULL
            if i == len(siblings):  # no sibling is left: a draw needs no normalised row, nor a stored one
                last = find_in_difference(
                    current, point, token, V, room + V, uniforms[used] if used < uniforms.shape[0] else 0)
                if last >= 0:
                    next_uniform(uniforms, &used)
                    return tuple(accepted), last, tuple(rejected), used
                summed = False
            else:
                summed = write_residual(current, point, token, V, room, room + V)
                current = room if summed else current
        if room == NULL:
            room = scratch(V)
        sums = room + V
        if not summed:
            sum_blocks(current, V, sums)
        token = find_token(current, V, sums, next_uniform(uniforms, &used))
        if token < 0:
            raise_no_mass(sums, V)
        return tuple(accepted), token, tuple(rejected), used
    finally:
        release(room)
