"""The C libraries: found, loaded, their headers mirrored, and a run's client."""
