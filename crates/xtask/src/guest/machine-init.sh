#!/bin/sh
# The first program of a virtual machine: mounts the exported disk and starts the system there.
export PATH=/usr/sbin:/usr/bin
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys
dmesg -n 5
modprobe virtio_blk
modprobe ext4
until [ -b /dev/vda ]; do sleep 0.05; done
mount -t ext4 -o errors=panic /dev/vda /system
for folder in dev proc sys; do mount -o move /$folder /system/$folder; done
exec switch_root /system /sbin/init
