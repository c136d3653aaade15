"""Survey section 2.1: where the guesses come from."""
