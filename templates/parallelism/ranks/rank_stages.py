"""List the stages that start several ranks, with their help.

This module does not import torch, so that `--help` is fast.
"""

RANK_STAGES = {
    "scale": "Run on 1 to n processes: same losses, efficiency, memory per rank, DDP or FSDP.",
}
