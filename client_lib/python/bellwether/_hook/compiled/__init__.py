"""torch.compile: what it traces in the place of a call, and the taps in its graph."""
