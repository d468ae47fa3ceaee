"""Who has which core is set before TensorFlow computes, so each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(lines: str) -> str:
  code = 'import tensorflow as tf\nfrom lingvo_moe import cores\n' + lines
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  return done.stdout.strip()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason='there is one core')
def test_parts_run_side_by_side_once_kernels_have_one_core_each():
  assert run('print(cores.side_by_side()); cores.one_each(); print(cores.side_by_side() == cores.count())') == '1\nTrue'


def test_too_late_is_without_effect():
  assert run('tf.add(1, 2); cores.one_each(); print(cores.side_by_side())') == '1'
