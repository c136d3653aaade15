# cython: language_level=3
"""What the texts of a forest can be asked for from compiled code."""

from tinyspec._core.windows cimport Windows

cdef class Texts(Windows):
    cdef void spelling(self, int text, int most) noexcept nogil
    cdef int walk(self, int root, int n, int* slot) noexcept nogil
    cdef void resume(self, int text) noexcept nogil
    cdef int pop(self, int text) except -1
    cdef void free_slots(self, int last) noexcept nogil
    cdef tuple open_tree(self, tree)
    cdef void halve_tree(self, int root, list ends, int halvings)
    cdef int known(self, int text) except -1
