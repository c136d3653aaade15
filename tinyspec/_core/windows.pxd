# cython: language_level=3
"""What the counted tries of windows.pyx are made of."""

from libc.stdint cimport int64_t

cdef struct Node:
    int parent, token
    int count, through                 # occurrences of its window, and of all that continue it; a root: nodes below it
    int child, last, older, younger    # children as a doubly linked list, the most frequent first
    int group                          # of siblings with the same count
    int tail                           # slot of its only occurrence, whose text stands for the nodes below; -1: they are there

cdef struct Slot:
    int token, before, after           # neighbours in its own text; after the newest: -2 - text, or -1 where it is closed

cdef struct Group:
    int head, tail

cdef struct Text:
    int root, last, length             # its tree, its newest slot, its tokens
    int since                          # tokens whose counts a halving has blurred: no window crosses it

cdef struct Candidate:
    double key, share                  # what it is ranked by; product of the frequencies on its path
    int node, slot                     # one of them is -1
    int depth, parent, order           # of its window; in the draft; of arrival

cdef class Windows:
    cdef readonly int depth, bound
    cdef Node* nodes
    cdef Slot* slots
    cdef Group* groups
    cdef Text* texts
    cdef Candidate* heap
    cdef int* table                    # hash of nodes, -1 empty
    cdef int* active                   # [text, depth]: node of each suffix that is repeated, -1 for what a tail stands for
    cdef int* spell                    # [depth]: newest tokens of a text, the newest first
    cdef int* drawn                    # [5, heap_room]: tokens and parents of a draft, of the best so far, and matches
    cdef double* shares                # [2, heap_room]
    cdef int node_room, node_top, node_free, slot_room, slot_top, slot_free, group_room, group_top, group_free
    cdef int text_room, text_top, text_free, heap_room, heap_top, arrivals, made
    cdef int live, used, groups_used   # nodes in the hash; nodes, roots included; groups
    cdef int64_t table_size
    cdef dict trees                    # tree -> (root, newest slots of its closed texts)

    cdef int64_t home(self, int parent, int token) noexcept nogil
    cdef int find(self, int parent, int token) noexcept nogil
    cdef void place(self, int node) noexcept nogil
    cdef int make_room(self) except -1
    cdef int new_node(self, int root, int parent, int token, int tail) noexcept nogil
    cdef void free_root(self, int root) noexcept nogil
    cdef int drop_node(self, int root, int node) noexcept nogil
    cdef void join(self, int node, int group, int at) noexcept nogil
    cdef void leave(self, int node) noexcept nogil
    cdef void recount(self, int node, int count) noexcept nogil
    cdef int push(self, int text, int token) except -1
    cdef void thin(self, int root, int halvings) noexcept nogil


cdef void* widened(void* pool, int* room, size_t size) noexcept nogil
