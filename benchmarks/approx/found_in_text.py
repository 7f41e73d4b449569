"""How much of known passages is found in prompts as frameworks write them, without boundaries.

Needs a tokenizer only. Each question's prompt is cut twice: with its passages in one order behind one preamble, which
stores the content keys of its chunks, and in another order behind another preamble. Counted are the passages' tokens
in chunks of the second whose key the first has stored. Then passages that were never seen in a prompt: each was
prefilled on its own, as a document, and is found in plain text and in a chat by natural chunks alone, and by the
registry of ``add_documents``. Invariant: no part of a text is marked for the chunker.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import positive
from benchmarks.common.rag import read_questions
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import (
    ContentChunker,
    DocumentRegistry,
    NaturalChunker,
    PromptEncoder,
    break_table,
    chunk_keys,
    reusable_chunks,
    token_array,
)
from kvboost.extend import Chunker

QUICK = {"prompts": 6}

_ROOT = bytes(32)
# The default prompts of LangChain's and LlamaIndex's question answering over documents. LangChain's chat form has its
# question in a message of its own; here both are in one.
_FORMATS = {
    "LangChain": (
        "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
        "that you don't know, don't try to make up an answer.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:"
    ),
    "LangChain chat": (
        "Use the following pieces of context to answer the user's question. \nIf you don't know the answer, just say "
        "that you don't know, don't try to make up an answer.\n----------------\n{context}\n{question}"
    ),
    "LlamaIndex": (
        "Context information is below.\n---------------------\n{context}\n---------------------\nGiven the context "
        "information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: "
    ),
}
_BARS = {"blank line": ("\n\n", 90.0), "single space": (" ", 60.0)}
_SURROUNDINGS = {  # of documents in a prompt
    "blank lines": ("", "\n\n", ""),
    "single spaces": ("", " ", ""),
    "quotes": ('"', '", "', '"'),
    "a list": ("- ", "\n- ", "\n"),
    "tags": ("<doc>", "</doc><doc>", "</doc>"),
}
_DOCUMENT_BAR = 90.0
_PREAMBLES = 20
_SENTENCE = "you are a careful assistant who reads what is given answers in short plain sentences and never guesses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the folder of the tokenizer")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions with passages, such as MuSiQue's")
    parser.add_argument("--prompts", type=positive, default=150, help="questions, from the first on (default 150)")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> Report:
    """Every format, separator and chunker."""
    if args.model is None:
        raise BenchError("this benchmark needs a model; give its folder with --model FOLDER")
    if args.data is None:
        raise BenchError("this benchmark needs questions with passages; give them with --data FILE")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    records = read_questions(args.data)[: args.prompts]
    breaks = break_table(tokenizer)
    chunkers: dict[str, Chunker] = {
        "natural 16": NaturalChunker(16, breaks),
        "natural 32": NaturalChunker(32, breaks),
        "natural 64": NaturalChunker(64, breaks),
        "natural 32, no tokenizer": NaturalChunker(32),
        "content 32": ContentChunker(32),
        "content 128": ContentChunker(128),
    }
    report = Report("found_in_text")
    columns = ["format", "passages joined by", *chunkers, "bar (natural 32)"]
    table = report.table("Found: % of the passages' tokens, no boundaries given", columns, model=args.model)
    lengths: dict[str, list[int]] = {name: [] for name in chunkers}
    report.raw = {"shares": []}
    for form, template in _FORMATS.items():
        for separator, (joint, bar) in _BARS.items():
            found = dict.fromkeys(chunkers, 0)
            total, rng = 0, random.Random(args.seed)
            for number, record in enumerate(records):
                passages = [c["text"].strip() for c in record["ctxs"]]
                orders = [rng.sample(passages, len(passages)) for _ in range(2)]
                words = [1 + 23 * ((number + step) % _PREAMBLES) for step in (0, 7)]  # 20 lengths, two for a question
                before, after = (
                    _Prompt(tokenizer, template, order, joint, record["question"], preamble=count)
                    for order, count in zip(orders, words, strict=True)
                )
                total += int(after.inside.sum())
                for name, chunker in chunkers.items():
                    stored = {chunk.content_key for chunk in before.chunks(chunker)}
                    for chunk in after.chunks(chunker):
                        lengths[name].append(chunk.end - chunk.start)
                        if chunk.content_key in stored:
                            found[name] += int(after.inside[chunk.start : chunk.end].sum())
            shares = {name: 100 * count / total for name, count in found.items()}
            report.raw["shares"].append({"format": form, "separator": separator, "tokens": total, **shares})
            report.failed |= shares["natural 32"] < bar
            table.add(form, separator, *(f"{share:.1f}" for share in shares.values()), f"{bar:.0f}")
    table.add("tokens per chunk, mean", "-", *(f"{np.mean(lengths[name]):.0f}" for name in chunkers), "-")
    table.notes.append(
        f"{len(records)} questions of {len(records[0]['ctxs'])} passages, each cut twice: in two orders behind two of "
        f"{_PREAMBLES} preambles of 1 to {1 + 23 * (_PREAMBLES - 1)} words, a system message where the tokenizer has a "
        "chat template. Found: in chunks whose content key the first prompt has stored."
    )
    _add_documents(report, args, tokenizer, records, NaturalChunker(32, breaks))
    return report


def _add_documents(
    report: Report, args: argparse.Namespace, tokenizer: Any, records: Sequence[Any], chunker: Chunker
) -> None:
    """The table of passages that were added as documents, each prefilled on its own."""
    columns = ["passages stand in", "text, without", "text, add_documents", "chat, without", "chat, add_documents"]
    table = report.table("Documents: % of their tokens found, never seen in a prompt", columns, model=args.model)
    encoder = PromptEncoder(tokenizer, max_tokens=None, vocab_size=len(tokenizer))
    passages = sorted({c["text"].strip() for record in records for c in record["ctxs"]})
    registry, alone, cut_alike = DocumentRegistry(), set(), set()
    for passage in passages:
        tokens, edges = encoder.encode_document(passage)
        ids = token_array(tokens)
        alone |= {chunk.content_key for chunk in chunk_keys(_ROOT, ids, chunker.cut(ids, [len(ids)]))}
        ends = chunker.cut(ids, [*edges, len(ids)])
        cut_alike |= {chunk.content_key for chunk in chunk_keys(_ROOT, ids, ends)}
        registry.add(passage, tokens, ends)
    chats = (False, True) if getattr(tokenizer, "chat_template", None) is not None else (False,)
    for name, (before, joint, behind) in _SURROUNDINGS.items():
        shares: list[str] = []
        for chat in chats:
            found, total, rng = [0, 0], 0, random.Random(args.seed)
            for number, record in enumerate(records):
                asked = [c["text"].strip() for c in record["ctxs"]]
                rng.shuffle(asked)
                form = f"Read this: {before}{{context}}{behind} {{question}}"
                words = 1 + 23 * (number % _PREAMBLES)
                prompt = _Prompt(tokenizer, form, asked, joint, record["question"], preamble=words, chat=chat)
                total += int(prompt.inside.sum())
                ways = ((), alone), (registry.boundaries(prompt.tokens.tolist()), cut_alike)
                for way, (boundaries, stored) in enumerate(ways):
                    for chunk in prompt.chunks(chunker, boundaries):
                        if chunk.content_key in stored:
                            found[way] += int(prompt.inside[chunk.start : chunk.end].sum())
            shares += [f"{100 * count / total:.1f}" for count in found]
            report.failed |= 100 * found[1] / total < _DOCUMENT_BAR
            report.raw["shares"].append({"documents": name, "chat": chat, "without": found[0], "with": found[1]})
        table.add(name, *shares, *("-" for _ in range(4 - len(shares))))
    table.notes.append(
        f"{len(passages)} passages, cut with natural 32 as each was prefilled: on its own. Without: by natural chunks "
        f"of the prompt. The bar for add_documents is {_DOCUMENT_BAR:.0f}."
    )


class _Prompt:
    """One prompt as token ids, and which of them belong to passages."""

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        passages: Sequence[str],
        joint: str,
        question: str,
        *,
        preamble: int,
        chat: bool = True,
    ) -> None:
        context = joint.join(passages)
        words = _SENTENCE.split()
        system = " ".join(words[i % len(words)] for i in range(preamble)) + "."
        user = template.format(context=context, question=question)
        text = f"{system}\n\n{user}"
        if chat and getattr(tokenizer, "chat_template", None) is not None:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.tokens = token_array([int(token) for token in encoded["input_ids"]])
        starts, ends = np.array(encoded["offset_mapping"]).T
        self.inside = np.zeros(len(self.tokens), dtype=bool)
        position = text.index(context)
        for passage in passages:
            self.inside |= (starts < position + len(passage)) & (ends > position)
            position += len(passage) + len(joint)

    def chunks(self, chunker: Chunker, boundaries: Sequence[int] = ()) -> Any:
        """The chunks that may be reused: all that end before the last token."""
        chunks = chunk_keys(_ROOT, self.tokens, chunker.cut(self.tokens, boundaries))
        return reusable_chunks(chunks, prompt_tokens=len(self.tokens))
