#!/bin/sh
# Installs the browser that the dashboard is tested in, where it is missing: Debian's chromium, and a font for it.
# Debian and Ubuntu; root. Without either, or if it takes too long, this says so, and those tests are skipped.
set -u
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "ui: chromium is missing; install it (as root: apt-get install chromium fonts-dejavu-core)" >&2
    exit 0
fi
echo "ui: installing chromium ..."
export DEBIAN_FRONTEND=noninteractive
timeout 90 sh -c 'apt-get update -qq && apt-get -o DPkg::Lock::Timeout=60 install -yqq --no-install-recommends \
    chromium fonts-dejavu-core >/dev/null' || echo "ui: chromium could not be installed; its tests are skipped" >&2
exit 0
