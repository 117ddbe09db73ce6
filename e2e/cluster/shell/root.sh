# Sourced by the other scripts, in a mount namespace of its own: enter the Debian root file system as "/".
#
# The root file system itself stays as it was built: writes go to an overlay in memory, which vanishes with the
# namespace. Needs ROOTFS (the folder), SCRATCH (an empty folder to mount on).

# make_root: mount the new root and leave the caller in it as the current directory (not yet as "/").
make_root() {
	mount --make-rprivate /
	mount -t tmpfs -o mode=755 kvstrata "$SCRATCH"
	cd "$SCRATCH"
	mkdir lower upper work root
	mount --bind "$ROOTFS" lower
	# Relative names, because an overlay's options cannot hold every character that a path can.
	mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work kvstrata root
	cd root
	mount -t proc proc proc
	mount -t sysfs sysfs sys
	mount --rbind /dev dev
	mount -t tmpfs -o mode=1777 shm dev/shm
}

# show PATH: make a path of the host visible in the new root under the same name.
show() {
	if [ -d "$1" ]; then mkdir -p "./$1"; else mkdir -p "./${1%/*}" && : > "./$1"; fi
	mount --bind "$1" "./$1"
}

# enter_root: make the current directory "/" and forget the host's file systems.
enter_root() {
	mkdir -p .host
	pivot_root . .host
	cd /
	export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
}

# leave_host: after enter_root, drop the last way back to the host's files.
leave_host() {
	umount -l /.host
	rmdir /.host
}
