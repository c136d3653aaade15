"""What all methods share: the loops, sampling, verification, random numbers, drafters."""
