"""What proves the project's numbers: one module per benchmark, run by ``python -m benchmarks``."""
