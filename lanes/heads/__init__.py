"""MTP heads: where one comes from, whether it belongs to the model, and its layers by family."""
