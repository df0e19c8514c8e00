"""python -m bellwether scan: watches a run by the checkpoints that it writes."""
