#!/usr/bin/env bash
# Hosts as namespaces, so that `ray stop`, every signal and every address stay in one of them:
#   HOSTS=2 unshare --pid --mount --net --uts --fork --kill-child --mount-proc \
#       hosts.sh FOLDER COMMAND...
# The command runs on host-1, with 192.0.2.1; `on 2 COMMAND...` in it runs one on host-2, at
# 192.0.2.2. All see one file system, but for a /tmp each, in which FOLDER is everybody's. A host's
# only link is to a bridge on host-1, which calls it link-2. Everything ends with the command.
set -euo pipefail
export folder=$1; shift

on() {
    nsenter --target "$(cat "$folder/host-$1")" --pid --mount --net --uts --wd="$PWD" "${@:2}"
}
export -f on

name_and_tmp() {
    hostname "host-$1"
    mount --bind "$folder/hosts" /etc/hosts
    # nobody is asked for the names that are not there
    [ ! -e /etc/resolv.conf ] || mount --bind "$folder/resolv.conf" /etc/resolv.conf
    mount -t tmpfs tmpfs /mnt
    mkdir /mnt/upper /mnt/work /mnt/shared
    mount --bind "$folder" /mnt/shared
    mount -t overlay -o lowerdir=/tmp,upperdir=/mnt/upper,workdir=/mnt/work overlay /tmp
    mkdir -p "$folder" && mount --bind /mnt/shared "$folder"
}
export -f name_and_tmp

echo 'nameserver 127.0.0.1' >"$folder/resolv.conf"
echo '127.0.0.1 localhost' >"$folder/hosts"
for n in $(seq "$HOSTS"); do echo "192.0.2.$n host-$n" >>"$folder/hosts"; done
ip link set lo up
ip link add hosts type bridge
ip addr add 192.0.2.1/24 dev hosts
ip link set hosts up
# nothing is there, but with a way to it programs that ask for their own address need not wait
ip route add default via 192.0.2.254
for n in $(seq 2 "$HOSTS"); do
    # bash, as the first process of its host, waits for the orphans
    unshare --pid --mount --net --uts --fork --kill-child --mount-proc \
        bash -c 'sleep infinity & wait' &
    until pgrep --parent $! >"$folder/host-$n"; do sleep 0.1; done
    ip link add "link-$n" type veth peer name eth0 netns "$(cat "$folder/host-$n")"
    ip link set "link-$n" master hosts up
    on "$n" ip link set lo up
    on "$n" ip addr add "192.0.2.$n/24" dev eth0
    on "$n" ip link set eth0 up
    on "$n" ip route add default via 192.0.2.254
    on "$n" bash -ec "name_and_tmp $n"
done
name_and_tmp 1
cd "$folder/work"
"$@"
