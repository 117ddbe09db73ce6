#!/bin/sh
# Run a program of the root file system with the host's network, and the host's files visible below /.host.
#
# Needs: ROOTFS SCRATCH (see root.sh), SHELL_LIBRARY (root.sh), STORAGE (the image builder's storage on a real disk).
set -eu
. "$SHELL_LIBRARY"

make_root
mkdir -p var/lib/containers
mount --bind "$STORAGE" var/lib/containers
for file in etc/resolv.conf etc/hosts; do
	rm -f "$file"
	if [ -f "/$file" ]; then cat "/$file" > "$file"; fi
done
enter_root
# The host's cgroups, because the runtime of the image builder looks for them.
mount --rbind /.host/sys/fs/cgroup /sys/fs/cgroup
exec "$@"
