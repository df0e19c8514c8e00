"""What a model says of its attention before it runs: by names, weights and code."""
