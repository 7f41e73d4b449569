"""From a request to text: prompts, jobs, tools, stop strings."""
