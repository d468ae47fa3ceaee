"""Exports: a run in a form that works without this package.

graphs         translation_exports.py and language_exports.py, what tasks are exported as; engine_graphs.py,
               mt_graphs.py and lm_graphs.py, for the engine; text_search.py, from strings to strings
files          litert_export.py, saved_model.py, stablehlo.py, ctranslate2_model.py; model_card.py
smaller        pruning.py, of experts
"""
