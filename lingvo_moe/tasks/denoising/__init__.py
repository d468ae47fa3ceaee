"""Denoising: an encoder-decoder that learns from plain text by span corruption, as T5 does, and fills in spans."""
