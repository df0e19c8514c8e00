"""Gets between a model and its attention: layers, weights, and what is seen of each call."""
