"""Chapter 2, early exiting: a token leaves the model as soon as a layer is confident of the next."""
