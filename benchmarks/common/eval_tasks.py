"""Made-up evaluations in the formats of EleutherAI's harness: four choices after five shots, long endings, sums.

Written by :mod:`benchmarks.exact.evals`. Lengths and forms are those of MMLU, HellaSwag and GSM8K, the facts nobody's.
Invariant: made from a fixed seed, so every run has the same questions; those of a subject begin with the same shots.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

KINDS = ("subjects", "endings", "sums")
_SHOTS = 5
_PER_SUBJECT = 50  # questions; MMLU has 246 of a subject
_SUBJECTS = [
    "anatomy",
    "astronomy",
    "botany",
    "carpentry",
    "economics",
    "engineering",
    "geology",
    "history",
    "law",
    "logistics",
    "medicine",
    "music",
    "navigation",
    "physics",
    "weaving",
]
_PEOPLE = [
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Edith",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "Jakob",
    "Karin",
    "Louis",
    "Maria",
    "Niels",
    "Olga",
    "Peter",
]
_PLACES = [
    "the harbour",
    "the old mill",
    "the northern valley",
    "the town library",
    "the copper mine",
    "the river bridge",
    "the market square",
    "the weather station",
    "the botanical garden",
    "the railway yard",
]
_THINGS = [
    "lamps",
    "baskets",
    "ropes",
    "barrels",
    "maps",
    "candles",
    "bricks",
    "chairs",
    "bottles",
    "ladders",
    "kites",
    "wheels",
]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
_AIMS = [
    "shorten the way between the two markets",
    "keep the stores dry through the winter",
    "measure the height of the tide",
    "teach the apprentices without a master",
    "reduce the amount of fuel that was burned",
    "protect the seeds from frost",
    "compare the prices of several towns",
    "mark the border of the common land",
    "lower the noise of the machines",
    "record the names of all travellers",
    "carry heavier loads over soft ground",
    "find out who had opened the gate",
]
_MEANS = [
    "a chain of signal fires",
    "a double wall filled with straw",
    "a drum that turns once a day",
    "a wooden frame with pulleys",
    "a book of numbered drawings",
    "a pipe that leads below the ground",
    "a set of weights made of glass",
    "a small wind wheel",
]
_FIRST_ACTS = [
    "takes the tools out of the box and puts them on the bench",
    "opens the window and looks at the sky for a while",
    "pours warm water into a bowl and adds a little soap",
    "measures the board twice and marks it with a pencil",
    "ties the rope around the post and pulls it tight",
    "reads the instructions aloud to the others in the room",
]
_LATER_ACTS = [
    "then cuts the piece along the line and smooths the edges with sandpaper",
    "rinses everything, dries it with a cloth and hangs it up near the stove",
    "turns to the camera and explains which of the parts must be replaced first",
    "walks back to the start, because the wind has changed and the boat drifts",
    "waits until the glue is dry and then screws the lid back on",
    "folds the paper in half and gives it to the person who stands beside the table",
    "drops the hammer, laughs, and begins again from the other side",
    "fills the holes with earth and waters the young plants until the ground is dark",
]


def write_tasks(folder: Path, *, questions: int) -> dict[str, list[str]]:
    """Write tasks of so many questions of each kind. Returns the names of each kind's tasks."""
    draw = random.Random(0)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    count = min(len(_SUBJECTS), max(2, -(-questions // _PER_SUBJECT)))
    for number in range(count):
        subject, own = _SUBJECTS[number], len(range(number, questions, count))
        heading = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        letters = "\n".join(f"{letter}. {{{{choices[{place}]}}}}" for place, letter in enumerate("ABCD"))
        options = {"doc_to_text": f"{{{{question}}}}\n{letters}\nAnswer:", "doc_to_choice": list("ABCD")}
        name = f"subjects_{number}"
        _write(folder, name, partial(_choices, draw, subject), own, description=heading, **_CHOICE, **options)
        found["subjects"].append(name)
    options = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"}
    _write(folder, "endings", partial(_endings, draw), questions, shots=0, **_CHOICE, **options)
    _write(folder, "sums", partial(_sum, draw), questions, **_SUM)
    return found | {"endings": ["endings"], "sums": ["sums"]}


_CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
_SUM: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 128, "do_sample": False},
    "filter_list": [
        {
            "name": "strict-match",
            "filter": [{"function": "regex", "regex_pattern": "#### (\\-?[0-9]+)"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "regexes_to_ignore": ["(?s).*#### "],
        }
    ],
}


def _write(
    folder: Path, name: str, make: Callable[[], dict[str, Any]], count: int, *, shots: int = _SHOTS, **options: Any
) -> None:
    for part, rows in (("dev", max(shots, 1)), ("test", count)):
        lines = (json.dumps(make()) + "\n" for _ in range(rows))
        (folder / f"{name}_{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {part: str(folder / f"{name}_{part}.jsonl") for part in ("dev", "test")}},
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": shots,
        **options,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def _choices(draw: random.Random, subject: str) -> dict[str, Any]:
    """Who reads the question knows the answer, mostly."""
    who, place, means = draw.choice(_PEOPLE), draw.choice(_PLACES), draw.choice(_MEANS)
    aims = draw.sample(_AIMS, 4)
    answer = draw.randrange(4)
    question = (
        f"In {draw.randint(1700, 1990)} {who} built {means} near {place}, in order to {aims[answer]}. It cost "
        f"{draw.randint(20, 900)} crowns, and for {draw.randint(3, 60)} years nobody who worked in {subject} had "
        f"anything that was better. Which purpose did it serve?"
    )
    return {"question": question, "choices": [f"It was meant to {aim}." for aim in aims], "answer": answer}


def _endings(draw: random.Random) -> dict[str, Any]:
    (who, other), thing = draw.sample(_PEOPLE, 2), draw.choice(_THINGS)
    first, second = draw.sample(_FIRST_ACTS, 2)
    question = (
        f"Working with {thing}: {who} stands near {draw.choice(_PLACES)} with {draw.randint(2, 40)} {thing} and shows "
        f"{other} how it is done. First {who} {first}. Next {who} {second}. After {draw.randint(2, 50)} minutes {who}"
    )
    endings = [f"{act}, while {other} watches." for act in draw.sample(_LATER_ACTS, 4)]
    return {"question": question, "choices": endings, "answer": draw.randrange(4)}


def _sum(draw: random.Random) -> dict[str, Any]:
    who, thing, (one, two) = draw.choice(_PEOPLE), draw.choice(_THINGS), draw.sample(_DAYS, 2)
    first, times, price = draw.randint(3, 30), draw.randint(2, 6), draw.randint(2, 9)
    later, total = first * times, first * times + first
    question = (
        f"{who} sells {first} {thing} near {draw.choice(_PLACES)} on {one}, and {times} times as many on {two}. Each "
        f"of the {thing} costs {price} coins. How many coins does {who} earn in the two days?"
    )
    answer = (
        f"On {two} {who} sells {first} * {times} = {later} {thing}. In the two days {who} sells {first} + {later} = "
        f"{total} {thing}. So {who} earns {total} * {price} = {total * price} coins.\n#### {total * price}"
    )
    return {"question": question, "answer": answer}
