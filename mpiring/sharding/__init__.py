"""Ranges of tensors on ranks: held, gathered, saved, loaded, moved to other buckets."""
