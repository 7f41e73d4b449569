"""Where the reuse of logged prompts breaks, why, and what each fault costs: for ``kvboost explain``. Needs no torch."""
