"""Planted bugs: a promise is worth what it says of the bugs that break it. `python -m mutants` plants them in turn."""
