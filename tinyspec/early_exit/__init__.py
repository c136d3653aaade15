"""Chapter 2: early exit. A token leaves the model at the first layer that is confident enough."""
