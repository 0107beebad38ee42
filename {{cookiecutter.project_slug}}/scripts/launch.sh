#!/usr/bin/env bash
# Start training under torchrun, on one machine or on several.
#
#   scripts/launch.sh [-n PROCESSES] train|profile [options]
#
# PROCESSES on this machine: as many as it has GPUs, or 1. On several machines run the same line on
# each, with NNODES=2 RDZV_ENDPOINT=first-machine:29500 in the environment (and RDZV_ID=name where
# several jobs share that endpoint).
#
# With NNODES=1:4 the job goes on with whatever machines there are, one to four of them, from the
# newest checkpoint. A machine may fail; it may be told to stop (SIGTERM) or join at any time (by the
# same line), for which the others save first. Only that of RDZV_ENDPOINT has to stay. A failed one
# is given up after 15 s, and more are waited for 30 s at each start:
# PET_RDZV_CONF=keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=30.
#
# The console shows rank 0 and errors; each rank's own log is in logs/ of the run directory.
#
# A job whose process dies is started again from its last checkpoint, MAX_RESTARTS times (3), but
# for settings that are refused, on one machine. On SIGTERM it saves and stops; GRACE_SECONDS (120)
# later torchrun kills what is left.
set -euo pipefail

python=${PYTHON:-python}
processes=
if [ "${1:-}" = "-n" ]; then
    processes=${2:-}
    [[ $processes =~ ^[1-9][0-9]*$ ]] || { echo "-n wants a number of processes" >&2; exit 2; }
    shift 2
fi
# Asked here, not in each process, where it would take torch's start to be told.
if [[ ! ${1:-} =~ ^(train|profile)$ ]]; then
    echo "usage: scripts/launch.sh [-n PROCESSES] train|profile [options]" >&2
    echo "(the other commands start what they need: $python -m {{ cookiecutter.package_name }} --help)" >&2
    [[ ${1:-} =~ ^(-h|--help)$ ]] && exit 0
    exit 2
fi
if [[ ! ${NNODES:-1} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]]; then
    echo "NNODES wants a number of machines, or the fewest and the most (1:4)" >&2
    exit 2
fi
[ "$processes" ] || processes=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')

# Without this the workers' store outlives a restart, and the new attempt reads the addresses of the
# dead one: restarts then fail or hang more often than not.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Unset, torchrun gives each process a single thread.
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE_SECONDS:-120} # torch before 2.13 has a fixed 30
# Told to the processes, so that none lives on if torchrun is killed while they start.
export LAUNCHER_PID=$$

rendezvous=() # on one machine nothing listens to the network: distributed/launch.py
if [ "${NNODES:-1}" != 1 ]; then
    rendezvous=(
        --nnodes "$NNODES"
        --rdzv-backend c10d
        --rdzv-id "${RDZV_ID:-training}"
        --rdzv-endpoint "${RDZV_ENDPOINT:?set it to host:port of one of the $NNODES machines}"
    )
fi
exec "$python" -m {{ cookiecutter.package_name }}.distributed.launch ${rendezvous[@]+"${rendezvous[@]}"} \
    --nproc-per-node "$processes" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m {{ cookiecutter.package_name }} "$@"
