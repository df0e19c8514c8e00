"""The other commands of python -m bellwether."""
