"""Show a generation: on the terminal, as a picture, as a page that plays it back, and in a race."""
