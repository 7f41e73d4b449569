#!/usr/bin/env bash
# The same text twice through Anthropic's interface, without any package: examples/server/anthropic_client.sh [URL]
# usage.cache_read_input_tokens says what was reused.
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
for question in "Who built it?" "When?"; do
  curl -sS --fail-with-body "$url/v1/messages" -H "content-type: application/json" -H "anthropic-version: 2023-06-01" -d '{
    "model": "model", "max_tokens": 16,
    "system": "The lighthouse of Brunn was built in 1871 by the guild of the harbour, on the rock east of the pier.",
    "messages": [{"role": "user", "content": "'"$question"'"}]
  }'
  echo
done
