"""Bring data sets and models to this machine, checked and whole."""
