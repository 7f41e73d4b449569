"""What runs in a contestant's own process: line-JSON orders in, answers out.

Started by :mod:`kvboost.bench.contestants` with the Python of the rival's environment, so nothing here may import the
kvboost package but :mod:`ours`: another version of it may be installed there. Modules import each other relatively.
"""
