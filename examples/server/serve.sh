#!/usr/bin/env bash
# A server whose KV survives a restart: examples/server/serve.sh [MODEL] [options of kvboost serve]
# Needs pip install ".[serve]".
set -euo pipefail
model="${1:-HuggingFaceTB/SmolLM2-135M-Instruct}"
shift || true
mkdir -p -m 700 kv-cache
exec kvboost serve "$model" --disk-cache-dir kv-cache --served-model-name model "$@"
