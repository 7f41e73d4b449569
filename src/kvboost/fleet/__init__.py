"""Many replicas as one system: what each of them holds, and which of them a request goes to. No torch."""
