#!/bin/sh
# The first program of the guest of `./x package test`: mounts the disk, and goes on with the systemd on it.
export PATH=/usr/sbin:/usr/bin
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys
modprobe virtio_blk
modprobe ext4
modprobe virtio_console
mount -t ext4 /dev/vda /mnt || { echo "guest: no disk" >/dev/kmsg; poweroff -n -f; }
# The kernel's modules are those of the harness, and so is modprobe.
mkdir -p /mnt/usr/lib/modules
cp -a /usr/lib/modules/. /mnt/usr/lib/modules/
rm -f /mnt/usr/sbin/modprobe /mnt/usr/bin/busybox
cp /usr/sbin/modprobe /mnt/usr/sbin/modprobe
cp /usr/bin/busybox /mnt/usr/bin/busybox
dmesg -n 5
umount /proc /sys
exec switch_root /mnt /lib/systemd/systemd
