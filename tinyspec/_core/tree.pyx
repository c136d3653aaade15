# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""What a draft tree asks of a forward pass: who sees whom, at which depth, and which nodes are the same row.

Invariant of all: parents are topological, -1 <= parents[i] < i. Twins in reference_tree.py.
"""

from libc.stdint cimport uint8_t
from libc.string cimport memcpy

import numpy as np

from tinyspec._core.limits import MAX_TREE_NODES, check_range, read_ids
from tinyspec.errors import TinyspecError


cdef int check(const int[::1] parents) except -1:
    cdef Py_ssize_t i
    for i in range(parents.shape[0]):
        if not -1 <= parents[i] < i:
            raise TinyspecError(f"node {i} has parent {parents[i]}: a tree lists every parent before its children")
    return 0


def ancestors(parents):
    """uint8 [n, n]: row i marks node i and its ancestors, the columns it attends to. O(n^2): row i is its parent's plus i."""
    cdef const int[::1] parent = read_ids(parents)
    cdef Py_ssize_t i, n = parent.shape[0]
    check_range("the number of nodes", n, 0, MAX_TREE_NODES)
    check(parent)
    out = np.zeros((n, n), np.uint8)
    cdef uint8_t[:, ::1] mask = out
    with nogil:
        for i in range(n):
            if parent[i] >= 0:
                memcpy(&mask[i, 0], &mask[parent[i], 0], i)
            mask[i, i] = 1
    return out


def depths(parents):
    """int32 [n]: the depth of every node; a child of the root has depth 1. O(n)."""
    cdef const int[::1] parent = read_ids(parents)
    cdef Py_ssize_t i, n = parent.shape[0]
    check(parent)
    out = np.empty(n, np.int32)
    cdef int[::1] depth = out
    for i in range(n):
        depth[i] = 1 if parent[i] < 0 else depth[parent[i]] + 1
    return out


def unique_paths(tokens, parents):
    """int32 [n]: for every node the first node that spells the same path, itself if none does earlier. O(n^2) worst case.

    Equal paths are one row of the forward. Node i repeats node j if their tokens are equal and their parents are, after
    merging; so one backward scan a node suffices, and drafts have tens of nodes.
    """
    cdef const int[::1] token = read_ids(tokens), parent = read_ids(parents)
    cdef Py_ssize_t i, j, n = parent.shape[0]
    cdef int above
    if token.shape[0] != n:
        raise TinyspecError(f"a tree of {token.shape[0]} tokens has {n} parents")
    check(parent)
    out = np.empty(n, np.int32)
    cdef int[::1] first = out
    with nogil:
        for i in range(n):
            first[i] = <int> i
            above = first[parent[i]] if parent[i] >= 0 else -1
            for j in range(i):
                if token[j] == token[i] and first[j] == j and (first[parent[j]] if parent[j] >= 0 else -1) == above:
                    first[i] = <int> j
                    break
    return out
