# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""A suffix array over a text of int32 ids, and what followed the longest match in it, as a tree. Twin: reference_suffixes.py.

Places are sorted by the DEPTH tokens from there on, no further: a match and its continuation never look beyond. That takes
log2(DEPTH) rounds of prefix doubling, each a few linear passes, so 10 million tokens take seconds and 160 MB; ids may be any
int32, and a negative one stands between documents. A retrieval is a binary search for each length tried (at most
log2(longest) + 1 of them): O(log n) comparisons of at most `longest` tokens. The matches of a range are sorted, so their
continuations become a trie in one scan, without a table: a new branch begins where a continuation leaves the one before it.
Every place read from `order` is checked, for that may be a damaged file.
"""

from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

import numpy as np

from tinyspec._core.limits import MAX_DRAFT_NODES, MAX_MATCHES, check_range, read_ids, read_text
from tinyspec.errors import TinyspecError

DEPTH = 32

cdef enum:
    SORTED = 32  # DEPTH, as the compiler needs it
    RADIX = 65536
    AHEAD = 8  # places

cdef extern from *:
    """
    #ifndef __GNUC__
    #define __builtin_prefetch(place) ((void) 0)
    #endif
    """
    void prefetch "__builtin_prefetch"(const int* place) nogil

cdef uint32_t SIGN = 0x80000000  # flipped, it makes negative ids the smallest unsigned ones

cdef struct Node:
    int token, parent, count, depth

# --- the order ---------------------------------------------------------------------------------------------------------


cdef void by_digit(const int* tokens, const int* source, int* target, int n, int shift, int* heads) noexcept nogil:
    """Stable sort of places by 16 bits of their token; source NULL: places in order."""
    cdef int i, at, digit, total = 0, count
    memset(heads, 0, RADIX * sizeof(int))
    for i in range(n):
        heads[((<uint32_t> tokens[i] ^ SIGN) >> shift) & (RADIX - 1)] += 1
    for digit in range(RADIX):
        count, heads[digit] = heads[digit], total
        total += count
    for i in range(n):
        at = i if source == NULL else source[i]
        digit = ((<uint32_t> tokens[at] ^ SIGN) >> shift) & (RADIX - 1)
        target[heads[digit]] = at
        heads[digit] += 1


cdef int ranked(const int* tokens, const int* order, int* rank, int n) noexcept nogil:
    """rank[place]: where its group of equal tokens begins in the order. Returns the number of groups."""
    cdef int j, head = 0, groups = 1 if n else 0
    for j in range(n):
        if j > 0 and tokens[order[j]] != tokens[order[j - 1]]:
            head = j
            groups += 1
        rank[order[j]] = head
    return groups


cdef int doubled(int* order, int* rank, int* other, int* heads, int n, int h) noexcept nogil:
    """From places sorted by h tokens, and their groups, to 2h: by the second half first, then stably by the first.

    The new ranks are left in `other`. Returns the number of groups.
    """
    cdef int j, k = 0, place, head = 0, groups = 1, second, before = -2, first, group = -1
    for j in range(max(n - h, 0), n):  # these have no second half, which is less than any
        other[k] = j
        k += 1
    for j in range(n):
        if order[j] >= h:
            other[k] = order[j] - h
            k += 1
    for j in range(n):
        heads[j] = j
    for j in range(n):
        place = other[j]
        order[heads[rank[place]]] = place
        heads[rank[place]] += 1
    for j in range(n):
        place = order[j]
        first, second = rank[place], rank[place + h] if place < n - h else -1
        if j > 0 and (first != group or second != before):
            head = j
            groups += 1
        group, before = first, second
        other[place] = head
    return groups


def suffix_order(tokens, tell=None):
    """Places 0 .. n - 1 of a text sorted by the DEPTH tokens from there on; equal ones in order. int32 [n]."""
    cdef const int[::1] text = read_text(tokens)
    cdef Py_ssize_t size = text.shape[0]
    if size >= 1 << 31:
        raise TinyspecError(f"a text of {size} tokens is too long for one index: at most {(1 << 31) - 1}")
    made = np.empty(size, np.int32)
    if size == 0:
        return made
    cdef int[::1] out = made
    cdef int n = <int> size, h = 1, groups
    cdef int* order = &out[0]
    cdef int* rank = <int*> malloc(size * sizeof(int))
    cdef int* other = <int*> malloc(size * sizeof(int))
    cdef int* heads = <int*> malloc(max(size, RADIX) * sizeof(int))
    try:
        if not (rank and other and heads):
            raise MemoryError()
        with nogil:
            by_digit(&text[0], NULL, other, n, 0, heads)
            by_digit(&text[0], other, order, n, 16, heads)
            groups = ranked(&text[0], order, rank, n)
        while h < SORTED:
            if tell is not None:
                tell(h)
            if groups == n:
                break
            with nogil:
                groups = doubled(order, rank, other, heads, n, h)
            rank, other, h = other, rank, 2 * h
    finally:
        free(rank); free(other); free(heads)
    if tell is not None:
        tell(SORTED)
    return made


# --- the search --------------------------------------------------------------------------------------------------------


cdef class _Text:
    """A text and its order, as the search reads them."""

    cdef const int[::1] tokens
    cdef const int[::1] order
    cdef int n

    def __cinit__(self, tokens, order):
        if tokens is None or order is None:
            raise TypeError("a text and its order are arrays of int32, got None")
        self.tokens, self.order = tokens, order
        if self.tokens.shape[0] != self.order.shape[0]:
            raise TinyspecError(f"an order of {len(order)} places is not that of {len(tokens)} tokens")
        check_range("the number of tokens", self.tokens.shape[0], 0, INT_MAX)
        self.n = <int> self.tokens.shape[0]

    cdef inline int place(self, int64_t j) except -1 nogil:
        cdef int at = self.order[j]
        if not 0 <= at < self.n:
            with gil:
                raise TinyspecError("the index names a place outside of its text: it is damaged, build it again")
        return at

    cdef inline int token(self, int at) noexcept nogil:
        """The id at a place; -1 between documents and after the last."""
        return self.tokens[at] if at < self.n and self.tokens[at] >= 0 else -1

    cdef int side(self, int at, const int* pattern, int m) noexcept nogil:
        """Whether the text at a place comes before (-1) the pattern, spells it (0), or comes after (1)."""
        cdef int i
        for i in range(m):
            if at + i >= self.n or self.tokens[at + i] < pattern[i]:
                return -1
            if self.tokens[at + i] > pattern[i]:
                return 1
        return 0

    cdef int first(self, const int* pattern, int m, bint beyond) except -1 nogil:
        """Where in the order what spells the pattern and goes on begins; `beyond`: where it ends."""
        cdef int low = 0, high = self.n, middle, at, side
        while low < high:
            middle = low + (high - low) // 2
            at = self.place(middle)
            side = self.side(at, pattern, m)
            if side == 0 and not beyond and self.token(at + m) < 0:
                side = -1  # it spells the pattern and ends there: those stand first
            if side < 0 or (side == 0 and beyond):
                low = middle + 1
            else:
                high = middle
        return low

    cdef bint occurs(self, const int* pattern, int m, int* low) except -1 nogil:
        """Whether the pattern occurs and goes on; `low` is where."""
        low[0] = self.first(pattern, m, False)
        return low[0] < self.n and self.side(self.place(low[0]), pattern, m) == 0

    cdef int grow(self, Node* nodes, int low, int count, int taken, int m, int length) except -1 nogil:
        """The trie of `taken` continuations, evenly spaced in the range, each counted at every node it passes."""
        cdef int top = 0, j, at, d, before = 0, token
        cdef int path[SORTED]
        for j in range(taken):
            if j + AHEAD < taken:  # each place is somewhere else in the text: ask for it before it is needed
                prefetch(&self.tokens[0] + self.place(low + <int64_t> (j + AHEAD) * count // taken) + m)
            at, d = self.place(low + <int64_t> j * count // taken) + m, 0
            token = self.token(at)
            while d < before and token == nodes[path[d]].token:
                nodes[path[d]].count += 1
                d += 1
                token = self.token(at + d)
            while d < length and token >= 0:
                nodes[top] = Node(token, path[d - 1] if d else -1, 1, d + 1)
                path[d] = top
                top, d = top + 1, d + 1
                token = self.token(at + d)
            before = d
        return top


cdef bint heavier(Node* nodes, int a, int b) noexcept nogil:
    """Heavier first, then shallower, then the first in the order."""
    if nodes[a].count != nodes[b].count:
        return nodes[a].count > nodes[b].count
    return nodes[a].depth < nodes[b].depth if nodes[a].depth != nodes[b].depth else a < b


cdef int cut(Node* nodes, int top, int most, int heaviest, int* kept) except -1 nogil:
    """The `most` heaviest nodes into `kept`, heaviest first: with a node its parent, which is as heavy and shallower."""
    cdef int i, j, n = 0, weight = heaviest, room = most, depth = 0
    cdef int* found = <int*> calloc(heaviest + SORTED + 2, sizeof(int))  # nodes of each weight; then of each depth
    if found == NULL:
        with gil:
            raise MemoryError()
    for i in range(top):
        found[nodes[i].count] += 1
    while weight > 0 and found[weight] <= room:
        room, weight = room - found[weight], weight - 1
    for i in range(top if weight else 0):
        if nodes[i].count == weight:
            found[heaviest + 1 + nodes[i].depth] += 1
    while weight and found[heaviest + 1 + depth] <= room:  # of those at the limit, the shallow ones
        room, depth = room - found[heaviest + 1 + depth], depth + 1
    for i in range(top):
        if nodes[i].count == weight:
            if nodes[i].depth > depth or (nodes[i].depth == depth and room == 0):
                continue
            room -= nodes[i].depth == depth
        elif nodes[i].count < weight:
            continue
        j, n = n, n + 1
        while j > 0 and heavier(nodes, i, kept[j - 1]):
            kept[j] = kept[j - 1]
            j -= 1
        kept[j] = i
    free(found)
    return n


def retrieve(tokens, order, suffix, int shortest, int longest, int length, int matches, int most):
    """What followed the longest end of `suffix` that occurs: (its length, tokens, parents, weights); see the twin."""
    if not (1 <= shortest <= longest and 1 <= length and longest + 1 <= SORTED and matches >= 1 and most >= 0):
        raise TinyspecError(
            f"a retrieval needs 1 <= shortest <= longest < {DEPTH} and length, matches >= 1, "
            f"got {shortest}, {longest}, {length}, {matches}"
        )
    check_range("the number of matches", matches, 1, MAX_MATCHES)
    check_range("the number of draft tokens", most, 0, MAX_DRAFT_NODES)
    cdef _Text text = _Text(tokens, order)
    cdef const int[::1] ids = read_ids(suffix[-longest:])
    cdef int pattern[SORTED]
    cdef int given = <int> min(ids.shape[0], <Py_ssize_t> longest), i, low = 0, high, above, middle, m, at = 0, taken, top = 0, n = 0
    cdef list out, up, weights
    cdef Node* nodes = NULL
    cdef int* kept = NULL
    for i in range(given):
        pattern[i] = ids[ids.shape[0] - given + i]
    m, above = shortest, given + 1  # the last m tokens occur, the last `above` do not
    try:
        with nogil:
            if m > given or not text.occurs(pattern + given - m, m, &low):
                m = 0
            while m and above - m > 1:
                middle = m + (above - m) // 2
                if text.occurs(pattern + given - middle, middle, &at):
                    m, low = middle, at
                else:
                    above = middle
            if m and most:
                high = text.first(pattern + given - m, m, True)
                length = min(length, SORTED - m)  # beyond, the order is that of places
                taken = min(matches, high - low)
                nodes = <Node*> malloc(<size_t> taken * length * sizeof(Node))
                kept = <int*> malloc(<size_t> (min(most, taken * length) + 1) * sizeof(int))
                if nodes == NULL or kept == NULL:
                    with gil:
                        raise MemoryError()
                top = text.grow(nodes, low, high - low, taken, m, length)
                n = cut(nodes, top, most, taken, kept)
                for i in range(n):
                    nodes[kept[i]].depth = i  # from now on its place among those kept
        out = [nodes[kept[i]].token for i in range(n)]
        up = [-1 if nodes[kept[i]].parent < 0 else nodes[nodes[kept[i]].parent].depth for i in range(n)]
        weights = [nodes[kept[i]].count for i in range(n)]
    finally:
        free(nodes); free(kept)
    return m, out, up, weights
