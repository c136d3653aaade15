"""Assignments and their autograder: the laws are the tests."""
