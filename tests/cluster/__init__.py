"""Tests of several hosts: Slurm, Kubernetes, elastic launches, hybrid sharding."""
