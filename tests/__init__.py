"""The tests of the template."""
