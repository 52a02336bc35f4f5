#!/usr/bin/env bash
# Two network namespaces as two hosts with a cable between them: same tokens; then the cable is cut under load.
# Needs Linux and the right to make namespaces (user namespaces do), so it is run by hand: tests/distributed/in_namespaces.sh
set -euo pipefail

if [ "${INSIDE:-}" != yes ]; then
  INSIDE=yes exec unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc "$0" "${1:-python3}"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$1
mount -t tmpfs none /run
ip netns add left
ip netns add right
ip link add cable netns left type veth peer name cable netns right
for side in left right; do
  address=$([ $side = left ] && echo 10.77.0.1 || echo 10.77.0.2)
  ip -n $side address add $address/24 dev cable
  ip -n $side link set cable up
  ip -n $side link set lo up
  # Gloo, which carries the exchange of CPU devices, listens where the name of the machine leads.
  printf '127.0.0.1 localhost\n%s %s\n' $address "$(hostname)" > /run/hosts.$side
done
export PYTHONPATH=$PWD JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 TRANSFORMERS_VERBOSITY=error

host() { # SIDE ACTION HOST_ID
  ip netns exec "$1" unshare --mount sh -c "mount --bind /run/hosts.$1 /etc/hosts && exec $python tests/distributed/host_checks.py $2 $3 10.77.0.1:8476"
}

host right tokens 1 > /run/follower 2>&1 &
host left tokens 0 2> /run/leader.errors | tee /run/leader
wait $!
grep -q "same tokens" /run/leader
echo "same tokens in two namespaces"

host right load 1 > /run/follower 2>&1 &
follower=$!
host left load 0 > /run/leader 2>&1 &
leader=$!
until grep -q running /run/leader; do
  kill -0 $leader || { cat /run/leader; exit 1; }
  sleep 0.2
done
ip -n left link set cable down
cut=$SECONDS
for each in $leader $follower; do
  status=0
  wait $each || status=$?
  echo "status $status after $((SECONDS - cut)) s"
  [ $status -ne 0 ] && [ $((SECONDS - cut)) -lt 30 ]
done
grep -h "^error: " /run/leader /run/follower
