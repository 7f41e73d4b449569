#!/usr/bin/env bash
# Three replicas of a model on this machine, under Ray Serve, over one Redis:  examples/fleet/local.sh MODEL [OPTIONS]
# Needs, in a checkout: pip install ".[ray]", and redis-server. Ends with Ctrl-C.
set -euo pipefail
MODEL="${1:?give a model: a folder or a hub name}"
shift
PORT="${REDIS_PORT:-6390}"
redis-server --port "$PORT" --bind 127.0.0.1 --save "" --appendonly no --maxmemory 4gb --maxmemory-policy allkeys-lru >/dev/null &
trap 'kill %1' EXIT
kvboost serve "$MODEL" --ray --replicas 3 --remote-url "redis://127.0.0.1:$PORT/0" "$@"
