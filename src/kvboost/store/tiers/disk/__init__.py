"""Blocks in a directory that several processes share."""
