#!/bin/sh
# Installs what the laboratory needs and does not find: iproute2, and, where the kernel has no sch_netem, User Mode
# Linux (its kernel and modules, 116 MB) with kmod's insmod. Debian and Ubuntu; root.
set -eu
need=""
for pair in ip:iproute2 tc:iproute2 linux.uml:user-mode-linux insmod:kmod; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || need="$need ${pair#*:}"
done
[ -n "$need" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "netlab: missing$need; install them (as root: apt-get install$need)" >&2
    exit 0
fi
echo "netlab: installing$need ..."
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -yqq --no-install-recommends $need >/dev/null
