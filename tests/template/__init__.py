"""Tests of the template: answers, renders, updates, documentation, demo, benchmarks, matrix."""
