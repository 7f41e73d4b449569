"""The plan of a warming run, for any corpus. Needs no Ray."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvboost.integrations.ray.warm_plan import CorpusSurvey, SurveyedDocument, spread

_HEAD, _BYTES = 7, 10

_documents = st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=40)


def _survey(documents: list[tuple[int, bool]]) -> CorpusSurvey:
    surveyed = tuple(SurveyedDocument(2 * n, tokens, known) for n, (tokens, known) in enumerate(documents))
    return CorpusSurvey(surveyed, _HEAD, max_tokens=100, bytes_per_token=_BYTES, tokens_per_second=50.0)


@given(_documents, st.integers(0, 3), st.integers(1, 4))
def test_every_missing_document_is_prefilled_once(documents: list[tuple[int, bool]], context: int, actors: int) -> None:
    survey = _survey(documents)
    plan = survey.plan(context_documents=context, actors=actors)
    prefilled = [index for _, new in plan.groups for index in new]
    assert len(prefilled) == len(set(prefilled))
    assert {document.number for document in survey.documents if not document.known} <= set(prefilled)
    known = {document.number for document in survey.documents if document.known}
    assert all(not known.issuperset(new) for _, new in plan.groups), "a group that is stored is not run"
    assert plan.seconds == plan.tokens / 50.0 / actors
    assert plan.over_budget == 0


@given(_documents, st.integers(0, 3), st.data())
def test_groups_do_not_depend_on_what_is_stored(
    documents: list[tuple[int, bool]], context: int, data: st.DataObject
) -> None:
    first = _survey([(tokens, False) for tokens, _ in documents]).plan(context_documents=context, actors=1)
    later = _survey(documents).plan(context_documents=context, actors=1)
    assert set(later.groups) <= set(first.groups)


@given(_documents, st.integers(0, 3), st.integers(0, 20_000))
def test_a_budget_is_kept(documents: list[tuple[int, bool]], context: int, budget: int) -> None:
    survey = _survey(documents)
    whole = survey.plan(context_documents=context, actors=1)
    plan = survey.plan(context_documents=context, actors=1, budget_bytes=budget)
    assert plan.nbytes <= budget
    assert set(plan.groups) <= set(whole.groups)
    own = {index for _, new in plan.groups for index in new}
    left = [document for document in survey.documents if not document.known and document.number not in own]
    assert len(left) == plan.over_budget


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 200))
def test_every_actor_gets_some_of_the_rows(rows: int, actors: int, most: int) -> None:
    batch, blocks = spread(rows, actors=actors, batch_size=most)
    assert 1 <= batch <= most
    assert 1 <= blocks <= rows
    assert -(-rows // batch) >= min(actors, rows), "Ray merges blocks up to a batch"
