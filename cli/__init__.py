"""What every command shares: options, exit codes, user errors, safe writes and locks."""
