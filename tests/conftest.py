"""Before any test: few threads, a quiet TensorFlow, fixed seeds, and the right checkout."""

from __future__ import annotations

import os
import pathlib
import random

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')  # virtual ones, for meshes; read when JAX is first used
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # programs of a test are compiled far more often than run

import hypothesis
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
THREADS = 2

hypothesis.settings.register_profile('same_every_time', deadline=None, derandomize=True)
hypothesis.settings.load_profile('same_every_time')


def pytest_sessionstart(session: pytest.Session) -> None:
  """Refuses to test one checkout's lingvo_moe with another's params."""
  try:
    import lingvo_moe
    import lingvo_moe.params
  except ImportError as e:
    raise pytest.UsageError(
      f'{e}: lingvo_moe is not installed. Run tools/test, or pip install -e ".[test]" first.'
    ) from e
  for module in lingvo_moe, lingvo_moe.params:
    found = pathlib.Path(module.__file__).resolve()
    if ROOT not in found.parents:
      raise pytest.UsageError(
        f'{module.__name__} comes from {found.parent}, not from this checkout ({ROOT}). '
        'Run tools/test, or pip install -e ".[test]" here first.'
      )
  _limit_threads()


def _limit_threads() -> None:
  """Few threads: the arrays of a test are small, and machines that run tests are shared."""
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(THREADS)
  tf.config.threading.set_inter_op_parallelism_threads(THREADS)


@pytest.fixture(autouse=True)
def _seeds() -> None:
  """The same random numbers in every run and in any order of tests."""
  import tensorflow as tf

  random.seed(0)
  np.random.seed(0)
  tf.random.set_seed(0)
