"""Of what a rendered project does: training, data, checkpoints, logs, trackers."""
