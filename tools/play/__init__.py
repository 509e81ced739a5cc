"""The playground: type a prompt, watch tokens arrive, branch, and look inside."""
