"""The tree of a model's modules."""

from __future__ import annotations

import torch

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
