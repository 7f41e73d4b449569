"""smolagents' TransformersModel, attached: each step of an agent reads what the last one added.

python examples/programs/with_smolagents.py MODEL

A model of 135M parameters seldom calls a tool; the steps then hold its mistakes. What is shown is the reuse.
"""

from __future__ import annotations

import argparse
import sys

from smolagents import ToolCallingAgent, TransformersModel, tool

import kvboost


@tool
def founded(name: str) -> int:
    """When something was founded.

    Args:
        name: What it is called.
    """
    return 1800 + len(name)


def main() -> None:
    """Let the agent take three steps at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    model = TransformersModel(parser.parse_args().model, max_new_tokens=24, do_sample=False)
    attached = kvboost.attach(model.model)  # the new line
    agent = ToolCallingAgent(tools=[founded], model=model, max_steps=3)
    print("answer:", agent.run("When was the mill founded?"))
    stats = attached.engine.cache_stats()
    print(f"{stats['cache_hits']} of {stats['cache_hits'] + stats['cache_misses']} chunks were reused")
    sys.exit(None if stats["cache_hits"] else "nothing was reused")


if __name__ == "__main__":
    main()
