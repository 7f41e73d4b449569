from __future__ import annotations

import pytest

from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Streams


def test_a_key_that_takes_all_streams_does_not_shut_out_another() -> None:
    streams = Streams(2)
    streams.enter("a")
    streams.enter("a")
    with pytest.raises(ApiError, match="2 requests are being answered"):
        streams.enter("a")
    streams.enter("b")
    with pytest.raises(ApiError, match="2 requests are being answered"):
        streams.enter("b")
    for tenant in "aab":
        streams.leave(tenant)
    assert streams.running == 0
    streams.enter("b")
    streams.enter("b")
