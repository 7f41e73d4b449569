"""Exact reuse: bits, tokens, time to the first token, chunking."""
