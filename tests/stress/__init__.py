"""Stress tests: programs that try to break what the template promises (`make torture`)."""
