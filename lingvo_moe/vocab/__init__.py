"""Vocabularies: text to ids and back, by SentencePiece, characters or bytes; their training; tags of languages.

vocab.py, text_vocab.py and language_tags.py are without TensorFlow, for the engine.
"""
