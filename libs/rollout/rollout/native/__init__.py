"""The native engine: sampling from a plain transformers module in this process."""
