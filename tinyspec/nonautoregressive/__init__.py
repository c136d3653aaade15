"""Non-autoregressive and parallel generation: one forward pass writes several tokens."""
