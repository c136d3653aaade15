"""Early exit: tokens run fewer layers, or the first layers draft for the whole model."""
