"""Readers of file formats. They know bytes and arrays, and nothing of datasets."""
