"""The server and continuous batching."""
