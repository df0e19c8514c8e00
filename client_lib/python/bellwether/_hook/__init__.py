"""Gets between a model and its attention.

Here is what the rooms inside share: what each asks of the others (hosts.py), and which forwards run
(running.py, attention_switch.py).
"""
