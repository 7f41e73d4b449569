"""The tree of a model's modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvboost.hf import weights
from kvboost.hf.peft_layers import walk
from kvboost.hf.weights import ModuleTree


def test_a_changed_tree_is_walked_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1)))
    tree = ModuleTree(model)
    assert set(tree.modules()) == set(model.modules())
    assert tree.modules() is tree.modules(), "walked once"
    model[1][0] = torch.nn.Identity()
    assert set(tree.modules()) == set(model.modules())
    model[0].added = torch.nn.Linear(1, 1)
    assert set(tree.modules()) == set(model.modules())
    del model[0].added
    assert set(tree.modules()) == set(model.modules())


def test_a_module_that_comes_while_the_tree_is_walked_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    tree = ModuleTree(model)

    def interrupted(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
        yield from list(walk(root))
        model.added = torch.nn.Linear(1, 1)  # by another thread

    with monkeypatch.context() as patch:
        patch.setattr(weights, "walk", interrupted)
        tree.modules()
    assert set(tree.modules()) == set(model.modules())
