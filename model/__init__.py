"""The network: a decoder-only transformer in plain PyTorch. Start reading in gpt.py."""
