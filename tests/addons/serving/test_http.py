"""HTTP interface: LibreTranslate's form of questions and answers, limits, errors, metrics and the page, over a stub."""

import asyncio
import gzip
import json
import random
import re

import pytest

pytest.importorskip('aiohttp')
pytest.importorskip('prometheus_client')

import aiohttp
from served_stub import Stub

from lingvo_moe.addons.serving import http_app, server, service, translate_routes
from lingvo_moe.addons.serving.connections import Connections
from lingvo_moe.addons.serving.http_app import HttpApp
from lingvo_moe.addons.serving.origins import Origins
from lingvo_moe.addons.serving.query import parse
from lingvo_moe.text.sentences import Plan, _Arranged, sentences

JSON, FORM = 'application/json', 'application/x-www-form-urlencoded'


class BySentence(Stub):
  """A run that splits lines into sentences."""

  def plan(self, lines, asked):
    return Plan([_Arranged.of(line, sentences(line, 'en')) for line in lines])


def with_client(test, run=None, **options):
  """Runs test(client, run, app) with a server."""
  run = run or Stub()

  async def go():
    app, bound = HttpApp(run, **{'wait': 0.0, **options}), server.bind('127.0.0.1', 0)
    connections = Connections(app.answer, app.malformed)
    accepting = asyncio.create_task(connections.accept(bound))
    async with aiohttp.ClientSession(server.url(bound)) as client:
      try:
        return await asyncio.wait_for(test(client, run, app), 60)
      finally:
        run.go.set()
        accepting.cancel()
        await connections.close(1)
        await asyncio.to_thread(app.batcher.close)

  return asyncio.run(go())


def ask(*queries, run=None, **options):
  """(status, answer) of each query, a dict as JSON or bytes as they are."""

  async def test(client, run, app):
    found = []
    for query in queries:
      body = query if isinstance(query, bytes) else json.dumps(query).encode()
      response = await client.post('/translate', data=body, headers={'Content-Type': 'application/json'})
      found.append((response.status, await response.json()))
    return found

  return with_client(test, run, **options)


def test_a_string_gives_a_string_and_a_list_a_list():
  assert ask(
    {'q': 'abc', 'source': 'de', 'target': 'en'},
    {'q': ['abc', '', 'déf'], 'source': 'de', 'target': 'en', 'format': 'text', 'api_key': ''},
    {'q': []},
  ) == [(200, {'translatedText': 'cba'}), (200, {'translatedText': ['cba', '', 'féd']}), (200, {'translatedText': []})]


def files_client(test):
  """Runs test(post) with a server, where post(path, **fields) gives (status, answer)."""

  async def with_post(client, run, app):
    async def post(path, **fields):
      response = await client.post(path, data=aiohttp.FormData(fields, default_to_multipart=True))
      return response.status, await response.json()

    return await test(client, post)

  return with_client(with_post, limits=service.Limits(file=10_000))


def test_the_language_of_a_source_is_detected_among_those_of_the_model():
  german, french = 'Wo ist das Haus der Katze?', 'Où est la maison du chat ?'

  async def test(client, run, app):
    asked = [(await (await client.post('/detect', json={'q': q})).json())[0] for q in (german, french)]
    return asked, await (await client.post('/translate', json={'q': [french, 'x'], 'source': 'auto'})).json()

  found, answer = with_client(test)
  assert [one['language'] for one in found] == ['de', 'fr'] and all(one['confidence'] > 60 for one in found)
  told = answer['detectedLanguage']
  assert told[0]['language'] == 'fr' and answer['translatedText'][1] == 'x'


def test_each_text_has_a_source_language_of_its_own():
  """Kind: what is detected of all texts of a request together."""
  texts = ['Il gatto dorme sul divano.', 'Le chat dort sur le canapé.', '', 'Il cane corre nel parco.', 'x']
  run = Stub(pairs=(('it', 'en'), ('fr', 'en')), tags=['en'])
  query = {'q': texts, 'source': 'auto', 'target': 'en'}
  [(status, answer), (_, one), (_, alone)] = ask(query, {**query, 'q': texts[1]}, {**query, 'q': []}, run=run)
  assert status == 200 and answer['translatedText'] == [f'{text[:10][::-1]}>en' for text in texts]
  assert [found['language'] for found in answer['detectedLanguage'][:2]] == ['it', 'fr']
  assert answer['detectedLanguage'][3]['language'] == 'it' and len(answer['detectedLanguage']) == 5
  assert [warning.split()[0] for warning in answer['warnings']] == ['q[0]', 'q[1]', 'q[3]']
  assert one['detectedLanguage']['language'] == 'fr' and alone == {'translatedText': [], 'detectedLanguage': []}
  batches = [{*lines} for lines, *_ in run.batches]
  assert {texts[0], texts[3]} <= batches[0] and texts[1] not in batches[0]


def test_a_public_client_of_libretranslate_works_unchanged():
  """Of PyPI's libretranslatepy, where it is installed."""
  api = pytest.importorskip('libretranslatepy').LibreTranslateAPI

  async def test(client, run, app):
    lt = api(str(client._base_url), api_key='any')
    calls = (lt.translate, 'abc', 'de', 'en'), (lt.detect, 'Wo ist das Haus?'), (lt.languages,)
    return [await asyncio.to_thread(*call) for call in calls]

  text, detected, languages = with_client(test)
  assert text == 'cba' and detected[0]['language'] == 'de' and languages[0]['code'] == 'de'


def test_what_else_is_asked_of_a_translation_is_passed_on_or_refused():
  run = Stub()
  found = ask(
    {'q': ['ab', ''], 'alignments': True, 'ban': 'x', 'terms': {'a': 'b'}},
    {'q': 'ab', 'prefix': 'c'},
    {'q': 'ab', 'ban': 5},
    {'q': 'ab', 'terms': ['a']},
    {'q': 'ab', 'prefix': '\ud800'},
    {'q': 'ab', 'ban': ['x', 'y\udfff']},
    {'q': 'ab', 'terms': {'a\ud800': 'b'}},
    {'q': 'ab', 'terms': ['a=\ud800']},
    {'q': 'ab', 'ban': ['longest']},
    run=run,
  )
  places = lambda spans: {'source_spans': spans, 'target_spans': spans}
  assert found[0] == (
    200,
    {
      'translatedText': ['ba', ''],
      'alignments': [
        [{'source': 'a b', 'target': 'b a', 'pairs': '1-0 0-1', **places([[0, 1], [1, 2]])}],
        [{'source': '', 'target': '', 'pairs': '', **places([])}],
      ],
    },
  )
  messages = "['prefix'] cannot be asked here", *['prefix is a string, ban has words'] * 2
  messages = *messages, *['prefix, ban and terms must be Unicode; saw half of a'] * 4, 'constraints leave no room'
  for (status, answer), message in zip(found[1:], messages, strict=True):
    assert status == 400 and answer['error'].startswith(message), answer
  ask({'q': 'ab', 'ban': 'x', 'terms': {'a': 'b'}}, run=run)
  assert (run.asked.ban, run.asked.terms) == (('x',), (('a', 'b'),))
  for off, is_kept in ((None, True), (True, True), (False, False), ('false', False)):
    ask({'q': 'ab', 'placeholders': off}, run=run)
    assert run.asked.placeholders == is_kept
  ask({'q': 'ab', 'search': 'sample', 'top_k': 3, 'top_p': None}, run=run)
  assert (run.asked.search, run.asked.top_k, run.asked.top_p) == ('sample', 3, None)


def test_numbers_of_a_form_are_read_as_those_of_json():
  form = parse(b'q=a&top_k=3&top_p=0.5&sample_seed=x', 'application/x-www-form-urlencoded')
  names = ('top_k', 'top_p', 'sample_seed', 'sample_temperature')
  assert form.numbers(names) == {'top_k': 3, 'top_p': 0.5, 'sample_seed': 'x'}
  assert parse(b'{"q": "a", "top_k": 3, "top_p": null}').numbers(names) == {'top_k': 3}


def test_html_keeps_its_tags_and_a_file_its_kind():
  html = '<p>Ab <b>Hund</b> &amp; <br>ab</p>'

  async def test(client, post):
    text = await (await client.post('/translate', json={'q': html, 'format': 'html', 'alternatives': 1})).json()
    status, answer = await post('/translate_file', file=aiohttp.payload.BytesPayload(b'x'), source='de')
    form = aiohttp.FormData({'source': 'auto', 'target': 'en'}, quote_fields=False)
    form.add_field('file', b'ab cd\r\n\nef', filename='über; uns.txt')
    made = await (await client.post('/translate_file', data=form)).json()
    fetched = await client.get(made['translatedFileUrl'])
    lost = await client.get('/download_file/other.txt')
    return text, (status, answer), await fetched.read(), fetched.headers, lost.status

  text, missing, data, headers, lost = files_client(test)
  assert text['translatedText'] == '<p>&amp; <b>dnuH</b> bA <br>ba</p>'
  assert len(text['alternatives']) == 1 and missing[0] == 400 and missing[1]['error'].startswith('missing file')
  assert data == b'dc ba\r\n\nfe' and lost == 404
  assert headers['Content-Disposition'] == "attachment; filename*=UTF-8''%C3%BCber%3B%20uns.txt"


def test_the_oldest_translated_files_make_room_for_new_ones(monkeypatch):
  monkeypatch.setattr(translate_routes, '_FILE_BYTES', 250)

  async def kept(client, post):
    urls, found = [], []
    for size in (100, 100, 100, 300):
      form = aiohttp.FormData()
      form.add_field('file', b'a' * 9 + b'\n' * (size - 9), filename=f'{size}.txt')
      urls.append((await (await client.post('/translate_file', data=form)).json())['translatedFileUrl'])
      found.append([(await client.get(url)).status for url in urls])
    return found

  assert files_client(kept) == [[200], [200, 200], [404, 200, 200], [404, 404, 404, 200]]


def test_a_file_that_is_not_one_is_refused():
  async def test(client, post):
    found = []
    for name, data in (('a.pdf', b'x'), ('a.docx', b'x'), ('a.txt', b'\xff'), ('a.txt', b'x' * 10_001)):
      form = aiohttp.FormData()
      form.add_field('file', data, filename=name)
      response = await client.post('/translate_file', data=form)
      found.append((response.status, (await response.json())['error']))
    return found

  messages = (
    (400, 'a file must be one of .txt, .html, .htm, .srt, .docx, .odt; saw a.pdf'),
    (400, 'the file is not a whole .docx file: File is not a zip file'),
    (400, 'text must be UTF-8; a.txt is not from byte 0 on: save it as UTF-8'),
    (413, 'a body has at most 10000 bytes: send less at once'),
  )
  assert tuple(files_client(test)) == messages


def test_lines_of_a_text_are_translated_each_and_stay_lines():
  run = Stub()
  assert ask({'q': 'ab\r\n\ncd\n'}, run=run) == [(200, {'translatedText': 'ba\n\ndc\n'})]
  assert run.batches[-1][0] == ['ab', '', 'cd', '']


def test_alternatives_follow_the_best():
  run = Stub()
  queries = {'q': 'ab', 'alternatives': 2}, {'q': ['a\nb', ''], 'alternatives': 1}, {'q': 'ab', 'alternatives': 3}
  assert ask(*queries, run=run) == [
    (200, {'translatedText': 'ba', 'alternatives': ["ba'", "ba''"]}),
    (200, {'translatedText': ['a\nb', ''], 'alternatives': [["a'\nb'"], []]}),
    (400, {'error': 'alternatives must be at most 2, the beam less one'}),
  ]
  assert {n_best for _, _, n_best in run.batches} == {3}  # one program for any number


def test_a_line_over_the_length_is_translated_in_part_with_a_warning():
  long = '0123456789abc'
  part = 'is over max_length=10 tokens and was translated in part'
  assert ask({'q': long}, {'q': ['a', f'b\n{long}']}) == [
    (200, {'translatedText': '9876543210', 'warnings': [f'q {part}']}),
    (200, {'translatedText': ['a', 'b\n9876543210'], 'warnings': [f'line 2 of q[1] {part}']}),
  ]


def test_a_form_is_taken_as_libretranslates_clients_send_it():
  query = {'q': 'äb c\r\n', 'source': 'de', 'target': 'en', 'alternatives': '1'}
  multipart = aiohttp.FormData(query, default_to_multipart=True)
  two_texts = aiohttp.FormData([('q', 'a'), ('q', 'b')])

  async def test(client, run, app):
    posts = (
      dict(data=aiohttp.FormData(query)),
      dict(data=multipart),
      dict(params=query),  # of the URL, with no body
      dict(params={'q': 'of the URL', 'target': 'en'}, data=aiohttp.FormData({'q': 'äb', 'source': 'de'})),
      dict(data=two_texts),
    )
    return [await (await client.post('/translate', **post)).json() for post in posts]

  *same, joined, two = with_client(test)
  assert same == 3 * [{'translatedText': 'c bä\n', 'alternatives': ["c bä'\n"]}]
  assert joined == {'translatedText': ['LRU eht fo', 'bä']} and two == {'translatedText': ['a', 'b']}


def test_a_body_of_another_type_is_answered_with_its_type_and_what_to_send():
  boundary = 'multipart/form-data; boundary=x'
  wrong = [
    (b'{"q": "a"}', FORM, 400, f'the body is JSON, but its Content-Type says {FORM}: send Content-Type: {JSON}'),
    (
      b'{"q": "a"}',
      'text/plain',
      415,
      f'a body of Content-Type text/plain is not read: send JSON with Content-Type: {JSON}',
    ),
    (
      b'text=a&to=de',
      FORM,
      400,
      'missing q: the text to translate, a string or a list of strings; the form has text, to',
    ),
    (b'', FORM, 400, 'missing q: the text to translate, a string or a list of strings; the form has nothing'),
    (
      b'{"text": 1}',
      JSON,
      400,
      'missing q: the text to translate, a string or a list of strings; the JSON object has text',
    ),
    (b'q=%ff', FORM, 400, 'a form must be UTF-8'),
    (b'q=\xff', FORM, 400, 'a form must be UTF-8'),
    (b'q&' * 20_000, FORM, 400, 'a form has at most 10000 fields'),
    (b'q=a', boundary, 400, 'the multipart body is cut off, or its boundary is not that of its Content-Type'),
    (b'--x\r\n\r\na\r\n--x--', 'multipart/form-data', 400, 'the multipart body is cut off'),
    (b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\n\xff\r\n--x--', boundary, 400, 'a form must be UTF-8'),
    (b'{"q": "a"}', f'{JSON}; charset=latin-1', 200, None),
    (b'{"q": "a"}', 'application/vnd.api+json', 200, None),
  ]

  async def test(client, run, app):
    posts = [await client.post('/translate', data=body, headers={'Content-Type': kind}) for body, kind, *_ in wrong]
    bare = await client.post('/translate', data=b'{"q": "a"}', skip_auto_headers=['Content-Type'])
    return [(post.status, await post.json()) for post in posts], bare.status

  answers, bare = with_client(test)
  for (body, kind, status, error), (found, answer) in zip(wrong, answers, strict=True):
    assert (found, answer.get('error', '')[: len(error or '')]) == (status, error or ''), (body[:40], kind)
  assert bare == 200  # JSON where nothing is said


@pytest.mark.parametrize('empty', [None, '', False, [], 0])
def test_optional_fields_may_be_empty_in_any_way(empty):
  names = ('source', 'target', 'format', 'alternatives', 'api_key')
  assert ask({'q': 'ab', **dict.fromkeys(names, empty)}) == [(200, {'translatedText': 'ba'})]


def test_a_body_that_is_not_what_its_header_says_is_400_and_leaves_no_trace(capsys, caplog):
  async def test(client, run, app):
    post = lambda data, coding: client.post(
      '/translate', data=data, headers={'Content-Type': JSON, 'Content-Encoding': coding}
    )
    bodies = (b'garbage', 'deflate'), (b'garbage', 'gzip'), (b'{}', 'nonsense'), (gzip.compress(b'[' * 10**7), 'gzip')
    answers = [await post(*body) for body in (*bodies, (gzip.compress(b'{"q": "ab"}'), 'gzip'))]
    return [(answer.status, await answer.json()) for answer in answers]

  deflated, zipped, unknown, bomb, fine = with_client(test)
  assert deflated == (400, {'error': 'the body is not deflate, as its Content-Encoding says'})
  assert zipped == (400, {'error': 'the body is not gzip, as its Content-Encoding says'})
  assert unknown[0] == 400 and bomb[0] == 413 and fine == (200, {'translatedText': 'ba'})
  assert capsys.readouterr().err == '' and not caplog.records


def raw(*requests, **options):
  """What the server sends for bytes, until it closes the connection."""

  async def test(client, run, app):
    reader, writer = await asyncio.open_connection('127.0.0.1', client._base_url.port)
    writer.write(b''.join(requests))
    return await asyncio.wait_for(reader.read(), 20)

  return with_client(test, **options)


HEAD = b'POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 11\r\n'


def test_a_client_that_waits_to_send_its_body_is_told_to_only_where_it_is_read():
  waits, body, last = b'Expect: 100-continue\r\n', b'{"q": "ab"}', b'Connection: close\r\n\r\n'
  assert raw(HEAD, waits, last, body).startswith(b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n')
  assert raw(HEAD, waits, b'Origin: http://evil.example\r\n', last).startswith(b'HTTP/1.1 403 Forbidden\r\n')
  assert raw(HEAD, b'Expect: other\r\n', last, body).startswith(b'HTTP/1.1 200 OK\r\n')
  assert raw(HEAD.replace(b'1.1', b'1.0'), waits, last, body).startswith(b'HTTP/1.0 200 OK\r\n')


def test_requests_in_one_packet_are_answered_in_turn():
  head = b'HEAD /health HTTP/1.1\r\nHost: localhost\r\n'
  found = raw(HEAD, b'\r\n{"q": "ab"}', HEAD, b'\r\n{"p": "ab"}', head, b'Connection: close\r\n\r\n')
  assert re.findall(rb'HTTP/1.1 (\d+)', found) == [b'200', b'400', b'200'] and found.endswith(b'\r\n\r\n')


def test_a_body_that_takes_too_long_is_408(monkeypatch):
  monkeypatch.setattr(service, '_BODY_SECONDS', 0.2)
  found = raw(HEAD, b'\r\n{"q":')
  assert found.startswith(b'HTTP/1.1 408 ') and b'Connection: close' in found
  assert found.endswith(b'{"error": "the body took more than 0.2 seconds to come"}')


FRAGMENTS = (
  *(
    b'GET ',
    b'POST ',
    b'OPTIONS ',
    b'HEAD ',
    b'CONNECT ',
    b'/',
    b'/translate',
    b'/health',
    b'*',
    b'?q=%ff',
    b'%',
    b' HTTP/1.1',
  ),
  *(
    b' HTTP/1.0',
    b'\r\n',
    b'\n',
    b'\r\n\r\n',
    b'Host: localhost',
    b'Host:',
    b'Content-Type: ',
    JSON.encode(),
    FORM.encode(),
  ),
  *(
    b'multipart/form-data; boundary="x',
    b'Content-Length: ',
    b'11',
    b'-1',
    b'99999999999999999999',
    b'Expect: 100-continue',
  ),
  *(
    b'Transfer-Encoding: chunked',
    b'b\r\n',
    b'0\r\n\r\n',
    b'Content-Encoding: gzip',
    b'Upgrade: websocket',
    b'Connection: ',
  ),
  *(
    b'Upgrade',
    b'close',
    b'Origin: null',
    b'{"q": "ab"}',
    b'{"q": ',
    b'"\\ud800"',
    b'[',
    b'null',
    b'1e999',
    b'q=ab',
    b'&',
  ),
  *(b'\x00', b'\xff', b'\xed\xa0\x80', b'--x\r\n', b'name="q"', b'PRI * HTTP/2.0', b'a' * 9000),
)


def test_no_bytes_bring_the_server_down_or_into_its_log(capsys, caplog):
  """Requests with parts removed, repeated and swapped: each answer is JSON with a status of the client's, or a page."""
  rng = random.Random(0)
  whole = [HEAD + b'\r\n{"q": "ab"}', HEAD + b'Expect: 100-continue\r\nOrigin: null\r\n\r\n{"q": ["a", "b"]}']

  async def send(client, data):
    reader, writer = await asyncio.open_connection('127.0.0.1', client._base_url.port)
    middle = rng.randrange(len(data))
    for part in (data[:middle], data[middle:]):
      writer.write(part)
      await asyncio.sleep(0)
    writer.write_eof()
    try:
      return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
      return b''
    finally:
      writer.close()

  def mutant():
    data = bytearray(rng.choice(whole))
    for _ in range(rng.randint(1, 4)):
      at = rng.randrange(len(data))
      data[at : at + rng.choice((0, 0, 1, 12))] = rng.choice(FRAGMENTS)
    return bytes(data)

  async def test(client, run, app):
    for data in [mutant() for _ in range(100)] + [b''.join(rng.choices(FRAGMENTS, k=12)) for _ in range(100)]:
      head, _, body = (await send(client, data)).removeprefix(b'HTTP/1.1 100 Continue\r\n\r\n').partition(b'\r\n\r\n')
      if head:
        status = int(head.split()[1])
        assert status < 500, (data, head)
        if status >= 400 and not data.startswith(b'HEAD'):
          assert json.JSONDecoder().raw_decode(body.decode())[0]['error'], (data, head, body)
    return (await client.get('/health')).status, app.in_flight

  assert with_client(test) == (200, 0)
  assert capsys.readouterr().err == '' and not caplog.records


def test_a_page_of_another_origin_is_refused_before_its_body_is_read():
  page = {'Origin': 'http://evil.example'}
  kinds = 'application/json', 'text/plain', FORM, 'multipart/form-data; boundary=x', ''

  async def test(client, run, app):
    async def endless():
      yield b'{"q": "'
      await asyncio.sleep(60)

    posts = [
      await asyncio.wait_for(client.post('/translate', data=endless(), headers={**page, 'Content-Type': kind}), 10)
      for kind in kinds
    ]
    others = [await client.get(path, headers=page) for path in ('/', '/languages', '/health', '/metrics', '/nothing')]
    own = await client.post('/translate', json={'q': 'ab'}, headers={'Origin': str(client._base_url).rstrip('/')})
    rebound = await client.get('/health', headers={'Host': 'evil.example'})
    return [(r.status, (await r.json())['error']) for r in (*posts, *others)], own.status, rebound.status, run.batches

  evil = 'http://evil.example'
  words = f'pages of the origin {evil} may not use this server: start the server with --cors={evil} to let them'
  answers, own, rebound, batches = with_client(test, origins=Origins(loopback=True))
  assert answers == 10 * [(403, words)] and (own, rebound, len(batches)) == (200, 403, 1)


def test_a_page_that_cors_names_may_ask_and_read_what_it_is_told():
  page = {'Origin': 'https://my.site'}

  async def test(client, run, app):
    asks = {**page, 'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': 'content-type'}
    preflight = await client.options('/translate', headers=asks)
    post = await client.post('/translate', json={'q': 'ab'}, headers=page)
    wrong = await client.post('/translate', json={}, headers=page)
    nobody = await client.get('/health')
    return preflight, post, wrong, nobody

  preflight, post, wrong, nobody = with_client(test, origins=Origins(cors=['https://my.site']))
  assert (preflight.status, post.status, wrong.status) == (204, 200, 400)
  for response in (preflight, post, wrong):
    assert response.headers['Access-Control-Allow-Origin'] == 'https://my.site' and response.headers['Vary'] == 'Origin'
    assert 'Access-Control-Allow-Credentials' not in response.headers
  assert preflight.headers['Access-Control-Allow-Headers'] == 'Authorization, Content-Type'
  assert preflight.headers['Access-Control-Allow-Methods'] == 'GET, POST'
  assert nobody.headers['Vary'] == 'Origin' and 'Access-Control-Allow-Origin' not in nobody.headers


def test_mistakes_are_answered_with_400():
  wrong = {
    b'{"q": ': 'the body must be JSON, with Content-Type: application/json; Expecting value',
    b'\xff\xfe{}"': 'the body must be JSON',
    b'[' * 100_000: 'the body must be JSON, with Content-Type: application/json; it is nested too deeply',
    b'["abc"]': 'the body must be a JSON object',
    b'{"q": "\\ud800"}': 'q must be Unicode; it holds half of a surrogate pair',
    b'{}': 'missing q: the text to translate, a string or a list of strings; the JSON object has nothing',
    b'{"q": 3}': 'q must be a string or a list of strings; it is 3',
    b'{"q": null}': 'q must be a string or a list of strings; it is null',
    b'{"q": NaN}': 'q must be a string or a list of strings; it is NaN',
    b'{"q": {}}': 'q must be a string or a list of strings; it is an object',
    b'{"q": ["a", null]}': 'q must be a string or a list of strings; q[1] is null',
    b'{"q": "a", "format": "pdf"}': "format must be 'text' or 'html'; it is \"pdf\"",
    b'{"q": "a", "format": "\\ud800"}': "format must be 'text' or 'html'",
    b'{"q": "a", "alternatives": -1}': 'alternatives must be a number of translations, 0 or more; it is -1',
    b'{"q": "a", "alternatives": true}': 'alternatives must be a number of translations, 0 or more; it is true',
    b'{"q": "a", "alternatives": "1.5"}': 'alternatives must be a number of translations, 0 or more; it is "1.5"',
    b'{"q": "a", "alternatives": 1' + b'0' * 4000 + b'}': 'alternatives must be at most 2',
    b'{"q": "a", "alternatives": 1' + b'0' * 5000 + b'}': 'the body must be JSON',
    b'{"q": "a", "source": ["de"]}': 'source must be the code of a language, a string; it is a list',
    b'{"q": "a", "target": "\\ud800"}': '\ud800 is not a target language of this model; it has en',
    b'{"q": "a", "source": "xx"}': 'xx is not a source language of this model; it has de, fr',
    b'{"q": "a", "target": "de"}': 'de is not a target language of this model; it has en',
  }
  for (body, message), (status, answer) in zip(wrong.items(), ask(*wrong), strict=True):
    assert (status, list(answer)) == (400, ['error']), body
    assert answer['error'].startswith(message), body


def test_models_of_several_targets_are_told_which():
  run = Stub([('en', 'de'), ('en', 'fr')], tags=['de', 'fr'])
  assert ask({'q': 'ab', 'target': 'de'}, {'q': 'ab'}, run=run) == [
    (200, {'translatedText': 'ba>de'}),
    (400, {'error': 'target must be given; one of de, fr'}),
  ]


def test_targets_of_a_model_without_known_pairs_are_those_with_a_tag():
  run = Stub([], tags=['de', 'fr'])
  assert ask({'q': 'ab', 'source': 'anything', 'target': 'xx'}, {'q': 'ab', 'target': 'fr'}, {'q': 'ab'}, run=run) == [
    (400, {'error': 'xx is not a target language of this model; it has de, fr'}),
    (200, {'translatedText': 'ba>fr'}),
    (400, {'error': 'target must be given; one of de, fr'}),
  ]

  async def languages(client, run, app):
    return await (await client.get('/languages')).json()

  listed = with_client(languages, run=Stub([], tags=['de', 'fr']))
  assert [(language['code'], language['targets']) for language in listed] == [('de', ['fr']), ('fr', ['de'])]


def test_a_body_over_the_limit_is_413_with_and_without_a_length():
  async def test(client, run, app):
    async def pieces():
      for _ in range(20):
        yield b'"' * 100

    found = [
      await client.post('/translate', data=data, headers={'Content-Type': JSON}) for data in (b' ' * 1001, pieces())
    ]
    at_limit = await client.post(
      '/translate', data=json.dumps({'q': 'a'}).encode().ljust(1000), headers={'Content-Type': JSON}
    )
    return [(r.status, await r.json()) for r in [*found, at_limit]]

  long, chunked, fits = with_client(test, limits=service.Limits(body=1000))
  assert long == chunked == (413, {'error': 'a body has at most 1000 bytes: send less at once'})
  assert fits == (200, {'translatedText': 'a'})
  assert ask({'q': 'a\n' * 5}, max_waiting=5) == [(413, {'error': 'q has 6 lines; at most 5 are taken at once'})]


def test_a_full_queue_is_503_with_retry_after_and_requests_that_wait_share_a_batch():
  async def test(client, run, app):
    run.go.clear()
    post = lambda q: asyncio.create_task(client.post('/translate', json={'q': q}))
    waits = [post('first')]
    while not run.batches:
      await asyncio.sleep(0.001)
    waits += [post(f'{i}') for i in range(3)]
    while app.batcher.waiting < 3:
      await asyncio.sleep(0.001)
    refused = await client.post('/translate', json={'q': 'x\ny'})
    run.go.set()
    answers = [(await (await wait).json())['translatedText'] for wait in waits]
    return refused.status, refused.headers['Retry-After'], await refused.json(), answers

  run = Stub()
  status, retry, error, answers = with_client(test, run, max_waiting=4)
  assert (status, retry, error) == (503, '1', {'error': '3 lines are waiting: try again in 1 s'})
  assert answers == ['tsrif', '0', '1', '2']
  assert [sorted(lines) for lines, *_ in run.batches] == [['first'], ['0', '1', '2']]


def test_lines_of_a_client_that_hangs_up_are_not_translated():
  async def test(client, run, app):
    run.go.clear()
    first = asyncio.create_task(client.post('/translate', json={'q': 'first'}))
    while not run.batches:
      await asyncio.sleep(0.001)
    leaves = asyncio.create_task(client.post('/translate', json={'q': 'leaves'}))
    while not app.batcher.waiting:
      await asyncio.sleep(0.001)
    leaves.cancel()
    while app.batcher.waiting:
      await asyncio.sleep(0.001)
    run.go.set()
    return await (await first).json(), await (await client.get('/metrics')).text()

  run = Stub()
  answer, metrics = with_client(test, run)
  assert answer == {'translatedText': 'tsrif'} and [lines for lines, *_ in run.batches] == [['first']]
  assert 'lingvo_moe_requests_total{path="/translate",status="499"} 1.0' in metrics


@pytest.mark.parametrize('leaves', [False, True])
def test_a_long_line_shares_batches_by_its_sentences_and_those_of_a_client_that_left_are_not_translated(leaves):
  line = ('Ab cd. ' * 5000).strip()

  async def test(client, run, app):
    run.go.clear()
    post = lambda q: asyncio.create_task(client.post('/translate', json={'q': q}))
    long = post(line)
    while not run.batches:
      await asyncio.sleep(0.001)
    short = post('short')
    while app.batcher.waiting < 2:
      await asyncio.sleep(0.001)
    if leaves:
      long.cancel()
      while app.batcher.waiting > 1:
        await asyncio.sleep(0.001)
    run.go.set()
    answers = [await (await one).json() for one in (short, *([] if leaves else [long]))]
    return [answer['translatedText'] for answer in answers]

  run = BySentence()
  short, *long = with_client(test, run, max_waiting=2)
  assert short == 'trohs' and long == ([] if leaves else [line.replace('Ab cd.', '.dc bA')])
  assert 'short' in run.batches[1][0]
  assert len(run.batches) == (2 if leaves else 79)


def test_a_failure_tells_nothing_and_the_log_all(capsys):
  assert ask({'q': 'bad'}, {'q': 'good'}) == [
    (500, {'error': 'internal error; the log of the server has it'}),
    (200, {'translatedText': 'doog'}),
  ]
  assert 'RuntimeError: secret' in capsys.readouterr().err


def test_health_languages_metrics_and_errors_of_paths():
  async def test(client, run, app):
    await client.post('/translate', json={'q': ['ab', '0123456789abc']})
    await asyncio.to_thread(app.batcher.close)  # which has then counted the batch
    found = {path: await client.get(path) for path in ('/health', '/languages', '/metrics', '/nothing', '/translate')}
    read = {path: (r.status, await (r.text() if path == '/metrics' else r.json())) for path, r in found.items()}
    app.draining = True
    drains = await client.get('/health')
    refused = await client.post('/translate', json={'q': 'ab'})
    return (
      read,
      found,
      (drains.status, (await drains.json())['status']),
      (refused.status, 'Retry-After' in refused.headers),
    )

  read, responses, drains, refused = with_client(test)
  ok = {
    'status': 'ok',
    'model': 'toy.Stub',
    'checkpoint': 'step 3, the newest',
    'continues_text': False,
    'waiting_lines': 0,
    'limits': {'body': 1 << 20, 'file': 10 << 20, 'prompt': 2000},
  }
  assert read['/health'] == (200, ok) and drains == (503, 'draining') and refused == (503, True)
  assert read['/languages'] == (
    200,
    [
      {'code': 'de', 'name': 'German', 'targets': ['en']},
      {'code': 'en', 'name': 'English', 'targets': []},
      {'code': 'fr', 'name': 'French', 'targets': ['en']},
    ],
  )
  paths = '/, /translate, /detect, /translate_file, /download_file/, /languages, /frontend/settings, /health, /metrics'
  assert read['/nothing'] == (404, {'error': f'no such path; there are {paths}'})
  assert read['/translate'] == (405, {'error': '/translate takes POST, OPTIONS; not GET'})
  assert responses['/translate'].headers['Allow'] == 'POST, OPTIONS'
  status, text = read['/metrics']
  assert status == 200 and responses['/metrics'].headers['Content-Type'].startswith('text/plain; version=')
  samples = dict(line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
  assert samples['lingvo_moe_requests_total{path="/translate",status="200"}'] == '1.0'
  assert samples['lingvo_moe_truncated_lines_total'] == '1.0' and samples['lingvo_moe_waiting_lines'] == '0.0'
  assert samples['lingvo_moe_batch_lines_sum'] == '2.0' and float(samples['process_resident_memory_bytes']) > 1e6
  assert samples['lingvo_moe_model_info{checkpoint="step 3, the newest",model="toy.Stub"}'] == '1.0'


def test_memory_is_given_back_at_most_once_a_minute(monkeypatch):
  http_app._trim_memory()  # also where the C library cannot
  now, trimmed = [100.0], []
  monkeypatch.setattr('time.monotonic', lambda: now[0])
  monkeypatch.setattr(http_app, '_trim_memory', lambda: trimmed.append(now[0]))
  app = HttpApp(Stub())
  for now[0] in (100.0, 159.0, 160.0, 161.0, 221.0):
    app._after_batch(1, 0.1)
  app.batcher.close()
  assert trimmed == [160.0, 221.0]


def test_the_page_asks_nobody_else_and_labels_its_fields():
  async def test(client, run, app):
    response = await client.get('/')
    return response.headers, await response.text()

  headers, html = with_client(test)
  assert headers['Content-Type'] == 'text/html; charset=utf-8'
  policy = headers['Content-Security-Policy']
  assert "default-src 'none'" in policy and 'unsafe' not in policy and policy.count('sha256-') == 2
  assert not re.search(r'(src|href|url)\s*[=(]', html) and '://' not in html and ' style=' not in html
  fields = re.findall(r'<(?:textarea|select|output|input)[^>]* id="(\w+)"', html) + re.findall(
    r'<select id="(\w+)"', html
  )
  assert set(fields) == {'q', 'source', 'target', 'result', 'alternatives', 'temperature', 'tokens', 'file'} and all(
    f'<label for="{f}"' in html for f in fields
  )
  assert '<html lang="en">' in html and 'role="status"' in html
