"""Non-prefix reuse: its quality, its speed, how much it finds."""
