"""Chapter 3: non-autoregressive generation. Many tokens in one pass, and what that costs in
dependence.
"""
