"""Inference engine without TensorFlow: translates with an export of a model, by LiteRT, NumPy and sentencepiece.

files          manifest.py: the files of an export, their hashes and settings
arithmetic     graph.py: a LiteRT graph and its buffers; vocab.py: text to ids and back
search         flat_cache.py: keys and values of a beam; beam.py: ranking of hypotheses; search.py: both, step by step
model          model.py: lines in, translations out

Imports core/ alone. runtime/litert.py writes the exports.
"""
