"""Turns float32 vectors into short payloads and back; communicates nothing."""
