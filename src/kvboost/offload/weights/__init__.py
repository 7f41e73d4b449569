"""Weight streaming: weights that do not fit into memory are brought there layer by layer."""
