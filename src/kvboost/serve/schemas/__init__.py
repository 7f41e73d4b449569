"""What clients may send, field by field, a module for each endpoint."""
