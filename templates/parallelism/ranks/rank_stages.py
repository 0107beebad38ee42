"""The stages that start several ranks, and what each does.

Importing this imports no torch, so that `--help` stays quick.
"""

RANK_STAGES = {
    "scale": "Run on 1 to n processes: same losses, efficiency, memory per rank, DDP or FSDP.",
}
