"""One call of attention: what it is, and how it is read from a function's arguments."""
