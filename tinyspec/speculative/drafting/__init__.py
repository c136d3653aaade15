"""Survey section 2.1: where the draft tokens come from."""
