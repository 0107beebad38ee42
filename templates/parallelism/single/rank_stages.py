"""The stages that start several ranks: none, as this project trains in one process."""

RANK_STAGES: dict[str, str] = {}
