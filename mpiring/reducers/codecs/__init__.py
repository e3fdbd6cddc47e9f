"""Converts float32 vectors to short payloads and back, without communication."""
