"""Translation over HTTP in LibreTranslate's form: text, HTML and files, languages and their detection."""

import asyncio
import collections
import itertools
import re
import secrets
import urllib.parse
from collections.abc import Sequence
from typing import Any

import babel
from aiohttp import web

from lingvo_moe.addons.documents import document_files
from lingvo_moe.addons.serving import query as query_lib
from lingvo_moe.addons.serving.detection import Detector
from lingvo_moe.addons.serving.query import BadQueryError, File
from lingvo_moe.addons.serving.service import GET, POST, Route, Service, refused
from lingvo_moe.core.alignment import Alignment
from lingvo_moe.core.errors import UserError
from lingvo_moe.search.request import BEAM, SAMPLING, TranslationRequest
from lingvo_moe.text.inline_placement import Aligned
from lingvo_moe.text.text_model import Asked, TextModel
from lingvo_moe.text.translator import Answers, Hypothesis
from lingvo_moe.vocab.language_tags import Languages, check_known

DOWNLOAD = '/download_file/'
_UNSAFE = re.compile(r'[^\w.-]')  # characters of a file's name in a URL
_FILE_SECONDS = 1800.0  # that a translated file may be fetched
_FILE_BYTES = 64 << 20  # of all that wait to be fetched; the oldest make room


class Translation(Service):
  """Service of a translation model."""

  def __init__(self, *arguments: Any) -> None:
    super().__init__(*arguments)
    self._languages = _Languages(self.run)
    self._detect_language = Detector(self._languages.known['source'])
    self._files: collections.OrderedDict[str, File] = collections.OrderedDict()
    self.routes = {
      '/translate': Route(POST, self._translate),
      '/detect': Route(POST, self._detect),
      '/translate_file': Route(POST, self._translate_file),
      DOWNLOAD: Route(GET, self._download),
      '/languages': Route((*GET, 'POST'), lambda _: web.json_response(self._languages.listed)),
      '/frontend/settings': Route((*GET, 'POST'), self._settings),
    }

  def answer(self, parts: list[str], key: Asked) -> Answers:
    return self.run.answer_parts(parts, key)

  async def _choose(
    self, query: query_lib.Fields, documents: Sequence[Sequence[str]]
  ) -> tuple[list[tuple[Languages, str | None]], list[Any]]:
    """By document, languages to pass to the run and its source if there are several; and what was detected if asked."""
    source, target = query.language('source'), query.language('target')
    detected: list[Any] = []
    if source == 'auto':
      found = await asyncio.to_thread(lambda: [self._detect_language('\n'.join(texts)) for texts in documents])
      detected = [languages[0] for languages in found]
    sources = [one['language'] for one in detected] if source == 'auto' else [source] * len(documents)
    tells = len(self._languages.known['source']) > 1
    chosen = {one: refused(self._languages.choose, one, target) for one in {*sources, *[None] * (not sources)}}
    return [(chosen[one], one if tells else None) for one in sources], detected

  def _asked(self, fields: query_lib.Fields, n_best: int, is_marked_up: bool) -> TranslationRequest:
    """What else is asked of translations; those of markup are aligned where the model does it."""
    asked = {name: fields[name] for name in ('prefix', 'ban', 'terms', 'search') if fields.get(name)}
    asked |= fields.numbers((*SAMPLING, *BEAM))
    if fields.get('placeholders') in (False, 'false', '0'):
      asked['placeholders'] = False
    if isinstance(asked.get('terms'), str):
      asked['terms'] = [asked['terms']]
    if fields.get('alignments') or (is_marked_up and 'alignments' in self.run.translator(n_best).able):
      asked['alignments'] = True
    request = refused(TranslationRequest.of, **asked)
    if asked:
      refused(self.run.translator(n_best).check, request)
    return request

  async def _answers(self, texts: Sequence[str], asked: Sequence[Asked]) -> Answers:
    """Answers of texts, by what is asked of each; those of equal requests share batches by their sentences.

    Constraints that ask for more than a translation has room for are the mistake of a client.
    """
    self.check_count(len(texts))
    places = {one: [i for i, other in enumerate(asked) if other == one] for one in dict.fromkeys(asked)}

    async def answers_of(one: Asked) -> Answers:
      plan = await asyncio.to_thread(self.run.plan, [texts[i] for i in places[one]], one)
      answers = await self.compute(plan.parts, one, plan.ends)
      return await asyncio.to_thread(plan.joined, answers)

    try:
      found = list(zip(places.values(), await asyncio.gather(*map(answers_of, places))))
    except UserError as e:
      raise BadQueryError(str(e)) if any(one.request.is_constrained for one in asked) else e from None
    hypotheses = dict(itertools.chain(*(zip(of, answers.hypotheses) for of, answers in found)))
    noticed = [[of[i] for of, answers in found for i in getattr(answers, name)] for name in Answers._fields[1:]]
    return Answers([hypotheses[i] for i in range(len(texts))], *noticed)

  async def _translate(self, request: web.BaseRequest) -> web.Response:
    fields = await self.fields(request)
    query = await asyncio.to_thread(query_lib.query, fields)
    languages, detected = await self._choose(fields, [document.texts for document in query.documents])
    most = self.run.beam_size - 1
    if query.alternatives > most:
      raise BadQueryError(f'alternatives must be at most {most}, the beam less one')
    # The whole beam for any number of alternatives, so that one more program is compiled and they share batches.
    n_best = self.run.beam_size if query.alternatives else 1
    request_of_all = self._asked(fields, n_best, query.unit == 'paragraph')
    texts, asked = [], []
    for document, (of_both, source) in zip(query.documents, languages, strict=True):
      texts += document.texts
      asked += [Asked(of_both, n_best, source, request_of_all)] * len(document.texts)
    answers = await self._answers(texts, asked)
    result = await asyncio.to_thread(_result, query, answers, self.run.over_the_length)
    if fields.language('source') == 'auto':
      result['detectedLanguage'] = detected if query.is_list else detected[0]
    return web.json_response(result)

  async def _detect(self, request: web.BaseRequest) -> web.Response:
    texts = (await self.fields(request)).texts('q', 'the text whose language is detected')
    return web.json_response(await asyncio.to_thread(self._detect_language, '\n'.join(texts)))

  async def _translate_file(self, request: web.BaseRequest) -> web.Response:
    fields = await self.fields(request, self.limits.file)
    if not isinstance(file := fields.get('file'), File):
      raise BadQueryError('missing file: send a form (multipart/form-data) with a file of that name')
    document = await asyncio.to_thread(refused, document_files.read, file.name, file.data, self.limits.file)
    [(languages, source)], _ = await self._choose(fields, [document.texts])
    asked = self._asked(fields, 1, not isinstance(document, document_files.Lines))
    translations: list[Aligned] = []
    step = min(100, self.batcher.max_waiting)  # so that others need not wait for a whole file
    for begin in range(0, len(document.texts), step):
      texts = document.texts[begin : begin + step]
      answers = await self._answers(texts, [Asked(languages, 1, source, asked)] * len(texts))
      translations += [_aligned(best) for best, *_ in answers.hypotheses]
    written = await asyncio.to_thread(document.written, translations)
    data = written.encode() if isinstance(written, str) else written
    name = f'{secrets.token_urlsafe(16)}.{re.sub(_UNSAFE, "_", file.name)[-100:]}'
    self._files[name] = File(file.name, data)
    while len(self._files) > 1 and sum(len(kept.data) for kept in self._files.values()) > _FILE_BYTES:
      self._files.popitem(last=False)
    asyncio.get_running_loop().call_later(_FILE_SECONDS, self._files.pop, name, None)
    path = DOWNLOAD + urllib.parse.quote(name)
    return web.json_response({'translatedFileUrl': f'{request.scheme}://{request.host}{path}'})

  def _download(self, request: web.BaseRequest) -> web.Response:
    if (file := self._files.get(request.path.removeprefix(DOWNLOAD))) is None:
      raise BadQueryError('no such file; a translated file can be fetched for half an hour', 404)
    headers = {
      'Content-Disposition': f"attachment; filename*=UTF-8''{urllib.parse.quote(file.name)}",
      'X-Content-Type-Options': 'nosniff',
    }
    return web.Response(body=file.data, content_type='application/octet-stream', headers=headers)

  def _settings(self, request: web.BaseRequest) -> web.Response:
    targets = [{name: language[name] for name in ('code', 'name')} for language in self._languages.listed]
    targets = [language for language in targets if language['code'] in self._languages.known['target']]
    settings = {
      **dict.fromkeys(('apiKeys', 'keyRequired', 'suggestions'), False),
      'alternatives': self.run.beam_size - 1,
      'alignments': 'alignments' in self.run.translator(1).able,
      'charLimit': -1,
      'frontendTimeout': 500,
      'filesTranslation': True,
      'supportedFilesFormat': document_files.SUFFIXES,
      'language': {'source': {'code': 'auto', 'name': 'Auto Detect'}, 'target': next(iter(targets), None)},
    }
    return web.json_response(settings)


class _Languages:
  """Languages of a run.

  Where neither its log nor a corpus says which there are, targets are those with a tag, and any source is taken by a
  model that does not read its code.
  """

  def __init__(self, run: TextModel):
    self._run = run
    pairs, names = run.pairs(), babel.Locale('en').languages
    targets = {target for _, target in pairs} or set(run.targets())
    self.known = {'source': {source for source, _ in pairs}, 'target': targets}  # codes
    shown = pairs or itertools.permutations(sorted(targets), 2)
    targets_of = {source: [t for _, t in of] for source, of in itertools.groupby(shown, key=lambda pair: pair[0])}
    self.listed: list[dict[str, Any]] = [  # as LibreTranslate has them, names in English
      {'code': code, 'name': names.get(code, code), 'targets': targets_of.get(code, [])}
      for code in sorted(self.known['source'] | targets)
    ]
    try:
      run.choose_target(None)
      self._must_choose = False
    except UserError:
      self._must_choose = True

  def choose(self, source: str | None, target: str | None) -> Languages:
    """Languages to pass to TextModel.answer; UserError names the languages there are."""
    for role, code in (('source', source), ('target', target)):
      check_known(role, code, self.known[role])
    if self._must_choose and target is None:
      known = ', '.join(sorted(self.known['target'])) or 'none that is known'
      raise UserError(f'target must be given; one of {known}')
    return self._run.choose_target(target if self._must_choose else None, source)


def _aligned(hypothesis: Hypothesis) -> Aligned:
  return Aligned(hypothesis.text, hypothesis.alignment.links if hypothesis.alignment else ())


def _alignment(alignment: Alignment) -> dict[str, Any]:
  """Tokens of both sides, their pairs, and places of the tokens as [begin, end] in characters of their line."""
  spans = [[(token.begin, token.end) for token in side] for side in (alignment.source, alignment.target)]
  names = ('source', 'target', 'pairs', 'source_spans', 'target_spans')
  return dict(zip(names, (*alignment.columns, *spans), strict=True))


def _result(query: query_lib.Query, answers: Answers, over_the_length: str) -> dict[str, Any]:
  """The answer as LibreTranslate has it; with 'warnings' where a line is over the length."""
  texts: list[list[str]] = []  # of each document, its translation and the alternatives
  warnings, first, notices = [], 0, sorted(answers.notices(over_the_length))
  for number, document in enumerate(query.documents):
    count = len(document.texts)
    lines = answers.hypotheses[first : first + count]
    ranks = range(min(1 + query.alternatives, max(map(len, lines), default=1)))
    ranked = ([_aligned(line[min(rank, len(line) - 1)]) for line in lines] for rank in ranks)
    texts.append(list(map(document.written, ranked)))
    where = f'q[{number}]' if query.is_list else 'q'
    for i, what in notices:
      if first <= i < first + count:
        warnings.append(f'{query.unit} {i - first + 1} of {where} {what}' if count > 1 else f'{where} {what}')
    first += count
  best, alternatives = [ranked[0] for ranked in texts], [ranked[1:] for ranked in texts]
  result: dict[str, Any] = {'translatedText': best if query.is_list else best[0]}
  if query.alternatives:
    result['alternatives'] = alternatives if query.is_list else alternatives[0]
  if query.alignments:
    lines = [_alignment(best.alignment) for best, *_ in answers.hypotheses]
    ends = list(itertools.accumulate(len(document.texts) for document in query.documents))
    aligned = [lines[begin:end] for begin, end in zip([0, *ends], ends)]
    result['alignments'] = aligned if query.is_list else aligned[0]
  return {**result, **({'warnings': warnings} if warnings else {})}
