"""Ray's own router by prefix, for requests as our fronts send them. Imported in Ray's processes only."""

from __future__ import annotations

import json

# The public name of it wants vLLM or SGLang to be installed; the class itself needs neither.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest


class PrefixAffinity(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's. Only where a request has its prompt is ours: it looks for an attribute."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        """One character for each token."""
        _, body = pending_request.args
        prompt = json.loads(body or b"{}").get("prompt") or [0]
        return "".join(map(chr, prompt))
