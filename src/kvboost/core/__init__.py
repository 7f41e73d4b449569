"""Exact reuse: what is stored of a prompt and how it is prefilled. No transformers."""
