"""Memory given back now and then."""

from __future__ import annotations

import pytest

from lingvo_moe.serving.memory import Trimmer


def test_memory_is_given_back_at_most_once_a_while(monkeypatch):
  now = [100.0]
  monkeypatch.setattr('time.monotonic', lambda: now[0])
  trim = Trimmer(60.0)
  called = []
  for now[0] in (100.0, 159.0, 160.0, 161.0, 221.0):
    called.append(trim())
  if not any(called):
    pytest.skip('this C library has no malloc_trim')
  assert called == [False, False, True, False, True]
