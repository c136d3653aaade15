"""Survey section 2.2: what is accepted."""
