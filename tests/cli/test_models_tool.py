"""lingvo-moe models, as typed."""

import json
import re

import forks
import pytest

from lingvo_moe.config import registry

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'models']


def run(*flags):
  return forks.run([*COMMAND, *flags])


def test_without_a_model_it_lists_every_name_by_task_with_a_summary():
  *tasks, legend = [task.splitlines() for task in run().stdout.split('\n\n')]

  assert [task[0].split(',')[0] for task in tasks] == ['Translation', 'Language models', 'Span corruption']
  lines = [line for task in tasks for line in task[1:]]
  assert sorted(line[2:].split()[0] for line in lines) == registry.names()
  assert all(len(line.split()) > 3 for line in lines) and legend == ['* start here']
  assert all(1 <= sum(line[0] == '*' for line in task[1:]) < 3 for task in tasks)
  assert '* mt.starter.MoE8E' in {line[:18] for line in lines}


def test_json_tells_the_weights_of_the_1t_model():
  found = json.loads(run('--model=mt.m4.MoE2048E60L', '--json').stdout)

  assert found['model'] == 'mt.m4.MoE2048E60L'
  assert found['weights'] == sum(found['parts'].values()) == 1_032_212_709_376
  assert found['weights_per_token'] == 2_361_656_320
  assert found['experts'] == 2048 * 30
  assert found['parts']['encoder/experts'] == 15 * 2048 * 2 * 1024 * 8192
  assert found['config']['activation_dtype'] == 'bfloat16'
  assert found['about'].startswith('MoE(2048E, 60L), bfloat16 activations')
  assert 'Run:     lingvo-moe train --model=mt.m4.MoE2048E60L ' in found['about']


def test_json_describes_every_field():
  found = json.loads(run('--model=mt.m4mini.Tiny', '--json').stdout)

  assert list(found['fields']) == list(found['config'])
  meaning = (
    'Step at which training ends; None: chosen when a run begins, so many that training reads 20,000 * sqrt(n) '
    'positions, where an epoch has n. The schedules warmup_linear, cosine, wsd end there: with another max_steps, a '
    'run that goes on has other rates from then on, and says both.'
  )
  assert found['fields']['max_steps'] == {
    'default': 1000,
    'meaning': meaning,
    'rule': 'at least 0',
    'may_change': True,
    'text': f'{meaning} At least 0. A run may change it.',
  }
  assert re.fullmatch('one of .*adam, .*', found['fields']['optimizer']['rule'])


def test_bindings_and_files_are_resolved_before_counting(tmp_path):
  gin_file = tmp_path / 'a.gin'
  gin_file.write_text('Tiny.num_experts = 16\n')

  done = run('--model=mt.m4mini.Tiny', f'--gin_file={gin_file}', '--gin_bindings=Tiny.ff_dim = 48')

  lines = [' '.join(line.split()) for line in done.stdout.splitlines()]
  assert lines[0] == 'mt.m4mini.Tiny'
  assert {'num_experts = 16', 'ff_dim = 48', 'experts in all 32 32'} <= set(lines)
  assert any(line.startswith(f'encoder/experts {16 * 2 * 32 * 48:,} ') for line in lines)
  assert {'encoder/layer_01/moe/wi 16x32x48 EMH', 'decoder/layer_00/attention/wq 32x4x8 MNK'} <= set(lines)
  described = ' '.join(lines[lines.index('ff_dim = 48') + 1 :][:2])
  assert described.startswith('H, ') and described.endswith('Bound here; 64 by default.')


@pytest.mark.parametrize(
  'flags, answer',
  [
    (['--model=mt.m4mini.Tiny', '--gin_file=/no/such.gin'], 'error: --gin_file=/no/such.gin: there is no such file'),
    (['--gin_bindings=Tiny.max_steps = 1'], 'error: bindings are of one model, and no --model was given'),
    (['mt.m4.T96L'], "error: arguments are given as --flag=value; saw 'mt.m4.T96L'"),
  ],
)
def test_a_mistake_gets_one_line_and_status_1(flags, answer):
  done = run(*flags)

  assert done.returncode == 1 and not done.stdout
  assert done.stderr.splitlines()[-1].startswith(answer)
