"""Who may call, and within what limits."""
