"""Flat memory in which the tensors of a model are fused."""

from .bucket import (
    Bucket, BucketPlan, TensorSpec, backward_order, plan, refuse_changed, usual_bytes)
