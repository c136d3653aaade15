"""Survey section 2.3: both at once, with caches, contrast, retrieval or batching."""
