# cython: language_level=3
"""What the n-gram index of trie.pyx is made of."""

from libc.stdint cimport int64_t

cdef struct Node:
    int parent, token, link, count     # count: occurrences of the n-gram
    int first, last                    # slots that continue it, a list through Slot links of its depth
    int best, child, older, younger    # most frequent child; children as a doubly linked list
    int depth

cdef struct Slot:
    int token, before, after           # neighbours in its own text


cdef class NgramIndex:
    cdef readonly int max_n
    cdef Node* nodes
    cdef Slot* slots
    cdef int* links                    # [slot, 2 * max_n]: previous and next slot that continues the same n-gram
    cdef int* table                    # hash of nodes, -1 empty
    cdef int* spell                    # [max_n + 2]: work space
    cdef int node_room, node_top, node_free, slot_room, slot_top, slot_free, live
    cdef int64_t table_size
    cdef dict texts                    # text -> (last slot, length, node of its longest final n-gram, n <= max_n)

    cdef int64_t home(self, int parent, int token) noexcept nogil
    cdef int find(self, int parent, int token) noexcept nogil
    cdef void place(self, int node) noexcept nogil
    cdef int make_room(self) except -1
    cdef int new_node(self, int parent, int token, int link) noexcept nogil
    cdef void drop_node(self, int node) noexcept nogil
    cdef int descend(self, int state, int token, int limit) noexcept nogil
    cdef int end_of(self, int slot, int limit) noexcept nogil
    cdef bint better(self, int a, int b) noexcept nogil
    cdef int push(self, int last, int state, int token) except -1
    cdef void pop(self, int slot) noexcept nogil
