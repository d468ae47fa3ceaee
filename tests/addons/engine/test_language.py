"""Language models of the engine: continuations are those of the run."""

import functools
import json
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import untrained_run
from shared_traces import untraced

import lingvo_moe
from lingvo_moe import decoder
from lingvo_moe.addons.engine import numpy_sampling
from lingvo_moe.addons.export import litert_export
from lingvo_moe.cli.commands import export
from lingvo_moe.config import configuration
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.search import continuations
from lingvo_moe.search import sampling as reference
from lingvo_moe.search.continuations import Listeners, Request

MODEL = 'lm.shakespeare.Tiny'
PROMPTS = ['1 and', '', 'a\nb \\n', '12 and 13 make', '7' * 40]  # windows have 16 tokens


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  path = str(tmp_path_factory.mktemp('log'))
  values = {'num_layers': 1, 'num_experts': 3, 'window': 16, 'num_kv_heads': 2, 'max_new_tokens': 12}
  config = RunDir(path).begin(MODEL, configuration.resolve(MODEL, **values))
  RunDir(path).checkpoints().save(untrained_run.state_of(config, 20, seed=1))
  return path


@pytest.fixture(scope='module')
def exported(run, tmp_path_factory):
  """Function that exports the run with some options; exports that differ in settings alone share their graphs."""
  files_of, files, made = litert_export._files, {}, {}

  def converted(name, program, graph, weights, kind):
    key = name, repr(program), repr(graph.inputs), kind
    if key not in files:
      files[key] = files_of(name, program, graph, weights, kind)
    return files[key]

  def make(**options):
    key = json.dumps(options)
    if key not in made:
      made[key] = str(tmp_path_factory.mktemp('exported') / 'out')
      with mock.patch.object(litert_export, '_files', converted):
        export.export(export.Options(run, out=made[key], format='litert', **options))
    return made[key]

  return make


@pytest.fixture(scope='module')
def loaded(run):
  return lingvo_moe.load(run)


GREEDY, BEAM = {'search': 'greedy'}, {'search': 'beam'}
REPETITION = {'repetition_penalty': 1.4, 'no_repeat_ngram_size': 3}


@pytest.mark.parametrize(
  'options, n_best',
  [
    pytest.param({}, 2, marks=pytest.mark.long('it converts graphs to LiteRT, which other tests then share')),
    ({'top_k': 5, 'top_p': 0.9, 'sample_seed': 7}, 1),
    pytest.param(GREEDY, 1, marks=pytest.mark.slow),
    pytest.param(BEAM, 1, marks=pytest.mark.slow),
    (GREEDY | REPETITION, 1),
    (BEAM | REPETITION, 3),
  ],
)
def test_float32_continues_as_the_run(run, exported, options, n_best):
  continued = lambda path, **more: lingvo_moe.load(path, **more).generate(PROMPTS, n_best=n_best, scores=True)
  found = continued(exported(weights='float32', **options))
  with untraced():
    expected = continued(run, **options)
  for ours, theirs in zip(found, expected, strict=True):
    assert [h.text for h in ours] == [h.text for h in theirs]
    np.testing.assert_allclose([h[1:3] for h in ours], [h[1:3] for h in theirs], atol=1e-4)


VALUES = (
  {'sample_temperature': 0.8, 'top_k': 5, 'sample_seed': 7, 'max_new_tokens': 8},
  {'sample_temperature': 0},
  {'top_p': 0.6, 'sample_seed': 2**30},
)


def test_values_of_a_call_are_those_of_a_model_loaded_with_them(run, exported, loaded):
  ours, theirs = lingvo_moe.load(exported(weights='float32')), loaded
  found = [ours.generate(PROMPTS, **values) for values in VALUES]
  assert found == [theirs.generate(PROMPTS, **values) for values in VALUES]
  with untraced():
    assert found[:2] == [lingvo_moe.load(run, **of_model).generate(PROMPTS) for of_model in (VALUES[0], GREEDY)]
  for call, message in (
    (lambda: theirs.generate(['a'], top_p=0), 'top_p must be a number from 1e-06 to 1; saw 0'),
    (lambda: theirs.generate(['a'], top_k=True), 'top_k must be a whole number from 0'),
    (lambda: ours.generate(['a'], max_new_tokens=13), 'max_new_tokens must be a whole number from 1 to 12; saw 13'),
    (lambda: ours.generate(['a'], top=3), 'a continuation has no top; there are sample_temperature, top_k'),
    (lambda: lingvo_moe.load(run, search='beam').generate(['a'], top_k=3), 'beam search draws no samples'),
  ):
    with pytest.raises(UserError, match=message):
      call()


@pytest.mark.parametrize('of_run', [False, True])
def test_a_stream_is_what_generate_returns_and_each_row_of_a_batch_is_its_own(loaded, exported, of_run):
  model = loaded if of_run else lingvo_moe.load(exported(weights='float32'))
  heard = {}

  def listen(number, piece):
    heard.setdefault(number, []).append(piece)
    return number != 1 or len(heard[1]) < 3

  sampled = [model.sampling(**values) for values in VALUES]
  requests = [Request('1 and', values, 0, functools.partial(listen, number)) for number, values in enumerate(sampled)]
  found = [best.text for [best] in model.translator().complete(requests)]
  alone = [model.generate(['1 and'], **values)[0] for values in VALUES]
  assert [''.join(heard[number]) for number in range(3)] == found
  assert (found[0], found[2]) == (alone[0], alone[2]) and len(heard[0]) > 5
  assert alone[1].startswith(found[1]) and len(found[1]) <= 3  # it was told to end


def test_pieces_of_a_stream_are_whole_characters():
  text, heard = 'aé\u20ac\ufffd😀', []
  decode = lambda ids: bytes(i - 4 for i in ids if i > 3).decode(errors='replace')
  request = Request('', None, 0, lambda piece: heard.append(piece) or True)
  listeners = Listeners([request], decode)
  for byte in text.encode():
    assert listeners([0], np.array([[byte + 4]])).all()
  listeners.finish([text])
  assert [piece for piece in heard if piece] == ['a', 'é', '€', '\ufffd😀']


def test_a_continuation_in_int8_depends_on_its_prompt_alone(exported):
  model = lingvo_moe.load(exported(search='greedy'))
  together = model.generate(PROMPTS)
  assert [model.generate([prompt])[0] for prompt in PROMPTS] == together and len(set(together)) > 1


def test_commands_continue_lines_without_tensorflow(loaded, exported):
  path = exported(weights='float32')
  command = [sys.executable, '-c', _COMMAND, path]
  done = subprocess.run(command, input='1 and\na\\nb \\\\n\n', capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  texts = loaded.generate(['1 and', 'a\nb \\n'])
  escaped = [text.replace('\\', '\\\\').replace('\n', '\\n').replace('\r', '\\r') for text in texts]
  assert done.stdout.split('\n')[:-1] == escaped


_COMMAND = """
import sys
from lingvo_moe import translate
translate.translate(translate.Options(sys.argv[1], batch_lines=2), sys.stdin.buffer, sys.stdout)
assert 'tensorflow' not in sys.modules and 'jax' not in sys.modules
"""


def test_what_an_export_cannot_do_is_refused(run, exported):
  path = exported(search='greedy')
  model = lingvo_moe.load(path)
  for call, message in (
    (lambda: model.translate(['1 and']), 'language model, which continues text: use generate'),
    (lambda: model.generate(['1 and'], n_best=2), 'one greedy continuation'),
    (lambda: lingvo_moe.load(path, top_k=3), r'\(top_k=0\); saw top_k=3 for .*: leave it out, or export'),
    (lambda: decoder.decode(decoder.Options(path, data_dir='x')), 'continues text: use lingvo-moe translate'),
    (lambda: export.export(export.Options(run, out=f'{path}-')), 'models of translation are exported'),
  ):
    with pytest.raises(UserError, match=message):
      call()


def test_draws_are_those_of_tensorflow():
  logits_BV = np.random.default_rng(0).normal(size=[6, 20]).astype(np.float32)
  for seed in (3, 2**40 + 5):
    keys_B = np.concatenate([continuations.keys(seed, 2, number) for number in (4, 5, 6)])
    key_BW = prng.fold(prng.fold(prng.key(seed, 'sample'), np.arange(4, 7))[:, np.newaxis], np.arange(2)[np.newaxis])
    np.testing.assert_array_equal(keys_B, np.reshape(key_BW, -1))
    for values in ((1.0, 0, 1.0), (0.5, 3, 1.0), (2.0, 7, 0.6)):
      barred_BV = tf.constant(np.where(np.arange(20) < 2, -np.inf, logits_BV), tf.float32)
      theirs = reference.Sampler(*values)(barred_BV[np.newaxis], tf.constant(keys_B[np.newaxis]))
      by_row = reference.Sampler(*(tf.constant([value]) for value in values))
      ours = numpy_sampling.NumpySampler(*(np.full(6, value) for value in values))(
        logits_BV[:, np.newaxis], keys_B[:, np.newaxis]
      )
      np.testing.assert_array_equal(ours[:, 0], theirs[0])
      np.testing.assert_array_equal(by_row(barred_BV[np.newaxis], tf.constant(keys_B[np.newaxis])), theirs)
