"""python -m bellwether attach: watches a process that runs already."""
