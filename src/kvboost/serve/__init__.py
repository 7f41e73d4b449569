"""The OpenAI-compatible server: HTTP around an engine and a runner of jobs."""

from kvboost.serve.main import ServeSettings, main
from kvboost.serve.run import serve
from kvboost.serve.security.limits import Limits

__all__ = ["Limits", "ServeSettings", "main", "serve"]
