"""Our figures beside the peers': each topic a program, `python -m benchmarks.loop` and so on."""
