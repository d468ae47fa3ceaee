"""Record of where a run was computed: environment.jsonl, a line for each start of the trainer with something new.

{"step", "time", "software": {...}, "machine": {...}, "runtime": {...}, "examples": {part: number}}
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import lingvo_moe
from lingvo_moe.core import host_memory
from lingvo_moe.storage import files, json_files, log_directory

_PACKAGES = ('lingvo_moe', 'tensorflow', 'tensorflow-text', 'numpy', 'sentencepiece', 'jax', 'jaxlib', 'libtpu')


def record(logdir: str, step: int, **facts: Any) -> None:
  """Appends a line to environment.jsonl, unless its last line says the same but for step and time.

  `step` is that at which the trainer starts: later lines are dropped, as those of the log are. `facts` are ready for
  JSON.
  """
  path = os.path.join(logdir, log_directory.ENVIRONMENT)
  lines: list[Mapping[str, Any]] = []
  json_files.keep_lines_up_to(path, step, lines.append)
  facts = {'software': software(), 'machine': machine(), **facts}
  last = {name: value for name, value in (lines or [{}])[-1].items() if name not in ('step', 'time')}
  if last == json.loads(json.dumps(facts)):
    return
  now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds').replace('+00:00', 'Z')
  with files.append(path) as f:
    f.write(json_files.dump({'step': step, 'time': now, **facts}))


def software() -> dict[str, Any]:
  """Versions of Python and packages, and the commit of the checkout that runs, if it is one."""
  versions = {'python': platform.python_version()}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return versions | commit(os.path.dirname(os.path.dirname(os.path.abspath(lingvo_moe.__file__))))


def commit(root: str) -> dict[str, Any]:
  """Commit of a checkout, and whether files that git tracks are changed; {} where there is none, or no git."""
  if not os.path.exists(os.path.join(root, '.git')):  # a folder above may be another project's
    return {}
  git = lambda *arguments: subprocess.run(
    ['git', '-C', root, *arguments], capture_output=True, text=True, timeout=10, check=True
  ).stdout.strip()
  try:
    return {'commit': git('rev-parse', 'HEAD'), 'changed': bool(git('status', '--porcelain', '--untracked-files=no'))}
  except (OSError, subprocess.SubprocessError):
    return {}


def machine() -> dict[str, Any]:
  """System, processor, cores that this process may use, memory, and accelerators that TensorFlow sees."""
  tensorflow = sys.modules.get('tensorflow')
  devices = tensorflow.config.get_visible_devices() if tensorflow else []
  return {
    'system': platform.platform(),
    'processor': _processor(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'memory': f'{host_memory.size() / 2**30:.1f} GiB',
    'accelerators': [d.name for d in devices if d.device_type != 'CPU'],
  }


def _processor() -> str:
  try:
    with open('/proc/cpuinfo', encoding='utf-8', errors='replace') as f:
      return next(line.partition(':')[2].strip() for line in f if line.startswith('model name'))
  except (OSError, StopIteration):
    return platform.processor() or platform.machine()
