"""Inference engine without TensorFlow: translates and continues text with an export, by LiteRT, NumPy, sentencepiece.

files          manifest.py: the files of an export, their hashes and settings; exported.py: a folder of them
arithmetic     graph.py: a LiteRT graph and its buffers; stages.py: graphs in stages, with experts between them;
               lanes.py: batches side by side, each on its share of the cores
search         flat_cache.py: keys and values of a beam; beam.py: ranking of hypotheses; search.py: both, step by step;
               sampling.py: samples, symbol by symbol
models         translation.py: lines in, translations out; generation.py: prompts in, continuations out; model.py: load

Imports core/ alone, which has the vocabularies. runtime/litert_export.py writes the exports.
"""
