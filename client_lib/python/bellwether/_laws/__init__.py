"""What exact arithmetic makes equal in the backward pass of attention, and what differs."""
