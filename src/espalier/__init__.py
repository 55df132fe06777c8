"""Espalier serves EXL3-quantized language models on a Ray cluster, with exact output."""

__version__ = "0.1.0"
