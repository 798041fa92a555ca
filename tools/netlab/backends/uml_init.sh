#!/bin/sh
# The first process of the User Mode Linux kernel: a wire between vec0 and vec1. Each line of the console is a number and
# a command; it is answered by what it prints, and "RC number status". When the console closes, the machine goes off.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs tmpfs /run
for module in sch_ingress cls_matchall act_mirred sch_netem sch_tbf sch_red; do
    insmod "/usr/lib/uml/modules/$(uname -r)/kernel/net/sched/$module.ko" || echo "no module $module"
done
for i in 0 1; do
    ip link set "vec$i" promisc on up
    tc qdisc add dev "vec$i" ingress
done
join() {
    for i in 0 1; do
        tc filter add dev "vec$i" ingress protocol all matchall \
            action mirred egress redirect dev "vec$((1 - i))" || return 1
    done
}
stty -echo
echo "READY $(uname -r)"
while read -r number line; do
    [ -n "$number" ] || continue
    eval "$line" 2>&1
    echo "RC $number $?"
done
echo o >/proc/sysrq-trigger
sleep 5
