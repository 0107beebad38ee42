"""Of jobs on several hosts: Slurm, Kubernetes, elastic launches."""
