"""The model: what is stored, how it is loaded, and how a forward pass is computed."""
