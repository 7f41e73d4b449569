"""The OpenAI-compatible server: HTTP around an engine and a runner of jobs."""

from kvboost.serve.limits import Limits
from kvboost.serve.main import ServeSettings, main
from kvboost.serve.run import serve

__all__ = ["Limits", "ServeSettings", "main", "serve"]
