"""Tests of a rendered project: training, data, checkpoints, logs, trackers, your own models."""
