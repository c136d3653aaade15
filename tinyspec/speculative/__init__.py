"""Chapter 1: speculative decoding. A cheap draft is verified in one forward pass of the target."""
