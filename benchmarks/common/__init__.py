"""What benchmarks share: models, texts, prompts, traces, servers, plots."""
