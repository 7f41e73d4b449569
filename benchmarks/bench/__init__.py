"""What `python -m benchmarks bench` is made of: workloads, rivals in processes of their own, tables, the page."""
