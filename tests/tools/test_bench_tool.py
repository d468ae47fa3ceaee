"""tools/bench.py, as typed."""

import importlib.util
import json
import pathlib
import re

import forks
import pytest
from text_lines import records

from lingvo_moe.addons.analysis import flops
from lingvo_moe.addons.analysis.parts import PARTS
from lingvo_moe.config import registry

TOOL = pathlib.Path(__file__).parents[2] / 'tools' / 'bench.py'
FLAGS = ('--model=mt.bench_s.Tiny', '--calls=2', '--warmup=1')
LAYERS = ('--gin_bindings=Tiny.encoder_layers = 1', '--gin_bindings=Tiny.decoder_layers = 1')


def tool(*args):
  return forks.run([TOOL, *args], timeout=300)


@pytest.mark.compiled
def test_a_measurement_has_a_process_of_its_own(tmp_path):
  bindings = [f'--gin_bindings={cls}.num_groups = 2' for cls in ('Tiny', 'Dense')]
  done = tool(
    *FLAGS, '--model=mt.bench_s.Dense,mt.bench_s.Tiny', '--what=moe_layer', *bindings, f'--json={tmp_path}/out'
  )
  assert done.returncode == 0, done.stderr
  found = records(tmp_path / 'out')  # of the one model with experts
  assert [(f['model'], f['dispatch'], f['num_groups']) for f in found] == [
    ('mt.bench_s.Tiny', 'einsum', 2),
    ('mt.bench_s.Tiny', 'gather', 2),
    ('mt.bench_s.Tiny', 'grouped', 2),
  ]
  peak = float(re.match(r'matrix products here reach (\d+) GFLOP/s\n', done.stdout)[1])
  for f, line in zip(found, done.stdout.splitlines()[1:], strict=True):
    assert 100 < f['peak_rss_before_mib'] <= f['peak_rss_mib'] and 0 < f['share_of_peak'] < 1
    assert f['peak_gflop_per_s'] == pytest.approx(peak, abs=0.56)  # each is rounded from the same figure
    assert json.loads(line[line.index('{') :]) == f


def test_a_language_model_is_timed_in_training_alone():
  done = tool('--model=lm.shakespeare.Tiny', '--what=train,decode')
  assert done.returncode and 'Traceback' not in done.stderr
  assert '--what=decode is of translation models; saw --model=lm.shakespeare.Tiny' in done.stderr
  done = tool(
    *FLAGS,
    '--model=lm.shakespeare.Tiny',
    '--gin_bindings=Tiny.num_layers = 1',
    '--what=train',
    '--in_this_process',
    '--peak_gflop_per_s=50',
    '--calls=1',
  )
  assert done.returncode == 0 and 'tokens/s' in done.stdout, done.stderr


@pytest.mark.compiled
def test_everything_is_measured(tmp_path):
  write_corpus(tmp_path / 'data')
  (tmp_path / 'earlier').write_text(json.dumps({'model': 'mt.bench_s.Tiny', 'what': 'train', 'tokens_per_s': 100.0}))
  done = tool(
    *FLAGS,
    '--what=train,decode,latency,moe_layer,input,beam',
    '--profile',
    '--in_this_process',
    '--peak_gflop_per_s=50',
    f'--data_dir={tmp_path}/data',
    *LAYERS,
    '--gin_bindings=Tiny.moe_every = 1',
    '--gin_bindings=Tiny.experts_in = "decoder"',
    '--gin_bindings=Tiny.window = 64',
    f'--against={tmp_path}/earlier',
    f'--json={tmp_path}/out',
  )
  assert done.returncode == 0, done.stderr
  train, decode, latency, einsum, gather, grouped, text, *beams = records(tmp_path / 'out')
  config = registry.get('mt.bench_s.Tiny')(encoder_layers=1, decoder_layers=1, moe_every=1, experts_in='decoder')
  assert train['flops'] == sum(flops.train_step(config).values())
  assert train['gflop_per_s'] == pytest.approx(train['flops'] / train['median_s'] / 1e9, abs=1e-3)
  assert train['share_of_peak'] == pytest.approx(train['gflop_per_s'] / 50, abs=1e-4)
  assert train['tokens_per_s'] == round(2 * 128 / train['median_s'], 1)
  assert train['num_groups'] == 4 and all(0 < train[f'{n}_dropped'] < 1 for n in ('first', 'second'))
  assert set(train['parts_s']) == set(PARTS) and all(s > 0 for s in train['parts_s'].values())
  assert train['against'] == {'mt.bench_s.Tiny': round(train['tokens_per_s'] / 100, 4)}
  assert 'tokens/s of mt.bench_s.Tiny' in done.stdout and 'ms of kernels a step' in done.stdout
  assert decode['tokens_per_s'] == round(128 / decode['median_s'], 1)
  assert (decode['sentences'], latency['sentences'], latency['beam_size']) == (8, 1, 4)
  assert latency['tokens_per_s'] == round(16 / latency['median_s'], 1)
  assert [found['dispatch'] for found in (einsum, gather, grouped)] == ['einsum', 'gather', 'grouped']
  assert text['pairs'] == 2 and text['tokens_per_s'] > 0
  assert [found['length'] for found in beams] == [16, 64, 256]
  assert all(found['flat_over_reordering'] > 0 for found in beams)
  assert 'times the reordering form at length 256' in done.stdout and ' s a sentence' in done.stdout


def write_corpus(folder):
  for pair in ('de-en', 'fr-en'):
    (folder / pair).mkdir(parents=True)
    for side in pair.split('-'):
      lines = [f'{side} {i} {7 * i}\n' for i in range(200)]
      (folder / pair / f'train.{side}').write_text(''.join(lines))


def test_engines_are_timed_in_turn_on_one_model(tmp_path):
  engines = ['litert_int8', 'ctranslate2_float32']
  sizes = (*LAYERS, '--gin_bindings=Tiny.num_experts = 0', '--rounds=2', '--what=latency', f'--json={tmp_path}/out')
  done = tool(*FLAGS, *sizes, f'--engine={",".join(engines)}')
  assert done.returncode == 0, done.stderr
  found = records(tmp_path / 'out')
  assert [f['engine'] for f in found] == engines and found[0]['ratio'] == 1
  for f in found:
    assert len(f['tokens_per_s_of_rounds']) == 2 and f['sentences'] == 1
    assert f['ratio'] == pytest.approx(f['tokens_per_s'] / found[0]['tokens_per_s'], abs=1e-4)
    assert f['peak_rss_mib'] < 150  # TensorFlow alone needs more
  rounds = [line for line in done.stderr.splitlines() if line.startswith('round')]
  assert rounds == [f'round {i} of 2: {engine}' for i in (1, 2) for engine in engines]


def test_engines_are_timed_on_a_public_folder(tmp_path):
  engines = ['litert_int8', *(['ctranslate2_int8'] if importlib.util.find_spec('transformers') else [])]
  sizes = (
    '--set=max_length=8',
    '--set=batch_tokens=64',
    '--set=num_groups=1',
    '--what=decode',
    f'--json={tmp_path}/out',
  )
  folder = pathlib.Path(__file__).parents[1] / 'data' / 'interop' / 'marian'
  flags = (f'--model={folder}', '--what=decode', f'--engine={",".join(engines)}', f'--json={tmp_path}/out')
  done = tool(*flags, *sizes, '--calls=1', '--warmup=1', '--rounds=1')
  assert done.returncode == 0, done.stderr
  assert [(f['engine'], f['sentences']) for f in records(tmp_path / 'out')] == [(engine, 8) for engine in engines]


def test_real_text_is_timed(toy_run, tmp_path):
  (tmp_path / 'de').write_text('Ein Hund.\nZwei Katzen.\nund mehr\n')
  (tmp_path / 'en').write_text('A dog.\nTwo cats.\nand more\n')
  flags = (f'--model={toy_run.path}', '--what=text', f'--text={tmp_path}/de,{tmp_path}/en', f'--json={tmp_path}/out')
  done = tool(*flags, '--engine=litert_int8', '--calls=1', '--rounds=2', '--lines=2', '--single=1', '--search=greedy')
  assert done.returncode == 0, done.stderr
  (found,) = records(tmp_path / 'out')
  assert found['lines'] == 2 <= found['tokens'] and found['ratio'] == 1 and 0 <= found['bleu'] <= 100
  assert len(found['tokens_per_processor_s_of_rounds']) == 2 and found['search'] == 'greedy'
  assert 0 < found['ms_of_one'] and found['peak_rss_mib'] < 250


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--what=trian'], "--what must be of train, decode, latency, moe_layer, rounds, input, beam, text; saw 'trian'"),
    (
      ['--what=text', '--model=x'],
      '--what=text takes a run and two files, --model=LOGDIR --text=SOURCE,REFERENCE; saw',
    ),
    (['--what=text,train'], '--what=text is timed by itself, without --runtime, --versus and --against: leave the'),
    (['--what=text', '--model=x', '--text=a,b', '--profile'], '--profile has no effect on --what=text: leave it out'),
    (['--what=decode', '--search=greedy'], '--search is for --what=text; saw --what=decode: leave it out'),
    (['--what=text', '--engine=onnx'], '--engine of --what=text must be of litert_int8, litert_float32, '),
    (['--what=text', '--model=x', f'--text={TOOL},/dev/null'], '--text is of files with text; saw /dev/null, which is'),
    (['--what=text', '--model=x', f'--text={TOOL},{TOOL}'], 'x: there is no such directory; give the log directory of'),
    (['--model=mt.bench_s.Dense', '--what=moe_layer'], '--what=moe_layer is of models with experts; saw --model='),
    (
      ['--gin_bindings=Moe8.num_groups = 2'],
      "models timed, mt.bench_s.Dense, mt.bench_s.Moe16; saw 'Moe8.num_groups = 2'",
    ),
    (['--what=decode', '--profile'], '--profile is of the train step; saw --what=decode: add train'),
    (['--what=beam', '--runtime=spmd', '--mesh=data:2'], '--runtime is for --what=train,decode,latency; saw'),
    (['--engine=onnx'], '--engine must be of tensorflow, litert_int8, litert_float32, ctranslate2_int8, '),
    (['--engine=litert_int8'], '--engine is for --what=decode,latency without --runtime, --versus and --against'),
    (['--versus=HEAD', '--against=results'], '--versus times a commit, --against reads figures: leave either out'),
    (['--versus=HEAD', '--engine=litert_int8'], '--versus times commits, --engine=litert_int8 other engines: leave'),
    (['--engine='], '--engine names what is timed; saw none: give one or several, with commas between'),
  ],
)
def test_mistakes_get_one_line(flags, message):
  done = tool(*flags)
  (line,) = done.stderr.splitlines()
  assert done.returncode == 1 and message in line


@pytest.mark.skipif(not (pathlib.Path(__file__).parents[2] / '.git').exists(), reason='it is about a git checkout')
def test_a_commit_that_does_not_exist_is_told():
  done = tool('--versus=nonsense')
  assert done.returncode == 1 and "saw 'nonsense', which git does not know: see git log" in done.stderr.splitlines()[-1]
