"""Exact reuse: what is stored of a prompt, under which keys, and how the rest of it is prefilled. No transformers."""
