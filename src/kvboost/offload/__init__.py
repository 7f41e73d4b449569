"""What does not fit: weights streamed from disk and KV paged out of memory."""
