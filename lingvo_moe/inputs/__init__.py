"""Inputs: text that becomes batches of ids, for training, for the dev loss and for decoding.

what is read   batch_config.py, data_config.py and plain_text_config.py, the values; feed.py, the interface to jobs
pairs          pair_caches.py and token_cache.py, ids on disk; examples.py; mixture.py, of corpora; dev_lines.py, held
               out of training; batching.py, plans of batches; mt_input.py, the batches
noise          augmentation.py, with noise.py and subword_sampling.py
plain text     windows.py
"""
