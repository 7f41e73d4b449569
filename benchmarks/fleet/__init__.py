"""Benchmarks of a fleet: the router's time, and the simulator."""
