"""The report of one run or several: written to a file, or served live."""
