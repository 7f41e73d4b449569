"""Non-prefix reuse: the same text elsewhere in a prompt, repositioned, repaired and guarded."""
