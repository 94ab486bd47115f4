"""What Transformers calls: the attention, the hooks on a model, the turns of generate."""
