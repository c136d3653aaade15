# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The loops under sampling.pyx: sums, the inverse CDF, and a selection that does not sort. Compiled into it, inline."""

from libc.math cimport INFINITY, NAN
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset


cdef enum:
    BLOCK = 256
    HIGH = 16369  # 16-bit prefixes of the doubles 0.0 ... 1.0
    LOW = 4096


# --- sums and draws -------------------------------------------------------------------------------------------------

cdef inline double block_sum(const double* x, Py_ssize_t n) noexcept nogil:
    """The sum of one block in eight lanes."""
    cdef double a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0
    cdef Py_ssize_t i = 0
    while i + 8 <= n:
        a += x[i]; b += x[i + 1]; c += x[i + 2]; d += x[i + 3]
        e += x[i + 4]; f += x[i + 5]; g += x[i + 6]; h += x[i + 7]
        i += 8
    if i < n: a += x[i]
    if i + 1 < n: b += x[i + 1]
    if i + 2 < n: c += x[i + 2]
    if i + 3 < n: d += x[i + 3]
    if i + 4 < n: e += x[i + 4]
    if i + 5 < n: f += x[i + 5]
    if i + 6 < n: g += x[i + 6]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


cdef inline double add_blocks(const double* sums, Py_ssize_t blocks) noexcept nogil:
    cdef double mass = 0
    cdef Py_ssize_t b
    for b in range(blocks):
        mass += sums[b]
    return mass


cdef inline double sum_blocks(const double* x, Py_ssize_t n, double* sums) noexcept nogil:
    """Fill sums[ceil(n / BLOCK)] and return their total."""
    cdef Py_ssize_t b, blocks = (n + BLOCK - 1) // BLOCK
    for b in range(blocks):
        sums[b] = block_sum(x + b * BLOCK, min(<Py_ssize_t> BLOCK, n - b * BLOCK))
    return add_blocks(sums, blocks)


cdef inline void divide(double* x, Py_ssize_t n, double mass, double* sums) noexcept nogil:
    """x /= mass, block by block, with the sums of the quotients."""
    cdef Py_ssize_t b, i, stop, blocks = (n + BLOCK - 1) // BLOCK
    for b in range(blocks):
        stop = min(n, b * BLOCK + BLOCK)
        for i in range(b * BLOCK, stop):
            x[i] /= mass
        sums[b] = block_sum(x + b * BLOCK, stop - b * BLOCK)


cdef inline Py_ssize_t find(const double* x, Py_ssize_t n, const double* sums, double u) noexcept nogil:
    """Inverse CDF over a row and its block sums; -1 where the row is no law."""
    cdef Py_ssize_t b, i, start = 0, stop = n, blocks = (n + BLOCK - 1) // BLOCK
    cdef double mass = add_blocks(sums, blocks), before = 0, target
    if not (0 < mass < INFINITY):
        return -1
    target = u * mass
    for b in range(blocks):
        if before + sums[b] > target:
            start, stop = b * BLOCK, min(n, b * BLOCK + BLOCK)
            for i in range(start, stop):
                before += x[i]
                if before > target:
                    return i
            break
        before += sums[b]
    for i in range(stop - 1, start - 1, -1):
        if x[i] > 0:
            return i
    return -1


cdef inline double* scratch(Py_ssize_t n) except NULL:
    """Room for a row of n and its block sums, one allocation; the caller frees it."""
    cdef double* room = <double*> malloc((n + n // BLOCK + 2) * sizeof(double))
    if room == NULL:
        raise MemoryError()
    return room


cdef inline uint64_t bits(double x) noexcept nogil:
    """The bit pattern of a double >= 0, which orders as the double does."""
    cdef uint64_t key
    memcpy(&key, &x, sizeof(double))
    return key


cdef inline int keep_leading(double* w, Py_ssize_t n, double scale, uint64_t need) except -1 nogil:
    """Zero all but the highest weights, ties by lowest id, whose masses reach `need`; at least one stays.

    A mass is floor(w * scale), or 1 where scale is 0. A weighted radix select, O(V): find the 16-bit prefix of the
    crossing token by a histogram of masses, then 12 bits at a time among the candidates that share it. Invariant: `above`
    is the mass of everything greater than the candidates, above < need <= above + mass(candidates).
    """
    cdef uint64_t* mass = <uint64_t*> malloc(HIGH * sizeof(uint64_t))
    cdef int* candidate = <int*> malloc(n * sizeof(int))
    cdef uint64_t above = 0, cut = 0
    cdef Py_ssize_t i, kept, found, digit
    cdef int shift
    if mass == NULL or candidate == NULL:
        free(mass)
        free(candidate)
        raise MemoryError()
    need = max(need, <uint64_t> 1)
    memset(mass, 0, HIGH * sizeof(uint64_t))
    for i in range(n):
        mass[bits(w[i]) >> 48] += <uint64_t> (w[i] * scale) if scale else 1
    digit = HIGH - 1
    while above + mass[digit] < need:
        above += mass[digit]
        digit -= 1
    found = 0
    for i in range(n):
        if (bits(w[i]) >> 48) == <uint64_t> digit:
            candidate[found] = <int> i
            found += 1
    shift = 36
    while shift >= 0 and found > 1:
        memset(mass, 0, LOW * sizeof(uint64_t))
        for i in range(found):
            mass[(bits(w[candidate[i]]) >> shift) & (LOW - 1)] += <uint64_t> (w[candidate[i]] * scale) if scale else 1
        digit = LOW - 1
        while above + mass[digit] < need:
            above += mass[digit]
            digit -= 1
        kept = 0
        for i in range(found):
            if ((bits(w[candidate[i]]) >> shift) & (LOW - 1)) == <uint64_t> digit:
                candidate[kept] = candidate[i]
                kept += 1
        found = kept
        shift -= 12
    # All candidates weigh the same by now: the lowest ids stay until the need is met.
    cut = bits(w[candidate[0]])
    i = 0
    while i < found:
        above += <uint64_t> (w[candidate[i]] * scale) if scale else 1
        i += 1
        if above >= need:
            break
    while i < found:
        w[candidate[i]] = 0
        i += 1
    for i in range(n):
        if bits(w[i]) < cut:
            w[i] = 0
    free(mass)
    free(candidate)
    return 0


cdef inline double top_score(const double* x, Py_ssize_t n) noexcept nogil:
    """The largest score; NaN if there is one."""
    cdef double top = -INFINITY
    cdef Py_ssize_t i
    cdef bint nan = False
    for i in range(n):
        nan |= x[i] != x[i]
        top = x[i] if x[i] > top else top
    return NAN if nan else top
