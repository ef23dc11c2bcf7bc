#!/bin/sh
# The system of a virtual machine: runs the lines that arrive on the second serial line. Each is followed by its exit
# status, on a line of its own that begins with "status".
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C
for folder in /tmp /run; do mount -t tmpfs -o mode=1777 none $folder; done
echo 100 >/proc/sys/kernel/hung_task_timeout_secs
stty raw -echo </dev/ttyS1
exec </dev/ttyS1 >/dev/ttyS1 2>&1
echo ready
while read -r line; do
    eval "$line" </dev/null
    echo "status $?"
done
