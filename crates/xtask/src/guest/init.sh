#!/bin/sh
# The first program of a guest: makes it usable, runs the job, brings out what the job left in /out, switches off.
# The harness passes by the kernel's command line: GUEST_JOB the terminal for the job's output, GUEST_SECONDS when the
# job will be given up, GUEST_OUT (user-mode kernels) the folder of the host that takes the results.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C CI=$GUEST_CI
umask 022
mount -t devtmpfs none /dev
echo '<1>guest is up' >/dev/kmsg
mkdir -p /dev/pts /dev/shm
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devpts none /dev/pts
for folder in /dev/shm /tmp /run /var/tmp; do mount -t tmpfs -o mode=1777 none $folder; done
mount -t debugfs none /sys/kernel/debug 2>/dev/null
mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null
modprobe configfs 2>/dev/null
mount -t configfs none /sys/kernel/config 2>/dev/null
ln -sf /proc/self/fd /dev/fd
ifconfig lo 127.0.0.1 up 2>/dev/null
# Warnings of the kernel count, so they must reach the console; what it says while it starts need not.
dmesg -n 5
echo 100 >/proc/sys/kernel/hung_task_timeout_secs 2>/dev/null
echo -1 >/proc/sys/kernel/hung_task_warnings 2>/dev/null
# Shortly before the job is given up, the kernel tells what every blocked task waits for.
(sleep $((GUEST_SECONDS > 16 ? GUEST_SECONDS - 8 : GUEST_SECONDS / 2)); dmesg -n 8; echo w >/proc/sysrq-trigger) &
stty raw -echo </dev/$GUEST_JOB 2>/dev/null
[ -n "$GUEST_SHELL" ] && stty sane </dev/$GUEST_JOB
cd /job
setsid -c ./run </dev/$GUEST_JOB >/dev/$GUEST_JOB 2>&1
echo $? >/out/.status
dmesg >/out/.dmesg
if [ -n "$GUEST_OUT" ]; then
    mkdir -p /host && mount -t hostfs none /host -o "$GUEST_OUT"
    tar -C /out -cf /host/out.tar . && umount /host
fi
# Modules on Linux 6.1; nothing here loads modules for devices.
for module in virtio_pci virtio_console; do modprobe $module 2>/dev/null; done
for port in /sys/class/virtio-ports/vport*; do
    [ "$(cat $port/name 2>/dev/null)" = out ] && tar -C /out -cf /dev/${port##*/} .
done
echo '<1>guest is done' >/dev/kmsg
# No sync: a device whose server is gone would hold it up for ever.
poweroff -n -f
