#!/usr/bin/env bash
# `./x demo`: serves an image, copies real data in and out with clients that are not ours, measures ten seconds of random
# reads and writes, and prints one table. Everything it makes lies in the folder it is given, which its caller removes;
# the server ends with this script, however that ends.
#
#     demo.sh BINARY FOLDER
set -euo pipefail
blockyard=$1 folder=$2
size_mib=512 seconds=10 jobs=4 depth=16
ticks=$(getconf CLK_TCK)
server=

stop() {
    [[ $server ]] || return 0
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    server=
}
trap stop EXIT
trap 'exit 130' INT TERM HUP

step() { printf '\n\e[1m%s\e[0m\n' "$1" | if [[ -t 1 ]]; then cat; else sed 's/\x1b\[[0-9]*m//g'; fi; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

# Prints the command as a person would type it, then runs it.
run() {
    printf '  $ %s\n' "${*//$folder/DIR}"
    "$@" >"$folder/output" 2>&1 || {
        cat "$folder/output" "$folder/log" >&2
        kill -0 "$server" 2>/dev/null || die "that command failed: the server has ended"
        die "that command failed"
    }
}

sum() { sha256sum "$1" | cut -c1-64; }
cpu_ticks() { local stat; stat=$(<"/proc/$server/stat"); set -- ${stat##*) }; echo $((${12} + ${13})); }
resident() { awk '/^Rss:/ { print $2 }' "/proc/$server/smaps_rollup"; }

step "An image of $size_mib MiB, half of it random data"
truncate -s "${size_mib}M" "$folder/disk.img"
head -c "$((size_mib / 2))M" /dev/urandom >"$folder/data"
truncate -s "${size_mib}M" "$folder/data"
wanted=$(sum "$folder/data")

step "Serve it"
export BLOCKYARD_RUN=$folder/run
printf '  $ blockyard serve file:DIR/disk.img --nbd unix:DIR/disk.sock\n'
started=${EPOCHREALTIME/[.,]/}
"$blockyard" serve "file:$folder/disk.img" --nbd "unix:$folder/disk.sock" >"$folder/ready" 2>"$folder/log" &
server=$!
until [[ -s $folder/ready ]]; do
    kill -0 "$server" 2>/dev/null || { cat "$folder/log" >&2; die "the server ended at once"; }
    sleep 0.001
done
ready_ms=$(((${EPOCHREALTIME/[.,]/} - started) / 1000))
read -r _ _ uri <"$folder/ready"
printf '  %s\n' "$(sed "s|$folder|DIR|g" "$folder/ready")"

step "Copy real data in and out, with clients that are not ours"
run nbdcopy "$folder/data" "$uri"
run nbdcopy "$uri" "$folder/out.nbdcopy"
run qemu-img convert -f raw -O raw "$uri" "$folder/out.qemu"
run qemu-img compare -f raw -F raw "$folder/data" "$uri"
for copy in out.nbdcopy out.qemu; do
    [[ $(sum "$folder/$copy") == "$wanted" ]] || die "$copy differs from what was written"
    rm "$folder/$copy"
done
printf '  sha256 of both copies is that of the data: %s…\n' "${wanted:0:16}"

step "Random reads and writes for $seconds seconds: 4 KiB, $jobs connections, $depth requests in flight on each"
before=$(cpu_ticks)
run fio --name=demo --ioengine=nbd "--uri=$uri" --rw=randrw --bs=4k --numjobs=$jobs --iodepth=$depth --thread \
    --group_reporting --time_based --runtime=$seconds --output-format=json --output="$folder/fio.json"
used=$(($(cpu_ticks) - before))
resident=$(resident)

step "Stop it"
kill -TERM "$server"
wait "$server" || die "the server ended with status $?: $(cat "$folder/log")"
server=

# fio prints lines of its own before the JSON.
sed -n '/^{/,$p' "$folder/fio.json" | jq -r --argjson used "$used" --argjson ticks "$ticks" \
    --argjson rss "$resident" --argjson ready "$ready_ms" '
    def pad($width): tostring | (" " * ($width - length)) + .;
    def row($name; $iops; $bw; $p50; $p99): "  \($name)\($iops|round|pad(12))\($bw|round|pad(10))\($p50|pad(10))\($p99|pad(10))";
    def us($at): .clat_ns.percentile[$at] / 1000 | round;
    .jobs[0] | (.read.total_ios + .write.total_ios) as $total
    | "\n            IOPS      MB/s    p50 us    p99 us",
      row("read "; .read.iops; .read.bw_bytes / 1e6; (.read | us("50.000000")); (.read | us("99.000000"))),
      row("write"; .write.iops; .write.bw_bytes / 1e6; (.write | us("50.000000")); (.write | us("99.000000"))),
      row("both "; .read.iops + .write.iops; (.read.bw_bytes + .write.bw_bytes) / 1e6; "-"; "-"),
      "",
      "  server: \($used / $ticks * 1e6 / $total * 100 | round / 100) us of CPU for each request, \($rss / 1024 * 10 | round / 10) MiB resident, ready \($ready) ms after its start"'
