"""What a rank did and what it cost: the recorder, trace files, statistics."""
