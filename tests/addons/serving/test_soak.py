"""Soak: under 20 clients, some of whom hang up, no request is lost and memory does not grow. soak.py does it longer."""

import importlib.util
import pathlib

import pytest
import toy_run as toy

pytest.importorskip('aiohttp')


def _module():
  path = pathlib.Path(__file__).parent / 'soak.py'
  spec = importlib.util.spec_from_file_location('soak', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.slow
def test_no_request_is_lost_and_memory_does_not_grow(toy_run):
  found = _module().soak(toy_run.path, [source for source, _ in toy.sentences()], seconds=60)
  assert found['wrong'] == [] and set(found['requests']) <= {'200', '503', 'hung up'}, found
  assert found['requests']['200'] > 200 and found['requests']['hung up'] > 10, found
  assert (found['exit_status'], found['stderr']) == (0, ''), found
  first, last = found['resident_mib'][0], found['resident_mib'][-1]
  assert last < first * 1.05 + 20, found['resident_mib']
