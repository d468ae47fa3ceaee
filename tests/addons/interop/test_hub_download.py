"""Models that are downloaded from a server that speaks the hub's protocol."""

import errno
import json
import os
import shutil

import forks
import pytest
import safetensors.numpy
from hub_server import COMMIT, EARLIER, HubServer
from imported_model import FIXTURES

from lingvo_moe.addons.interop import hub_download, importing
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir

constants = pytest.importorskip('huggingface_hub.constants')
READ = ['config.json', 'generation_config.json', 'model.safetensors', 'source.spm', 'target.spm', 'vocab.json']
OTHER = {'README.md': b'text', 'tf_model.h5': b'other weights', 'pytorch_model.bin': b'a pickle'}


@pytest.fixture
def serve(tmp_path, monkeypatch):
  """A hub of a fixture's folder, of which huggingface_hub downloads into a cache of the test's own."""
  servers = []

  def serve(folder=FIXTURES / 'marian', extra=OTHER):
    hub = HubServer(folder, extra=extra).__enter__()
    servers.append(hub)
    monkeypatch.setattr(constants, 'ENDPOINT', hub.url)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', hub.url + '/{repo_id}/resolve/{revision}/{filename}')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    return hub

  yield serve
  for hub in servers:
    hub.__exit__()


def test_only_what_the_family_reads_is_fetched_and_only_once(serve):
  hub = serve()
  folder, origin = hub_download.download('a/b')
  assert sorted(hub.fetched()) == sorted(os.listdir(folder)) == READ
  assert origin == f'a/b@{COMMIT}'
  hub.requests.clear()
  assert hub_download.download('a/b') == (folder, origin)
  assert not hub.fetched()


@pytest.mark.parametrize('revision', ['v1', EARLIER])
def test_a_revision_is_that_which_is_asked_for_and_the_run_notes_its_commit(serve, tmp_path, revision):
  hub = serve()
  folder, origin = hub_download.download('a/b', revision)
  assert origin == f'a/b@{EARLIER}'
  hub.revisions['v1'] = COMMIT  # a tag that moves between two requests
  assert {path.split('/')[4] for _, path, _ in hub.requests if '/resolve/' in path} == {EARLIER}
  importing.import_folder(folder, str(tmp_path / 'run'), origin=origin)
  assert json.loads((tmp_path / 'run' / 'imported.json').read_text())['of'] == origin
  of_folder = tmp_path / 'of_folder'
  importing.import_folder(str(FIXTURES / 'marian'), str(of_folder))
  downloaded, given = (RunDir(str(path)).checkpoints().path(0) for path in (tmp_path / 'run', of_folder))
  for name in os.listdir(os.path.dirname(given)):
    if name.startswith(os.path.basename(given) + '.data'):
      read = [open(os.path.join(os.path.dirname(path), name), 'rb').read() for path in (downloaded, given)]
      assert read[0] == read[1]


def test_shards_are_those_of_the_index(serve, tmp_path):
  folder = tmp_path / 'sharded'
  shutil.copytree(FIXTURES / 'marian', folder, copy_function=shutil.copyfile)
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names, weight_map = sorted(tensors), {}
  for number in (0, 1):
    part = {name: tensors[name] for name in names[number::2]}
    safetensors.numpy.save_file(part, folder / f'model-{number}.safetensors')
    weight_map |= dict.fromkeys(part, f'model-{number}.safetensors')
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  hub = serve(folder, extra={'model-2.safetensors': b'of another index'})
  downloaded, _ = hub_download.download('a/b')
  assert {'model-0.safetensors', 'model-1.safetensors'} <= {*hub.fetched()}
  assert 'model-2.safetensors' not in hub.fetched()
  assert HubFolder(downloaded).tensors.keys() == tensors.keys()


def test_a_connection_that_is_cut_goes_on_where_it_was(serve, monkeypatch):
  hub = serve()
  monkeypatch.setattr(constants, 'DOWNLOAD_CHUNK_SIZE', 1000)
  hub.cut['model.safetensors'] = 5000
  folder, _ = hub_download.download('a/b')
  ranges = [r for method, path, r in hub.requests if method == 'GET' and path.endswith('model.safetensors')]
  assert ranges == [None, 'bytes=5000-']
  whole = (FIXTURES / 'marian' / 'model.safetensors').read_bytes()
  assert open(os.path.join(folder, 'model.safetensors'), 'rb').read() == whole


def test_a_download_that_stopped_is_completed_by_the_same_call(serve, monkeypatch):
  hub = serve()
  answer = hub.answer

  def stop(request):
    if request.command == 'GET' and request.path.endswith('model.safetensors'):
      request.send_response(500)
      request.send_header('Content-Length', '0')
      request.end_headers()
    else:
      answer(request)

  hub.answer = stop
  with pytest.raises(UserError, match=r'did not give all files of a/b \(.*the same command goes on with those'):
    hub_download.download('a/b')
  hub.answer = answer
  hub.requests.clear()
  folder, _ = hub_download.download('a/b')
  assert sorted(os.listdir(folder)) == READ
  assert hub.fetched() == ['model.safetensors']


def test_names_that_cannot_be_had_are_told_apart(serve):
  serve()
  for name, revision, message in (
    ('a/none', '', r'no model a/none that you may read: check the spelling; for a private model, hf auth login'),
    ('a/gated', '', r'a/gated is read by those alone who agreed'),
    ('a/b', 'v7', r'a/b has no --revision=v7'),
    ('a b', '', r"OWNER/NAME, such as Helsinki-NLP/opus-mt-de-en; saw 'a b'"),
  ):
    with pytest.raises(UserError, match=message):
      hub_download.download(name, revision)


def test_without_a_network_one_line_says_where_the_cache_is(serve, monkeypatch):
  hub = serve()
  hub._server.server_close()
  hub._server.shutdown()
  monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
  with pytest.raises(UserError, match=r'the hub \(http://127.0.0.1:9\) did not give .* in .*models--a--b is imported'):
    hub_download.download('a/b')


LISTING = {'id': 'a/b', 'sha': COMMIT, 'siblings': [{'rfilename': name} for name in READ]}
ANSWERS = {
  'no JSON': b'<html>',
  'half of JSON': b'{"id": "a/b", "sha": ',
  'bytes': b'\xff\xfe\x00',
  'nothing': b'',
  'a list': [],
  'null': None,
  'a string': 'x',
  'no siblings': {'id': 'a/b', 'sha': COMMIT},
  'siblings of another type': LISTING | {'siblings': 3},
  'siblings that are names': LISTING | {'siblings': READ},
  'siblings without a name': LISTING | {'siblings': [{}]},
  'a name of another type': LISTING | {'siblings': [{'rfilename': {}}]},
  'no commit': {'id': 'a/b', 'siblings': LISTING['siblings']},
  'a commit of another type': LISTING | {'sha': 7},
  'a commit that leads elsewhere': LISTING | {'sha': '../../../../x'},
}


@pytest.mark.parametrize('odd', ANSWERS)
def test_an_odd_answer_of_the_hub_is_one_line_and_nothing_is_written(odd, serve, tmp_path):
  """Of the kind: what a stranger's server says is read as a type and a range, as a stranger's file is."""
  hub = serve()
  answer, body = hub.answer, ANSWERS[odd] if isinstance(ANSWERS[odd], bytes) else json.dumps(ANSWERS[odd]).encode()
  is_listing = lambda request: request.path.startswith('/api/models/a/b')
  json_type = {'Content-Type': 'application/json'}
  hub.answer = lambda request: hub._send(request, 200, body, json_type) if is_listing(request) else answer(request)
  with pytest.raises(UserError, match=r'the hub \(http.* (gave an answer for|did not give all files of) a/b') as raised:
    hub_download.download('a/b')
  assert '\n' not in str(raised.value)
  assert not hub.fetched() and not (tmp_path / 'cache').exists()


@pytest.mark.parametrize('header', ['ETag', 'X-Linked-ETag', 'X-Repo-Commit', 'X-Xet-Hash'])
@pytest.mark.parametrize('value', ['"../../../../x"', '..', 'a/b', '/x', 'W/"../x"', '', 'a' * 300])
def test_a_name_that_leaves_the_cache_is_refused_before_anything_is_written(header, value, serve, tmp_path):
  """Of the kind: a name from outside that becomes the name of a file is one part of a path."""
  hub = serve()
  send = hub._send
  odd = lambda headers: headers | {header: value} if 'X-Repo-Commit' in headers else headers
  hub._send = lambda request, status, body, headers, *rest: send(request, status, body, odd(headers), *rest)
  with pytest.raises(UserError, match=rf'not of its protocol \(ValueError: {header} '):
    hub_download.download('a/b')
  assert [path.name for path in tmp_path.iterdir() if path.name != 'cache'] == []
  assert not [path for path in (tmp_path / 'cache').rglob('*') if path.is_file()]


def test_names_are_checked_in_sessions_that_are_opened_after_a_lost_connection_too(serve, tmp_path):
  hub = serve()
  send, lost = hub._send, []

  def lose(request, status, body, headers, *rest):
    if 'X-Repo-Commit' in headers and not lost:
      lost.append(request.path)
      request.close_connection = True
      return request.connection.close()
    return send(request, status, body, headers | {'ETag': '"../../../../x"'}, *rest)

  hub._send = lose
  with pytest.raises(UserError, match='a/b'):
    hub_download.download('a/b')
  assert lost and not [path for path in tmp_path.rglob('*') if path.is_file() and '.locks' not in str(path)]


def test_a_full_disk_is_an_error_of_the_disk(serve, monkeypatch):
  serve()
  import huggingface_hub

  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device', 'blobs/0')

  monkeypatch.setattr(huggingface_hub, 'hf_hub_download', full)
  with pytest.raises(OSError, match='No space left on device'):
    hub_download.download('a/b')


def test_a_pickle_alone_needs_torch_before_anything_is_downloaded(serve, tmp_path, monkeypatch):
  folder = tmp_path / 'pickled'
  shutil.copytree(FIXTURES / 'marian', folder, copy_function=shutil.copyfile)
  (folder / 'model.safetensors').unlink()
  hub = serve(folder)
  monkeypatch.setattr(hub_download.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match='as a pickle alone, .* torch'):
    hub_download.download('a/b')
  assert not hub.fetched()


def test_a_model_without_weights_or_of_no_family_is_refused(serve, tmp_path):
  folder = tmp_path / 'odd'
  folder.mkdir()
  (folder / 'config.json').write_text('{"architectures": ["BertModel"]}')
  serve(folder, extra={})
  with pytest.raises(UserError, match='a/b must have one of model.safetensors, .* on the hub; it has none'):
    hub_download.download('a/b')
  hub = serve(folder, extra={'model.safetensors': b'x'})
  with pytest.raises(UserError, match='BertModel'):
    hub_download.download('a/b')
  assert hub.fetched() == ['config.json']


def test_a_model_without_a_configuration_is_refused(serve, tmp_path):
  (tmp_path / 'bare').mkdir()
  serve(tmp_path / 'bare', extra={'model.safetensors': b'x'})
  with pytest.raises(UserError, match='a/b must have a config.json on the hub; it has none'):
    hub_download.download('a/b')


def test_the_command_imports_a_model_by_name(tmp_path):
  def run(*args):
    return forks.run(['-m', 'lingvo_moe.cli.commands.import_', *args, f'--logdir={tmp_path / "run"}'], env=environment)

  with HubServer(FIXTURES / 'marian') as hub:
    environment = {**os.environ, 'HF_ENDPOINT': hub.url, 'HF_HOME': str(tmp_path / 'home')}
    done = run('--hub=a/b', '--revision=v1')
    assert done.returncode == 0, done.stderr
    assert f'imported from a/b@{EARLIER}' in done.stdout
    assert 'HTTP Request' not in done.stderr
    hub.requests.clear()
    assert 'exists' in run('--hub=a/b').stderr
    assert not hub.requests
  for args, message in (
    ((), 'one model is imported'),
    (('--hub=a/b', 'folder'), "saw 'folder a/b'"),
    (('folder', '--revision=v1'), "--revision is of a model of --hub; saw 'v1' with a folder"),
  ):
    done = run(*args)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
