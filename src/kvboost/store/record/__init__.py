"""One block as self-describing bytes."""
