#!/usr/bin/env bash
# Run a command as in a pod of trainjob.yaml: process 1 of its own namespace, user 1000
# without any right but to read, and nothing to write to but /tmp, /dev/shm and runs.
#
#   unshare --uts --mount --pid --fork --kill-child bash tests/cluster/pod.sh NAME ROOT PROJECT RUNS PYTHON \
#       COMMAND ...
#
# ROOT is an empty folder; in the pod, the project is in /srv/app, and PYTHON, a folder, is where it
# was. The network is the machine's, with an address for each NAME: node-0, node-1.
set -euo pipefail
name=$1 root=$2 project=$3 runs=$4 python=$5
shift 5

mount --make-rprivate /
echo "$name" >/proc/sys/kernel/hostname
mount --rbind / "$root"
mount -t proc proc "$root/proc"
for place in tmp srv dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root/$place"; done
mkdir -p "$root/srv/app" "$project/runs" "$root$python"
printf '127.0.0.1 localhost\n127.0.1.1 node-0\n127.0.1.2 node-1\n' >"$root/srv/hosts"
mount --bind "$root/srv/hosts" "$root/etc/hosts"
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
