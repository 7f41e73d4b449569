"""What does not fit into memory: weights are streamed layer by layer, KV is paged."""
