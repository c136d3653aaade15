"""Drafting and verification together, with caches, contrast, retrieval or batching."""
