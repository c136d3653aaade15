"""Chapter 1: speculative decoding. A draft is guessed cheaply and verified in one pass of the
target.
"""
