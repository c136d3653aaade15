# cython: language_level=3
"""What the texts of a forest can be asked for from compiled code."""

from tinyspec._core.windows cimport Windows

cdef class Texts(Windows):
    cdef void spelling(self, int text, int most) noexcept nogil
    cdef int walk(self, int root, int n, int* slot) noexcept nogil
    cdef void resume(self, int text) noexcept nogil
    cdef int pop(self, int text) except -1 nogil
    cdef void free_slots(self, int last) noexcept nogil
    cdef int root_of(self, tree) except -1
    cdef int known(self, int text) except -1
