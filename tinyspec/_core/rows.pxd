# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The loops under sampling.pyx: sums, the inverse CDF, and a selection that does not sort. Inlined into it."""

from libc.math cimport INFINITY, ceil, fabs
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memset


cdef extern from "exp.h":
    void weigh_all(double* x, long n, double top, double temperature) noexcept nogil  # x = exp((x - top) / temperature)
    double largest(const double* x, long n) noexcept nogil  # NaN if there is one
    long first_float(const float* x, long n) noexcept nogil  # of the largest; -1: one is NaN, or it is not finite
    long first_double(const double* x, long n) noexcept nogil


cdef enum:
    BLOCK = 256
    LOWEST = 0x3BF0  # the 16-bit prefix of 2^-64 (1.0 has 0x3FF0, a halving takes 16)
    BUCKETS = 1025
    LOW = 4096


# --- sums and draws

cdef inline double block_sum(const double* x, Py_ssize_t n) noexcept nogil:
    """Return the sum of one block in eight lanes."""
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
    """Divide x by its mass, block by block, and update its block sums.

    x is not negative, so a block whose sum is 0 needs no division.
    """
    cdef Py_ssize_t b, i, stop, blocks = (n + BLOCK - 1) // BLOCK
    for b in range(blocks):
        if sums[b] == 0:
            continue
        stop = min(n, b * BLOCK + BLOCK)
        for i in range(b * BLOCK, stop):
            x[i] /= mass
        sums[b] = block_sum(x + b * BLOCK, stop - b * BLOCK)


cdef inline double subtract_block(const double* row, const double* q, Py_ssize_t token, Py_ssize_t n,
                                  double* x) noexcept nogil:
    """Write x = max(0, row - q) over one block, and return its sum. x may be the row.

    A q of NULL is a point mass at `token`.
    """
    cdef Py_ssize_t i
    cdef double left
    if q == NULL:
        for i in range(n):
            x[i] = row[i]
        if 0 <= token < n:
            x[token] = 0
    else:
        for i in range(n):  # left + |left| is exactly twice left, or 0: no branch that half of the tokens mispredict
            left = row[i] - q[i]
            x[i] = 0.5 * (left + fabs(left))
    return block_sum(x, n)


cdef inline bint write_residual(const double* row, const double* q, Py_ssize_t token, Py_ssize_t n, double* x,
                                double* sums) noexcept nogil:
    """Write x = max(0, row - q), normalized, and its block sums, and return True. x may be the row.

    If nothing is left, return False and leave x as it was. The difference is formed twice, which is cheaper
    than to store it and to read it again.
    """
    cdef double difference[BLOCK]
    cdef double mass
    cdef Py_ssize_t b, at, blocks = (n + BLOCK - 1) // BLOCK
    for b in range(blocks):
        at = b * BLOCK
        sums[b] = subtract_block(row + at, q + at if q != NULL else NULL, token - at, min(<Py_ssize_t> BLOCK, n - at), difference)
    mass = add_blocks(sums, blocks)
    if not mass > 0:
        return False
    for b in range(blocks):
        at = b * BLOCK
        subtract_block(row + at, q + at if q != NULL else NULL, token - at, min(<Py_ssize_t> BLOCK, n - at), x + at)
        divide(x + at, min(<Py_ssize_t> BLOCK, n - at), mass, sums + b)
    return True


cdef inline Py_ssize_t find_block(const double* sums, Py_ssize_t blocks, double u, double* before,
                                  double* target) noexcept nogil:
    """Return the block whose interval holds u * total, and write the sum before it; -1 if there is no finite mass."""
    cdef double mass = add_blocks(sums, blocks)
    cdef Py_ssize_t b
    if not (0 < mass < INFINITY):
        return -1
    target[0], before[0] = u * mass, 0
    for b in range(blocks):
        if before[0] + sums[b] > target[0]:
            return b
        before[0] += sums[b]
    target[0] = INFINITY  # rounding put u after the last interval: the last token takes it
    for b in range(blocks - 1, -1, -1):
        if sums[b] > 0:
            return b
    return -1


cdef inline Py_ssize_t find_in_block(const double* x, Py_ssize_t n, double before, double target) noexcept nogil:
    """Return the token whose interval holds the target, else the last one of positive probability."""
    cdef Py_ssize_t i
    for i in range(n):
        before += x[i]
        if before > target:
            return i
    for i in range(n - 1, -1, -1):
        if x[i] > 0:
            return i
    return -1


cdef inline Py_ssize_t find_token(const double* x, Py_ssize_t n, const double* sums, double u) noexcept nogil:
    """Return the token at u of the cumulative sum, from the row and its block sums; -1 if there is no finite mass."""
    cdef double before, target
    cdef Py_ssize_t b = find_block(sums, (n + BLOCK - 1) // BLOCK, u, &before, &target)
    return -1 if b < 0 else b * BLOCK + find_in_block(x + b * BLOCK, min(<Py_ssize_t> BLOCK, n - b * BLOCK), before, target)


cdef inline Py_ssize_t find_in_difference(const double* row, const double* q, Py_ssize_t token, Py_ssize_t n,
                                          double* sums, double u) noexcept nogil:
    """Return find_token(max(0, row - q)) without storing the difference; -1 if nothing is left."""
    cdef double difference[BLOCK]
    cdef double before, target
    cdef Py_ssize_t b, at, blocks = (n + BLOCK - 1) // BLOCK
    for b in range(blocks):
        at = b * BLOCK
        sums[b] = subtract_block(row + at, q + at if q != NULL else NULL, token - at, min(<Py_ssize_t> BLOCK, n - at), difference)
    b = find_block(sums, blocks, u, &before, &target)
    if b < 0:
        return -1
    at = b * BLOCK
    subtract_block(row + at, q + at if q != NULL else NULL, token - at, min(<Py_ssize_t> BLOCK, n - at), difference)
    return at + find_in_block(difference, min(<Py_ssize_t> BLOCK, n - at), before, target)


cdef inline uint64_t bits(double x) noexcept nogil:
    """Return the bit pattern of a double >= 0, which orders as the double does."""
    cdef uint64_t key
    memcpy(&key, &x, sizeof(double))
    return key


cdef inline Py_ssize_t bucket(double w) noexcept nogil:
    """Return the bucket of a weight: exponent and four bits of mantissa, counted from 2^-64.

    Smaller weights have no unit of mass, so they share one bucket.
    """
    cdef int64_t prefix = <int64_t> (bits(w) >> 48) - LOWEST
    return <Py_ssize_t> (prefix if prefix > 0 else 0)


cdef inline int64_t mass_of(double w, double scale) noexcept nogil:
    """Return the mass of a weight in [0, 1]: floor(w * scale), or 1 if scale is 0."""
    return <int64_t> (w * scale) if scale else 1


cdef inline void keep_top_mass(double* w, Py_ssize_t n, Py_ssize_t top_k, double top_p, int64_t* mass,
                               int* candidate) noexcept nogil:
    """Keep the highest weights, ties by lowest id, until their mass reaches the need; set the others to 0.

    At least one weight stays. Mass is counted in tokens and the need is top_k; or, if top_k is 0, mass is
    counted in units and the need is top_p of all. A weighted radix select, O(V), in memory for 4 * BUCKETS
    masses and n candidates: it finds the bucket of the crossing token by a histogram, then its key among the
    candidates, 12 bits at a time. Invariant: `above` is the mass of everything greater than the candidates,
    and above < need <= above + mass(candidates).
    """
    cdef int64_t above = 0, whole = 0, need = top_k
    cdef Py_ssize_t i, kept, found = 0, digit = BUCKETS - 1
    cdef int shift = 62
    cdef double low = INFINITY, high = 0, scale = 0
    if top_k == 0:
        while (n >> (62 - shift)) > 0:
            shift -= 1
        scale = <double> ((<int64_t> 1) << shift)  # all masses together stay below 2^62
    memset(mass, 0, 4 * BUCKETS * sizeof(int64_t))
    for i in range(n):  # four histograms in turn: an addition does not wait for the one before it
        mass[4 * bucket(w[i]) + (i & 3)] += mass_of(w[i], scale)
    for i in range(BUCKETS):
        mass[i] = mass[4 * i] + mass[4 * i + 1] + mass[4 * i + 2] + mass[4 * i + 3]
        whole += mass[i]
    if top_k == 0:
        need = min(whole, <int64_t> ceil(top_p * <double> whole))
    need = max(need, <int64_t> 1)
    while above + mass[digit] < need:
        above += mass[digit]
        digit -= 1
    for i in range(n):
        candidate[found] = <int> i
        found += bucket(w[i]) == digit
    for i in range(found):
        low, high = min(low, w[candidate[i]]), max(high, w[candidate[i]])
    shift = 52
    while low != high:
        memset(mass, 0, LOW * sizeof(int64_t))
        for i in range(found):
            mass[(bits(w[candidate[i]]) >> shift) & (LOW - 1)] += mass_of(w[candidate[i]], scale)
        digit = LOW - 1
        while above + mass[digit] < need:
            above += mass[digit]
            digit -= 1
        kept, low, high = 0, INFINITY, 0
        for i in range(found):
            if ((bits(w[candidate[i]]) >> shift) & (LOW - 1)) == <uint64_t> digit:
                candidate[kept] = candidate[i]
                low, high = min(low, w[candidate[i]]), max(high, w[candidate[i]])
                kept += 1
        found = kept
        shift = max(shift - 12, 0)
    kept = 0
    while kept < found and above < need:  # candidates weigh the same by now: the lowest ids stay
        above += mass_of(low, scale)
        kept += 1
    for i in range(kept, found):
        w[candidate[i]] = 0
    for i in range(n):
        w[i] = w[i] if w[i] >= low else 0


cdef inline void write_probs(double* x, Py_ssize_t n, double* sums, double top, double temperature,
                             Py_ssize_t top_k, double top_p, double min_p) noexcept nogil:
    """Turn scores x[n] with maximum `top` into a distribution in place, and write its block sums.

    The temperature is above 0. The memory after the sums is that of keep_top_mass.
    """
    cdef int64_t* masses = <int64_t*> (sums + n // BLOCK + 1)
    cdef int* candidates = <int*> (masses + 4 * BUCKETS)
    cdef Py_ssize_t i
    weigh_all(x, n, top, temperature)
    if 0 < top_k < n:
        keep_top_mass(x, n, top_k, 0, masses, candidates)
    if top_p < 1:
        keep_top_mass(x, n, 0, top_p, masses, candidates)
    if min_p > 0:
        for i in range(n):
            x[i] = x[i] if x[i] >= min_p else 0  # the top weight is exactly 1
    divide(x, n, sum_blocks(x, n, sums), sums)
