"""The HTTP endpoints and their schemas."""
