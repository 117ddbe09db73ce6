#!/bin/sh
# Process 1 of the node, started in new mount, network, cgroup, UTS, IPC and PID namespaces.
#
# Needs: ROOTFS SCRATCH (see root.sh), LOCAL (the project's state folder), SOURCES (the e2e package), DISK (the node's
# real disk), STATE (the node's state folder), NODE_NAME, INIT (the program to become), and CGROUP: "v2", or the v1
# hierarchies of the host, one a line, named by their mount options.
set -eu
. "$SOURCES/cluster/shell/root.sh"

make_root
show "$LOCAL"
show "$SOURCES"
mount -o remount,ro,bind "./$SOURCES"
for folder in containerd kubelet cni kube-proxy; do
	mkdir -p "$DISK/$folder" "var/lib/$folder"
	mount --bind "$DISK/$folder" "var/lib/$folder"
done
# Volumes that kubelet mounts must be seen by the containers that started earlier.
mount --make-shared var/lib/kubelet
mkdir -p "$DISK/log" && mount --bind "$DISK/log" var/log
enter_root
leave_host

# Settings of the whole machine that a kubelet wants to own: it is shown, and writes, private copies.
mkdir -p /run/sysctl
while read -r setting value; do
	copy=/run/sysctl/$(echo "$setting" | tr / .)
	echo "$value" > "$copy"
	mount --bind "$copy" "/proc/sys/$setting"
done <<-SETTINGS
	vm/overcommit_memory 1
	kernel/panic 10
	kernel/panic_on_oops 1
SETTINGS

echo "$NODE_NAME" > /proc/sys/kernel/hostname
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link set lo up

if [ "$CGROUP" = v2 ]; then
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
	mount -t tmpfs -o mode=755 cgroup_root /sys/fs/cgroup
	echo "$CGROUP" | while read -r options; do
		name=${options#none,name=}
		mkdir "/sys/fs/cgroup/$name"
		mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$name"
		# Hierarchies that hold several controllers are looked for under each one's name.
		case $name in *,*) for one in $(echo "$name" | tr , ' '); do ln -s "$name" "/sys/fs/cgroup/$one"; done ;; esac
	done
fi

mkdir -p /run/netns /run/lock /etc/kubernetes
: > "$STATE/ready"
exec "$INIT"
