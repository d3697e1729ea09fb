#!/bin/sh
# Simulates two hosts by two connected network namespaces:  two_hosts.sh SCRIPT-OF-A SCRIPT-OF-B
# Runs both scripts at once. $ME is the address of the host (a 10.77.0.1, b 10.77.0.2). Output is prefixed a: or b:.
# Exits with 77 and a reason if this machine allows no namespaces.
set -u
skip() { echo "cannot simulate two hosts: $*"; exit 77; }
PATH=$PATH:/usr/sbin:/sbin
command -v ip >/dev/null || skip "ip is not installed (iproute2)"
[ "$(id -u)" = 0 ] || skip "only root can create network namespaces"
a=tessera-a-$$ b=tessera-b-$$
trap 'ip netns del $a 2>/dev/null; ip netns del $b 2>/dev/null' EXIT
trap 'exit 143' INT TERM
said=$(ip netns add $a 2>&1 && ip netns add $b 2>&1) || skip "$said"
said=$(ip -n $a link add cable type veth peer name cable netns $b 2>&1) || skip "$said"
for host in "$a 10.77.0.1" "$b 10.77.0.2"; do
  set -- "$@" $host
  ip -n "${host% *}" address add "${host#* }/24" dev cable
  ip -n "${host% *}" link set lo up
  ip -n "${host% *}" link set cable up
done
ME=10.77.0.1 ip netns exec $a unshare --uts sh -c "hostname host-a; $1" 2>&1 | sed -u 's/^/a: /' &
ME=10.77.0.2 ip netns exec $b unshare --uts sh -c "hostname host-b; $2" 2>&1 | sed -u 's/^/b: /' &
wait
