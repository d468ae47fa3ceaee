"""Before any test: few threads, a quiet TensorFlow, fixed seeds, and the right checkout."""

import contextlib
import ctypes
import fcntl
import functools
import gc
import os
import pathlib
import random
import re
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')  # virtual ones, for meshes; read when JAX is first used
# Programs of a test are compiled far more often than run; runtime/test_optimised_programs.py has those of a user.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')

import hypothesis
import numpy as np
import pytest

pytest_plugins = ['processor_seconds']

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKER = 'PYTEST_XDIST_WORKER' in os.environ  # one of several processes that share the tests and the cores
THREADS = 1 if WORKER else 2
# As JAX_DISABLE_MOST_OPTIMIZATIONS, for what TensorFlow compiles. Without fusion emitters XLA is twice as fast.
XLA_FLAGS = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
XLA_FLAGS += ' --xla_cpu_use_fusion_emitters=false'
os.environ['XLA_FLAGS'] = f'{XLA_FLAGS} {os.environ.get("XLA_FLAGS", "")}'
_MUCH = 2**29  # bytes
_resident = 0  # bytes, when the last were given back

hypothesis.settings.register_profile('same_every_time', deadline=None, derandomize=True)
hypothesis.settings.register_profile('long', deadline=None, max_examples=5000, print_blob=True)
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
  if WORKER or not session.config.getoption('numprocesses', 0):  # the process that hands out tests runs none
    _limit_threads()


def _limit_threads() -> None:
  """Few threads: the arrays of a test are small, and machines that run tests are shared."""
  import quick_tensorflow

  quick_tensorflow.load()
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(THREADS)
  tf.config.threading.set_inter_op_parallelism_threads(THREADS)
  tf.zeros([])  # settles it: a runtime that is made by a test would have one core a kernel, on a machine of few
  # Graphs are not rewritten by Grappler, which takes a sixth of the time; those of commands in forks are.
  tf.config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
  # Collections that look at all that was imported, or at a graph that grows, would take a tenth of the time.
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def _seeds(request: pytest.FixtureRequest) -> None:
  """The same random numbers in every run and in any order of tests."""
  random.seed(0)
  np.random.seed(0)
  if _draws_by_tensorflow(request.path):
    import tensorflow as tf

    # Frees all kernels: programs that other tests call as well would be made ready anew.
    tf.random.set_seed(0)


@functools.cache
def _draws_by_tensorflow(path: pathlib.Path) -> bool:
  """Whether tests of a file draw from TensorFlow's generator; the package draws by keys alone."""
  return bool(re.search(r'tf\.random\.(?!stateless)', path.read_text(encoding='utf-8')))


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
  """Gives back what tests traced and compiled, once that is much: the programs of all tests together take 20 GiB."""
  global _resident
  yield
  if _resident_bytes() < _resident + _MUCH:
    return
  if 'jax' in sys.modules:
    sys.modules['jax'].clear_caches()
  gc.collect()
  with contextlib.suppress(OSError, AttributeError):  # other C libraries need not be told
    ctypes.CDLL('libc.so.6').malloc_trim(0)
  _resident = _resident_bytes()


@pytest.fixture(scope='module')
def one_trace() -> Iterator[None]:
  """Local runtimes of the module that run the same program share its trace."""
  import shared_traces

  with shared_traces.shared():
    yield


@pytest.fixture(scope='session')
def toy_run(tmp_path_factory: pytest.TempPathFactory):
  """A RunDir, FOLDER/runs/mine, that knows a few German sentences by heart; treat it as read-only."""
  import toy_run as toy

  shared = tmp_path_factory.getbasetemp()
  folder = (shared.parent if WORKER else shared) / 'toy_run'  # one for all workers
  folder.mkdir(exist_ok=True)
  _make_once(folder / 'made', lambda: toy.make(folder))
  return toy.run_of(folder)


@pytest.fixture(scope='session')
def toy_export(toy_run):
  """Function of 'int8' or 'float32': the folder of toy_run's export for the engine; treat it as read-only."""
  from lingvo_moe.cli.commands import export

  def exported(weights: str) -> pathlib.Path:
    out = pathlib.Path(toy_run.path).parents[1] / weights
    options = export.Options(toy_run.path, out=str(out), format='litert', weights=weights)
    _make_once(pathlib.Path(f'{out}.made'), lambda: export.export(options))
    return out

  return exported


def _make_once(note: pathlib.Path, make: Callable[[], object]) -> None:
  """Calls make() unless a process of these tests has, which the file `note` says; waits for one that does."""
  with open(note, 'a+') as made:
    fcntl.flock(made, fcntl.LOCK_EX)
    if not os.fstat(made.fileno()).st_size:  # as it is now, not as it was before the lock was free
      make()
      made.write('yes')


def _resident_bytes() -> int:
  """Memory of this process; 0 where the system does not say."""
  try:
    with open('/proc/self/statm', encoding='ascii') as f:
      return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    return 0
