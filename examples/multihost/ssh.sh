#!/usr/bin/env bash
# examples/multihost/ssh.sh HOST...: the first one leads, and its terminal is yours. torchax-serve is on the path of all.
set -euo pipefail

hosts=("$@")
common="--coordinator ${hosts[0]}:8476 --num-hosts ${#hosts[@]}"
for id in "${!hosts[@]}"; do
  if ((id > 0)); then
    ssh "${hosts[$id]}" "torchax-serve run qwen3-32b $common --host-id $id" &
  fi
done
ssh -t "${hosts[0]}" "torchax-serve run qwen3-32b $common --host-id 0"
wait
