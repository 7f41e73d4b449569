"""Several servers as one: what each holds, told to others, and where a request goes."""
