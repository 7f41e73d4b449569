#!/usr/bin/env bash
# Two vLLM servers with KVBoost's tiers over one Redis, behind vllm-router:  examples/fleet/vllm_router.sh MODEL
# Needs, in a checkout: pip install vllm vllm-router ".[redis]", and redis-server. Ends with Ctrl-C.
# Not run as a whole in this repository's tests. They run vLLM with these tiers and, where vllm-router is installed, check its flags.
set -euo pipefail
MODEL="${1:?give a model: a folder or a hub name}"
REDIS="${REDIS_PORT:-6390}"
trap 'kill $(jobs -p)' EXIT
redis-server --port "$REDIS" --bind 127.0.0.1 --save "" --appendonly no --maxmemory 4gb --maxmemory-policy allkeys-lru >/dev/null &
TIERS='{"kv_connector": "KVBoostConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"remote_url": "redis://127.0.0.1:'"$REDIS"'/0"}}'
for port in 8101 8102; do
  vllm serve "$MODEL" --host 127.0.0.1 --port "$port" --shutdown-timeout 30 --kv-transfer-config "$TIERS" &
done
vllm-router --host 127.0.0.1 --port 8000 --policy cache_aware --worker-startup-timeout-secs 1200 \
  --worker-urls http://127.0.0.1:8101 http://127.0.0.1:8102
