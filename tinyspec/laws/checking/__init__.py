"""Prove or refute a function of the reader's own: its signature, its cases, its randomness."""
