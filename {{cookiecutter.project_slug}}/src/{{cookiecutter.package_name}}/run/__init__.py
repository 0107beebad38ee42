"""What a run keeps: its directory, log, journal, and what it knows of its machine."""
