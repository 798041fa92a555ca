#!/bin/sh
# The first process of a User Mode Linux guest whose root is this host's, read-only: runs the laboratory's own tests on
# the guest's kernel, which has sch_netem. Prints what they say, and RESULT n.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 NETLAB=netem NETLAB_REQUIRED=1
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs tmpfs /run
# Not over /tmp: the project may lie there.
mkdir /run/tmp && export TMPDIR=/run/tmp
modules="/usr/lib/uml/modules/$(uname -r)/kernel"
for module in sched/sch_ingress sched/cls_matchall sched/act_mirred sched/sch_netem sched/sch_tbf sched/sch_red; do
    insmod "$modules/net/$module.ko"
done
insmod "$modules/drivers/net/veth.ko"
ip link set lo up
# The kernel hands its unknown arguments over as variables: guest_python, guest_root, guest_tests.
cd "$guest_root" || exit 1
"$guest_python" -m pytest -q -m netem tests/netem/test_truth.py -k "netem] and ($(echo "$guest_tests" | sed "s,|, or ,g"))"
echo "RESULT $?"
echo o >/proc/sysrq-trigger
sleep 5
