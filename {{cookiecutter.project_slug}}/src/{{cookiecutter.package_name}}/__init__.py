"""A training project: see README.md, and `python -m` this package for its commands."""
