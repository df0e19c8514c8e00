"""Functions whose calls come to ours while a monitor watches, of C and of Python."""
