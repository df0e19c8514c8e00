"""One attention module under watch: its calls, their taps, its weights, and what is measured."""
