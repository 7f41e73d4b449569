"""Many replicas as one system: what each of them holds, what it sends others, where a request goes. No torch."""
