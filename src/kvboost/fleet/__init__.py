"""Many replicas as one system: what each of them holds, what it tells others, where a request goes. No torch."""
