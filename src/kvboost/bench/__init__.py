"""What a user measures on their own model (`kvboost bench`), and the report code that all benchmarks share."""
