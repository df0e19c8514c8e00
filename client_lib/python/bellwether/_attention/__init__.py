"""The stabilized attention: operators, centred keys, and a model switched to it."""
