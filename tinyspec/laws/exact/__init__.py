"""The exact laws: every outcome of a decoder, on models whose probabilities are exact."""
