"""Noisecast side by side with its peers: `make bench`, or `python -m benchmarks --help`."""
