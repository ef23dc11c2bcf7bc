#!/bin/sh
# modprobe as busybox has it, which takes a module that is built in for one that is not there.
version=$(uname -r)
[ -d /lib/modules/$version ] || exit 0
for word; do case $word in -*) ;; *) break ;; esac; done
name=$(echo "$word" | tr - _)
grep -qx "$name" /lib/modules/$version/builtin && exit 0
exec /bin/busybox modprobe "$@"
