"""The patched forward of modules, and what a call inside it comes to."""
