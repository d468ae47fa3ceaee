"""Registered models by task and data set; installed as lingvo_moe.params."""
