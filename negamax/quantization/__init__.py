"""Quantization methods: the format of each module of a checkpoint, one file per method."""
