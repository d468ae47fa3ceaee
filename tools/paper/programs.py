"""Programs of the giants as a table: memory, compile time, AllToAlls, time and tokens a second of each, by rounds.

Where no token is dropped, a MoE layer makes as many rounds over its experts as the longest queue of an expert in a
group needs (ops/xla.py). Times are given for one round, which is perfect balance; for tokens that choose their
experts at random, all experts alike; and for tokens some of whose experts are SKEW times as likely as the average.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_moe.addons.analysis import cost
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.gates.gate import expert_capacity
from lingvo_moe.models import sizes
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.text.markdown import table
from paper import claims
from paper.claims import Case
from paper.report_cache import configured

Report = Mapping[str, Any]

SKEW = 4.0
ROWS_A_CORE = 8  # sentences of a core that are scored, encoded or decoded together: 2048 positions, as in training
_GIB = 2**30
_NONE = '-'


def cases() -> list[Case]:
  """Programs of the models of Table 1, model by model."""
  return [_case(row.case, program) for row in claims.TABLE_1 for program in cost.PROGRAMS]


def _case(train: Case, program: str) -> Case:
  if program in ('train', 'eval'):
    return dataclasses.replace(train, program=program)
  tokens = ROWS_A_CORE * configured(train).max_length * train.devices
  values = (*train.values, ('num_groups', train.devices), ('eval_batch_tokens', tokens))
  # Without optimizer slots there is room for whole dense weights, which a step of decoding would gather one and all.
  return dataclasses.replace(train, program=program, values=values, split_dense=False)


def blocks(get: Callable[[Case], tuple[Case, Report | None]]) -> list[str]:
  """Markdown blocks.

  Args:
    get: function of a case that returns the case as compiled (the tiny sibling's, with --tiny) and its report.
  """
  rows = [_row(*get(case)) for case in cases()]
  columns = ['model', 'program', 'tokens a core', 's to compile', 'MiB of program', 'GiB a core', 'AllToAlls']
  columns += ['s, 1 round', 'tokens/s', 'rounds at random', 'tokens/s', f'rounds, skew {SKEW:g}', 'tokens/s']
  return [
    '## All programs of the giants',
    'Compiled for the slices of the paper. `train` is a train step; `eval` computes the dev loss of a batch as large '
    f'as one of training; `score`, `encode` and `decode` have {ROWS_A_CORE} sentences of max_length a core. `decode` '
    'is encoder and beam search of max_length steps, with the beam of the configuration. Seconds are those of a batch, '
    "at the compiler's estimate and our time of collectives; tokens are source positions, which are as many as "
    f'symbols written. Of the 16 GiB of a core the compiler allows {claims.USABLE_GIB}. AllToAlls are those of a MoE '
    'layer in a round.',
    'In training tokens without room are dropped; elsewhere none is, and each MoE layer makes as many rounds as the '
    f'longest queue needs. "At random": tokens choose two experts at random; "skew {SKEW:g}": some experts are '
    f'{SKEW:g} times as likely as the average. The number of rounds is then that of the longest queue of all groups, '
    'its median; in `decode` that of a step.',
    table(columns, rows),
  ]


def _row(case: Case, report: Report | None) -> tuple[str, ...]:
  first = case.model.rpartition('.')[2], case.program
  if report is None:
    return (*first, *[_NONE] * 11)
  return (
    *first,
    f'{report["batch_tokens"] // report["devices"]:,}',
    f'{report["compile_seconds"]:.0f}',
    f'{report["program_bytes"] / 2**20:.1f}',
    f'{report["memory_per_device"]["total"] / _GIB:.1f}' + ('' if report['fits'] else ', too much'),
    str(report['moe_all_to_alls']),
    f'{seconds(report, 1):.3g}',
    _pace(report, 1),
    *_at(case, report, 1.0),
    *_at(case, report, SKEW),
  )


def _at(case: Case, report: Report, skew: float) -> tuple[str, str]:
  rounds = rounds_of(case, skew)
  return (_NONE, _NONE) if rounds is None else (str(rounds), _pace(report, rounds))


def seconds(report: Report, rounds: int) -> float:
  """Seconds of a program with so many rounds in every MoE layer; the time is linear in them."""
  kind = 'compiler' if report['step_seconds_compiler'] else 'roofline'
  return report[f'step_seconds_{kind}'] + (rounds - report['rounds']) * (report[f'round_seconds_{kind}'] or 0.0)


def _pace(report: Report, rounds: int) -> str:
  return sizes.short(int(report['batch_tokens'] / seconds(report, rounds)))


def rounds_of(case: Case, skew: float) -> int | None:
  """Rounds of a MoE layer of a program; None if it has no experts or drops tokens."""
  config = configured(case)
  if not config.num_experts or case.program == 'train':
    return None
  config = cost.for_program(config, Mesh.parse(case.mesh), case.program)
  rows = config.batcher(training=False).rows(config.max_length)
  # The encoder of 'decode' has longer queues than a step, and next to no share of the time.
  width = config.beam_size if case.program == 'decode' else config.max_length
  return _rounds(config, rows * width, skew)


def _rounds(config: MtConfig, tokens: int, skew: float) -> int:
  group = tokens // config.num_groups
  capacity = expert_capacity(group, config.num_experts, config.round_capacity_factor)
  queues = config.num_groups * (config.num_experts if skew == 1 else 1)
  longest = longest_queue(group, min(1.0, 2 * skew / config.num_experts), queues)
  if skew != 1:
    longest = max(longest, longest_queue(group, 2 / config.num_experts, config.num_groups * config.num_experts))
  return -(-longest // capacity)


def longest_queue(tokens: int, chance: float, queues: int) -> int:
  """Median of the longest of many queues, each of which a token joins with this chance; at least 1."""
  left = 1.0  # chance that a queue is longer than `length`
  for length in range(tokens + 1):
    left -= _binomial(tokens, length, chance)
    if length and queues * max(left, 0.0) < math.log(2):
      return length
  return tokens


def _binomial(n: int, k: int, p: float) -> float:
  if p in (0.0, 1.0):
    return float(k == n * p)
  choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
  return math.exp(choose + k * math.log(p) + (n - k) * math.log1p(-p))
