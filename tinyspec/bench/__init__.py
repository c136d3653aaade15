"""The measuring harness: every figure with its raw samples, the machine, the command and the
date.
"""
