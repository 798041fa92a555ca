#!/bin/sh
# Installs what the laboratory needs and does not find: iproute2, and, where the kernel has no sch_netem, User Mode
# Linux (its kernel and modules, 116 MB) with kmod's insmod. Debian and Ubuntu; root. Where it cannot, it says so: the
# laboratory then takes the backend that there is, and says which.
set -u
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
export DEBIAN_FRONTEND=noninteractive
# Twice: package servers have their moments. shellcheck: $need is several words.
for _ in 1 2; do
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get -o DPkg::Lock::Timeout=300 install -yqq --no-install-recommends $need >/dev/null && exit 0
done
echo "netlab: could not install$need; see above" >&2
