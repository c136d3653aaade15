# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Warp, draw and verify over a vocabulary: each kernel equals its twin in reference.py bit for bit in float64.

Everything is O(V): nothing sorts. Sums run in the twin's order (blocks of 256 in order, eight strided lanes inside), which
the compiler may turn into SIMD without -ffast-math; exp is written out for the same reason (src/exp.h).
"""

from libc.math cimport INFINITY
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from tinyspec._core.rows cimport (
    BLOCK, BUCKETS, add_blocks, block_sum, find, find_left_over, first_double, first_float, largest, law_into, residual_into,
    sum_blocks,
)

import numpy as np

from tinyspec.errors import TinyspecError

ROOT = -1

ctypedef fused real:
    float
    double


cdef double* spare = NULL


cdef double* scratch(Py_ssize_t n) except NULL:
    """Room for n tokens: a row, its block sums, and keep_leading's masses and candidates, in this order.

    The last room is kept (its n stands before it), as fresh pages cost as much as the kernels. Taken and given back under
    the GIL, so no two kernels ever share one.
    """
    global spare
    cdef double* room = spare
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


cdef int no_law(const double* sums, Py_ssize_t n) except -1:
    mass = add_blocks(sums, (n + BLOCK - 1) // BLOCK)
    raise TinyspecError(f"cannot draw from a row whose sum is {mass}: a law must be finite and have some mass")


def pick(const double[::1] row, double u):
    """The token whose interval of the cumulative sum holds u * total; never one of probability zero. O(V)."""
    cdef Py_ssize_t n = row.shape[0], token = -1
    cdef double* sums = scratch(n)
    try:
        if n:
            with nogil:
                sum_blocks(&row[0], n, sums)
                token = find(&row[0], n, sums, u)
        if token < 0:
            no_law(sums, n)
        return token
    finally:
        release(sums)


def order(const double[::1] row, const double[::1] uniforms):
    """Draw without replacement, one token a uniform, until the support is exhausted. O(V + k (B + V/B))."""
    cdef Py_ssize_t n = row.shape[0], k = uniforms.shape[0], i, token, b
    cdef double* x = scratch(n)
    cdef double* sums = x + n
    cdef list drawn = []
    try:
        if n:
            memcpy(x, &row[0], n * sizeof(double))
        sum_blocks(x, n, sums)
        for i in range(k):
            token = find(x, n, sums, uniforms[i])
            if token < 0:
                if add_blocks(sums, (n + BLOCK - 1) // BLOCK) != 0:
                    no_law(sums, n)
                break
            drawn.append(token)
            x[token] = 0
            b = token // BLOCK
            sums[b] = block_sum(x + b * BLOCK, min(<Py_ssize_t> BLOCK, n - b * BLOCK))
        return drawn
    finally:
        release(x)


def race(const double[::1] row, const double[::1] noise):
    """argmin noise / row over the support, ties by lowest id. O(V)."""
    cdef Py_ssize_t n = row.shape[0], i, best = -1
    cdef double time = INFINITY, t
    if noise.shape[0] != n:
        raise ValueError(f"race needs one noise value a token: {n} tokens, {noise.shape[0]} values")
    with nogil:
        for i in range(n):
            if row[i] > 0:
                t = noise[i] / row[i]
                if best < 0 or t < time:
                    best, time = i, t
    if best < 0:
        raise TinyspecError("cannot race a row without mass")
    return best


# --- warping --------------------------------------------------------------------------------------------------------

cdef Py_ssize_t first(const real[::1] logits) noexcept:
    """The lowest id of the highest logit; -1: there is none, or not a finite one."""
    if real is float:
        return first_float(&logits[0], logits.shape[0]) if logits.shape[0] else -1
    else:
        return first_double(&logits[0], logits.shape[0]) if logits.shape[0] else -1


cdef Py_ssize_t make(const real[::1] logits, double* x, double* sums, history, double temperature, top_k, top_p, min_p,
                     double penalty) except -2:
    """A law x[n] of logits[n], penalised once for each distinct id, and its block sums (in a room for n tokens); or the token
    of a greedy law, which needs neither. A penalty of 1 or more lets no score rise: the highest stays, unless it falls."""
    cdef Py_ssize_t i, token, n = logits.shape[0], k = 0 if top_k is None else top_k
    cdef double nucleus = 1 if top_p is None else top_p, floor = 0 if min_p is None else min_p, score, top
    token = first(logits) if temperature == 0 and penalty >= 1 else -1
    if token >= 0 and (penalty == 1 or token not in history):
        return token
    if n == 0:
        raise TinyspecError("the logits are empty, so they define no law")
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
        raise TinyspecError(f"the logits {what}, so they define no law")
    with nogil:
        law_into(x, n, sums, top, temperature, k, nucleus, floor)
    return -1


def warp(const real[::1] logits, history, double temperature, top_k, top_p, min_p, double penalty):
    """Logits [V] (float32 or float64) to a law, float64 [V], in Hugging Face's order. O(V)."""
    cdef Py_ssize_t n = logits.shape[0], token
    cdef double* sums = scratch(n)
    cdef double[::1] row
    try:
        row = out = np.empty(max(n, 1))
        token = make(logits, &row[0], sums + n, history, temperature, top_k, top_p, min_p, penalty)
        if token >= 0:
            row[:] = 0
            row[token] = 1
        return out
    finally:
        release(sums)


def draw(const real[::1] logits, history, double temperature, top_k, top_p, min_p, double penalty, double u):
    """pick(warp(...), u) without a row in between. O(V)."""
    cdef Py_ssize_t n = logits.shape[0], token
    cdef double* x = scratch(n)
    try:
        token = make(logits, x, x + n, history, temperature, top_k, top_p, min_p, penalty)
        return token if token >= 0 else find(x, n, x + n, u)
    finally:
        release(x)


# --- verifying ------------------------------------------------------------------------------------------------------

cdef int same_length(Py_ssize_t n, Py_ssize_t m) except -1:
    if n != m:
        raise TinyspecError(f"the draft's law has {m} tokens, the target's {n}: pad it with zeros")
    return 0


cdef new_residual(const double[::1] row, const double* q, Py_ssize_t token):
    cdef Py_ssize_t n = row.shape[0]
    cdef double* sums = scratch(n)
    cdef double[::1] x
    try:
        out = np.empty(n)
        x = out
        return out if n and residual_into(&row[0], q, token, n, &x[0], sums) else np.array(row)
    finally:
        release(sums)


def residual(const double[::1] row, const double[::1] q):
    """normalise(max(0, row - q)); the row itself where nothing is left. O(V)."""
    same_length(row.shape[0], q.shape[0])
    return new_residual(row, &q[0] if q.shape[0] else NULL, -1)


def without(const double[::1] row, Py_ssize_t token):
    """The row given that it is not `token`; the row itself where nothing is left. O(V)."""
    return new_residual(row, NULL, token)


cdef double take(const double[::1] uniforms, Py_ssize_t* used) except -1:
    if used[0] >= uniforms.shape[0]:
        raise TinyspecError("the given uniforms are used up: a walk needs one a tested node and one for the last draw")
    used[0] += 1
    return uniforms[used[0] - 1]


def walk(tokens, parents, laws, probe, p, const double[::1] uniforms):
    """The alive-set walk of reference.walk from given uniforms: one a tested node in order, one for the final draw.

    Returns (path, next, refused, used uniforms). Reads p[ROOT], and p[node] of accepted nodes only. O(n depth + tested V).
    """
    cdef Py_ssize_t n = len(tokens), V, used = 0, node, token, i = 0
    cdef const double[::1] row = p[ROOT], q
    cdef const double* current
    cdef double* room = NULL
    cdef double* sums
    cdef const double* point
    cdef Py_ssize_t last
    cdef bint summed = False  # the room holds the law in force, a residual, and its block sums
    cdef double ratio
    cdef list path = [], refused = [], siblings
    V = row.shape[0]
    if V == 0:
        raise TinyspecError("cannot draw from a row without tokens")
    try:
        current = &row[0]
        siblings = [node for node in range(n) if parents[node] == -1 and not probe[node]]
        while i < len(siblings):
            node = siblings[i]
            token = tokens[node]
            law = laws[node]
            if not 0 <= token < V:
                raise TinyspecError(f"drafted token {token} is outside of the target's vocabulary of {V}")
            ratio = current[token]
            if law is not None:
                q = law
                same_length(V, q.shape[0])
                if not q[token] > 0:
                    raise TinyspecError(
                        f"drafted token {token} has probability {q[token]} under its declared law (declare None)")
                ratio = ratio / q[token]
            if take(uniforms, &used) < ratio:
                path.append(node)
                release(room)  # p[node] may run a kernel that wants it
                room = NULL
                here = {twin for twin in siblings if tokens[twin] == token}
                row = p[node]
                same_length(V, row.shape[0])
                current, summed = &row[0], False
                siblings = [twin for twin in range(n) if parents[twin] in here and not probe[twin]]
                i = 0
                continue
            refused.append(node)
            i += 1
            if room == NULL:
                room = scratch(V)
            point = &q[0] if law is not None else NULL
            if i == len(siblings):  # the last refusal only draws, and a draw needs no normalised row, nor a stored one
                last = find_left_over(current, point, token, V, room + V, uniforms[used] if used < uniforms.shape[0] else 0)
                if last >= 0:
                    take(uniforms, &used)
                    return tuple(path), last, tuple(refused), used
                summed = False
            else:
                summed = residual_into(current, point, token, V, room, room + V)
                current = room if summed else current
        if room == NULL:
            room = scratch(V)
        sums = room + V
        if not summed:
            sum_blocks(current, V, sums)
        token = find(current, V, sums, take(uniforms, &used))
        if token < 0:
            no_law(sums, V)
        return tuple(path), token, tuple(refused), used
    finally:
        release(room)
