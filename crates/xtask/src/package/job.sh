#!/bin/bash
# The job of `./x package test`: runs under systemd, on the first boot and on the second.
export PATH=/usr/sbin:/usr/bin LC_ALL=C HOME=/root DEBIAN_FRONTEND=noninteractive

finish() {
    status=$?
    if [ $status != 0 ]; then
        systemctl --no-pager --full status 'blockyard*'
        journalctl --no-pager -b -n 60
    fi
    mkdir -p /out
    echo $status >/out/.status
    journalctl --no-pager -b >/out/journal.log 2>&1
    for port in /sys/class/virtio-ports/vport*; do
        [ "$(cat "$port/name" 2>/dev/null)" = out ] && tar -C /out -cf "/dev/${port##*/}" .
    done
    sync
    # The harness waits for the end of the emulator, so that this is a whole shutdown.
    systemctl poweroff 2>/dev/null
}
trap finish EXIT

step() { echo "== $(cut -d. -f1 /proc/uptime) s: $*"; }
until_ok() {
    for ((i = 0; i < 300; i++)); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.2
    done
    echo "never: $*"
    return 1
}
main_pid() { systemctl show -P MainPID "$1"; }
size_of_socket() { nbdinfo --size "nbd+unix:///scratch?socket=/run/blockyard-nbd/example.sock"; }

set -eu
modprobe ublk_drv || true
if [ ! -e /stage ]; then
    step install
    dpkg --force-depends -i /pkg/old.deb
    id blockyard
    blockyard --version
    [ "$(stat -c %U:%a /var/lib/blockyard)" = blockyard:750 ]

    step start
    cat >/etc/blockyard/disk.toml <<'TOML'
[device.disk]
stack = "file:/var/lib/blockyard/disk.img,size=16M,create"
[[export]]
device = "disk"
ublk = 5
TOML
    cat >/etc/blockyard/plain.toml <<'TOML'
[device.plain]
stack = "file:/var/lib/blockyard/plain.img,size=8M,create"
[[export]]
device = "plain"
nbd = "unix:/run/blockyard-plain.sock"
TOML
    systemctl enable --now blockyard@disk.service blockyard@plain.service blockyard-nbd@example.socket
    systemctl enable blockyard-recover.service
    systemctl show -P StatusText blockyard@disk.service | grep 'serving 1 device'
    [ -b /dev/ublkb5 ]
    [ "$(nbdinfo --size 'nbd+unix:///plain?socket=/run/blockyard-plain.sock')" = 8388608 ]

    step "socket activation, as the user blockyard"
    [ "$(systemctl is-active blockyard-nbd@example.service)" = inactive ]
    [ "$(size_of_socket)" = 67108864 ]
    systemctl is-active blockyard-nbd@example.service
    ps -o user= -p "$(main_pid blockyard-nbd@example.service)" | grep blockyard

    step reload
    sed -i 's/size=8M/size=12M/' /etc/blockyard/plain.toml
    before=$(main_pid blockyard@plain.service)
    systemctl reload blockyard@plain.service
    [ "$(nbdinfo --size 'nbd+unix:///plain?socket=/run/blockyard-plain.sock')" = 12582912 ]
    [ "$(main_pid blockyard@plain.service)" = "$before" ]
    systemctl is-active blockyard@plain.service

    step "a dead NBD server is restarted"
    kill -9 "$before"
    until_ok nbdinfo --size 'nbd+unix:///plain?socket=/run/blockyard-plain.sock'

    step "a stopped server misses its watchdog: a drop-in of 2 s"
    mkdir -p /run/systemd/system/blockyard@plain.service.d
    printf '[Service]\nWatchdogSec=2\n' >/run/systemd/system/blockyard@plain.service.d/watchdog.conf
    systemctl daemon-reload
    systemctl restart blockyard@plain.service
    before=$(main_pid blockyard@plain.service)
    sleep 5
    [ "$(main_pid blockyard@plain.service)" = "$before" ]
    kill -STOP "$before"
    replaced() { [ "$(main_pid blockyard@plain.service)" != "$before" ] && systemctl -q is-active blockyard@plain.service; }
    until_ok replaced

    step "upgrade of the package under load"
    echo "kept over reboots" | dd of=/dev/ublkb5 bs=4096 conv=sync,fsync status=none
    (while [ ! -e /tmp/enough ]; do dd if=/dev/ublkb5 of=/dev/null bs=64k iflag=direct status=none || echo failed; done) \
        >/tmp/reads 2>&1 &
    reader=$!
    disk=$(main_pid blockyard@disk.service)
    dpkg --force-depends -i /pkg/new.deb
    [ "$(main_pid blockyard@disk.service)" = "$disk" ]

    step "a dead ublk server is recovered, by the new program"
    kill -9 "$disk"
    until_ok systemctl -q is-active blockyard-recover@disk.service
    new=$(main_pid blockyard-recover@disk.service)
    [ "$(readlink "/proc/$new/exe")" = /usr/bin/blockyard ]
    sleep 1
    touch /tmp/enough
    wait "$reader"
    cat /tmp/reads
    [ ! -s /tmp/reads ]
    dd if=/dev/ublkb5 bs=4096 count=1 iflag=direct status=none | grep -a 'kept over reboots'
    touch /stage
else
    step "the devices are back after the reboot"
    until_ok systemctl -q is-active blockyard@disk.service
    until_ok test -b /dev/ublkb5
    dd if=/dev/ublkb5 bs=4096 count=1 status=none | grep -a 'kept over reboots'
    [ "$(nbdinfo --size 'nbd+unix:///plain?socket=/run/blockyard-plain.sock')" = 12582912 ]
    [ "$(size_of_socket)" = 67108864 ]
    dpkg-query -W blockyard | grep 1.1-1

    step remove
    dpkg --force-depends -r blockyard
    [ ! -e /dev/ublkb5 ]
    [ -z "$(pgrep -x blockyard || true)" ]
    [ ! -e /usr/bin/blockyard ] && [ -e /etc/blockyard/example.toml ]
    dpkg --force-depends -P blockyard
    [ ! -e /etc/blockyard/example.toml ] && [ -e /var/lib/blockyard/disk.img ]
    [ -z "$(find /etc/systemd/system -name 'blockyard*' -print)" ]
fi
step done
