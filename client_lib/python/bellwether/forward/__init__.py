"""python -m bellwether forward: a run's signals in other loggers."""
