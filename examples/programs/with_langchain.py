"""LangChain's HuggingFacePipeline, attached: a chain whose prompts begin alike reads that beginning once.

python examples/programs/with_langchain.py MODEL
"""

from __future__ import annotations

import argparse
import sys

from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline

import kvboost

TEXT = "The mill was built in 1840, burned down in 1911 and was rebuilt of stone. " * 12
QUESTIONS = ["When was it built?", "When did it burn down?", "What was it rebuilt of?"]


def main() -> None:
    """Run the chain once for each question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    asked = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    llm = HuggingFacePipeline.from_model_id(parser.parse_args().model, task="text-generation", pipeline_kwargs=asked)
    attached = kvboost.attach(llm.pipeline.model)  # the new line
    chain = PromptTemplate.from_template("{text}\n{question}\n") | llm
    for question in QUESTIONS:
        print(question, repr(chain.invoke({"text": TEXT, "question": question})))
    stats = attached.engine.cache_stats()
    print(f"{stats['cache_hits']} of {stats['cache_hits'] + stats['cache_misses']} chunks were reused")
    sys.exit(None if stats["cache_hits"] else "nothing was reused")


if __name__ == "__main__":
    main()
