"""Where the reuse of logged prompts breaks, why, and what each fault costs: for ``kvboost explain``. Needs no torch."""

from kvboost.explain.explanation import Explanation, PromptBar, explain
from kvboost.explain.faults import Fault, FaultKind
from kvboost.explain.log import LogRecord, read_log
from kvboost.explain.page import html_page
from kvboost.explain.replay import LoggedPrompt
from kvboost.explain.text import text_report

__all__ = [
    "Explanation",
    "Fault",
    "FaultKind",
    "LogRecord",
    "LoggedPrompt",
    "PromptBar",
    "explain",
    "html_page",
    "read_log",
    "text_report",
]
