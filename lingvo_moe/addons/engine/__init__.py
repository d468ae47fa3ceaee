"""Inference engine without TensorFlow: translates and continues text with an export, by LiteRT, NumPy, sentencepiece.

files          manifest.py: the files of an export, their hashes and settings; exported.py: a folder of them, and which
               graph computes a beam of which size
arithmetic     graph.py: a LiteRT graph and its buffers; stages.py: graphs in stages, with experts between them;
               lanes.py: batches side by side, each on its share of the cores
search         flat_cache.py: keys and values of a beam; numpy_beam.py: ranking of hypotheses; search.py: both, step by
               step, and greedy search; numpy_sampling.py: samples, symbol by symbol
models         exported_translator.py: lines in, translations out; exported_generator.py: prompts in, continuations out;
               exported_model.py: load

Imports core/, storage/, text/, and the files of search/ and vocab/ that are without TensorFlow, alone.
addons/export/litert_export.py writes the exports.
"""
