"""Toys that bear a technique's name: each fails the trap test of the real one."""
