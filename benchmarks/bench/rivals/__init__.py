"""What runs in a contestant's own process: line-JSON orders in, answers out.

Started by :mod:`benchmarks.bench.contestants` with the Python of the rival's environment, so nothing here but
:mod:`ours` may import the kvboost package: another version of it may be installed there. Modules import each other
relatively.
"""
