"""Export to Hugging Face, ONNX, TorchScript and torch.export: python -m tools.export RUN."""
