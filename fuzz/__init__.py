"""Hostile input: every file that noisecast reads back, garbled on purpose. `python -m fuzz --help`."""
