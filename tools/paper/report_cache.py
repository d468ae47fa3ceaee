"""Cache of reports of lingvo-moe cost as JSON files in a folder, so that an interrupted run can be resumed.

The key of a report is what was compiled: the model's resolved configuration, the program, the slice and the mesh. The
code is not part of the key: after a change, use a new folder or delete files to compile again.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_moe.config import configuration
from lingvo_moe.storage import json_files
from lingvo_moe.tasks.mt.mt_config import MtConfig
from paper.claims import Case

_LAST_LINES = 3
_FORM = 2  # of a report; to be raised when its fields change


class ReportCache:
  """Cache that compiles each case in a separate process, which frees its memory and confines a crash to that case.

  Args:
    folder: folder of the reports; created if missing.
    command: words after Python that run lingvo-moe cost.
    progress: function called with each line about progress.
  """

  def __init__(self, folder: str, command: Sequence[str], progress: Callable[[str], None]):
    os.makedirs(folder, exist_ok=True)
    self._folder, self._command, self._progress = folder, command, progress
    self._reports: dict[Case, Mapping[str, Any] | None] = {}

  def get(self, case: Case) -> Mapping[str, Any] | None:
    """Report of a case, as lingvo-moe cost --json writes it; None if it failed, which was reported to `progress`."""
    if case not in self._reports:
      path = os.path.join(self._folder, self.name(case) + '.json')
      if not os.path.exists(path):
        self._compile(case, path)
      what, way_out = 'a report of lingvo-moe cost', 'remove it, and it is made again'
      self._reports[case] = json_files.read_if_any(path, what, way_out)
    return self._reports[case]

  def name(self, case: Case) -> str:
    """File name of a case: 'MoE2048E36L-decode-v3_32x32-1f0c...', with a hash of everything that is compiled."""
    what = {'form': _FORM, 'case': dataclasses.asdict(case), 'values': dataclasses.asdict(configured(case))}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    program = '' if case.program == 'train' else f'-{case.program}'
    return f'{case.model.rpartition(".")[2]}{program}-{case.topology.replace(":", "_")}-{digest}'

  def _compile(self, case: Case, path: str) -> None:
    settings = [case.mesh, *(f'{name}={value!r}' for name, value in case.values)]
    self._progress(f'{case.model}, {case.program}, on {case.topology}, {", ".join(settings)}: compiling')
    begun, log, partial = time.monotonic(), path.removesuffix('.json') + '.log', path + '.partial'
    with contextlib.suppress(FileNotFoundError):
      os.remove(partial)  # left by an interrupted run
    command = [sys.executable, *self._command, f'--model={case.model}', f'--topology={case.topology}']
    command += [f'--program={case.program}']
    command += [f'--mesh={case.mesh}', f'--split_dense={case.split_dense}', f'--json={partial}']
    command += [f'--gin_bindings={binding}' for binding in bindings(case)]
    with open(log, 'w', encoding='utf-8') as f:
      status = subprocess.run(command, stdout=f, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    seconds = f'{time.monotonic() - begun:.0f} s'
    if status in (0, 1) and os.path.exists(partial):  # 1: it does not fit, and the report says so
      os.replace(partial, path)
      self._progress(f'  {seconds}{"" if status == 0 else "; it does not fit"}')
      return
    with open(log, encoding='utf-8', errors='replace') as f:
      last = ' / '.join(line.strip() for line in f.read().strip().splitlines()[-_LAST_LINES:])
    self._progress(f'  no report after {seconds}, exit status {status} ({last}): its row stays empty; see {log}')


def bindings(case: Case) -> list[str]:
  """gin bindings for lingvo-moe cost with the values of a case."""
  return [f'{case.model.rpartition(".")[2]}.{name} = {value!r}' for name, value in case.values]


@functools.cache
def configured(case: Case) -> MtConfig:
  """Configuration of a case."""
  return configuration.resolve(case.model, [], bindings(case))
