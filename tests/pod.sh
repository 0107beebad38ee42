#!/usr/bin/env bash
# Run a command as in a pod of scripts/trainjob.yaml: process 1 of its own namespace, user 1000 without
# any right but to read, and nothing to write to but /tmp, /dev/shm and runs.
#
#   unshare --mount --pid --fork --kill-child bash tests/pod.sh ROOT PROJECT RUNS PYTHON COMMAND ...
#
# ROOT is an empty folder; in the pod, the project is in /srv/app. PYTHON, a folder, is seen there too.
set -euo pipefail
root=$1 project=$2 runs=$3 python=$4
shift 4

mount --make-rprivate /
mount --rbind / "$root"
mount -t proc proc "$root/proc"
for place in tmp srv dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root/$place"; done
mkdir -p "$root/srv/app" "$project/runs" "$root$python"
mount --bind "$python" "$root$python"
mount --bind "$project" "$root/srv/app"
mount --bind "$runs" "$root/srv/app/runs"
# Each mount is made read-only on its own.
while read -r _ _ _ _ place _; do
    case $place in
        "$root"/tmp | "$root"/dev | "$root"/dev/* | "$root"/proc* | "$root"/srv/app/runs) ;;
        "$root" | "$root"/*) mount -o remount,bind,ro "$place" ;;
    esac
done </proc/self/mountinfo
exec chroot "$root" setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs \
    --bounding-set=-all,+dac_read_search --inh-caps=-all,+dac_read_search \
    --ambient-caps=-all,+dac_read_search env --chdir=/srv/app "$@"
