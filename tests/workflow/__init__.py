"""Tests of the stages of the workflow, their order and their report."""
