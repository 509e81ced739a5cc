"""The parts of a training run; train.py puts them together. Start reading in step.py."""
