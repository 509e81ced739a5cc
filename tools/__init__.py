"""Scripts around a run, `python -m tools.NAME`: nothing else imports them."""
