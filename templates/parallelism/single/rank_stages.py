"""List the stages that start several ranks: none, since this project trains in one process."""

RANK_STAGES: dict[str, str] = {}
