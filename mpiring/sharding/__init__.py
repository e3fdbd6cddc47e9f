"""Ranges of tensors that lie on ranks: held, gathered, saved, loaded, moved to other buckets."""
